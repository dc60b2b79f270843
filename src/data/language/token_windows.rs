//! Windows over token ids: a sample is `context` consecutive ids, and its targets are the ids shifted by one.

use std::{
    ops::Range,
    path::PathBuf,
    sync::{Arc, OnceLock},
};

use super::token_storage::{RandomAccessFile, TokenFiles};
use super::tokenizer::{MAX_TOKENIZER_BYTES, Tokenizer, TokenizerSpec};
use super::{BatchRow, DataError, Dataset, Features, InputSpec, SampleKey, TargetSpec};
use crate::base::features::IGNORE_INDEX;
use crate::base::random::{RngKey, stream_id};
use crate::base::regular_file;
use crate::split::{SplitSettings, ValidSet};

/// How the windows of a dataset are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowPlacement {
    /// Contiguous from the start: an epoch predicts each token once.
    Fixed,
    /// Each at a random position, drawn from (seed, epoch, sample). An epoch has as many windows as with `Fixed`, but
    /// they overlap and leave gaps, and every epoch draws new ones.
    Random,
}

/// One bit per id: whether it contributes to the loss.
pub struct LossMask(pub RandomAccessFile);

impl LossMask {
    /// Replaces the ids that do not contribute to the loss by [`IGNORE_INDEX`]. `start` is the position of the first
    /// id.
    pub fn apply(&self, start: u64, ids: &mut [u32]) -> Result<(), DataError> {
        let mut bytes = [0; 256];
        let mut done = 0;
        while done < ids.len() {
            let at = start + done as u64;
            // Stop at a byte boundary of the buffer.
            let count = (ids.len() - done).min(8 * bytes.len() - (at % 8) as usize);
            let read = &mut bytes[..((at % 8) as usize + count).div_ceil(8)];
            self.0.read(at / 8, read)?;
            for (i, id) in ids[done..done + count].iter_mut().enumerate() {
                let bit = (at % 8) as usize + i;
                if read[bit / 8] >> (bit % 8) & 1 == 0 {
                    *id = IGNORE_INDEX;
                }
            }
            done += count;
        }
        Ok(())
    }
}

/// Decodes ids to text for display.
pub enum TokenDecoder {
    Loaded(Tokenizer),
    /// The vocabulary of a tokenizer file takes memory, so the file is loaded again on first use.
    Lazy {
        file: PathBuf,
        tokenizer: OnceLock<Option<Tokenizer>>,
    },
}

impl TokenDecoder {
    /// Decoder for ids that `tokenizer`, described by `units`, produced.
    pub fn new(units: &TokenizerSpec, tokenizer: Tokenizer) -> Self {
        match units {
            TokenizerSpec::File(file) => Self::from_file(file.clone()),
            TokenizerSpec::Characters | TokenizerSpec::Bytes => TokenDecoder::Loaded(tokenizer),
        }
    }

    /// Decoder for ids that the tokenizer in `file` produced.
    pub fn from_file(file: PathBuf) -> Self {
        TokenDecoder::Lazy { file, tokenizer: OnceLock::new() }
    }

    /// `None` if the tokenizer can no longer be loaded.
    pub fn decode(&self, ids: &[u32]) -> Option<String> {
        let tokenizer = match self {
            TokenDecoder::Loaded(tokenizer) => tokenizer,
            TokenDecoder::Lazy { file, tokenizer } => {
                let open = || TokenizerSpec::File(file.clone()).load().ok().flatten();
                tokenizer.get_or_init(open).as_ref()?
            }
        };
        Some(tokenizer.decode(ids))
    }

    /// The tokenizer as `tokenizer.json` for other tools; `None` for bytes, which need none.
    pub fn to_json(&self) -> Option<Vec<u8>> {
        match self {
            TokenDecoder::Loaded(Tokenizer::Characters(characters)) => Some(characters.to_json()),
            TokenDecoder::Loaded(_) => None,
            TokenDecoder::Lazy { file, .. } => regular_file::read(file, MAX_TOKENIZER_BYTES).ok(),
        }
    }
}

/// Windows of `context` ids; no window crosses the boundary of its range.
pub struct TokenWindows {
    ids: Arc<TokenFiles>,
    ranges: Vec<WindowRange>,
    context: usize,
    placement: WindowPlacement,
    features: Features,
    loss_mask: Option<Arc<LossMask>>,
    decoder: Option<Arc<TokenDecoder>>,
    description: Vec<(String, String)>,
}

/// The windows of all sets.
pub struct WindowSets {
    pub train: TokenWindows,
    pub valid: TokenWindows,
    pub test: Option<TokenWindows>,
}

struct WindowRange {
    ids: Range<u64>,
    /// Cumulative over this and all earlier ranges: fixed windows, and possible window starts.
    windows: u64,
    starts: u64,
}

impl TokenWindows {
    /// Windows within each of `ranges` of `ids`, which are all below `vocab`. `name` is used in messages.
    pub fn new(
        ids: Arc<TokenFiles>,
        ranges: impl IntoIterator<Item = Range<u64>>,
        (context, vocab): (usize, usize),
        placement: WindowPlacement,
        name: &str,
    ) -> Result<Self, DataError> {
        if context == 0 {
            let (name, value) = ("context", "0".to_owned());
            return Err(DataError::InvalidSetting { name, value, expected: "expected at least one token" });
        }
        let (mut windows, mut starts, mut most) = (0, 0, 0);
        let mut kept = Vec::new();
        for stretch in ranges {
            let len = stretch.end.saturating_sub(stretch.start);
            most = most.max(len);
            if len > context as u64 {
                // The last id of a range is only a target.
                windows += (len - 1) / context as u64;
                starts += len - context as u64;
                kept.push(WindowRange { ids: stretch, windows, starts });
            }
        }
        if kept.is_empty() {
            let why = format!("it has {most} contiguous tokens, and a window needs {}", context + 1);
            return Err(DataError::TooSmall { set: name.to_owned(), why });
        }
        let features = Features::new(InputSpec::Tokens { length: context, vocab }, TargetSpec::Tokens);
        Ok(Self {
            ids,
            ranges: kept,
            context,
            placement,
            features,
            loss_mask: None,
            decoder: None,
            description: Vec::new(),
        })
    }

