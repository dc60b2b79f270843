//! Windows of token ids: a sample is `context` ids in a row, and its target the id after each.

use std::{
    ops::Range,
    path::PathBuf,
    sync::{Arc, OnceLock},
};

use super::tokenizer::{MOST_BYTES, Tokenizer, Units};
use super::tokens::{Joined, Stored};
use super::{DataError, Features, Input, Key, Row, Source, Target};
use crate::kernels::cross_entropy::IGNORE;
use crate::random::{Random, stream};
use crate::regular;

/// Where the windows of a set lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// End to end from the beginning: an epoch predicts each token once.
    Fixed,
    /// Each anywhere, as (seed, epoch, sample) say: an epoch has as many windows as with `Fixed`, but
    /// they overlap and leave gaps, other ones in every epoch.
    Random,
}

/// A bit for each id: whether it is to be learned.
pub struct Marks(pub Stored);

impl Marks {
    /// Puts [`IGNORE`] in the place of the ids from `start` on that are not to be learned.
    pub fn ignore(&self, start: u64, ids: &mut [u32]) -> Result<(), DataError> {
        let mut bytes = [0; 256];
        let mut done = 0;
        while done < ids.len() {
            let at = start + done as u64;
            // Up to the end of a whole number of bytes.
            let count = (ids.len() - done).min(8 * bytes.len() - (at % 8) as usize);
            let read = &mut bytes[..((at % 8) as usize + count).div_ceil(8)];
            self.0.read(at / 8, read)?;
            for (i, id) in ids[done..done + count].iter_mut().enumerate() {
                let bit = (at % 8) as usize + i;
                if read[bit / 8] >> (bit % 8) & 1 == 0 {
                    *id = IGNORE;
                }
            }
            done += count;
        }
        Ok(())
    }
}

/// Ids as text, for people.
pub enum Reading {
    Small(Tokenizer),
    /// Vocabularies of files take memory, so they are read again when they are first asked.
    File {
        file: PathBuf,
        tokenizer: OnceLock<Option<Tokenizer>>,
    },
}

impl Reading {
    /// Of ids that `tokenizer` made, which `units` describe.
    pub fn of(units: &Units, tokenizer: Tokenizer) -> Self {
        match units {
            Units::File(file) => Self::file(file.clone()),
            Units::Characters | Units::Bytes => Reading::Small(tokenizer),
        }
    }

    /// Of ids that the tokenizer in this file made.
    pub fn file(file: PathBuf) -> Self {
        Reading::File { file, tokenizer: OnceLock::new() }
    }

    /// `None` where the tokenizer can no longer be read.
    pub fn text(&self, ids: &[u32]) -> Option<String> {
        let tokenizer = match self {
            Reading::Small(tokenizer) => tokenizer,
            Reading::File { file, tokenizer } => {
                let open = || Units::File(file.clone()).tokenizer().ok().flatten();
                tokenizer.get_or_init(open).as_ref()?
            }
        };
        Some(tokenizer.decode(ids))
    }

    /// The tokenizer as other tools read it; bytes need none.
    pub fn to_json(&self) -> Option<Vec<u8>> {
        match self {
            Reading::Small(Tokenizer::Characters(characters)) => Some(characters.to_json()),
            Reading::Small(_) => None,
            Reading::File { file, .. } => regular::read(file, MOST_BYTES).ok(),
        }
    }
}

/// Windows of `context` ids within stretches of ids that none of them crosses.
pub struct Windows {
    ids: Arc<Joined>,
    stretches: Vec<Stretch>,
    context: usize,
    placement: Placement,
    features: Features,
    marks: Option<Arc<Marks>>,
    reading: Option<Arc<Reading>>,
    about: Vec<(String, String)>,
}

struct Stretch {
    ids: Range<u64>,
    /// Fixed windows, and places a window can begin at, in this and all stretches before it.
    windows: u64,
    starts: u64,
}

