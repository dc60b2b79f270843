//! Text files as one token stream, cut into windows.
//!
//! With the byte tokenizer, plain files are used as they are. Everything else is tokenized once into the cache; the
//! character tokenizer first takes a pass over the text to collect its vocabulary. Files are concatenated, with the
//! separator token between them if there is one.

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    iter,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::DataError;
use super::pieces::{BYTE_ORDER_MARK, for_each_piece};
use super::text_memory::{TextError, TextMemory};
use super::token_storage::{TokenFiles, TokenIdFile, TokenWidth};
use super::token_windows::{
    TokenDecoder, TokenRanges, TokenWindows, WindowPlacement, WindowSets, display_name,
};
use super::tokenizer::{CharTokenizer, Separator, SplitRule, Tokenizer, TokenizerSpec};
use crate::DatasetContext;
use crate::base::file_format;
use crate::cache::CacheKey;
use crate::files::{self, FileCompression};
use crate::split::SplitSettings;

/// Which text to read, and how to build samples from it.
#[derive(Clone, Debug)]
pub struct TextSettings {
    pub train: Vec<PathBuf>,
    /// Validation files; if empty, a part of the text is the validation set.
    pub valid: Vec<PathBuf>,
    /// Test files; if empty, there is no test set, or it is the end of the text.
    pub test: Vec<PathBuf>,
    /// How the text is split, always by position.
    pub split: SplitSettings,
    pub tokenizer: TokenizerSpec,
    pub separator: Separator,
    pub context: usize,
    /// Placement of the training windows; validation windows are always contiguous.
    pub placement: WindowPlacement,
}

/// Opens the windows of all sets.
pub fn open(settings: &TextSettings, ctx: &DatasetContext) -> Result<WindowSets, DataError> {
    let resolve = files::resolve_patterns;
    let (train, valid, test) =
        (resolve(&settings.train)?, resolve(&settings.valid)?, resolve(&settings.test)?);
    [&train, &valid, &test].into_iter().flatten().try_for_each(|file| refuse_binary(file))?;
    let tokenizer = match settings.tokenizer.load_within_memory(ctx)? {
        Some(tokenizer) => tokenizer,
        None => Tokenizer::Characters(character_vocabulary(&[&train[..], &valid, &test].concat(), ctx)?),
    };
    let separator = tokenizer.separator(&settings.separator)?;
    let tokenize = |files: &[PathBuf]| -> Result<Arc<TokenFiles>, DataError> {
        let ids = TextCorpus { files, tokenizer_spec: &settings.tokenizer, tokenizer: &tokenizer, separator }
            .token_files(ctx)?;
        Ok(Arc::new(TokenFiles::new(ids)))
    };
    let ids = tokenize(&train)?;
    let shape = (settings.context, tokenizer.vocab());
    let own = |files: &[PathBuf]| (!files.is_empty()).then(|| tokenize(files)).transpose();
    let (valid_ids, test_ids) = (own(&valid)?, own(&test)?);
    let separator_text = separator.map_or("none".into(), |id| format!("`{}`", tokenizer.decode(&[id])));
    let about = |name: &str, tokens: u64| {
        vec![
            (format!("{name} tokens"), tokens.to_string()),
            ("vocabulary".into(), shape.1.to_string()),
            ("separator".into(), separator_text.clone()),
        ]
    };
    let decoder = Arc::new(TokenDecoder::new(&settings.tokenizer, tokenizer));
    let windows = |ids: &Arc<TokenFiles>, ranges: Vec<Range<u64>>, placement, name: &str| {
        let tokens = ranges.iter().map(|range| range.end - range.start).sum();
        let set = TokenWindows::new(ids.clone(), ranges, shape, placement, name)?;
        Ok(set.with_description(Some(decoder.clone()), about(name, tokens)))
    };
    let TokenRanges { train, valid, test } = TokenRanges::new(ids.len(), &settings.split);
    let other = |own: Option<Arc<TokenFiles>>, part: Vec<Range<u64>>, name: &str| match own {
        Some(own) => windows(&own, iter::once(0..own.len()).collect(), WindowPlacement::Fixed, name),
        None => windows(&ids, part, WindowPlacement::Fixed, name),
    };
    let has_test = test_ids.is_some() || settings.split.test_fraction > 0.0;
    Ok(WindowSets {
        train: windows(&ids, train, settings.placement, "train")?,
        valid: other(valid_ids, valid, "valid")?,
        test: has_test.then(|| other(test_ids, test, "test")).transpose()?,
    })
}

