//! Records of JSON, a line each: texts or chats to go on with, or texts to tell apart.
//!
//! Records are tokenised once into the cache. A sample is a record, padded; or, packed, a window of all records one
//! after the other.

mod jinja;
mod lines;
mod made;
mod record;
mod template;

use std::{
    collections::{BTreeSet, HashMap},
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::pieces::{Progress, in_order};
use super::text::seen;
use super::tokenizer::{Characters, Separator, Tokenizer, Units};
use super::windows::{Placement, Reading, Windows, name_of, split_at};
use super::{DataError, Features, Input, Key, Lengths, Row, Source, Target};
use crate::data::bad::OnBad;
use crate::data::cache::Fingerprint;
use crate::data::{Opening, files, split};
use crate::kernels::cross_entropy::IGNORE;
use lines::{Chunk, Lines};
use made::Made;
use record::{Content, Reader};
use template::Template;

pub use jinja::MOST_BYTES as TEMPLATE_BYTES;
pub use record::{Loss, TooLong};
pub use template::NAMED as TEMPLATES;

/// What records, and what is made of them.
#[derive(Clone, Debug)]
pub struct Settings {
    pub train: Vec<PathBuf>,
    /// Own files to measure on; where empty, a share of the samples is.
    pub valid: Vec<PathBuf>,
    pub valid_share: f64,
    pub units: Units,
    pub separator: Separator,
    /// The field of a text, where `chat` is absent.
    pub field: String,
    pub chat: Option<Chat>,
    /// The field of a class: samples are told apart instead of gone on with.
    pub label: Option<String>,
    /// Documents one after the other in whole windows, instead of a padded sample each.
    pub pack: bool,
    /// Lengths to pad to; powers of two where empty.
    pub buckets: Vec<usize>,
    pub too_long: TooLong,
    /// Tokens of a sample, at most.
    pub context: usize,
    /// What happens to bad records, of the files of each set.
    pub on_bad: OnBad,
}

/// Messages, and how they become a text.
#[derive(Clone, Debug)]
pub struct Chat {
    /// Their field.
    pub field: String,
    /// The template's name, its text, or "auto" for the tokenizer's own.
    pub template: String,
    pub loss: Loss,
}

/// A training and a validation set.
type Both = (Arc<dyn Source>, Arc<dyn Source>);

/// The samples to train on and those to measure on.
pub fn open(settings: &Settings, opening: &Opening) -> Result<Both, DataError> {
    let (train, valid) = (files::find(&settings.train)?, files::find(&settings.valid)?);
    // Buckets bound a sample as the model does.
    let context = settings.buckets.iter().max().map_or(settings.context, |&most| most.min(settings.context));
    let known = settings.units.tokenizer_within(opening)?;
    let content = content(settings, known.as_ref())?;
    let unbound = |tokenizer| Reader {
        content: &content,
        label: settings.label.as_deref(),
        tokenizer,
        separator: None,
        too_long: settings.too_long,
        // A target for each input.
        room: match (settings.pack, &settings.label) {
            (true, _) => usize::MAX,
            (false, None) => context + 1,
            (false, Some(_)) => context,
        },
        on_bad: settings.on_bad,
    };
    let mut how = format!("{settings:?}");
    let tokenizer = match known {
        Some(tokenizer) => tokenizer,
        None => {
            let all = [&train[..], &valid].concat();
            let characters = vocabulary(&all, &unbound(&Tokenizer::Bytes), &how, opening)?;
            how.extend(characters.vocabulary());
            Tokenizer::Characters(characters)
        }
    };
    let separator = match settings.chat {
        // A template ends what it puts together.
        Some(_) if !settings.pack => None,
        _ => tokenizer.separator(&settings.separator)?,
    };
    let reader = Reader { separator, ..unbound(&tokenizer) };
    let from: Vec<PathBuf> = match &settings.units {
        Units::File(file) => vec![file.clone()],
        _ => Vec::new(),
    };
    let made = |files: &[PathBuf]| Made::open(files, &from, &reader, &how, opening);
    let (train, valid) = (made(&train)?, (!valid.is_empty()).then(|| made(&valid)).transpose()?);
    let vocab = tokenizer.vocab();
    let reading = Arc::new(Reading::of(&settings.units, tokenizer));
    if settings.pack {
        return packed(train, valid, settings, vocab, reading);
    }
    let longest = [Some(&train), valid.as_ref()].into_iter().flatten().map(|made| made.found.longest.0).max();
    let targets = usize::from(settings.label.is_none());
    let longest = (longest.unwrap_or(1) as usize).saturating_sub(targets).clamp(1, context);
    let buckets = buckets(&settings.buckets, longest, context);
    let target = match settings.label {
        None => Target::Tokens,
        Some(_) => Target::Class { names: class_names(&train.found) },
    };
    let length = buckets.last().copied().unwrap_or(context);
    let features = Features { buckets, ..Features::new(Input::Tokens { length, vocab }, target) };
    let documents = |made, name| Documents::new(made, features.clone(), reading.clone(), name);
    let train = Arc::new(documents(train, "train")?);
    match valid {
        Some(valid) => Ok((train, Arc::new(documents(valid, "valid")?))),
        None => {
            let (train, valid) = split::split(train, settings.valid_share, opening.seed)?;
            Ok((Arc::new(train), Arc::new(valid)))
        }
    }
}

fn content(settings: &Settings, tokenizer: Option<&Tokenizer>) -> Result<Content, DataError> {
    let Some(chat) = &settings.chat else {
        return Ok(Content::Text { field: settings.field.clone() });
    };
    let wrong = |value: &str, problem: String| {
        // A template's text may be long; its beginning tells which one it is.
        let end = value.floor_char_boundary(value.len().min(60));
        let template = value[..end].to_owned() + if end < value.len() { "..." } else { "" };
        DataError::Template { template, problem }
    };
    let source = match (&*chat.template, tokenizer) {
        ("auto", Some(Tokenizer::Json(json))) => json.template(),
        (name, _) => {
            let named = TEMPLATES.iter().find(|(known, _)| *known == name).map(|(_, source)| *source);
            named.or(name.contains('{').then_some(name)).map(str::to_owned)
        }
    };
    let none =
        || wrong(&chat.template, "there is none of this name, and the tokenizer has none of its own".into());
    let source = source.ok_or_else(none)?;
    let special = |part: &str| tokenizer.map_or_else(String::new, |tokenizer| tokenizer.special(part));
    let template = Template::new(&source, special("bos_token"), special("eos_token"))
        .map_err(|problem| wrong(&chat.template, problem))?;
    Ok(Content::Chat { field: chat.field.clone(), template: Box::new(template), loss: chat.loss })
}

/// The distinct characters of all records, found once.
fn vocabulary(
    files: &[PathBuf],
    reader: &Reader,
    how: &str,
    opening: &Opening,
) -> Result<Characters, DataError> {
    let of = Fingerprint::of(files, how)?;
    let path = opening.cache.get("jsonl-vocabulary", of, |out| {
        let doing = format!("finding the characters of {}", name_of(files));
        let progress = Progress::new(files, &*opening.watch, &doing)?;
        let (mut lines, mut all) = (Lines::new(files, &progress), BTreeSet::new());
        let work = |chunk: &Chunk| {
            let texts = chunk.lines().map(|(number, line)| reader.text(line, chunk.file, number));
            // Those left out are counted when the others are tokenised.
            let texts = texts.filter(|text| text.is_ok() || !reader.on_bad.skips());
            texts.map(|text| text.map(|text| seen(&text))).collect::<Result<Vec<_>, _>>()
        };
        in_order(
            &progress,
            || lines.next(),
            work,
            |found| {
                all.extend(found.into_iter().flatten());
                Ok(())
            },
        )?;
        let text: String = all.into_iter().collect();
        out.write_all(text.as_bytes()).map_err(DataError::writing(Path::new("the vocabulary")))
    })?;
    let text = std::fs::read_to_string(&path).map_err(DataError::io(&path))?;
    Ok(Characters::new(text.chars()))
}

/// The lengths samples are padded to: those that are wished, or powers of two from 32 on, up to the first that holds
/// `longest`, none of them above `context`.
fn buckets(wished: &[usize], longest: usize, context: usize) -> Vec<usize> {
    let mut all: Vec<usize> = match wished {
        [] => std::iter::successors(Some(32), |n| (*n < longest).then_some(2 * n)).collect(),
        wished => wished.to_vec(),
    };
    all.iter_mut().for_each(|n| *n = (*n).min(context));
    all.push(context);
    all.sort_unstable();
    all.dedup();
    let needed = all.partition_point(|&n| n < longest) + 1;
    all.truncate(needed);
    all
}

/// Names of classes in order: of numbers if all are, otherwise of letters.
fn class_names(found: &made::Found) -> Vec<String> {
    let mut names: Vec<String> = found.classes.iter().map(|(name, _)| name.clone()).collect();
    match names.iter().map(|name| name.parse::<i128>()).collect::<Result<Vec<_>, _>>() {
        Ok(_) => names.sort_by_key(|name| name.parse::<i128>().unwrap_or(0)),
        Err(_) => names.sort(),
    }
    names
}

fn about(name: &str, made: &Made, vocab: usize) -> Vec<(String, String)> {
    let found = &made.found;
    let mut about = vec![
        (format!("{name} records"), found.records.to_string()),
        (format!("{name} tokens"), found.tokens.to_string()),
        ("vocabulary".into(), vocab.to_string()),
    ];
    if made.marks.is_some() {
        about.push(("learned tokens".into(), found.learned.to_string()));
    }
    if found.too_long > 0 {
        about.push(("longer than a sample".into(), format!("{} of the records", found.too_long)));
    }
    if found.bad > 0 {
        about.push(("bad records left out".into(), found.bad.to_string()));
        let first = found.first_bad.iter().enumerate();
        about.extend(first.map(|(i, why)| (format!("bad record {}", i + 1), why.clone())));
    }
    about
}

/// Documents one after the other: the share measured on is their end.
fn packed(
    train: Made,
    valid: Option<Made>,
    settings: &Settings,
    vocab: usize,
    reading: Arc<Reading>,
) -> Result<Both, DataError> {
    if settings.label.is_some() {
        let wanted = "records to tell apart are samples of their own: leave `pack` or `label` out";
        return Err(DataError::Setting { name: "pack", value: "true".into(), wanted });
    }
    let windows = |made: &Made, range: std::ops::Range<u64>, name: &str| {
        let set = Windows::new(made.ids.clone(), [range], (settings.context, vocab), Placement::Fixed, name)?;
        let set = set.marked(made.marks.clone()).told(Some(reading.clone()), about(name, made, vocab));
        Ok::<Arc<dyn Source>, DataError>(Arc::new(set))
    };
    let whole = 0..train.ids.len();
    match valid {
        Some(valid) => Ok((windows(&train, whole, "train")?, windows(&valid, 0..valid.ids.len(), "valid")?)),
        None => {
            let border = split_at(&whole, settings.valid_share);
            Ok((windows(&train, 0..border, "train")?, windows(&train, border..whole.end, "valid")?))
        }
    }
}

/// A record a sample, padded.
struct Documents {
    made: Made,
    features: Features,
    /// The class of each name as it came.
    classes: Vec<u32>,
    reading: Arc<Reading>,
    about: Vec<(String, String)>,
}

impl Documents {
    fn new(made: Made, features: Features, reading: Arc<Reading>, name: &str) -> Result<Self, DataError> {
        let classes = match &features.target {
            Target::Class { names } => {
                let places: HashMap<&str, u32> = names.iter().map(String::as_str).zip(0..).collect();
                let place = |(class, _): &(String, u64)| {
                    places.get(class.as_str()).copied().ok_or_else(|| DataError::NoSamples {
                        set: format!("the class `{class}` of the validation files"),
                        why: "it is not in the training files".into(),
                    })
                };
                made.found.classes.iter().map(place).collect::<Result<Vec<_>, _>>()?
            }
            _ => Vec::new(),
        };
        let Input::Tokens { vocab, .. } = features.input else { unreachable!("documents are tokens") };
        Ok(Self { about: about(name, &made, vocab), made, features, classes, reading })
    }
}

impl Source for Documents {
    fn len(&self) -> u64 {
        self.made.found.samples
    }

    fn features(&self) -> &Features {
        &self.features
    }

    fn read(&self, index: u64, _: Key, into: &mut Row<'_>) -> Result<(), DataError> {
        let range = self.made.sample(index)?;
        let (input, target) = (into.input.u32(), into.target.u32());
        let targets = u64::from(self.classes.is_empty());
        let inputs = range.start..range.end - targets;
        let length = ((inputs.end - inputs.start) as usize).min(input.len());
        self.made.ids.copy(inputs.start..inputs.start + length as u64, &mut input[..length])?;
        input[length..].fill(0);
        into.length = length as u32;
        if targets == 0 {
            target[0] = self.classes[self.made.class(index)?];
            return Ok(());
        }
        self.made.ids.copy(inputs.start + 1..inputs.start + 1 + length as u64, &mut target[..length])?;
        target[length..].fill(IGNORE);
        match &self.made.marks {
            Some(marks) => marks.ignore(inputs.start + 1, &mut target[..length]),
            None => Ok(()),
        }
    }

    fn balance(&self) -> Option<Vec<u64>> {
        let Target::Class { names } = &self.features.target else { return None };
        let mut balance = vec![0; names.len()];
        for ((_, samples), &class) in self.made.found.classes.iter().zip(&self.classes) {
            balance[class as usize] += samples;
        }
        Some(balance)
    }

    fn lengths(&self) -> Option<Lengths> {
        Some(self.made.found.lengths())
    }

    fn text(&self, tokens: &[u32]) -> Option<String> {
        self.reading.text(tokens)
    }

    fn tokenizer(&self) -> Option<Vec<u8>> {
        self.reading.to_json()
    }

    fn about(&self) -> Vec<(String, String)> {
        self.about.clone()
    }
}

#[cfg(test)]
mod tests;
