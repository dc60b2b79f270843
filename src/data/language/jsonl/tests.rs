use super::*;
use crate::cache::Cache;
use crate::split::{FoldIndex, ValidSet};
use crate::{SliceMut, published_dataset};

struct JsonlFixture {
    folder: tempfile::TempDir,
    ctx: DatasetContext,
}

fn fixture() -> JsonlFixture {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path().join("cache"));
    JsonlFixture { ctx: DatasetContext { cache, ..DatasetContext::default() }, folder }
}

/// Training set and validation set.
type TrainValid = (Arc<dyn Dataset>, Arc<dyn Dataset>);

impl JsonlFixture {
    fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn open(&self, settings: &JsonlSettings) -> Result<TrainValid, DataError> {
        open(settings, &self.ctx).map(|sets| (sets.train, sets.valid))
    }
}

fn settings(train: PathBuf, context: usize) -> JsonlSettings {
    JsonlSettings {
        train: vec![train],
        valid: Vec::new(),
        test: Vec::new(),
        split: SplitSettings::random(0.25),
        tokenizer: TokenizerSpec::Bytes,
        separator: Separator::Auto,
        field: "text".into(),
        chat: None,
        label: None,
        target: None,
        unlabelled: false,
        pack: false,
        buckets: Vec::new(),
        too_long: OverlongPolicy::Truncate,
        context,
        on_bad: BadRecordPolicy::Fail,
    }
}

/// All samples of the training files are for training.
fn whole() -> SplitSettings {
    SplitSettings { valid: ValidSet::OwnFiles, ..SplitSettings::random(0.25) }
}

fn chat(loss: ChatLossScope) -> Option<ChatSettings> {
    let format = ChatLayout::Messages { field: "messages".into() };
    Some(ChatSettings { format, template: "plain".into(), loss })
}

/// (input without padding, unmasked targets with their positions, length)
fn read(set: &dyn Dataset, index: u64) -> (String, Vec<(usize, u32)>, usize) {
    let features = set.features();
    let (mut input, mut target) = (vec![77; features.input_len()], vec![77; features.target_len()]);
    let mut row =
        BatchRow { input: SliceMut::U32(&mut input), target: SliceMut::U32(&mut target), length: 99 };
    set.read(index, SampleKey { seed: 1, epoch: 0, sample: index }, &mut row).unwrap();
    let length = row.length as usize;
    assert!(input[length..].iter().all(|&id| id == 0));
    let counts = target.iter().copied().enumerate().filter(|(_, id)| *id != IGNORE_INDEX);
    (set.decode_tokens(&input[..length]).unwrap(), counts.collect(), length)
}

fn lines(texts: &[&str]) -> String {
    texts.iter().map(|text| format!("{}\n", serde_json::json!({ "text": text }))).collect()
}

#[test]
fn a_record_is_a_sample_padded_to_a_bucket() {
    let fixture = fixture();
    let file = fixture
        .write("a.jsonl", lines(&["abc", "defghijk", "lm", "a longer one, of 40 bytes in all, really"]));
    let (set, _) = fixture
        .open(&JsonlSettings { valid: vec![file.clone()], split: whole(), ..settings(file.clone(), 100) })
        .unwrap();
    assert_eq!((set.len(), &set.features().buckets[..]), (4, &[32, 64][..]));
    let (text, targets, length) = read(&*set, 0);
    assert_eq!((&*text, length), ("ab", 2));
    assert_eq!(targets, [(0, b'b'.into()), (1, b'c'.into())]);
    let lengths = set.length_stats().unwrap();
    assert_eq!(
        (lengths.longest, &lengths.histogram[..]),
        ((40, 3), &[(2, 1), (4, 1), (8, 1), (16, 0), (32, 0), (64, 1)][..])
    );
    // Requested buckets limit the sample length.
    let requested = JsonlSettings {
        valid: vec![file.clone()],
        split: whole(),
        buckets: vec![4, 8],
        ..settings(file.clone(), 100)
    };
    let (set, _) = fixture.open(&requested).unwrap();
    assert_eq!(set.features().buckets, [4, 8]);
    assert_eq!(read(&*set, 3).0, "a longer");
    assert!(set.describe().contains(&("overlong records".into(), "1".into())));
    // A split by fraction puts each record into exactly one set.
    let (train, valid) = fixture.open(&settings(file, 100)).unwrap();
    assert_eq!((train.len(), valid.len()), (3, 1));
}