impl Windows {
    /// A set called `name` of windows within each of `stretches` of `ids`, which are all below `vocab`.
    pub fn new(
        ids: Arc<Joined>,
        stretches: impl IntoIterator<Item = Range<u64>>,
        (context, vocab): (usize, usize),
        placement: Placement,
        name: &str,
    ) -> Result<Self, DataError> {
        if context == 0 {
            let (name, value) = ("context", "0".to_owned());
            return Err(DataError::Setting { name, value, wanted: "a window has at least one token" });
        }
        let (mut windows, mut starts, mut most) = (0, 0, 0);
        let mut kept = Vec::new();
        for stretch in stretches {
            let len = stretch.end.saturating_sub(stretch.start);
            most = most.max(len);
            if len > context as u64 {
                // The last id of a stretch is a target only.
                windows += (len - 1) / context as u64;
                starts += len - context as u64;
                kept.push(Stretch { ids: stretch, windows, starts });
            }
        }
        if kept.is_empty() {
            let why = format!("it has {most} tokens in a row and a window takes {}", context + 1);
            return Err(DataError::NoSamples { set: name.to_owned(), why });
        }
        let features = Features::new(Input::Tokens { length: context, vocab }, Target::Tokens);
        Ok(Self {
            ids,
            stretches: kept,
            context,
            placement,
            features,
            marks: None,
            reading: None,
            about: Vec::new(),
        })
    }

    /// Targets without a mark do not count.
    pub fn marked(mut self, marks: Option<Arc<Marks>>) -> Self {
        self.marks = marks;
        self
    }

    /// Says what ids mean, and what there is to tell about them.
    pub fn told(mut self, reading: Option<Arc<Reading>>, about: Vec<(String, String)>) -> Self {
        (self.reading, self.about) = (reading, about);
        self
    }

    /// Where the window `index` begins.
    fn start(&self, index: u64, key: Key) -> u64 {
        const WINDOWS: u64 = stream("text.windows");
        let before = |of: fn(&Stretch) -> u64, at: u64| {
            let stretch = self.stretches.partition_point(|s| of(s) <= at);
            let earlier = stretch.checked_sub(1).map_or(0, |before| of(&self.stretches[before]));
            (self.stretches[stretch].ids.start, at - earlier)
        };
        match self.placement {
            Placement::Fixed => {
                let (first, window) = before(|s| s.windows, index);
                first + window * self.context as u64
            }
            Placement::Random => {
                let all = self.stretches.last().map_or(1, |s| s.starts);
                let drawn = Random::new(key.seed, WINDOWS).at(key.epoch).at(key.sample).below(0, all);
                let (first, start) = before(|s| s.starts, drawn);
                first + start
            }
        }
    }
}

impl Source for Windows {
    fn len(&self) -> u64 {
        self.stretches.last().map_or(0, |s| s.windows)
    }

    fn features(&self) -> &Features {
        &self.features
    }

    fn read(&self, index: u64, key: Key, into: &mut Row<'_>) -> Result<(), DataError> {
        let start = self.start(index, key);
        let (end, vocab) = (start + self.context as u64, self.vocab());
        let (input, target) = (into.input.u32(), into.target.u32());
        self.ids.copy(start..end, input)?;
        target[..self.context - 1].copy_from_slice(&input[1..]);
        self.ids.copy(end..end + 1, &mut target[self.context - 1..])?;
        let wrong = self.ids.too_large(start..end, input, vocab);
        if let Some(error) =
            wrong.or_else(|| self.ids.too_large(end..end + 1, &target[self.context - 1..], vocab))
        {
            return Err(error);
        }
        if let Some(marks) = &self.marks {
            marks.ignore(start + 1, target)?;
        }
        into.length = self.context as u32;
        Ok(())
    }

    fn text(&self, tokens: &[u32]) -> Option<String> {
        self.reading.as_ref()?.text(tokens)
    }

    fn tokenizer(&self) -> Option<Vec<u8>> {
        self.reading.as_ref()?.to_json()
    }

    fn about(&self) -> Vec<(String, String)> {
        self.about.clone()
    }
}

impl Windows {
    fn vocab(&self) -> usize {
        match self.features.input {
            Input::Tokens { vocab, .. } => vocab,
            Input::Floats { .. } | Input::Row { .. } => 0,
        }
    }
}

/// The border that leaves `valid_share` of a stretch behind it.
pub fn split_at(stretch: &Range<u64>, valid_share: f64) -> u64 {
    let len = stretch.end - stretch.start;
    stretch.start + (len as f64 * (1.0 - valid_share.clamp(0.0, 1.0))) as u64
}

/// A file name as people know it.
pub fn name_of(files: &[PathBuf]) -> String {
    let first = files.first().and_then(|file| file.file_name()).unwrap_or_default();
    match files.len() {
        0 | 1 => first.to_string_lossy().into_owned(),
        n => format!("{} and {} more", first.to_string_lossy(), n - 1),
    }
}
