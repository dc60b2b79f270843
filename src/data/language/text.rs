//! Text files: one stream of tokens, and windows of it.
//!
//! Bytes of plain files are mapped as they lie. Anything else is tokenised once into the cache; characters are first
//! looked through for the vocabulary. Files follow each other, with the separator between them where there is one.

use std::{
    collections::BTreeSet,
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::DataError;
use super::pieces::each_piece;
use super::tokenizer::{Characters, Cut, Separator, Tokenizer, Units};
use super::tokens::{Ids, Joined, Width};
use super::windows::{Placement, Reading, Windows, name_of, split_at};
use crate::data::Opening;
use crate::data::cache::Fingerprint;
use crate::data::files::{self, Packing};

/// What text, and what is made of it.
#[derive(Clone, Debug)]
pub struct Settings {
    pub train: Vec<PathBuf>,
    /// Own files to measure on; where empty, the end of the text is.
    pub valid: Vec<PathBuf>,
    /// Share of the tokens, at the end of the text.
    pub valid_share: f64,
    pub units: Units,
    pub separator: Separator,
    pub context: usize,
    /// Of the windows to train on; those to measure on lie end to end.
    pub placement: Placement,
}

/// The windows to train on and those to measure on.
pub fn open(settings: &Settings, opening: &Opening) -> Result<(Windows, Windows), DataError> {
    let (train, valid) = (files::find(&settings.train)?, files::find(&settings.valid)?);
    let tokenizer = match settings.units.tokenizer_within(opening)? {
        Some(tokenizer) => tokenizer,
        None => Tokenizer::Characters(vocabulary(&[&train[..], &valid].concat(), opening)?),
    };
    let separator = tokenizer.separator(&settings.separator)?;
    let made = |files: &[PathBuf]| -> Result<Arc<Joined>, DataError> {
        let ids = Text { files, units: &settings.units, tokenizer: &tokenizer, separator }.ids(opening)?;
        Ok(Arc::new(Joined::new(ids)))
    };
    let ids = made(&train)?;
    let shape = (settings.context, tokenizer.vocab());
    let own = (!valid.is_empty()).then(|| made(&valid)).transpose()?;
    let ends = separator.map_or("none".into(), |id| format!("`{}`", tokenizer.decode(&[id])));
    let about = |name: &str, tokens: u64| {
        vec![
            (format!("{name} tokens"), tokens.to_string()),
            ("vocabulary".into(), shape.1.to_string()),
            ("separator".into(), ends.clone()),
        ]
    };
    let reading = Arc::new(Reading::of(&settings.units, tokenizer));
    let windows = |ids: &Arc<Joined>, part: std::ops::Range<u64>, placement, name: &str| {
        let tokens = part.end - part.start;
        let set = Windows::new(ids.clone(), [part], shape, placement, name)?;
        Ok(set.told(Some(reading.clone()), about(name, tokens)))
    };
    let whole = 0..ids.len();
    match own {
        Some(own) => {
            let train = windows(&ids, whole, settings.placement, "train")?;
            Ok((train, windows(&own, 0..own.len(), Placement::Fixed, "valid")?))
        }
        None => {
            let border = split_at(&whole, settings.valid_share);
            let train = windows(&ids, 0..border, settings.placement, "train")?;
            Ok((train, windows(&ids, border..whole.end, Placement::Fixed, "valid")?))
        }
    }
}

/// The distinct characters of `files`, found once.
fn vocabulary(files: &[PathBuf], opening: &Opening) -> Result<Characters, DataError> {
    let of = Fingerprint::of(files, "characters")?;
    let path = opening.cache.get("vocabulary", of, |out| {
        let doing = format!("finding the characters of {}", name_of(files));
        let mut all = BTreeSet::new();
        let look = |text: &str| Ok(seen(text));
        each_piece(files, Cut::Anywhere, (&*opening.watch, &doing), look, |piece, _| {
            all.extend(piece.into_iter().flatten());
            Ok(())
        })?;
        let text: String = all.into_iter().collect();
        out.write_all(text.as_bytes()).map_err(DataError::writing(Path::new("the vocabulary")))
    })?;
    let text = std::fs::read_to_string(&path).map_err(DataError::io(&path))?;
    Ok(Characters::new(text.chars()))
}

/// The distinct characters of `text`.
pub fn seen(text: &str) -> BTreeSet<char> {
    let (mut ascii, mut others) = ([false; 128], BTreeSet::new());
    let mut last = '\0';
    for c in text.chars() {
        match ascii.get_mut(c as usize) {
            Some(seen) => *seen = true,
            None if c == last => {}
            None => drop(others.insert(c)),
        }
        last = c;
    }
    others.extend((0..128u8).filter(|&byte| ascii[byte as usize]).map(char::from));
    others
}

/// Files to be made into ids.
struct Text<'a> {
    files: &'a [PathBuf],
    units: &'a Units,
    tokenizer: &'a Tokenizer,
    separator: Option<u32>,
}

