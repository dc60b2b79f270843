//! Text files as characters: each distinct character is a token, and a sample is a window of them with
//! the next character of each as its target.
//!
//! Files are read twice in small pieces, once for the vocabulary and once for the tokens, so that only
//! the tokens are ever in memory: one byte each, or two with more than 256 distinct characters.

use std::{
    collections::BTreeSet,
    fs::File,
    io::Read,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{DataError, Features, Input, Key, Row, Source, Target};
use crate::random::{Random, stream};

/// The characters of some files, in order.
#[derive(Debug)]
pub struct Corpus {
    /// Sorted; a token is an index into it.
    vocabulary: Vec<char>,
    tokens: Tokens,
}

#[derive(Debug)]
enum Tokens {
    U8(Vec<u8>),
    U16(Vec<u16>),
}

impl Corpus {
    /// Reads UTF-8 `files`, one after the other, into at most `max_bytes` of memory.
    pub fn open(files: &[PathBuf], max_bytes: u64) -> Result<Self, DataError> {
        let (mut ascii, mut others, mut count) = ([false; 128], BTreeSet::new(), 0u64);
        for file in files {
            let before = count;
            each_character(file, |character| {
                count += 1;
                match ascii.get_mut(character as usize) {
                    Some(seen) => *seen = true,
                    None => drop(others.insert(character)),
                }
                Ok(())
            })?;
            if count == before {
                return Err(DataError::EmptyFile { file: file.clone() });
            }
        }
        let ascii = (0..128u8).filter(|&byte| ascii[byte as usize]).map(char::from);
        let vocabulary: Vec<char> = ascii.chain(others).collect();
        let wide = vocabulary.len() > 256;
        let bytes = count.saturating_mul(if wide { 2 } else { 1 });
        if bytes > max_bytes {
            let file = files.first().cloned().unwrap_or_default();
            return Err(DataError::TooLarge { file, bytes, limit: max_bytes });
        }
        let tokens = if wide {
            Tokens::U16(encode(files, &vocabulary, count)?)
        } else {
            Tokens::U8(encode(files, &vocabulary, count)?)
        };
        Ok(Corpus { vocabulary, tokens })
    }

    /// The distinct characters in order; a token is an index into them.
    pub fn vocabulary(&self) -> &[char] {
        &self.vocabulary
    }

    /// Characters in all files.
    pub fn len(&self) -> usize {
        match &self.tokens {
            Tokens::U8(tokens) => tokens.len(),
            Tokens::U16(tokens) => tokens.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The characters to train on and, the last `valid_share` of the text, those to validate on.
    pub fn split(&self, valid_share: f64) -> (Range<usize>, Range<usize>) {
        let border = (self.len() as f64 * (1.0 - valid_share.clamp(0.0, 1.0))) as usize;
        (0..border, border..self.len())
    }

    fn copy(&self, range: Range<usize>, into: &mut [u32]) {
        fn widen<T: Copy + Into<u32>>(from: &[T], into: &mut [u32]) {
            into.iter_mut().zip(from).for_each(|(into, &from)| *into = from.into());
        }
        match &self.tokens {
            Tokens::U8(tokens) => widen(&tokens[range], into),
            Tokens::U16(tokens) => widen(&tokens[range], into),
        }
    }
}

fn encode<T: TryFrom<usize>>(
    files: &[PathBuf],
    vocabulary: &[char],
    count: u64,
) -> Result<Vec<T>, DataError> {
    let mut tokens = Vec::new();
    let bytes = count.saturating_mul(size_of::<T>() as u64);
    tokens.try_reserve_exact(count as usize).map_err(|_| DataError::OutOfMemory { bytes })?;
    let ascii: [_; 128] = std::array::from_fn(|byte| vocabulary.binary_search(&(byte as u8 as char)).ok());
    for file in files {
        each_character(file, |character| {
            let place = match ascii.get(character as usize) {
                Some(place) => *place,
                None => vocabulary.binary_search(&character).ok(),
            };
            let token = place.and_then(|place| T::try_from(place).ok());
            // Room was made for what the first pass counted: a file that grew must not grow the memory.
            match token.filter(|_| tokens.len() < tokens.capacity()) {
                Some(token) => tokens.push(token),
                None => {
                    return Err(DataError::Value {
                        file: file.clone(),
                        record: tokens.len() as u64,
                        column: None,
                        value: character.to_string(),
                        wanted: match vocabulary.len() {
                            0..=65536 => {
                                "what was there a moment ago: the file is being written to".to_owned()
                            }
                            n => format!("one of at most 65536 distinct characters; the text has {n}"),
                        },
                    });
                }
            }
            Ok(())
        })?;
    }
    Ok(tokens)
}

/// Calls `take` with every character of a UTF-8 file, holding a small piece of it at a time.
fn each_character(file: &Path, mut take: impl FnMut(char) -> Result<(), DataError>) -> Result<(), DataError> {
    let mut reader = File::open(file).map_err(DataError::io(file))?;
    let mut piece = vec![0; 1 << 16];
    let (mut kept, mut offset) = (0, 0u64);
    loop {
        let read = reader.read(&mut piece[kept..]).map_err(DataError::io(file))?;
        let filled = kept + read;
        let not_text = |at: usize| {
            let (offset, byte) = (offset + at as u64, piece[at]);
            DataError::NotText { file: file.to_owned(), offset, byte }
        };
        let (text, whole) = match str::from_utf8(&piece[..filled]) {
            Ok(text) => (text, filled),
            // A character may be cut by the piece's end, but not by the file's.
            Err(error) if error.error_len().is_none() && read > 0 => {
                let whole = error.valid_up_to();
                (str::from_utf8(&piece[..whole]).map_err(|_| not_text(whole))?, whole)
            }
            Err(error) => return Err(not_text(error.valid_up_to())),
        };
        text.chars().try_for_each(&mut take)?;
        if read == 0 {
            return Ok(());
        }
        piece.copy_within(whole..filled, 0);
        (kept, offset) = (filled - whole, offset + whole as u64);
    }
}

/// Where the windows of a set lie in its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// End to end from the beginning: an epoch predicts each character once.
    Fixed,
    /// Each anywhere, as (seed, epoch, sample) say: an epoch has as many windows as with `Fixed`, but
    /// they overlap and leave gaps, other ones in every epoch.
    Random,
}

/// Windows of `context` characters of a part of a corpus.
pub struct Windows {
    corpus: Arc<Corpus>,
    range: Range<usize>,
    context: usize,
    placement: Placement,
    features: Features,
}

impl Windows {
    /// A set over the characters `range` of `corpus`; see [`Corpus::split`].
    pub fn new(
        corpus: Arc<Corpus>,
        range: Range<usize>,
        context: usize,
        placement: Placement,
    ) -> Result<Self, DataError> {
        if context == 0 {
            let (name, value) = ("context", "0".to_owned());
            return Err(DataError::Setting { name, value, wanted: "a window has at least one character" });
        }
        let range = range.start.min(corpus.len())..range.end.min(corpus.len());
        if range.len() <= context {
            let why =
                format!("it has {} characters and a window takes {}", range.len(), context.saturating_add(1));
            return Err(DataError::NoSamples { set: "the text".to_owned(), why });
        }
        let input = Input::Tokens { length: context, vocab: corpus.vocabulary.len() };
        let features = Features::new(input, Target::Tokens);
        Ok(Windows { corpus, range, context, placement, features })
    }
}

impl Source for Windows {
    fn len(&self) -> u64 {
        // The last character of all is a target only.
        ((self.range.len() - 1) / self.context) as u64
    }

    fn features(&self) -> &Features {
        &self.features
    }

    fn read(&self, index: u64, key: Key, into: &mut Row<'_>) -> Result<(), DataError> {
        const WINDOWS: u64 = stream("text.windows");
        let start = self.range.start
            + match self.placement {
                Placement::Fixed => index as usize * self.context,
                Placement::Random => {
                    let starts = (self.range.len() - self.context) as u64;
                    Random::new(key.seed, WINDOWS).at(key.epoch).at(key.sample).below(0, starts) as usize
                }
            };
        self.corpus.copy(start..start + self.context, into.input.u32());
        self.corpus.copy(start + 1..start + 1 + self.context, into.target.u32());
        Ok(())
    }

    /// This part's share of the corpus, so that the parts of one corpus add up to it.
    fn resident_bytes(&self) -> u64 {
        let width = match self.corpus.tokens {
            Tokens::U8(_) => 1,
            Tokens::U16(_) => 2,
        };
        self.range.len() as u64 * width
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Slice, published};

    fn corpus(texts: &[&[u8]]) -> Result<Corpus, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let files: Vec<PathBuf> = (0..texts.len()).map(|i| folder.path().join(format!("{i}.txt"))).collect();
        files.iter().zip(texts).for_each(|(file, text)| std::fs::write(file, text).unwrap());
        Corpus::open(&files, 1 << 20)
    }

    fn window(set: &Windows, index: u64, epoch: u64) -> (String, String) {
        let (mut input, mut target) = (vec![9999; set.context], vec![9999; set.context]);
        let mut row = Row { input: Slice::U32(&mut input), target: Slice::U32(&mut target), length: 0 };
        set.read(index, Key { seed: 5, epoch, sample: index }, &mut row).unwrap();
        let text = |tokens: &[u32]| tokens.iter().map(|&t| set.corpus.vocabulary[t as usize]).collect();
        (text(&input), text(&target))
    }

    #[test]
    fn fixed_windows_predict_each_character_once() {
        let corpus = Arc::new(corpus(&[b"hello ", "wörld".as_bytes()]).unwrap());
        assert_eq!(corpus.vocabulary(), [' ', 'd', 'e', 'h', 'l', 'o', 'r', 'w', 'ö']);
        let set = Windows::new(corpus.clone(), 0..corpus.len(), 5, Placement::Fixed).unwrap();
        assert_eq!((set.len(), set.resident_bytes()), (2, 11));
        assert_eq!(window(&set, 0, 0), ("hello".into(), "ello ".into()));
        assert_eq!(window(&set, 1, 3), (" wörl".into(), "wörld".into()));
    }

    #[test]
    fn random_windows_start_everywhere_and_depend_on_the_epoch() {
        let text: String = (0..50u8).map(|i| (b'A' + i) as char).collect();
        let corpus = Arc::new(corpus(&[text.as_bytes()]).unwrap());
        let set = Windows::new(corpus, 10..50, 8, Placement::Random).unwrap();
        let starts: BTreeSet<String> = (0..200)
            .flat_map(|epoch| (0..set.len()).map(move |i| (i, epoch)))
            .map(|(i, e)| window(&set, i, e).0)
            .collect();
        assert_eq!(starts.len(), 32, "every window that fits in 40 characters with its target");
        assert!(starts.iter().all(|s| s.as_bytes()[0] >= b'A' + 10));
        assert_eq!(window(&set, 1, 1), window(&set, 1, 1));
    }

    #[test]
    fn the_split_is_by_position_and_too_little_text_is_refused() {
        let corpus = Arc::new(corpus(&[&[b'x'; 100]]).unwrap());
        assert_eq!(corpus.split(0.1), (0..90, 90..100));
        let short = Windows::new(corpus.clone(), 90..100, 10, Placement::Fixed).err().unwrap();
        assert_eq!(
            short.to_string(),
            "the text gives no samples: it has 10 characters and a window takes 11"
        );
        assert!(Windows::new(corpus, 0..100, 0, Placement::Fixed).is_err());
    }

    #[test]
    fn characters_cut_by_a_piece_are_whole_and_wide_vocabularies_fit() {
        // Three bytes a character: pieces of 65,536 bytes end inside one.
        let text: String = (0..60_000u32).map(|i| char::from_u32(0x4e00 + i % 300).unwrap()).collect();
        let corpus = corpus(&[text.as_bytes()]).unwrap();
        assert_eq!((corpus.len(), corpus.vocabulary().len()), (60_000, 300));
        let mut tokens = vec![0; 60_000];
        corpus.copy(0..60_000, &mut tokens);
        assert!(tokens.iter().enumerate().all(|(i, &t)| t == i as u32 % 300));
    }

    #[test]
    fn what_is_not_text_is_refused_with_its_place() {
        let bad = [vec![b'a'; 70_000], vec![0xff, b'b']].concat();
        let error = corpus(&[&bad]).unwrap_err();
        assert!(matches!(error, DataError::NotText { offset: 70_000, byte: 0xff, .. }), "{error}");
        let cut = corpus(&[&"aö".as_bytes()[..2]]).unwrap_err();
        assert!(matches!(cut, DataError::NotText { offset: 1, byte: 0xc3, .. }), "{cut}");
        assert!(matches!(corpus(&[b"a", b""]).unwrap_err(), DataError::EmptyFile { .. }));
        assert!(matches!(Corpus::open(&["/no/such".into()], 9).unwrap_err(), DataError::Io { .. }));
    }

    #[test]
    fn tiny_shakespeare_as_published() {
        let Some(folder) = published("tinyshakespeare") else { return };
        let corpus = Arc::new(Corpus::open(&[folder.join("input.txt")], 2 << 20).unwrap());
        assert_eq!((corpus.len(), corpus.vocabulary().len()), (1_115_394, 65));
        let (train, valid) = corpus.split(0.1);
        assert_eq!((train.len(), valid.len()), (1_003_854, 111_540));
        let sets =
            [train, valid].map(|part| Windows::new(corpus.clone(), part, 256, Placement::Fixed).unwrap());
        assert_eq!(sets.each_ref().map(Source::len), [3921, 435]);
        assert_eq!(sets.iter().map(Source::resident_bytes).sum::<u64>(), 1_115_394);
        assert!(window(&sets[0], 0, 0).0.starts_with("First Citizen:\nBefore we proceed"));
    }
}
