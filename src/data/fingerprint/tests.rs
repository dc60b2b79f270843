use std::fs::File;

use super::*;
use crate::NoProgress;
use crate::images::LabelColumns;

struct TempData {
    folder: tempfile::TempDir,
}

impl TempData {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(name), text).unwrap();
    }

    /// Sets the modification time of a file.
    fn touch(&self, name: &str, seconds: u64) {
        let time = UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        File::options().append(true).open(self.path(name)).unwrap().set_modified(time).unwrap();
    }

    fn fingerprint(&self, kind: InputKind, known: Option<&DataFingerprint>) -> DataFingerprint {
        self.fingerprint_with_cache(kind, known, "cache")
    }

    fn fingerprint_with_cache(
        &self,
        kind: InputKind,
        known: Option<&DataFingerprint>,
        cache: &str,
    ) -> DataFingerprint {
        let cache = Cache::at(self.path(cache));
        let sources = fingerprint_sources(
            vec![FingerprintInput { key: "data.train", kind }],
            known,
            &cache,
            &NoProgress,
        )
        .unwrap();
        DataFingerprint { sources, ..DataFingerprint::default() }
    }

    fn files(&self, names: &[&str]) -> InputKind {
        InputKind::Files(names.iter().map(|name| self.path(name)).collect())
    }
}

#[test]
fn a_copy_is_the_same_and_a_change_is_named() {
    let data = TempData::new();
    data.write("a.csv", "1,2\n");
    data.write("copy.csv", "1,2\n");
    let first = data.fingerprint(data.files(&["a.csv"]), None);
    assert_eq!(first.changes(&data.fingerprint(data.files(&["copy.csv"]), Some(&first))), [""; 0]);
    data.write("a.csv", "1,3\n");
    data.touch("a.csv", 5);
    let changed = first.changes(&data.fingerprint(data.files(&["a.csv"]), Some(&first)));
    assert_eq!(changed.len(), 1);
    assert!(
        changed[0].contains("a.csv` of `data.train` changed: 4 bytes with different content"),
        "{changed:?}"
    );
}

#[test]
fn what_has_its_size_and_time_is_trusted_and_nothing_else() {
    let data = TempData::new();
    data.write("a", "one");
    data.touch("a", 1000);
    let first = data.fingerprint(data.files(&["a"]), None);
    // The content changed but size and mtime did not: neither the cache nor the checkpoint triggers a rehash.
    data.write("a", "two");
    data.touch("a", 1000);
    assert_eq!(first.changes(&data.fingerprint(data.files(&["a"]), None)), [""; 0]);
    assert_eq!(
        first.changes(&data.fingerprint_with_cache(data.files(&["a"]), Some(&first), "other")),
        [""; 0]
    );
    assert_eq!(first.changes(&data.fingerprint_with_cache(data.files(&["a"]), None, "third")).len(), 1);
    data.touch("a", 1001);
    assert_eq!(first.changes(&data.fingerprint(data.files(&["a"]), Some(&first))).len(), 1);
}

#[test]
fn a_folder_is_its_names_and_contents() {
    let data = TempData::new();
    for i in 0..600 {
        data.write(&format!("set/{}/{i}.jpg", ["cat", "dog"][i % 2]), &i.to_string());
        data.write(&format!("copy/{}/{i}.jpg", ["cat", "dog"][i % 2]), &i.to_string());
    }
    let folder = |name: &str| InputKind::Folder(data.path(name));
    let first = data.fingerprint(folder("set"), None);
    assert_eq!((first.sources[0].files, first.sources[0].bytes), (600, 10 + 180 + 1500));
    assert_eq!(first.changes(&data.fingerprint(folder("copy"), Some(&first))), [""; 0]);
    data.write("set/dog/7.jpg", "8");
    data.touch("set/dog/7.jpg", 7);
    let changed = first.changes(&data.fingerprint(folder("set"), Some(&first)));
    assert!(
        changed[0].contains("600 files of 1,690 bytes with different content, such as `dog/7.jpg`"),
        "{changed:?}"
    );
    data.write("set/dog/7.jpg", "7");
    assert_eq!(first.changes(&data.fingerprint(folder("set"), Some(&first))), [""; 0]);
    fs::rename(data.path("set/dog/7.jpg"), data.path("set/cat/7.jpg")).unwrap();
    assert_eq!(first.changes(&data.fingerprint(folder("set"), Some(&first))).len(), 1, "another class");
    data.write("set/dog/new.txt", "no image");
    fs::rename(data.path("set/cat/7.jpg"), data.path("set/dog/7.jpg")).unwrap();
    assert_eq!(first.changes(&data.fingerprint(folder("set"), Some(&first))), [""; 0]);
}

