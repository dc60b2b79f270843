//! Token files as prepared by the scripts of nanoGPT and llm.c, cut into windows.
//!
//! A window never crosses a file boundary: the shards of a corpus are separate texts, as in llm.c.

use std::{
    io::Write,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use rayon::prelude::*;

use super::DataError;
use super::token_storage::{TokenFiles, TokenIdFile, TokenWidth};
use super::token_windows::{
    TokenDecoder, TokenRanges, TokenWindows, WindowPlacement, WindowSets, display_name,
};
use super::tokenizer::TokenizerSpec;
use crate::cache::CacheKey;
use crate::split::SplitSettings;
use crate::{DatasetContext, files, warnings};

/// Which files to read, and how to build samples from them.
#[derive(Clone, Debug)]
pub struct TokenFileSettings {
    pub train: Vec<PathBuf>,
    /// Validation files; if empty, a part of the training files is the validation set.
    pub valid: Vec<PathBuf>,
    /// Test files; if empty, there is no test set, or it is the end of the training files.
    pub test: Vec<PathBuf>,
    /// How the training files are split, always by position.
    pub split: SplitSettings,
    /// Bytes per id; detected if `None`.
    pub width: Option<TokenWidth>,
    /// Vocabulary size; if `None`, a pass over the files finds the largest id.
    pub vocab: Option<usize>,
    /// Tokenizer that produced the ids, used to decode samples for display.
    pub tokenizer: Option<PathBuf>,
    pub context: usize,
    pub placement: WindowPlacement,
}

/// Opens the windows of all sets.
pub fn open(settings: &TokenFileSettings, ctx: &DatasetContext) -> Result<WindowSets, DataError> {
    let open = |patterns: &[PathBuf]| -> Result<Arc<TokenFiles>, DataError> {
        let found = files::resolve_patterns(patterns)?;
        let ids = found
            .iter()
            .map(|file| TokenIdFile::open(file, settings.width))
            .collect::<Result<Vec<_>, _>>()?;
        if let Some(short) = ids.iter().find(|ids| ids.len() <= settings.context as u64) {
            let why = format!("it has {} tokens, and a window needs {}", short.len(), settings.context + 1);
            return Err(DataError::NoSamples { set: format!("`{}`", short.file().display()), why });
        }
        Ok(Arc::new(TokenFiles::new(ids)))
    };
    let (train, valid, test) = (open(&settings.train)?, open(&settings.valid)?, open(&settings.test)?);
    let known_vocab = match (settings.vocab, &settings.tokenizer) {
        (None, Some(file)) => {
            TokenizerSpec::File(file.clone()).load_within_memory(ctx)?.map(|tokenizer| tokenizer.vocab())
        }
        (vocab, _) => vocab,
    };
    let vocab = match known_vocab {
        Some(vocab) => vocab,
        None => {
            let mut largest = 0;
            for ids in [&train, &valid, &test] {
                largest = largest.max(largest_token(ids, settings.width, ctx)?);
            }
            largest as usize + 1
        }
    };
    let placement = settings.placement;
    let decoder = settings.tokenizer.as_ref().map(|file| Arc::new(TokenDecoder::from_file(file.clone())));
    let windows = |ids: &Arc<TokenFiles>, ranges: Vec<Range<u64>>, placement, name: &str| {
        let tokens: u64 = ranges.iter().map(|s| s.end - s.start).sum();
        let mut about = vec![
            (format!("{name} tokens"), tokens.to_string()),
            ("vocabulary".into(), vocab.to_string()),
            ("token files".into(), ids.files().len().to_string()),
            (
                "bytes per token".into(),
                ids.files().first().map_or(0, |part| part.width().bytes()).to_string(),
            ),
        ];
        if vocab == 1 {
            about.push((warnings::WARNING.into(), "all token ids are 0: there is nothing to learn".into()));
        }
        let set = TokenWindows::new(ids.clone(), ranges, (settings.context, vocab), placement, name)?;
        Ok(set.with_description(decoder.clone(), about))
    };
    let files =
        |ids: &TokenFiles| (0..ids.files().len()).map(|part| ids.file_range(part)).collect::<Vec<_>>();
    // The parts of the training files within these ranges.
    let within = |ranges: &[Range<u64>]| -> Vec<Range<u64>> {
        let parts = files(&train).into_iter().flat_map(|file| {
            ranges.iter().map(move |range| file.start.max(range.start)..file.end.min(range.end))
        });
        parts.filter(|part| !part.is_empty()).collect()
    };
    let ranges = TokenRanges::new(train.len(), &settings.split);
    let other = |own: &Arc<TokenFiles>, part: &[Range<u64>], name: &str| match own.is_empty() {
        true => windows(&train, within(part), WindowPlacement::Fixed, name),
        false => windows(own, files(own), WindowPlacement::Fixed, name),
    };
    let has_test = !test.is_empty() || settings.split.test_fraction > 0.0;
    Ok(WindowSets {
        train: windows(&train, within(&ranges.train), placement, "train")?,
        valid: other(&valid, &ranges.valid, "valid")?,
        test: has_test.then(|| other(&test, &ranges.test, "test")).transpose()?,
    })
}

/// Ids scanned per task and between two progress reports.
const IDS_PER_REPORT: u64 = 4 << 20;
const IDS_PER_PIECE: usize = 1 << 16;

/// Largest id of all files; cached. 0 for no ids.
fn largest_token(
    ids: &TokenFiles,
    width: Option<TokenWidth>,
    ctx: &DatasetContext,
) -> Result<u32, DataError> {
    let files: Vec<PathBuf> = ids.files().iter().map(|part| part.file().to_owned()).collect();
    if files.is_empty() {
        return Ok(0);
    }
    let cache_key = CacheKey::new(&files, &format!("largest {width:?}"))?;
    let path = ctx.cache.get_or_create("largest-token", cache_key, |out| {
        let activity = format!("finding the largest token id of {}", display_name(&files));
        let (all, mut largest) = (ids.len(), 0);
        let bytes = ids.files().first().map_or(1, |part| part.width().bytes() as u64);
        for start in (0..all).step_by(IDS_PER_REPORT as usize) {
            ctx.observer.report(&activity, start * bytes, all * bytes);
            let end = all.min(start + IDS_PER_REPORT);
            let pieces: Vec<u64> = (start..end).step_by(IDS_PER_PIECE).collect();
            let found = pieces.into_par_iter().map(|start| {
                let mut piece = vec![0; IDS_PER_PIECE.min((end - start) as usize)];
                ids.read_ids(start..start + piece.len() as u64, &mut piece)?;
                Ok::<u32, DataError>(piece.into_iter().max().unwrap_or(0))
            });
            largest = largest.max(found.try_reduce(|| 0, |a, b| Ok(a.max(b)))?);
        }
        ctx.observer.report(&activity, all * bytes, all * bytes);
        write!(out, "{largest}").map_err(DataError::write(Path::new("the largest token")))
    })?;
    let text = std::fs::read_to_string(&path).map_err(DataError::io(&path))?;
    let wrong =
        || DataError::WrongFormat { file: path.clone(), expected: "a number", found: format!("`{text}`") };
    text.trim().parse().map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::split::ValidSet;
    use crate::{BatchRow, Dataset, SampleKey, SliceMut};

    struct TokenFileFixture {
        folder: tempfile::TempDir,
        ctx: DatasetContext,
    }

    fn fixture() -> TokenFileFixture {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().join("cache"));
        TokenFileFixture { ctx: DatasetContext { cache, ..DatasetContext::default() }, folder }
    }

    impl TokenFileFixture {
        fn write(&self, name: &str, ids: impl IntoIterator<Item = u32>) -> PathBuf {
            let (path, mut bytes) = (self.folder.path().join(name), Vec::new());
            TokenWidth::U16.write_ids(&ids.into_iter().collect::<Vec<_>>(), &mut bytes);
            std::fs::write(&path, bytes).unwrap();
            path
        }

        fn settings(&self, train: &str, context: usize) -> TokenFileSettings {
            TokenFileSettings {
                train: vec![self.folder.path().join(train)],
                valid: Vec::new(),
                test: Vec::new(),
                split: SplitSettings::random(0.25),
                width: Some(TokenWidth::U16),
                vocab: None,
                tokenizer: None,
                context,
                placement: WindowPlacement::Fixed,
            }
        }
    }

    fn read(set: &TokenWindows, index: u64, epoch: u64) -> Result<(Vec<u32>, Vec<u32>), DataError> {
        let length = set.features().input_len();
        let (mut input, mut target) = (vec![9; length], vec![9; length]);
        let mut row =
            BatchRow { input: SliceMut::U32(&mut input), target: SliceMut::U32(&mut target), length: 0 };
        set.read(index, SampleKey { seed: 1, epoch, sample: index }, &mut row)?;
        Ok((input, target))
    }

    #[test]
    fn windows_stay_within_files_and_the_end_is_the_validation_set() {
        let fixture = fixture();
        fixture.write("a.bin", 0..11);
        fixture.write("b.bin", 100..109);
        let WindowSets { train, valid, .. } = open(&fixture.settings("*.bin", 4), &fixture.ctx).unwrap();
        // The first 15 of 20 tokens are for training: 0..11, and 100..104, which is too short for a window.
        let all = |set: &TokenWindows| (0..set.len()).map(|i| read(set, i, 0).unwrap()).collect::<Vec<_>>();
        let expected = [(vec![0, 1, 2, 3], vec![1, 2, 3, 4]), (vec![4, 5, 6, 7], vec![5, 6, 7, 8])];
        assert_eq!(all(&train), expected);
        assert_eq!(all(&valid), [(vec![104, 105, 106, 107], vec![105, 106, 107, 108])]);
        assert_eq!(
            train.features().input,
            crate::base::features::InputSpec::Tokens { length: 4, vocab: 109 }
        );
        // Random placement never crosses a file boundary.
        let settings = TokenFileSettings {
            valid: vec![fixture.folder.path().join("b.bin")],
            split: SplitSettings { valid: ValidSet::OwnFiles, ..SplitSettings::random(0.25) },
            placement: WindowPlacement::Random,
            ..fixture.settings("*.bin", 4)
        };
        let WindowSets { train, valid, .. } = open(&settings, &fixture.ctx).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for epoch in 0..100 {
            for i in 0..train.len() {
                let (input, target) = read(&train, i, epoch).unwrap();
                assert!(input.windows(2).all(|w| w[1] == w[0] + 1) && target[3] == input[3] + 1);
                seen.insert(input[0]);
            }
        }
        assert!(seen.into_iter().eq((0..7).chain(100..105)), "each place a window fits at");
        assert_eq!((train.len(), valid.len()), (4, 2));
    }

    #[test]
    fn a_token_beyond_the_vocabulary_is_named_with_its_place() {
        let fixture = fixture();
        fixture.write("a.bin", (0..20).map(|i| if i == 9 { 700 } else { i }));
        let settings = TokenFileSettings { vocab: Some(100), ..fixture.settings("a.bin", 4) };
        let WindowSets { train, .. } = open(&settings, &fixture.ctx).unwrap();
        assert!(read(&train, 0, 0).is_ok());
        let error = read(&train, 2, 0).unwrap_err();
        assert!(error.is_bad_record());
        let text = error.to_string();
        assert!(
            text.contains("a.bin`, record 9: `700` is not a token id below 100, the vocabulary size"),
            "{text}"
        );
        let WindowSets { train, .. } = open(&fixture.settings("a.bin", 4), &fixture.ctx).unwrap();
        assert_eq!(train.describe()[1].1, "701", "found");
    }

    #[test]
    fn ids_that_are_all_0_are_named() {
        let fixture = fixture();
        fixture.write("a.bin", std::iter::repeat_n(0, 100));
        let WindowSets { train, valid, .. } = open(&fixture.settings("a.bin", 4), &fixture.ctx).unwrap();
        let found = warnings::warnings(&train, &valid, 1);
        assert_eq!(found, ["all token ids are 0: there is nothing to learn"]);
    }

    #[test]
    fn short_files_are_refused() {
        let fixture = fixture();
        fixture.write("a.bin", 0..4);
        let error = open(&fixture.settings("a.bin", 4), &fixture.ctx).err().unwrap().to_string();
        assert!(error.contains("a.bin` has no samples: it has 4 tokens, and a window needs 5"), "{error}");
    }
}