    /// Excludes targets outside of the mask from the loss.
    pub fn with_loss_mask(mut self, loss_mask: Option<Arc<LossMask>>) -> Self {
        self.loss_mask = loss_mask;
        self
    }

    /// Sets the decoder and the (name, value) lines that describe the dataset.
    pub fn with_description(
        mut self,
        decoder: Option<Arc<TokenDecoder>>,
        description: Vec<(String, String)>,
    ) -> Self {
        (self.decoder, self.description) = (decoder, description);
        self
    }

    /// Position of the first id of window `index`.
    fn window_start(&self, index: u64, key: SampleKey) -> u64 {
        const WINDOWS: u64 = stream_id("text.windows");
        let before = |of: fn(&WindowRange) -> u64, at: u64| {
            let stretch = self.ranges.partition_point(|s| of(s) <= at);
            let earlier = stretch.checked_sub(1).map_or(0, |before| of(&self.ranges[before]));
            (self.ranges[stretch].ids.start, at - earlier)
        };
        match self.placement {
            WindowPlacement::Fixed => {
                let (first, window) = before(|s| s.windows, index);
                first + window * self.context as u64
            }
            WindowPlacement::Random => {
                let all = self.ranges.last().map_or(1, |s| s.starts);
                let drawn =
                    RngKey::new(key.seed, WINDOWS).fold_in(key.epoch).fold_in(key.sample).below(0, all);
                let (first, start) = before(|s| s.starts, drawn);
                first + start
            }
        }
    }
}

impl Dataset for TokenWindows {
    fn len(&self) -> u64 {
        self.ranges.last().map_or(0, |s| s.windows)
    }

    fn features(&self) -> &Features {
        &self.features
    }

    fn read(&self, index: u64, key: SampleKey, into: &mut BatchRow<'_>) -> Result<(), DataError> {
        let start = self.window_start(index, key);
        let (end, vocab) = (start + self.context as u64, self.vocab());
        let (input, target) = (into.input.as_u32_mut(), into.target.as_u32_mut());
        self.ids.read_ids(start..end, input)?;
        target[..self.context - 1].copy_from_slice(&input[1..]);
        self.ids.read_ids(end..end + 1, &mut target[self.context - 1..])?;
        let wrong = self.ids.check_vocab(start..end, input, vocab);
        if let Some(error) =
            wrong.or_else(|| self.ids.check_vocab(end..end + 1, &target[self.context - 1..], vocab))
        {
            return Err(error);
        }
        if let Some(marks) = &self.loss_mask {
            marks.apply(start + 1, target)?;
        }
        into.length = self.context as u32;
        Ok(())
    }

    fn decode_tokens(&self, tokens: &[u32]) -> Option<String> {
        self.decoder.as_ref()?.decode(tokens)
    }

    fn tokenizer_json(&self) -> Option<Vec<u8>> {
        self.decoder.as_ref()?.to_json()
    }

    fn describe(&self) -> Vec<(String, String)> {
        self.description.clone()
    }
}

impl TokenWindows {
    fn vocab(&self) -> usize {
        match self.features.input {
            InputSpec::Tokens { vocab, .. } => vocab,
            InputSpec::Floats { .. } | InputSpec::Tabular { .. } => 0,
        }
    }
}

/// Which tokens of a stream belong to which set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenRanges {
    pub train: Vec<Range<u64>>,
    pub valid: Vec<Range<u64>>,
    pub test: Vec<Range<u64>>,
}

impl TokenRanges {
    /// Splits a stream of `tokens` tokens by position, since windows drawn from one text at random overlap: its end is
    /// the test set, the end of the rest or a fold of it the validation set.
    pub fn new(tokens: u64, split: &SplitSettings) -> Self {
        let before_last = |fraction: f64| (tokens as f64 * fraction.clamp(0.0, 1.0)) as u64;
        let test_start = before_last(1.0 - split.test_fraction);
        let valid = match split.valid {
            ValidSet::OwnFiles => test_start..test_start,
            ValidSet::Fraction(fraction) => before_last(1.0 - split.test_fraction - fraction)..test_start,
            ValidSet::Fold(fold) => fold.consecutive(test_start),
        };
        let train = [0..valid.start, valid.end..test_start];
        let not_empty = |range: Range<u64>| (!range.is_empty()).then_some(range);
        Self {
            train: train.into_iter().filter_map(not_empty).collect(),
            valid: Vec::from_iter(not_empty(valid)),
            test: Vec::from_iter(not_empty(test_start..tokens)),
        }
    }
}

/// File name for display.
pub fn display_name(files: &[PathBuf]) -> String {
    let first = files.first().and_then(|file| file.file_name()).unwrap_or_default();
    match files.len() {
        0 | 1 => first.to_string_lossy().into_owned(),
        n => format!("{} and {} more", first.to_string_lossy(), n - 1),
    }
}