#[test]
fn buckets_end_with_what_holds_the_longest() {
    assert_eq!(buckets(&[], 5, 1000), [32]);
    assert_eq!(buckets(&[], 33, 1000), [32, 64]);
    assert_eq!(buckets(&[], 900, 1000), [32, 64, 128, 256, 512, 1000]);
    assert_eq!(buckets(&[], 7, 16), [16]);
    assert_eq!(buckets(&[512, 128, 128], 100, 4096), [128]);
    assert_eq!(buckets(&[128, 512], 300, 400), [128, 400]);
}

#[test]
fn long_records_are_split_with_every_target_once() {
    let fixture = fixture();
    let file = fixture.write("a.jsonl", lines(&["abcdefghij", "xyz"]));
    let split = JsonlSettings {
        valid: vec![file.clone()],
        split: whole(),
        too_long: OverlongPolicy::Split,
        ..settings(file.clone(), 4)
    };
    let (set, _) = fixture.open(&split).unwrap();
    let all: Vec<_> = (0..set.len()).map(|i| read(&*set, i)).collect();
    let texts: Vec<&str> = all.iter().map(|(text, ..)| &**text).collect();
    assert_eq!(texts, ["abcd", "efgh", "i", "xy"]);
    let targets: Vec<u8> = all.iter().flat_map(|(_, targets, _)| targets).map(|(_, id)| *id as u8).collect();
    assert_eq!(targets, b"bcdefghijyz");
    let refused = fixture.open(&JsonlSettings { too_long: OverlongPolicy::Reject, ..split }).err().unwrap();
    assert!(refused.is_bad_record() && refused.to_string().contains("line 1: it has 10 tokens"), "{refused}");
}

const CHAT: &str =
    r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}"#;

#[test]
fn chats_learn_answers_padded_and_packed() {
    let fixture = fixture();
    let file = fixture.write("a.jsonl", format!("{CHAT}\n{CHAT}\n").repeat(4));
    let chats = JsonlSettings {
        chat: chat(ChatLossScope::Assistant),
        valid: vec![file.clone()],
        split: whole(),
        ..settings(file, 64)
    };
    let (set, _) = fixture.open(&chats).unwrap();
    let (text, targets, length) = read(&*set, 0);
    assert_eq!((&*text, length), ("user: Hi\nassistant: Yo", 22));
    assert_eq!(targets, [(18, b' '.into()), (19, b'Y'.into()), (20, b'o'.into())]);
    // Packed: windows over all chats; each token is a target at most once, and every answer token is learned.
    let (set, _) = fixture.open(&JsonlSettings { pack: true, context: 10, ..chats.clone() }).unwrap();
    assert!(set.features().buckets.is_empty());
    assert_eq!(set.len(), (23 * 8 - 1) / 10);
    let windows: Vec<_> = (0..set.len()).map(|i| read(&*set, i)).collect();
    let text: String = windows.iter().map(|(text, ..)| &**text).collect();
    assert_eq!(text, "user: Hi\nassistant: Yo\n".repeat(8)[..180]);
    let learned: Vec<u8> =
        windows.iter().flat_map(|(_, targets, _)| targets).map(|(_, id)| *id as u8).collect();
    assert_eq!(learned, b" Yo".repeat(8)[..learned.len()]);
    assert!(learned.len() >= 21);
    let (all, _) = fixture.open(&JsonlSettings { chat: chat(ChatLossScope::All), ..chats }).unwrap();
    assert_eq!(read(&*all, 0).1.len(), 22);
}