impl Text<'_> {
    fn ids(&self, opening: &Opening) -> Result<Vec<Ids>, DataError> {
        let plain = || -> Result<bool, DataError> {
            let packed = self.files.iter().map(|file| files::packing(file));
            Ok(packed.collect::<Result<Vec<_>, _>>()?.iter().all(|(packing, _)| *packing == Packing::Plain))
        };
        if *self.units == Units::Bytes && self.separator.is_none() && plain()? {
            return self.files.iter().map(|file| Ids::plain(file, Width::U8)).collect();
        }
        let mut how = format!("{} {:?}", self.units.how(), self.separator);
        let mut from = self.files.to_vec();
        match self.tokenizer {
            Tokenizer::Characters(characters) => how.extend(characters.vocabulary()),
            Tokenizer::Bytes => {}
            Tokenizer::Json(_) => from.extend(match self.units {
                Units::File(file) => Some(file.clone()),
                _ => None,
            }),
        }
        let of = Fingerprint::of(&from, &how)?;
        let path = opening.cache.get("tokens", of, |out| self.make(out, opening))?;
        Ok(vec![Ids::plain(&path, self.tokenizer.width())?])
    }

    fn make(&self, out: &mut impl Write, opening: &Opening) -> Result<(), DataError> {
        let (tokenizer, width) = (self.tokenizer, self.tokenizer.width());
        let doing = format!("tokenising {}", name_of(self.files));
        // Which file a piece is of is not known where it is worked on: it is named when its turn comes.
        let work = |text: &str| {
            let (mut ids, mut bytes) = (Vec::new(), Vec::new());
            let done = tokenizer.encode(text, &mut ids);
            width.put(&ids, &mut bytes);
            Ok(done.map(|()| bytes))
        };
        let mut waiting = false;
        let mut ending = Vec::new();
        width.put(&Vec::from_iter(self.separator), &mut ending);
        each_piece(self.files, tokenizer.cut(), (&*opening.watch, &doing), work, |piece, file| {
            let put = |out: &mut dyn Write, bytes: &[u8]| {
                out.write_all(bytes).map_err(DataError::writing(Path::new("the tokens of the text")))
            };
            match piece {
                None => waiting = true,
                Some(Ok(bytes)) => {
                    if std::mem::take(&mut waiting) {
                        put(out, &ending)?;
                    }
                    put(out, &bytes)?;
                }
                Some(Err(problem)) => {
                    return Err(DataError::Record { file: file.to_owned(), place: String::new(), problem });
                }
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::cache::Cache;
    use crate::data::{Key, Row, Slice, Source, published};

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
        fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
            let path = self.folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        }

        fn open(&self, settings: &Settings) -> Result<(Windows, Windows), DataError> {
            open(settings, &self.opening)
        }
    }

    fn settings(train: Vec<PathBuf>, units: Units, context: usize) -> Settings {
        Settings {
            train,
            valid: Vec::new(),
            valid_share: 0.1,
            units,
            separator: Separator::Auto,
            context,
            placement: Placement::Fixed,
        }
    }

    fn window(set: &Windows, index: u64, epoch: u64) -> (Vec<u32>, Vec<u32>) {
        let length = set.features().input_len();
        let (mut input, mut target) = (vec![9999; length], vec![9999; length]);
        let mut row = Row { input: Slice::U32(&mut input), target: Slice::U32(&mut target), length: 0 };
        set.read(index, Key { seed: 5, epoch, sample: index }, &mut row).unwrap();
        (input, target)
    }

    fn texts(set: &Windows, index: u64, epoch: u64) -> (String, String) {
        let (input, target) = window(set, index, epoch);
        (set.text(&input).unwrap(), set.text(&target).unwrap())
    }

    #[test]
    fn fixed_windows_predict_each_character_once() {
        let place = place();
        let files = vec![place.write("a", b"hello "), place.write("b", "wörld, and some more".as_bytes())];
        let (set, valid) = place
            .open(&Settings { valid_share: 0.5, ..settings(files.clone(), Units::Characters, 5) })
            .unwrap();
        assert_eq!((set.len(), valid.len(), set.resident_bytes()), (2, 2, 0));
        assert_eq!(texts(&set, 0, 0), ("hello".into(), "ello ".into()));
        assert_eq!(texts(&set, 1, 3), (" wörl".into(), "wörld".into()));
        assert_eq!(texts(&valid, 0, 0).0, "and s", "the end of the text");
        let own = Settings { valid: vec![files[1].clone()], ..settings(files, Units::Characters, 5) };
        let (set, valid) = place.open(&own).unwrap();
        assert_eq!((set.len(), valid.len()), (5, 3));
        assert_eq!(texts(&valid, 0, 0).0, "wörld");
    }

    #[test]
    fn random_windows_start_everywhere_and_depend_on_the_epoch() {
        let place = place();
        let text: String = (0..50u8).map(|i| (b'A' + i) as char).collect();
        let file = place.write("a", text.as_bytes());
        let random = Settings {
            placement: Placement::Random,
            valid_share: 0.2,
            ..settings(vec![file], Units::Bytes, 8)
        };
        let (set, _) = place.open(&random).unwrap();
        let starts: BTreeSet<String> = (0..200)
            .flat_map(|epoch| (0..set.len()).map(move |i| (i, epoch)))
            .map(|(i, e)| texts(&set, i, e).0)
            .collect();
        assert_eq!(starts.len(), 32, "every window that fits in 40 characters with its target");
        assert_eq!(window(&set, 1, 1), window(&set, 1, 1));
    }

    #[test]
    fn packed_files_are_as_plain_ones_and_bytes_are_mapped() {
        let place = place();
        let text = "Grüße, world! ".repeat(50);
        let plain = place.write("a.txt", text.as_bytes());
        let packed = place.write("a.zst", &zstd::encode_all(text.as_bytes(), 1).unwrap());
        for units in [Units::Bytes, Units::Characters] {
            let (a, _) = place.open(&settings(vec![plain.clone()], units.clone(), 16)).unwrap();
            let (b, _) = place.open(&settings(vec![packed.clone()], units, 16)).unwrap();
            assert_eq!(a.len(), b.len());
            (0..a.len()).for_each(|i| assert_eq!(window(&a, i, 0), window(&b, i, 0)));
        }
        std::fs::remove_dir_all(place.folder.path().join("cache")).unwrap();
        place.open(&settings(vec![plain], Units::Bytes, 16)).unwrap();
        assert!(!place.folder.path().join("cache").exists(), "nothing is made of plain bytes");
    }

    #[test]
    fn wide_vocabularies_fit_and_are_made_once() {
        let place = place();
        let text: String = (0..600_000u32).map(|i| char::from_u32(0x4e00 + i % 300).unwrap()).collect();
        let file = place.write("a", text.as_bytes());
        for _ in 0..2 {
            let (set, _) = place.open(&settings(vec![file.clone()], Units::Characters, 300)).unwrap();
            let (input, target) = window(&set, 1, 0);
            assert!(input.iter().enumerate().all(|(i, &t)| t == i as u32));
            assert!(target.iter().enumerate().all(|(i, &t)| t == (i as u32 + 1) % 300));
            let made = std::fs::read_dir(place.folder.path().join("cache")).unwrap().map(Result::unwrap);
            let made = made.filter(|entry| entry.path().extension().is_none_or(|end| end != "sum"));
            let sizes: Vec<u64> = made.map(|entry| entry.metadata().unwrap().len()).collect();
            assert_eq!(sizes.iter().sum::<u64>(), 2 * 600_000 + 900, "two bytes a token, and the vocabulary");
        }
    }

    #[test]
    fn too_little_text_is_refused() {
        let place = place();
        let file = place.write("a", &[b'x'; 100]);
        let short = place.open(&settings(vec![file.clone()], Units::Bytes, 10)).err().unwrap();
        let wanted = "valid gives no samples: it has 10 tokens in a row and a window takes 11";
        assert_eq!(short.to_string(), wanted);
        assert!(place.open(&settings(vec![file], Units::Bytes, 0)).is_err());
        let odd = place.write("b", b"ab\xff");
        assert!(matches!(
            place.open(&settings(vec![odd], Units::Characters, 1)).err().unwrap(),
            DataError::NotText { offset: 2, .. }
        ));
    }

    #[test]
    fn tiny_shakespeare_as_published() {
        let Some(folder) = published("tinyshakespeare") else { return };
        let place = place();
        let files = vec![folder.join("input.txt")];
        let (train, valid) = place.open(&settings(files.clone(), Units::Characters, 256)).unwrap();
        assert_eq!((train.len(), valid.len()), (3921, 435));
        assert_eq!(
            train.about()[..2],
            [("train tokens".into(), "1003854".into()), ("vocabulary".into(), "65".into())]
        );
        assert!(texts(&train, 0, 0).0.starts_with("First Citizen:\nBefore we proceed"));
    }

    /// The counts that are published of it, part by part.
    #[test]
    fn tiny_shakespeare_by_gpt2s_tokens() {
        let (Some(folder), Some(tokenizers)) = (published("tinyshakespeare"), published("tokenizers")) else {
            return;
        };
        let place = place();
        let text = std::fs::read(folder.join("input.txt")).unwrap();
        let (train, valid) = text.split_at(text.len() * 9 / 10);
        let files = [place.write("train", train), place.write("valid", valid)];
        let units = Units::File(tokenizers.join("gpt2/tokenizer.json"));
        let own =
            Settings { valid: vec![files[1].clone()], ..settings(vec![files[0].clone()], units.clone(), 64) };
        let (a, b) = place.open(&own).unwrap();
        let tokens = |set: &Windows| set.about()[0].1.parse::<u64>().unwrap();
        assert_eq!((tokens(&a), tokens(&b)), (301_966, 36_059));
        assert!(texts(&a, 0, 0).0.starts_with("First Citizen:\nBefore we proceed"));
        // Both files as one text: a separator stands between them.
        let joined = place.open(&settings(files.to_vec(), units, 64)).unwrap();
        assert_eq!(tokens(&joined.0) + tokens(&joined.1), 301_966 + 36_059 + 1);
        // In pieces as in one.
        let whole = std::str::from_utf8(train).unwrap();
        let tokenizer = own.units.tokenizer().unwrap().unwrap();
        let mut ids = Vec::new();
        tokenizer.encode(whole, &mut ids).unwrap();
        assert_eq!(ids.len(), 301_966);
        assert_eq!(window(&a, a.len() - 1, 0).0, ids[(a.len() as usize - 1) * 64..][..64]);
        assert_eq!(tokenizer.decode(&ids), whole);
    }
}