/// Refuses a file of a known binary format, which the byte tokenizer would take, and text in UTF-16.
fn refuse_binary(file: &Path) -> Result<(), DataError> {
    let start = first_bytes(file)?;
    if let [byte @ 0xff, 0xfe, ..] | [byte @ 0xfe, 0xff, ..] = start[..] {
        return Err(DataError::InvalidUtf8 { file: file.to_owned(), offset: 0, byte });
    }
    match file_format::name(&start) {
        None => Ok(()),
        Some(format) => Err(DataError::Table {
            file: file.to_owned(),
            place: String::new(),
            problem: format!("it is {format}, not text"),
            hint: "extract the text into a text file, or into a field of JSON Lines for `kind = \"jsonl\"`",
        }),
    }
}

/// The first bytes of a file, decompressed.
fn first_bytes(file: &Path) -> Result<Vec<u8>, DataError> {
    let mut start = Vec::new();
    let read = files::open(file)?.take(16).read_to_end(&mut start);
    read.map(|_| start).map_err(|error| files::read_error(file, error))
}

/// Distinct characters of `files`; cached.
fn character_vocabulary(files: &[PathBuf], ctx: &DatasetContext) -> Result<CharTokenizer, DataError> {
    let cache_key = CacheKey::new(files, "characters")?;
    let path = ctx.cache.get_or_create("vocabulary", cache_key, |out| {
        let activity = format!("collecting the characters of {}", display_name(files));
        let mut all = BTreeSet::new();
        let look = |text: &str| Ok(distinct_chars(text));
        for_each_piece(files, SplitRule::Anywhere, (&*ctx.observer, &activity), look, |piece, _| {
            all.extend(piece.into_iter().flat_map(|(_, found)| found));
            Ok(())
        })?;
        let text: String = all.into_iter().collect();
        out.write_all(text.as_bytes()).map_err(DataError::write(Path::new("the vocabulary")))
    })?;
    let text = std::fs::read_to_string(&path).map_err(DataError::io(&path))?;
    Ok(CharTokenizer::new(text.chars()))
}

pub fn distinct_chars(text: &str) -> BTreeSet<char> {
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

/// Files to tokenize.
struct TextCorpus<'a> {
    files: &'a [PathBuf],
    tokenizer_spec: &'a TokenizerSpec,
    tokenizer: &'a Tokenizer,
    separator: Option<u32>,
}