/// A list is any number of labels, and a class beside lists is a list of one.
#[test]
fn lists_are_labels() {
    let fixture = fixture();
    let line = |text: &str, label: &str| format!("{{\"text\": \"{text}\", \"y\": {label}}}\n");
    let lines = [("aa", "[\"b\", \"a\", \"b\"]"), ("b", "[]"), ("c", "\"c\""), ("d", "[\"a\", \"b\"]")];
    let train = fixture.write("a", lines.map(|(text, label)| line(text, label)).concat());
    let valid = fixture.write("b", line("dd", "[\"c\"]"));
    let labelled =
        JsonlSettings { label: Some("y".into()), valid: vec![valid], split: whole(), ..settings(train, 16) };
    let (set, valid) = fixture.open(&labelled).unwrap();
    let names = ["a", "b", "c"].map(str::to_owned).to_vec();
    assert_eq!(set.features().target, TargetSpec::MultiLabel { names: names.clone() });
    let labels = |set: &dyn Dataset, index| {
        let features = set.features();
        let (mut input, mut target) = (vec![0; features.input_len()], vec![7.0; features.target_len()]);
        let mut row =
            BatchRow { input: SliceMut::U32(&mut input), target: SliceMut::F32(&mut target), length: 99 };
        set.read(index, SampleKey { seed: 1, epoch: 0, sample: index }, &mut row).unwrap();
        target
    };
    assert_eq!(labels(&*set, 0), [1.0, 1.0, 0.0]);
    assert_eq!(labels(&*set, 1), [0.0; 3]);
    assert_eq!((labels(&*set, 2), labels(&*valid, 0)), (vec![0.0, 0.0, 1.0], vec![0.0, 0.0, 1.0]));
    assert_eq!((labels(&*set, 3), set.class_counts()), (vec![1.0, 1.0, 0.0], None));
    let of_classes = JsonlSettings { target: Some(TargetSpec::Class { names }), ..labelled };
    let error = fixture.open(&of_classes).err().unwrap().to_string();
    assert!(error.contains("lists of labels, and the model was trained on one class"), "{error}");
}

#[test]
fn an_array_of_records_is_read_as_lines_are() {
    let fixture = fixture();
    let records: Vec<_> =
        (0..300).map(|i| serde_json::json!({ "text": format!("record {i}, [{{"), "n": [i] })).collect();
    let lines: String = records.iter().map(|record| format!("{record}\n")).collect();
    let array = serde_json::to_string_pretty(&records).unwrap();
    let texts = |name: &str, content: &str| {
        let file = fixture.write(name, content);
        let settings = JsonlSettings { valid: vec![file.clone()], split: whole(), ..settings(file, 32) };
        let (set, _) = fixture.open(&settings).unwrap();
        (0..set.len()).map(|i| read(&*set, i).0).collect::<Vec<_>>()
    };
    assert_eq!(texts("a.jsonl", &lines).len(), 300);
    assert_eq!(texts("a.jsonl", &lines), texts("a.json", &array));
    assert_eq!(texts("a.jsonl", &lines), texts("b.json", &format!("\u{feff}{array}\n")));
    let wrong = |content: &str| {
        fixture.open(&settings(fixture.write("c.json", content), 32)).err().unwrap().to_string()
    };
    let cut = wrong(&array[..array.len() - 20]);
    assert!(cut.contains("record 300: it is no JSON: EOF"), "{cut}");
    let field = wrong("[{\"text\": \"ab\"}, {\"other\": \"ab\"}]");
    assert!(field.contains("record 2: no field `text`"), "{field}");
    let file = fixture.write("d.jsonl", "{\"conversations\": []}");
    let chats = JsonlSettings { chat: chat(ChatLossScope::Assistant), ..settings(file, 32) };
    let error = fixture.open(&chats).err().unwrap();
    assert!(error.to_string().ends_with("it looks like a chat: set `chat = \"sharegpt\"`"), "{error}");
    assert!(error.is_bad_record() && error.hint().unwrap().contains("`chat`"));
}

