//! Files of tokens: windows of what nanoGPT's and llm.c's scripts have prepared.
//!
//! A window never crosses from a file to the next: shards of a corpus are texts of their own, as in llm.c.

use std::{
    io::Write,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use rayon::prelude::*;

use super::DataError;
use super::tokenizer::Units;
use super::tokens::{Ids, Joined, Width};
use super::windows::{Placement, Reading, Windows, name_of, split_at};
use crate::data::cache::Fingerprint;
use crate::data::{Opening, files};

/// What files, and what is made of them.
#[derive(Clone, Debug)]
pub struct Settings {
    pub train: Vec<PathBuf>,
    /// Own files to measure on; where empty, the end of the others is.
    pub valid: Vec<PathBuf>,
    pub valid_share: f64,
    /// Of an id; found out where absent.
    pub width: Option<Width>,
    /// Ids are below it; where absent, the largest is looked for.
    pub vocab: Option<usize>,
    /// What made the ids, for people.
    pub tokenizer: Option<PathBuf>,
    pub context: usize,
    pub placement: Placement,
}

/// The windows to train on and those to measure on.
pub fn open(settings: &Settings, opening: &Opening) -> Result<(Windows, Windows), DataError> {
    let open = |patterns: &[PathBuf]| -> Result<Arc<Joined>, DataError> {
        let found = files::find(patterns)?;
        let ids = found.iter().map(|file| Ids::open(file, settings.width)).collect::<Result<Vec<_>, _>>()?;
        if let Some(short) = ids.iter().find(|ids| ids.len() <= settings.context as u64) {
            let why = format!("it has {} tokens and a window takes {}", short.len(), settings.context + 1);
            return Err(DataError::NoSamples { set: format!("`{}`", short.file().display()), why });
        }
        Ok(Arc::new(Joined::new(ids)))
    };
    let (train, valid) = (open(&settings.train)?, open(&settings.valid)?);
    let told = match (settings.vocab, &settings.tokenizer) {
        (None, Some(file)) => {
            Units::File(file.clone()).tokenizer_within(opening)?.map(|tokenizer| tokenizer.vocab())
        }
        (vocab, _) => vocab,
    };
    let vocab = match told {
        Some(vocab) => vocab,
        None => {
            let both = [&train, &valid].map(|ids| largest(ids, settings.width, opening));
            let [a, b] = both;
            a?.max(b?) as usize + 1
        }
    };
    let placement = settings.placement;
    let reading = settings.tokenizer.as_ref().map(|file| Arc::new(Reading::file(file.clone())));
    let windows = |ids: &Arc<Joined>, stretches: Vec<Range<u64>>, placement, name: &str| {
        let tokens: u64 = stretches.iter().map(|s| s.end - s.start).sum();
        let about = vec![
            (format!("{name} tokens"), tokens.to_string()),
            ("vocabulary".into(), vocab.to_string()),
            ("token files".into(), ids.parts().len().to_string()),
            ("bytes a token".into(), ids.parts().first().map_or(0, |part| part.width().bytes()).to_string()),
        ];
        let set = Windows::new(ids.clone(), stretches, (settings.context, vocab), placement, name)?;
        Ok(set.told(reading.clone(), about))
    };
    let files = |ids: &Joined| (0..ids.parts().len()).map(|part| ids.range(part)).collect::<Vec<_>>();
    if valid.is_empty() {
        let border = split_at(&(0..train.len()), settings.valid_share);
        let cut = |part: fn(Range<u64>, u64) -> Range<u64>| {
            files(&train).into_iter().map(|file| part(file, border)).filter(|part| !part.is_empty()).collect()
        };
        let before = cut(|file, border| file.start..file.end.min(border));
        let after = cut(|file, border| file.start.max(border)..file.end);
        Ok((windows(&train, before, placement, "train")?, windows(&train, after, Placement::Fixed, "valid")?))
    } else {
        let measured = windows(&valid, files(&valid), Placement::Fixed, "valid")?;
        Ok((windows(&train, files(&train), placement, "train")?, measured))
    }
}

/// Ids looked at between two reports, and by one thread at a time.
const STEP: u64 = 4 << 20;
const PIECE: usize = 1 << 16;

/// The largest id of all, found once. Nothing has 0.
fn largest(ids: &Joined, width: Option<Width>, opening: &Opening) -> Result<u32, DataError> {
    let files: Vec<PathBuf> = ids.parts().iter().map(|part| part.file().to_owned()).collect();
    if files.is_empty() {
        return Ok(0);
    }
    let of = Fingerprint::of(&files, &format!("largest {width:?}"))?;
    let path = opening.cache.get("largest-token", of, |out| {
        let doing = format!("finding the largest token of {}", name_of(&files));
        let (all, mut largest) = (ids.len(), 0);
        let bytes = ids.parts().first().map_or(1, |part| part.width().bytes() as u64);
        for start in (0..all).step_by(STEP as usize) {
            opening.watch.pass(&doing, start * bytes, all * bytes);
            let end = all.min(start + STEP);
            let pieces: Vec<u64> = (start..end).step_by(PIECE).collect();
            let found = pieces.into_par_iter().map(|start| {
                let mut piece = vec![0; PIECE.min((end - start) as usize)];
                ids.copy(start..start + piece.len() as u64, &mut piece)?;
                Ok::<u32, DataError>(piece.into_iter().max().unwrap_or(0))
            });
            largest = largest.max(found.try_reduce(|| 0, |a, b| Ok(a.max(b)))?);
        }
        opening.watch.pass(&doing, all * bytes, all * bytes);
        write!(out, "{largest}").map_err(DataError::writing(Path::new("the largest token")))
    })?;
    let text = std::fs::read_to_string(&path).map_err(DataError::io(&path))?;
    let wrong = || DataError::Format { file: path.clone(), wanted: "a number", found: format!("`{text}`") };
    text.trim().parse().map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::cache::Cache;
    use crate::data::{Key, Row, Slice, Source};

    struct Place {
        folder: tempfile::TempDir,
        opening: Opening,
    }

    fn place() -> Place {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().join("cache"));
        Place { opening: Opening { cache, ..Opening::default() }, folder }
    }

    impl Place {
        fn write(&self, name: &str, ids: impl IntoIterator<Item = u32>) -> PathBuf {
            let (path, mut bytes) = (self.folder.path().join(name), Vec::new());
            Width::U16.put(&ids.into_iter().collect::<Vec<_>>(), &mut bytes);
            std::fs::write(&path, bytes).unwrap();
            path
        }

        fn settings(&self, train: &str, context: usize) -> Settings {
            Settings {
                train: vec![self.folder.path().join(train)],
                valid: Vec::new(),
                valid_share: 0.25,
                width: Some(Width::U16),
                vocab: None,
                tokenizer: None,
                context,
                placement: Placement::Fixed,
            }
        }
    }

    fn read(set: &Windows, index: u64, epoch: u64) -> Result<(Vec<u32>, Vec<u32>), DataError> {
        let length = set.features().input_len();
        let (mut input, mut target) = (vec![9; length], vec![9; length]);
        let mut row = Row { input: Slice::U32(&mut input), target: Slice::U32(&mut target), length: 0 };
        set.read(index, Key { seed: 1, epoch, sample: index }, &mut row)?;
        Ok((input, target))
    }

    #[test]
    fn windows_stay_within_files_and_the_end_is_measured_on() {
        let place = place();
        place.write("a.bin", 0..11);
        place.write("b.bin", 100..109);
        let (train, valid) = open(&place.settings("*.bin", 4), &place.opening).unwrap();
        // Of 20 tokens the first 15 are trained on: 0..11 and 100..104, which is too short for a window.
        let all = |set: &Windows| (0..set.len()).map(|i| read(set, i, 0).unwrap()).collect::<Vec<_>>();
        let wanted = [(vec![0, 1, 2, 3], vec![1, 2, 3, 4]), (vec![4, 5, 6, 7], vec![5, 6, 7, 8])];
        assert_eq!(all(&train), wanted);
        assert_eq!(all(&valid), [(vec![104, 105, 106, 107], vec![105, 106, 107, 108])]);
        assert_eq!(train.features().input, crate::features::Input::Tokens { length: 4, vocab: 109 });
        // Drawn anywhere, but never over the border of the files.
        let settings = Settings {
            valid: vec![place.folder.path().join("b.bin")],
            placement: Placement::Random,
            ..place.settings("*.bin", 4)
        };
        let (train, valid) = open(&settings, &place.opening).unwrap();
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
        let place = place();
        place.write("a.bin", (0..20).map(|i| if i == 9 { 700 } else { i }));
        let settings = Settings { vocab: Some(100), ..place.settings("a.bin", 4) };
        let (train, _) = open(&settings, &place.opening).unwrap();
        assert!(read(&train, 0, 0).is_ok());
        let error = read(&train, 2, 0).unwrap_err();
        assert!(error.is_record());
        let text = error.to_string();
        assert!(text.contains("a.bin`, record 9: `700` is not a token below 100"), "{text}");
        let (train, _) = open(&place.settings("a.bin", 4), &place.opening).unwrap();
        assert_eq!(train.about()[1].1, "701", "found");
    }

    #[test]
    fn short_files_are_refused() {
        let place = place();
        place.write("a.bin", 0..4);
        let error = open(&place.settings("a.bin", 4), &place.opening).err().unwrap().to_string();
        assert!(error.contains("a.bin` gives no samples: it has 4 tokens and a window takes 5"), "{error}");
    }
}
