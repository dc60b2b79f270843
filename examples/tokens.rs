//! Measures tokenisation of text and random reads of token windows, for `bench/tokens.py`.
//!
//! `cargo run --release --example tokens -- encode TOKENIZER.json TEXT` tokenises a file into a temporary cache, as
//! `kind = "text"` does; `... -- windows TOKENS.bin CONTEXT SECONDS THREADS` reads windows at random, as
//! `kind = "tokens"` does. Both print one line of JSON.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::bail;
use serde_json::json;
use trainer::data::cache::Cache;
use trainer::data::language::token_windows::{WindowPlacement, WindowSets};
use trainer::data::language::tokenizer::{Separator, TokenizerSpec};
use trainer::data::language::{text, token_files};
use trainer::data::split::SplitSettings;
use trainer::data::{BatchRow, Dataset, DatasetContext, SampleKey, SliceMut};

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["encode", tokenizer, file] => encode(tokenizer, file),
        ["windows", file, context, seconds, threads] => {
            windows(file, context.parse()?, seconds.parse()?, threads.parse()?)
        }
        _ => bail!("usage: tokens encode TOKENIZER TEXT | tokens windows TOKENS CONTEXT SECONDS THREADS"),
    }
}

fn encode(tokenizer: &str, file: &str) -> anyhow::Result<()> {
    let folder = std::env::temp_dir().join(format!("trainer-tokens-{}", std::process::id()));
    let settings = text::TextSettings {
        train: vec![file.into()],
        valid: vec![],
        test: vec![],
        split: SplitSettings::random(0.5),
        tokenizer: TokenizerSpec::File(tokenizer.into()),
        separator: Separator::Auto,
        context: 64,
        placement: WindowPlacement::Fixed,
    };
    let ctx = DatasetContext { cache: Cache::at(&folder), ..DatasetContext::default() };
    let start = Instant::now();
    let WindowSets { train, valid, .. } = text::open(&settings, &ctx)?;
    let seconds = start.elapsed().as_secs_f64();
    let tokens = [&train, &valid].map(|set| set.describe()[0].1.parse::<u64>().unwrap_or(0));
    drop((train, valid));
    std::fs::remove_dir_all(&folder)?;
    let bytes = std::fs::metadata(file)?.len();
    println!("{}", json!({ "seconds": seconds, "bytes": bytes, "tokens": tokens.iter().sum::<u64>() }));
    Ok(())
}

fn windows(file: &str, context: usize, seconds: f64, threads: u64) -> anyhow::Result<()> {
    let settings = token_files::TokenFileSettings {
        train: vec![file.into()],
        valid: vec![],
        test: vec![],
        split: SplitSettings::random(0.01),
        width: None,
        vocab: Some(1 << 20),
        tokenizer: None,
        context,
        placement: WindowPlacement::Random,
    };
    let set = token_files::open(&settings, &DatasetContext::default())?.train;
    let (read, start, limit) = (AtomicU64::new(0), Instant::now(), Duration::from_secs_f64(seconds));
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (set, read) = (&set, &read);
            scope.spawn(move || {
                let (mut input, mut target) = (vec![0; context], vec![0; context]);
                for sample in (thread..).step_by(threads as usize) {
                    if start.elapsed() > limit {
                        break;
                    }
                    let mut row = BatchRow {
                        input: SliceMut::U32(&mut input),
                        target: SliceMut::U32(&mut target),
                        length: 0,
                    };
                    let key = SampleKey { seed: 1, epoch: sample / set.len(), sample: sample % set.len() };
                    if set.read(sample % set.len(), key, &mut row).is_err() {
                        break;
                    }
                    read.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let seconds = start.elapsed().as_secs_f64();
    println!("{}", json!({ "seconds": seconds, "windows": read.into_inner() }));
    Ok(())
}