#[test]
fn classes_that_look_like_lists_of_labels_are_named() {
    let fixture = fixture();
    let warned = |name: &str, labels: &[&str]| {
        let lines =
            labels.iter().map(|label| format!("{}\n", serde_json::json!({ "text": "ab", "y": label })));
        let train = fixture.write(name, lines.collect::<String>());
        let labelled = JsonlSettings { label: Some("y".into()), ..settings(train, 16) };
        let (set, valid) = fixture.open(&labelled).unwrap();
        warnings::warnings(&*set, &*valid, 1).join("; ")
    };
    let found = warned("a", &["a|b", "a", "b|c", "c", "a", "b|c"]);
    assert!(found.contains("lists of labels: write a list, `[\"b\",\"c\"]`"), "{found}");
    assert!(!warned("b", &["a", "b", "c", "a", "b", "c"]).contains("several labels"));
    assert!(warned("c", &["a", "a", "a", "a"]).contains("`a` is the only class"));
}

#[test]
fn classes_are_sorted_and_must_be_known() {
    let fixture = fixture();
    let line = |text: &str, label: &str| format!("{{\"text\": \"{text}\", \"y\": {label}}}\n");
    let train = fixture.write("a", line("aa", "10") + &line("b", "9") + &line("c", "10"));
    let valid = fixture.write("b", line("dd", "9"));
    let labelled =
        JsonlSettings { label: Some("y".into()), valid: vec![valid], split: whole(), ..settings(train, 16) };
    let (set, valid) = fixture.open(&labelled).unwrap();
    assert_eq!(set.features().target, TargetSpec::Class { names: vec!["9".into(), "10".into()] });
    assert_eq!((read(&*set, 0).1[0].1, read(&*set, 1).1[0].1, read(&*valid, 0).1[0].1), (1, 0, 0));
    assert_eq!((read(&*set, 0).2, set.class_counts()), (2, Some(vec![1, 2])));
    let other = fixture.write("c", line("x", "11"));
    let error = fixture
        .open(&JsonlSettings { valid: vec![other], split: whole(), ..labelled.clone() })
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("the class `11` of the validation files has no samples"), "{error}");
    assert!(
        fixture
            .open(&JsonlSettings { pack: true, ..labelled })
            .err()
            .unwrap()
            .to_string()
            .contains("`pack` cannot be true")
    );
}

#[test]
fn characters_files_and_compressions_agree() {
    let fixture = fixture();
    let texts = lines(&["grüße", "aus köln", "abc"]);
    let plain = fixture.write("a.jsonl", &texts);
    let packed = fixture.write("a.jsonl.zst", zstd::encode_all(texts.as_bytes(), 1).unwrap());
    let of = |file: &PathBuf| JsonlSettings {
        tokenizer: TokenizerSpec::Characters,
        valid: vec![file.clone()],
        split: whole(),
        ..settings(file.clone(), 16)
    };
    let (a, _) = fixture.open(&of(&plain)).unwrap();
    let (b, _) = fixture.open(&of(&packed)).unwrap();
    for i in 0..3 {
        assert_eq!(read(&*a, i), read(&*b, i));
    }
    assert_eq!(read(&*a, 1).0, "aus köl");
    assert!(a.tokenizer_json().is_some());
}

#[test]
fn errors_are_reported() {
    let fixture = fixture();
    let file = fixture.write("a.jsonl", "{\"text\": \"ok\"}\n{\"text\": 5}\n");
    let error = fixture.open(&settings(file.clone(), 16)).err().unwrap().to_string();
    assert!(error.contains("a.jsonl`, line 2: `text` must be a string, not a number"), "{error}");
    // Bad records are skipped and reported, up to the limit.
    let two = fixture.write("two.jsonl", "{\"text\": \"ok\"}\n{\"text\": 5}\n[]\n{\"text\": \"yes\"}\n");
    for units in [TokenizerSpec::Bytes, TokenizerSpec::Characters] {
        let skip = JsonlSettings {
            on_bad: BadRecordPolicy::Skip { limit: 2 },
            tokenizer: units,
            ..settings(two.clone(), 16)
        };
        let (set, valid) = fixture.open(&skip).unwrap();
        assert_eq!(set.len() + valid.len(), 2);
        let about = set.describe();
        assert!(about.contains(&("bad records skipped".into(), "2".into())), "{about:?}");
        assert!(
            about.iter().any(|(_, why)| why.contains("two.jsonl`, line 3: expected an object, got a list")),
            "{about:?}"
        );
        let error = fixture
            .open(&JsonlSettings { on_bad: BadRecordPolicy::Skip { limit: 1 }, ..skip })
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("line 3"), "{error}");
    }
    let wrong = ChatSettings { template: "nonsense".into(), ..chat(ChatLossScope::All).unwrap() };
    let error =
        fixture.open(&JsonlSettings { chat: Some(wrong), ..settings(file, 16) }).err().unwrap().to_string();
    assert!(error.contains("`nonsense`"), "{error}");
    let blank = fixture.write("b.jsonl", "\n\n");
    let error = fixture.open(&settings(blank, 16)).err().unwrap().to_string();
    assert!(error.contains("have no records"), "{error}");
}

