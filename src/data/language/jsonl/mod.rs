//! JSON Lines datasets: texts or chats for language modeling, or texts with a class or with any number of labels.
//!
//! Records are tokenized once into the cache. A sample is one padded record or, with packing, a window over the
//! concatenation of all records.

mod array_lines;
mod chat_formats;
mod jinja;
mod lines;
mod record;
mod template;
mod tokenized;

use std::{
    collections::{BTreeSet, HashMap},
    io::Write,
    iter,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::pieces::FileProgress;
use super::text::distinct_chars;
use super::text_memory::TextMemory;
use super::token_windows::{TokenDecoder, TokenRanges, TokenWindows, WindowPlacement, display_name};
use super::tokenizer::{CharTokenizer, Separator, Tokenizer, TokenizerSpec};
use super::{BatchRow, DataError, Dataset, Features, InputSpec, LengthStats, SampleKey, TargetSpec};
use crate::bad_records::BadRecordPolicy;
use crate::base::features::IGNORE_INDEX;
use crate::cache::CacheKey;
use crate::labels::{self, LabelLists};
use crate::split::{self, KeyFile, SplitKeys, SplitMethod, SplitPlan, SplitSettings, TrainFiles};
use crate::{DatasetContext, Datasets, TestSet, files, warnings};
use lines::convert_lines;
use record::{RecordContent, RecordReader};
use tokenized::TokenizedRecords;

pub use chat_formats::ChatLayout;
pub use jinja::MAX_TEMPLATE_BYTES as TEMPLATE_BYTES;
pub use record::{ChatLossScope, OverlongPolicy};
pub use template::{BUILTIN_TEMPLATES as TEMPLATES, ChatMessage, ChatTemplate};

/// Which records to read, and how to build samples from them.
#[derive(Clone, Debug)]
pub struct JsonlSettings {
    pub train: Vec<PathBuf>,
    /// Validation files; if empty, some of the samples are the validation set.
    pub valid: Vec<PathBuf>,
    /// Test files; if empty, there is no test set, or it is some of the samples.
    pub test: Vec<PathBuf>,
    /// How the samples of `train` are split; packed records by position.
    pub split: SplitSettings,
    pub tokenizer: TokenizerSpec,
    pub separator: Separator,
    /// Field that holds the text if `chat` is `None`.
    pub field: String,
    pub chat: Option<ChatSettings>,
    /// Field that holds the class, or a list of labels: the task is classification instead of next-token prediction.
    pub label: Option<String>,
    /// Target of a classifier that was trained before; `None` for what is found in the training files.
    pub target: Option<TargetSpec>,
    /// The records of a labelled task have no labels: they are to be predicted.
    pub unlabelled: bool,
    /// Concatenate documents and cut full windows, instead of padding each document.
    pub pack: bool,
    /// Sequence lengths to pad to; powers of two if empty.
    pub buckets: Vec<usize>,
    pub too_long: OverlongPolicy,
    /// Maximum tokens per sample.
    pub context: usize,
    /// Policy for bad records; the limit applies to the files of each split.
    pub on_bad: BadRecordPolicy,
}

/// Chat messages and how they are rendered.
#[derive(Clone, Debug)]
pub struct ChatSettings {
    pub format: ChatLayout,
    /// A built-in template's name, a template's source, or "auto" for the tokenizer's own.
    pub template: String,
    pub loss: ChatLossScope,
}

/// Opens all sets.
pub fn open(settings: &JsonlSettings, ctx: &DatasetContext) -> Result<Datasets, DataError> {
    let resolve = files::resolve_patterns;
    let (train, valid, test) =
        (resolve(&settings.train)?, resolve(&settings.valid)?, resolve(&settings.test)?);
    // The largest bucket limits a sample just as the model's context does.
    let context = settings.buckets.iter().max().map_or(settings.context, |&most| most.min(settings.context));
    let known = settings.tokenizer.load_within_memory(ctx)?;
    let content = build_content(settings, known.as_ref())?;
    let reader_for = |tokenizer| RecordReader {
        content: &content,
        label: settings.label.as_deref().filter(|_| !settings.unlabelled),
        group: match &settings.split.method {
            SplitMethod::Grouped(field) if settings.split.needs_keys() => Some(field),
            _ => None,
        },
        tokenizer,
        separator: None,
        too_long: settings.too_long,
        // One extra id for next-token prediction: each input needs a target.
        max_tokens: match (settings.pack, &settings.label) {
            (true, _) => usize::MAX,
            (false, None) => context + 1,
            (false, Some(_)) => context,
        },
        on_bad: settings.on_bad,
    };
    let mut how = settings.cache_settings();
    let tokenizer = match known {
        Some(tokenizer) => tokenizer,
        None => {
            let all = [&train[..], &valid, &test].concat();
            let characters = character_vocabulary(&all, &reader_for(&Tokenizer::Bytes), &how, ctx)?;
            how.extend(characters.vocabulary());
            Tokenizer::Characters(characters)
        }
    };
    let separator = match settings.chat {
        // A chat template writes its own end-of-text token.
        Some(_) if !settings.pack => None,
        _ => tokenizer.separator(&settings.separator)?,
    };
    let reader = RecordReader { separator, ..reader_for(&tokenizer) };
    let from: Vec<PathBuf> = match &settings.tokenizer {
        TokenizerSpec::File(file) => vec![file.clone()],
        _ => Vec::new(),
    };
    let tokenize = |files: &[PathBuf]| TokenizedRecords::open(files, &from, &reader, &how, ctx);
    let own = |files: &[PathBuf]| (!files.is_empty()).then(|| tokenize(files)).transpose();
    let (train, valid, test) = (tokenize(&train)?, own(&valid)?, own(&test)?);
    let vocab = tokenizer.vocab();
    let decoder = Arc::new(TokenDecoder::new(&settings.tokenizer, tokenizer));
    if settings.pack {
        return packed_windows([Some(train), valid, test], settings, vocab, decoder);
    }
    // As for the vocabulary, the lengths of all sets count, so that each can be evaluated.
    let all = [Some(&train), valid.as_ref(), test.as_ref()];
    let longest = all.into_iter().flatten().map(|records| records.summary.longest.0).max();
    let targets = usize::from(settings.label.is_none());
    let longest = (longest.unwrap_or(1) as usize).saturating_sub(targets).clamp(1, context);
    let buckets = buckets(&settings.buckets, longest, context);
    let target = match (&settings.label, &settings.target) {
        (None, _) => TargetSpec::Tokens,
        (Some(_), Some(target)) => target.clone(),
        (Some(_), None) => {
            let names = class_names(&train.summary);
            let sets = [Some(&train), valid.as_ref(), test.as_ref()];
            match sets.into_iter().flatten().any(|records| records.summary.multi_label) {
                true => TargetSpec::MultiLabel { names },
                false => TargetSpec::Class { names },
            }
        }
    };
    let length = buckets.last().copied().unwrap_or(context);
    let features = Features { buckets, ..Features::new(InputSpec::Tokens { length, vocab }, target) };
    let documents = |records, name| DocumentDataset::new(records, features.clone(), decoder.clone(), name);
    let train = Arc::new(documents(train, "train")?);
    let plan = match settings.split.is_whole() {
        true => None,
        false => {
            let groups = train.records.groups.clone().map(|path| KeyFile { path, noun: "sample" });
            let keys: Option<&dyn SplitKeys> = match (&settings.split.method, &groups) {
                (SplitMethod::Grouped(_), Some(groups)) => Some(groups),
                (SplitMethod::Stratified, _) if settings.label.is_some() => Some(train.as_ref()),
                _ => None,
            };
            Some(SplitPlan::new(train.len(), &settings.split, keys, ctx)?)
        }
    };
    let own = |records: Option<TokenizedRecords>, name| match records {
        Some(records) => Ok::<_, DataError>(Some(Arc::new(documents(records, name)?) as Arc<dyn Dataset>)),
        None => Ok(None),
    };
    let (valid, test) = (own(valid, "valid")?, own(test, "test")?);
    Ok(split::job_datasets(TrainFiles { train: train.clone(), others: train }, plan, valid, test))
}

impl JsonlSettings {
    /// What the tokens of a file depend on: everything but which files there are and how they are split.
    fn cache_settings(&self) -> String {
        let method = match &self.split.method {
            method @ SplitMethod::Grouped(_) => method.clone(),
            _ => SplitMethod::Random,
        };
        let split = SplitSettings { method, ..SplitSettings::random(0.0) };
        let files = (Vec::new(), Vec::new(), Vec::new());
        let of = Self { split, train: files.0, valid: files.1, test: files.2, ..self.clone() };
        format!("{of:?}")
    }
}

fn build_content(
    settings: &JsonlSettings,
    tokenizer: Option<&Tokenizer>,
) -> Result<RecordContent, DataError> {
    let Some(chat) = &settings.chat else {
        return Ok(RecordContent::Text { field: settings.field.clone() });
    };
    let template = Box::new(chat_template(&chat.template, tokenizer)?);
    Ok(RecordContent::Chat { format: chat.format.clone(), template, loss: chat.loss })
}

/// The chat template that `requested` names: built-in, "auto" for the tokenizer's own, or the source of one.
pub fn chat_template(requested: &str, tokenizer: Option<&Tokenizer>) -> Result<ChatTemplate, DataError> {
    let wrong = |problem: String| {
        // A template can be long; its start is enough to identify it.
        let end = requested.floor_char_boundary(requested.len().min(60));
        let template = requested[..end].to_owned() + if end < requested.len() { "..." } else { "" };
        DataError::Template { template, problem }
    };
    let source = match (requested, tokenizer) {
        ("auto", Some(Tokenizer::HuggingFace(json))) => json.chat_template(),
        (name, _) => {
            let named = TEMPLATES.iter().find(|(known, _)| *known == name).map(|(_, source)| *source);
            named.or(name.contains('{').then_some(name)).map(str::to_owned)
        }
    };
    let none = || wrong("it is no built-in template, and the tokenizer has none".into());
    let source = source.ok_or_else(none)?;
    let special = |part: &str| tokenizer.map_or_else(String::new, |tokenizer| tokenizer.special_token(part));
    ChatTemplate::new(&source, special("bos_token"), special("eos_token")).map_err(wrong)
}

/// Bytes that a character takes in a set of them.
const CHARACTER_BYTES: usize = 16;

/// Distinct characters of all records; cached.
fn character_vocabulary(
    files: &[PathBuf],
    reader: &RecordReader,
    how: &str,
    ctx: &DatasetContext,
) -> Result<CharTokenizer, DataError> {
    let cache_key = CacheKey::new(files, how)?;
    let path = ctx.cache.get_or_create("jsonl-vocabulary", cache_key, |out| {
        let activity = format!("collecting the characters of {}", display_name(files));
        let progress = FileProgress::new(files, &*ctx.observer, &activity)?;
        let mut all = BTreeSet::new();
        convert_lines(
            files,
            &progress,
            TextMemory::of(reader.tokenizer, ctx),
            |line, at| reader.text(line, at).map(|text| distinct_chars(&text)),
            |found| (CHARACTER_BYTES * found.len()) as u64,
            |found, _| match found {
                Ok(found) => {
                    all.extend(found);
                    Ok(())
                }
                // Tokenization counts the skipped records later, so this pass does not.
                Err(error) if error.is_bad_record() && reader.on_bad.skips() => Ok(()),
                Err(error) => Err(error),
            },
        )?;
        let text: String = all.into_iter().collect();
        out.write_all(text.as_bytes()).map_err(DataError::write(Path::new("the vocabulary")))
    })?;
    let text = std::fs::read_to_string(&path).map_err(DataError::io(&path))?;
    Ok(CharTokenizer::new(text.chars()))
}

/// Padded lengths: the requested ones, or powers of two from 32, up to the first that fits `longest` and capped at
/// `context`.
fn buckets(requested: &[usize], longest: usize, context: usize) -> Vec<usize> {
    let mut all: Vec<usize> = match requested {
        [] => std::iter::successors(Some(32), |n| (*n < longest).then_some(2 * n)).collect(),
        requested => requested.to_vec(),
    };
    all.iter_mut().for_each(|n| *n = (*n).min(context));
    all.push(context);
    all.sort_unstable();
    all.dedup();
    let needed = all.partition_point(|&n| n < longest) + 1;
    all.truncate(needed);
    all
}

/// Class names, sorted numerically if all are integers, otherwise as strings.
fn class_names(found: &tokenized::TokenizedSummary) -> Vec<String> {
    let mut names: Vec<String> = found.classes.iter().map(|(name, _)| name.clone()).collect();
    match names.iter().map(|name| name.parse::<i128>()).collect::<Result<Vec<_>, _>>() {
        Ok(_) => names.sort_by_key(|name| name.parse::<i128>().unwrap_or(0)),
        Err(_) => names.sort(),
    }
    names
}

/// A warning about class names that look like several labels in one.
fn label_list_warning(names: &[String]) -> Option<String> {
    let separator = match labels::detect(names.iter().map(String::as_str))? {
        LabelLists::Separated(separator) => Some(separator),
        LabelLists::Bracketed => None,
    };
    let (name, parts) = names
        .iter()
        .map(|name| (name, labels::split(name, separator)))
        .max_by_key(|(_, parts)| parts.len())?;
    let list = serde_json::Value::from(parts);
    Some(format!(
        "classes such as `{name}` look like lists of labels: write a list, `{list}`, if a record has any number \
         of them"
    ))
}

fn describe(name: &str, records: &TokenizedRecords, vocab: usize) -> Vec<(String, String)> {
    let summary = &records.summary;
    let mut about = vec![
        (format!("{name} records"), summary.records.to_string()),
        (format!("{name} tokens"), summary.tokens.to_string()),
        ("vocabulary".into(), vocab.to_string()),
    ];
    if records.loss_mask.is_some() {
        about.push(("learned tokens".into(), summary.learned.to_string()));
    }
    if summary.too_long > 0 {
        about.push(("overlong records".into(), summary.too_long.to_string()));
    }
    if summary.bad > 0 {
        about.push(("bad records skipped".into(), summary.bad.to_string()));
        let first = summary.first_bad.iter().enumerate();
        about.extend(first.map(|(i, why)| (format!("bad record {}", i + 1), why.clone())));
    }
    about
}

/// Windows over the concatenated documents of the training, validation and test files; the stream of the training
/// files is split by position.
fn packed_windows(
    files: [Option<TokenizedRecords>; 3],
    settings: &JsonlSettings,
    vocab: usize,
    decoder: Arc<TokenDecoder>,
) -> Result<Datasets, DataError> {
    if settings.label.is_some() {
        let expected = "with `label` each record is a sample: remove `pack` or `label`";
        return Err(DataError::InvalidSetting { name: "pack", value: "true".into(), expected });
    }
    let [Some(train), valid, test] = files else { unreachable!("there are training files") };
    let windows = |records: &TokenizedRecords, ranges: Vec<std::ops::Range<u64>>, name: &str| {
        let set = TokenWindows::new(
            records.ids.clone(),
            ranges,
            (settings.context, vocab),
            WindowPlacement::Fixed,
            name,
        )?;
        let set = set
            .with_loss_mask(records.loss_mask.clone())
            .with_description(Some(decoder.clone()), describe(name, records, vocab));
        Ok::<Arc<dyn Dataset>, DataError>(Arc::new(set))
    };
    let ranges = TokenRanges::new(train.ids.len(), &settings.split);
    let other = |own: Option<TokenizedRecords>, part, name: &str| match own {
        Some(own) => windows(&own, iter::once(0..own.ids.len()).collect(), name),
        None => windows(&train, part, name),
    };
    let has_test = test.is_some() || settings.split.test_fraction > 0.0;
    Ok(Datasets {
        train: windows(&train, ranges.train, "train")?,
        valid: other(valid, ranges.valid, "valid")?,
        test: has_test.then(|| other(test, ranges.test, "test").map(TestSet::Open)).transpose()?,
    })
}

/// One padded record per sample.
struct DocumentDataset {
    records: TokenizedRecords,
    features: Features,
    /// Ids of the classes for each entry of `TokenizedSummary::label_sets`.
    label_sets: Vec<Vec<u32>>,
    decoder: Arc<TokenDecoder>,
    description: Vec<(String, String)>,
}

impl DocumentDataset {
    fn new(
        records: TokenizedRecords,
        features: Features,
        decoder: Arc<TokenDecoder>,
        name: &str,
    ) -> Result<Self, DataError> {
        let summary = &records.summary;
        if let (TargetSpec::Class { .. }, true) = (&features.target, summary.multi_label) {
            return Err(DataError::NoSamples {
                set: format!("the {name} set"),
                why: "its records have lists of labels, and the model was trained on one class per record"
                    .into(),
            });
        }
        let names: HashMap<&str, u32> = features.target.names().iter().map(String::as_str).zip(0..).collect();
        let id = |(class, _): &(String, u64)| {
            names.get(class.as_str()).copied().ok_or_else(|| DataError::NoSamples {
                set: format!("the class `{class}` of the validation files"),
                why: "it is not in the training files".into(),
            })
        };
        let ids = summary.classes.iter().map(id).collect::<Result<Vec<_>, _>>()?;
        let label_sets = summary
            .label_sets
            .iter()
            .map(|set| set.iter().map(|&class| ids[class as usize]).collect())
            .collect();
        let InputSpec::Tokens { vocab, .. } = features.input else { unreachable!("documents are tokens") };
        let mut description = describe(name, &records, vocab);
        if let TargetSpec::Class { names } = &features.target {
            description.extend(label_list_warning(names).map(|text| (warnings::WARNING.into(), text)));
        }
        Ok(Self { description, records, features, label_sets, decoder })
    }
}

impl Dataset for DocumentDataset {
    fn len(&self) -> u64 {
        self.records.summary.samples
    }

    fn features(&self) -> &Features {
        &self.features
    }

    fn read(&self, index: u64, _: SampleKey, into: &mut BatchRow<'_>) -> Result<(), DataError> {
        let range = self.records.sample_range(index)?;
        let input = into.input.as_u32_mut();
        let targets = u64::from(self.features.target == TargetSpec::Tokens);
        let inputs = range.start..range.end - targets;
        let length = ((inputs.end - inputs.start) as usize).min(input.len());
        self.records.ids.read_ids(inputs.start..inputs.start + length as u64, &mut input[..length])?;
        input[length..].fill(0);
        into.length = length as u32;
        if targets == 0 {
            // Without labels, they are to be predicted.
            let labels = match self.label_sets.is_empty() {
                true => &[][..],
                false => &self.label_sets[self.records.label_set(index)?],
            };
            match &self.features.target {
                TargetSpec::MultiLabel { .. } => {
                    let target = into.target.as_f32_mut();
                    target.fill(0.0);
                    labels.iter().for_each(|&label| target[label as usize] = 1.0);
                }
                _ => into.target.as_u32_mut()[0] = labels.first().copied().unwrap_or(0),
            }
            return Ok(());
        }
        let target = into.target.as_u32_mut();
        self.records
            .ids
            .read_ids(inputs.start + 1..inputs.start + 1 + length as u64, &mut target[..length])?;
        target[length..].fill(IGNORE_INDEX);
        match &self.records.loss_mask {
            Some(marks) => marks.apply(inputs.start + 1, &mut target[..length]),
            None => Ok(()),
        }
    }

    fn class_counts(&self) -> Option<Vec<u64>> {
        let TargetSpec::Class { names } = &self.features.target else { return None };
        let mut balance = vec![0; names.len()];
        // Each set is one class, in the order in which the classes appeared.
        for ((_, samples), set) in self.records.summary.classes.iter().zip(&self.label_sets) {
            balance[set[0] as usize] += samples;
        }
        Some(balance)
    }

    fn class(&self, index: u64) -> Option<u32> {
        let TargetSpec::Class { .. } = &self.features.target else { return None };
        self.label_sets.get(self.records.label_set(index).ok()?)?.first().copied()
    }

    fn length_stats(&self) -> Option<LengthStats> {
        Some(self.records.summary.lengths())
    }

    fn decode_tokens(&self, tokens: &[u32]) -> Option<String> {
        self.decoder.decode(tokens)
    }

    fn tokenizer_json(&self) -> Option<Vec<u8>> {
        self.decoder.to_json()
    }

    fn describe(&self) -> Vec<(String, String)> {
        self.description.clone()
    }
}

/// The classes of the samples, or their sets of labels.
impl SplitKeys for DocumentDataset {
    fn for_each(&self, visit: &mut dyn FnMut(u64) -> Result<(), DataError>) -> Result<(), DataError> {
        (0..self.len()).try_for_each(|index| visit(self.records.label_set(index)? as u64))
    }

    fn name(&self, key: u64, _: u64) -> String {
        let summary = &self.records.summary;
        let set = summary.label_sets.get(key as usize).map_or(&[][..], Vec::as_slice);
        let names: Vec<&str> = set.iter().map(|&class| summary.classes[class as usize].0.as_str()).collect();
        format!("`{}`", names.join(", "))
    }
}

#[cfg(test)]
mod tests;