impl TextCorpus<'_> {
    fn token_files(&self, ctx: &DatasetContext) -> Result<Vec<TokenIdFile>, DataError> {
        let plain = || -> Result<bool, DataError> {
            for file in self.files {
                let (packing, _) = files::compression(file)?;
                if packing != FileCompression::Uncompressed || first_bytes(file)?.starts_with(BYTE_ORDER_MARK)
                {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        if *self.tokenizer_spec == TokenizerSpec::Bytes && self.separator.is_none() && plain()? {
            return self
                .files
                .iter()
                .map(|file| TokenIdFile::open_headerless(file, TokenWidth::U8))
                .collect();
        }
        let mut cache_settings = format!("{} {:?}", self.tokenizer_spec.cache_settings(), self.separator);
        let mut sources = self.files.to_vec();
        match self.tokenizer {
            Tokenizer::Characters(characters) => cache_settings.extend(characters.vocabulary()),
            Tokenizer::Bytes => {}
            Tokenizer::HuggingFace(_) => sources.extend(match self.tokenizer_spec {
                TokenizerSpec::File(file) => Some(file.clone()),
                _ => None,
            }),
        }
        let cache_key = CacheKey::new(&sources, &cache_settings)?;
        let path = ctx.cache.get_or_create("tokens", cache_key, |out| self.tokenize(out, ctx))?;
        Ok(vec![TokenIdFile::open_headerless(&path, self.tokenizer.width())?])
    }

    fn tokenize(&self, out: &mut impl Write, ctx: &DatasetContext) -> Result<(), DataError> {
        let (tokenizer, width) = (self.tokenizer, self.tokenizer.width());
        let activity = format!("tokenising {}", display_name(self.files));
        let memory = TextMemory::of(tokenizer, ctx);
        let encode = |text: &str, limit: u64| {
            tokenizer.check_memory(text, false, limit)?;
            let (mut ids, mut bytes) = (Vec::new(), Vec::new());
            tokenizer.encode(text, &mut ids)?;
            width.write_ids(&ids, &mut bytes);
            Ok::<_, TextError>(bytes)
        };
        let mut separator_pending = false;
        let mut separator_bytes = Vec::new();
        width.write_ids(&Vec::from_iter(self.separator), &mut separator_bytes);
        for_each_piece(
            self.files,
            tokenizer.split_rule(),
            (&*ctx.observer, &activity),
            // Workers do not know which file a piece is from: errors get it below.
            |text| Ok(encode(text, memory.parallel)),
            |piece, file| {
                let put = |out: &mut dyn Write, bytes: &[u8]| {
                    out.write_all(bytes).map_err(DataError::write(Path::new("the tokens of the text")))
                };
                let Some((text, encoded)) = piece else {
                    separator_pending = true;
                    return Ok(());
                };
                let encoded = match encoded {
                    Err(TextError::Memory { .. }) => encode(&text, memory.alone),
                    done => done,
                };
                if std::mem::take(&mut separator_pending) {
                    put(out, &separator_bytes)?;
                }
                put(out, &encoded.map_err(|error| error.at(file, String::new()))?)
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::split::{FoldIndex, ValidSet};
    use crate::{BatchRow, Dataset, SampleKey, SliceMut, published_dataset};

    struct TextFixture {
        folder: tempfile::TempDir,
        ctx: DatasetContext,
    }

    fn fixture() -> TextFixture {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().join("cache"));
        TextFixture { ctx: DatasetContext { cache, ..DatasetContext::default() }, folder }
    }

    impl TextFixture {
        fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
            let path = self.folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        }

        fn open(&self, settings: &TextSettings) -> Result<(TokenWindows, TokenWindows), DataError> {
            open(settings, &self.ctx).map(|sets| (sets.train, sets.valid))
        }
    }

    fn settings(train: Vec<PathBuf>, units: TokenizerSpec, context: usize) -> TextSettings {
        TextSettings {
            train,
            valid: Vec::new(),
            test: Vec::new(),
            split: SplitSettings::random(0.1),
            tokenizer: units,
            separator: Separator::Auto,
            context,
            placement: WindowPlacement::Fixed,
        }
    }

    /// All of the text is for training.
    fn whole() -> SplitSettings {
        SplitSettings { valid: ValidSet::OwnFiles, ..SplitSettings::random(0.1) }
    }

    fn window(set: &TokenWindows, index: u64, epoch: u64) -> (Vec<u32>, Vec<u32>) {
        let length = set.features().input_len();
        let (mut input, mut target) = (vec![9999; length], vec![9999; length]);
        let mut row =
            BatchRow { input: SliceMut::U32(&mut input), target: SliceMut::U32(&mut target), length: 0 };
        set.read(index, SampleKey { seed: 5, epoch, sample: index }, &mut row).unwrap();
        (input, target)
    }

    fn texts(set: &TokenWindows, index: u64, epoch: u64) -> (String, String) {
        let (input, target) = window(set, index, epoch);
        (set.decode_tokens(&input).unwrap(), set.decode_tokens(&target).unwrap())
    }

    #[test]
    fn fixed_windows_predict_each_character_once() {
        let fixture = fixture();
        let files =
            vec![fixture.write("a", b"hello "), fixture.write("b", "wörld, and some more".as_bytes())];
        let (set, valid) = fixture
            .open(&TextSettings {
                split: SplitSettings::random(0.5),
                ..settings(files.clone(), TokenizerSpec::Characters, 5)
            })
            .unwrap();
        assert_eq!((set.len(), valid.len(), set.resident_bytes()), (2, 2, 0));
        assert_eq!(texts(&set, 0, 0), ("hello".into(), "ello ".into()));
        assert_eq!(texts(&set, 1, 3), (" wörl".into(), "wörld".into()));
        assert_eq!(texts(&valid, 0, 0).0, "and s", "the end of the text");
        let own = TextSettings {
            valid: vec![files[1].clone()],
            split: whole(),
            ..settings(files, TokenizerSpec::Characters, 5)
        };
        let (set, valid) = fixture.open(&own).unwrap();
        assert_eq!((set.len(), valid.len()), (5, 3));
        assert_eq!(texts(&valid, 0, 0).0, "wörld");
    }

    #[test]
    fn binary_files_are_refused_and_a_byte_order_mark_is_left_out() {
        let fixture = fixture();
        let marked = fixture.write("marked", "\u{feff}hello, world".as_bytes());
        for units in [TokenizerSpec::Characters, TokenizerSpec::Bytes] {
            let files = vec![marked.clone()];
            let settings = TextSettings { valid: files.clone(), split: whole(), ..settings(files, units, 5) };
            let (set, _) = fixture.open(&settings).unwrap();
            assert_eq!(texts(&set, 0, 0), ("hello".into(), "ello,".into()));
        }
        for (start, expected) in [
            (&b"PAR1 and more bytes"[..], "it is a Parquet file, not text"),
            (b"\xff\xfeh\0i\0", "0xff, is not UTF-8"),
        ] {
            let file = fixture.write("binary", start);
            let error =
                fixture.open(&settings(vec![file], TokenizerSpec::Bytes, 5)).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    /// The test set is the end of the text; each other character is predicted in the validation set of one fold.
    #[test]
    fn folds_and_the_test_set_are_consecutive() {
        let fixture = fixture();
        let text: String = (0..100u8).map(|i| (b'!' + i % 90) as char).collect();
        let file = fixture.write("a", text.as_bytes());
        let mut validated = String::new();
        for index in 0..4 {
            let valid = ValidSet::Fold(FoldIndex { index, folds: 4 });
            let split = SplitSettings { test_fraction: 0.2, valid, ..SplitSettings::random(0.0) };
            let settings = TextSettings { split, ..settings(vec![file.clone()], TokenizerSpec::Bytes, 4) };
            let sets = open(&settings, &fixture.ctx).unwrap();
            let inputs = |set: &TokenWindows| (0..set.len()).map(|i| texts(set, i, 0).0).collect::<String>();
            assert_eq!(inputs(&sets.test.unwrap()), text[80..96]);
            // The last token of a stretch is only a target.
            assert_eq!(inputs(&sets.valid), text[20 * index as usize..][..16]);
            assert!(!inputs(&sets.train).contains(&text[20 * index as usize..][..5]));
            validated += &inputs(&sets.valid);
        }
        assert_eq!(validated.len(), 64);
    }

    #[test]
    fn random_windows_start_everywhere_and_depend_on_the_epoch() {
        let fixture = fixture();
        let text: String = (0..50u8).map(|i| (b'A' + i) as char).collect();
        let file = fixture.write("a", text.as_bytes());
        let random = TextSettings {
            placement: WindowPlacement::Random,
            split: SplitSettings::random(0.2),
            ..settings(vec![file], TokenizerSpec::Bytes, 8)
        };
        let (set, _) = fixture.open(&random).unwrap();
        let starts: BTreeSet<String> = (0..200)
            .flat_map(|epoch| (0..set.len()).map(move |i| (i, epoch)))
            .map(|(i, e)| texts(&set, i, e).0)
            .collect();
        assert_eq!(starts.len(), 32, "every window that fits in 40 characters with its target");
        assert_eq!(window(&set, 1, 1), window(&set, 1, 1));
    }

    #[test]
    fn compressed_files_are_as_plain_ones_and_bytes_are_not_copied() {
        let fixture = fixture();
        let text = "Grüße, world! ".repeat(50);
        let plain = fixture.write("a.txt", text.as_bytes());
        let packed = fixture.write("a.zst", &zstd::encode_all(text.as_bytes(), 1).unwrap());
        for units in [TokenizerSpec::Bytes, TokenizerSpec::Characters] {
            let (a, _) = fixture.open(&settings(vec![plain.clone()], units.clone(), 16)).unwrap();
            let (b, _) = fixture.open(&settings(vec![packed.clone()], units, 16)).unwrap();
            assert_eq!(a.len(), b.len());
            (0..a.len()).for_each(|i| assert_eq!(window(&a, i, 0), window(&b, i, 0)));
        }
        std::fs::remove_dir_all(fixture.folder.path().join("cache")).unwrap();
        fixture.open(&settings(vec![plain], TokenizerSpec::Bytes, 16)).unwrap();
        assert!(!fixture.folder.path().join("cache").exists(), "nothing is made of plain bytes");
    }

    #[test]
    fn wide_vocabularies_fit_and_are_built_once() {
        let fixture = fixture();
        let text: String = (0..600_000u32).map(|i| char::from_u32(0x4e00 + i % 300).unwrap()).collect();
        let file = fixture.write("a", text.as_bytes());
        for _ in 0..2 {
            let (set, _) =
                fixture.open(&settings(vec![file.clone()], TokenizerSpec::Characters, 300)).unwrap();
            let (input, target) = window(&set, 1, 0);
            assert!(input.iter().enumerate().all(|(i, &t)| t == i as u32));
            assert!(target.iter().enumerate().all(|(i, &t)| t == (i as u32 + 1) % 300));
            let made = std::fs::read_dir(fixture.folder.path().join("cache")).unwrap().map(Result::unwrap);
            let made = made.filter(|entry| entry.path().extension().is_none_or(|end| end != "sum"));
            let sizes: Vec<u64> = made.map(|entry| entry.metadata().unwrap().len()).collect();
            assert_eq!(sizes.iter().sum::<u64>(), 2 * 600_000 + 900, "two bytes a token, and the vocabulary");
        }
    }

    #[test]
    fn too_little_text_is_refused() {
        let fixture = fixture();
        let file = fixture.write("a", &[b'x'; 100]);
        let short = fixture.open(&settings(vec![file.clone()], TokenizerSpec::Bytes, 10)).err().unwrap();
        let expected = "valid has no samples: it has 10 contiguous tokens, and a window needs 11";
        assert_eq!(short.to_string(), expected);
        assert!(fixture.open(&settings(vec![file], TokenizerSpec::Bytes, 0)).is_err());
        let odd = fixture.write("b", b"ab\xff");
        assert!(matches!(
            fixture.open(&settings(vec![odd], TokenizerSpec::Characters, 1)).err().unwrap(),
            DataError::InvalidUtf8 { offset: 2, .. }
        ));
    }

    #[test]
    fn tiny_shakespeare_as_published() {
        let Some(folder) = published_dataset("tinyshakespeare") else { return };
        let fixture = fixture();
        let files = vec![folder.join("input.txt")];
        let (train, valid) = fixture.open(&settings(files.clone(), TokenizerSpec::Characters, 256)).unwrap();
        assert_eq!((train.len(), valid.len()), (3921, 435));
        assert_eq!(
            train.describe()[..2],
            [("train tokens".into(), "1003854".into()), ("vocabulary".into(), "65".into())]
        );
        assert!(texts(&train, 0, 0).0.starts_with("First Citizen:\nBefore we proceed"));
    }

    /// The published token counts of each part.
    #[test]
    fn tiny_shakespeare_by_gpt2s_tokens() {
        let (Some(folder), Some(tokenizers)) =
            (published_dataset("tinyshakespeare"), published_dataset("tokenizers"))
        else {
            return;
        };
        let fixture = fixture();
        let text = std::fs::read(folder.join("input.txt")).unwrap();
        let (train, valid) = text.split_at(text.len() * 9 / 10);
        let files = [fixture.write("train", train), fixture.write("valid", valid)];
        let units = TokenizerSpec::File(tokenizers.join("gpt2/tokenizer.json"));
        let own = TextSettings {
            valid: vec![files[1].clone()],
            split: whole(),
            ..settings(vec![files[0].clone()], units.clone(), 64)
        };
        let (a, b) = fixture.open(&own).unwrap();
        let tokens = |set: &TokenWindows| set.describe()[0].1.parse::<u64>().unwrap();
        assert_eq!((tokens(&a), tokens(&b)), (301_966, 36_059));
        assert!(texts(&a, 0, 0).0.starts_with("First Citizen:\nBefore we proceed"));
        // Both files as one stream: one separator token between them.
        let joined = fixture.open(&settings(files.to_vec(), units, 64)).unwrap();
        assert_eq!(tokens(&joined.0) + tokens(&joined.1), 301_966 + 36_059 + 1);
        // Tokenizing in pieces gives the same ids as tokenizing the whole text.
        let whole = std::str::from_utf8(train).unwrap();
        let tokenizer = own.tokenizer.load().unwrap().unwrap();
        let mut ids = Vec::new();
        tokenizer.encode(whole, &mut ids).unwrap();
        assert_eq!(ids.len(), 301_966);
        assert_eq!(window(&a, a.len() - 1, 0).0, ids[(a.len() as usize - 1) * 64..][..64]);
        assert_eq!(tokenizer.decode(&ids), whole);
    }
}