#[test]
fn a_published_tokenizer_ends_documents() {
    let Some(tokenizers) = published_dataset("tokenizers") else { return };
    let fixture = fixture();
    let file = fixture.write("a.jsonl", lines(&["Hello world", "Bye"]));
    let units = TokenizerSpec::File(tokenizers.join("gpt2/tokenizer.json"));
    let (set, _) = fixture
        .open(&JsonlSettings {
            tokenizer: units,
            valid: vec![file.clone()],
            split: whole(),
            ..settings(file, 16)
        })
        .unwrap();
    assert_eq!(read(&*set, 0), ("Hello world".into(), vec![(0, 995), (1, 50_256)], 2));
}

/// Groups stay together, classes are split evenly, and each record is in the validation set of one fold.
#[test]
fn records_are_split_by_class_by_group_and_into_folds() {
    let fixture = fixture();
    let record = |i: usize| {
        let (class, user) = (["yes", "no"][usize::from(i.is_multiple_of(5))], format!("user {}", i / 3));
        format!("{}\n", serde_json::json!({ "text": format!("record {i:02}"), "class": class, "user": user }))
    };
    let file = fixture.write("a.jsonl", (0..60).map(record).collect::<String>());
    let of = |method: SplitMethod, valid: ValidSet| {
        let split = SplitSettings { test_fraction: 0.2, valid, method };
        let settings = JsonlSettings { label: Some("class".into()), split, ..settings(file.clone(), 32) };
        let sets = open(&settings, &fixture.ctx).unwrap();
        let Some(TestSet::Open(test)) = sets.test else { panic!("no test set") };
        [sets.train, sets.valid, test].map(|set| (0..set.len()).map(|i| read(&*set, i).0).collect::<Vec<_>>())
    };
    let users = |texts: &[String]| {
        let number = |text: &String| text["record ".len()..].parse::<usize>().unwrap() / 3;
        texts.iter().map(number).collect::<BTreeSet<_>>()
    };
    let fold = |index| ValidSet::Fold(FoldIndex { index, folds: 4 });
    let mut all: Vec<String> = Vec::new();
    for index in 0..4 {
        let [train, valid, test] = of(SplitMethod::Grouped("user".into()), fold(index));
        assert_eq!((train.len(), valid.len(), test.len()), (36, 12, 12));
        let [train, valid_users, test_users] = [&train, &valid, &test].map(|set| users(set));
        assert!(train.is_disjoint(&valid_users) && train.is_disjoint(&test_users));
        assert!(valid_users.is_disjoint(&test_users));
        all.extend(valid);
        if index == 0 {
            all.extend(test);
        }
    }
    all.sort();
    assert!(all.into_iter().eq((0..60).map(|i| format!("record {i:02}"))), "every record once");
    let [train, valid, test] = of(SplitMethod::Stratified, ValidSet::Fraction(0.2));
    let rare = |texts: &[String]| {
        texts
            .iter()
            .filter(|text| text["record ".len()..].parse::<usize>().unwrap().is_multiple_of(5))
            .count()
    };
    assert_eq!([&train, &valid, &test].map(|set| (set.len(), rare(set))), [(36, 8), (12, 2), (12, 2)]);
}