/// The files of a folder and of a list that a change names: only those that changed, came or went.
#[test]
fn only_what_changed_is_named() {
    let data = TempData::new();
    let odd = ["a\n1 2 3 b.jpg", "a b.jpg", "\u{7f}.jpg", "0.jpg", "tab\t.jpg", "z.jpg"];
    let names: Vec<String> =
        odd.into_iter().map(String::from).chain((100..400).map(|i| format!("{i}.jpg"))).collect();
    let path = |name: &String| format!("set/cat/{name}");
    names.iter().for_each(|name| data.write(&path(name), name));
    let paths: Vec<String> = names.iter().map(path).collect();
    for cache in ["folder", "list"] {
        let kind = |paths: &[String]| match cache {
            "folder" => InputKind::Folder(data.path("set")),
            _ => data.files(&paths.iter().map(String::as_str).collect::<Vec<_>>()),
        };
        let fingerprint = |paths: &[String]| data.fingerprint_with_cache(kind(paths), None, cache);
        let named = |change: &str, before: &DataFingerprint, now: DataFingerprint| {
            let changes = before.changes(&now);
            let [text] = &changes[..] else { panic!("{change}: {changes:?}") };
            assert!(!text.contains('\n'), "{text}");
            let shown = text.split_once(", such as ").unwrap_or_else(|| panic!("{change}: {text}")).1;
            let shown: Vec<&str> = shown.split("`, `").collect();
            shown.join("|").replace(&format!("{}/", data.path("set/cat").display()), "").replace("cat/", "")
        };
        let first = fingerprint(&paths);
        data.write("set/cat/350.jpg", "-");
        let changed = fingerprint(&paths);
        assert_eq!(named("changed", &first, changed.clone()), "`350.jpg`", "{cache}");
        data.write(&paths[0], "-");
        let changed_twice = fingerprint(&paths);
        assert_eq!(named("changed", &changed, changed_twice.clone()), "`a\\n1 2 3 b.jpg`", "{cache}");
        fs::remove_file(data.path("set/cat/0.jpg")).unwrap();
        let without: Vec<String> = paths.iter().filter(|path| *path != "set/cat/0.jpg").cloned().collect();
        let gone = fingerprint(&without);
        assert_eq!(named("gone", &changed_twice, gone.clone()), "`0.jpg`, which is gone", "{cache}");
        data.write("set/cat/0.jpg", "0.jpg");
        assert_eq!(named("new", &gone, fingerprint(&paths)), "`0.jpg`, which is new", "{cache}");
        fs::remove_file(data.path("set/cat/z.jpg")).unwrap();
        let last: Vec<String> = paths.iter().filter(|path| !path.ends_with("/z.jpg")).cloned().collect();
        assert_eq!(named("last", &changed_twice, fingerprint(&last)), "`z.jpg`, which is gone", "{cache}");
        names.iter().for_each(|name| data.write(&path(name), name));
    }
}

#[test]
fn names_are_printed_in_one_line() {
    for (name, shown) in [
        (&b"a b.jpg"[..], "a b.jpg"),
        (b"\xc3\xa4\n'\x1b.jpg", "ä\\n'\\u{1b}.jpg"),
        (b"\xff\xfe", "\\xff\\xfe"),
    ] {
        assert_eq!(printable(name), shown);
    }
}

#[test]
fn a_table_counts_with_the_images_it_names() {
    let data = TempData::new();
    data.write("t.csv", "path,label\nx/b.png,1\na.png,0\nmissing.png,0\n");
    data.write("x/b.png", "b");
    data.write("a.png", "a");
    let columns = LabelColumns { path: "path".into(), label: "label".into(), separator: None };
    let table = || InputKind::Table(data.path("t.csv"), columns.clone());
    let first = data.fingerprint(table(), None);
    assert_eq!(first.sources[0].files, 4);
    data.write("x/b.png", "c");
    data.touch("x/b.png", 9);
    let changed = first.changes(&data.fingerprint(table(), Some(&first)));
    assert!(changed[0].contains("such as `x/b.png`"), "{changed:?}");
}

#[test]
fn files_classes_and_vocabularies_are_compared() {
    let data = TempData::new();
    (0..3).for_each(|i| data.write(&i.to_string(), &format!("file {i}")));
    let first = data.fingerprint(data.files(&["0", "1"]), None);
    let swapped = data.fingerprint(data.files(&["1", "0"]), None);
    assert_eq!(first.changes(&swapped).len(), 1, "another order is other data");
    let known = DataFingerprint { classes: vec!["a".into()], vocabulary: Some(3), ..first.clone() };
    let now = DataFingerprint { classes: vec!["b".into()], vocabulary: Some(4), ..first.clone() };
    assert_eq!(
        known.changes(&now),
        ["the classes were [a] and are [b]", "the vocabulary size was 3 and is 4"]
    );
    let text = serde_json::to_string(&known).unwrap();
    assert_eq!(serde_json::from_str::<DataFingerprint>(&text).unwrap(), known);
    let one = |name: &str| FingerprintInput::file("data.train", data.path(name));
    let cache = Cache::at(data.path("cache"));
    let sources = fingerprint_sources(vec![one("0"), one("1"), one("2")], None, &cache, &NoProgress).unwrap();
    assert_eq!(sources.len(), 3);
    let more = DataFingerprint { sources, ..DataFingerprint::default() };
    let changed = first.changes(&more);
    assert!(changed[0].starts_with("`data.train` was `"), "{changed:?}");
    // One file too many for separate fingerprints: all are hashed as one source.
    (0..=MAX_SEPARATE_FILES).for_each(|i| data.write(&format!("many/{i}"), "x"));
    let many: Vec<FingerprintInput> = (0..=MAX_SEPARATE_FILES)
        .map(|i| FingerprintInput::file("data.train", data.path(&format!("many/{i}"))))
        .collect();
    let sources = fingerprint_sources(many, None, &cache, &NoProgress).unwrap();
    assert_eq!((sources.len(), sources[0].files), (1, MAX_SEPARATE_FILES as u64 + 1));
}

#[test]
fn drawn_samples_are_their_settings() {
    let data = TempData::new();
    let of = |text: &str| data.fingerprint(InputKind::Settings(text.into()), None);
    assert_eq!(of("a").changes(&of("a")), [""; 0]);
    assert_eq!(of("a").changes(&of("b")).len(), 1);
}
