//! Pictures a second through the loader, decoded, resized, flipped and normalised:
//! `cargo run --release --example pictures -- FOLDER SIZE SECONDS WORKERS [crop]`.
//!
//! Prints one JSON object: pictures a second, and seconds from the start to the first batch.

use std::sync::Arc;
use std::time::Instant;

use trainer::data::images::{Columns, Images, Options, Set};
use trainer::data::loader::{Loader, Reading};
use trainer::data::order::{Cursor, Order};
use trainer::data::picture::{Augment, Fit, Normalise, Pipeline, ResizedCrop};
use trainer::data::{Batch, Opening, Source, Values};
use trainer::kernels::palette;

const BATCH: usize = 32;

/// Pictures of a batch, once their bytes are the normalised values that a model is given.
fn normalised(batch: &Batch) -> usize {
    if let Values::U8(bytes, tables) = &batch.inputs {
        std::hint::black_box(palette::values(tables, bytes));
    }
    batch.ids.len()
}

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder, size, seconds, workers, rest @ ..] = &args[..] else {
        anyhow::bail!("FOLDER SIZE SECONDS WORKERS [crop]")
    };
    let (size, seconds, workers): (usize, f64, usize) = (size.parse()?, seconds.parse()?, workers.parse()?);
    let begun = Instant::now();
    let columns = Columns { path: "path".into(), label: "label".into() };
    let options =
        Options { channels: 3, size: [size, size], max_pixels: 64_000_000, columns, readers: workers };
    let set = Set::open(&[folder.into()], options, None, &Opening::default())?;
    let normalise = Normalise { mean: vec![0.485, 0.456, 0.406], std: vec![0.229, 0.224, 0.225] };
    let crop = ResizedCrop { scale: [0.08, 1.0], ratio: [0.75, 4.0 / 3.0] };
    let augment =
        Augment { horizontal_flip: 0.5, resized_crop: rest.first().map(|_| crop), ..Augment::default() };
    let pipeline = Pipeline::new([size, size, 3], Fit::Stretch, normalise)?.augmented(augment)?;
    let source = Arc::new(Images::new(Arc::new(set), pipeline));
    let order = Order::new(source.len(), BATCH as u64, 1, true)?;
    let start = Cursor { update: 0, done: 0 };
    let reading = Reading { micro_batch: BATCH, limit: 256 << 20, workers, skip_bad: false };
    let mut loader = Loader::start(source.clone(), order, start, u64::MAX, reading)?;
    let first = loader.next()?.map_or(0, |batch| normalised(&batch));
    let to_first = begun.elapsed().as_secs_f64();
    let (begun, mut pictures) = (Instant::now(), 0);
    while first > 0 && begun.elapsed().as_secs_f64() < seconds {
        pictures += loader.next()?.map_or(0, |batch| normalised(&batch));
    }
    let rate = pictures as f64 / begun.elapsed().as_secs_f64().max(1e-9);
    println!(
        "{{\"pictures_per_s\": {rate:.1}, \"to_first_batch_s\": {to_first:.3}, \"pictures\": {}}}",
        source.len()
    );
    Ok(())
}
