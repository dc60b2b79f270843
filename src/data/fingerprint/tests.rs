use super::*;
use crate::data::Unwatched;
use crate::data::images::Columns;

struct Data {
    folder: tempfile::TempDir,
}

impl Data {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn put(&self, name: &str, text: &str) {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(name), text).unwrap();
    }

    /// Gives a file a time of change of its own.
    fn touch(&self, name: &str, seconds: u64) {
        let time = UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        File::options().append(true).open(self.path(name)).unwrap().set_modified(time).unwrap();
    }

    fn of(&self, kind: Kind, known: Option<&DataFingerprint>) -> DataFingerprint {
        self.cached(kind, known, "cache")
    }

    fn cached(&self, kind: Kind, known: Option<&DataFingerprint>, cache: &str) -> DataFingerprint {
        let cache = Cache::at(self.path(cache));
        let sources = of(vec![Input { key: "data.train", kind }], known, &cache, &Unwatched).unwrap();
        DataFingerprint { sources, ..DataFingerprint::default() }
    }

    fn files(&self, names: &[&str]) -> Kind {
        Kind::Files(names.iter().map(|name| self.path(name)).collect())
    }
}

#[test]
fn a_copy_is_the_same_and_a_change_is_named() {
    let data = Data::new();
    data.put("a.csv", "1,2\n");
    data.put("copy.csv", "1,2\n");
    let first = data.of(data.files(&["a.csv"]), None);
    assert_eq!(first.changes(&data.of(data.files(&["copy.csv"]), Some(&first))), [""; 0]);
    data.put("a.csv", "1,3\n");
    data.touch("a.csv", 5);
    let changed = first.changes(&data.of(data.files(&["a.csv"]), Some(&first)));
    assert_eq!(changed.len(), 1);
    assert!(
        changed[0].contains("a.csv` of `data.train` changed: 4 bytes with another content"),
        "{changed:?}"
    );
}

#[test]
fn what_has_its_size_and_time_is_trusted_and_nothing_else() {
    let data = Data::new();
    data.put("a", "one");
    data.touch("a", 1000);
    let first = data.of(data.files(&["a"]), None);
    // Only the content changed: nobody looks, whether the cache or the checkpoint knows it.
    data.put("a", "two");
    data.touch("a", 1000);
    assert_eq!(first.changes(&data.of(data.files(&["a"]), None)), [""; 0]);
    assert_eq!(first.changes(&data.cached(data.files(&["a"]), Some(&first), "other")), [""; 0]);
    assert_eq!(first.changes(&data.cached(data.files(&["a"]), None, "third")).len(), 1);
    data.touch("a", 1001);
    assert_eq!(first.changes(&data.of(data.files(&["a"]), Some(&first))).len(), 1);
}

#[test]
fn a_folder_is_its_names_and_contents() {
    let data = Data::new();
    for i in 0..600 {
        data.put(&format!("set/{}/{i}.jpg", ["cat", "dog"][i % 2]), &i.to_string());
        data.put(&format!("copy/{}/{i}.jpg", ["cat", "dog"][i % 2]), &i.to_string());
    }
    let folder = |name: &str| Kind::Folder(data.path(name));
    let first = data.of(folder("set"), None);
    assert_eq!((first.sources[0].files, first.sources[0].bytes), (600, 10 + 180 + 1500));
    assert_eq!(first.changes(&data.of(folder("copy"), Some(&first))), [""; 0]);
    data.put("set/dog/7.jpg", "8");
    data.touch("set/dog/7.jpg", 7);
    let changed = first.changes(&data.of(folder("set"), Some(&first)));
    assert!(
        changed[0].contains("600 files of 1690 bytes with another content, such as `dog/7.jpg`"),
        "{changed:?}"
    );
    data.put("set/dog/7.jpg", "7");
    assert_eq!(first.changes(&data.of(folder("set"), Some(&first))), [""; 0]);
    fs::rename(data.path("set/dog/7.jpg"), data.path("set/cat/7.jpg")).unwrap();
    assert_eq!(first.changes(&data.of(folder("set"), Some(&first))).len(), 1, "another class");
    data.put("set/dog/new.txt", "no image");
    fs::rename(data.path("set/cat/7.jpg"), data.path("set/dog/7.jpg")).unwrap();
    assert_eq!(first.changes(&data.of(folder("set"), Some(&first))), [""; 0]);
}

#[test]
fn a_table_counts_with_the_images_it_names() {
    let data = Data::new();
    data.put("t.csv", "path,label\nx/b.png,1\na.png,0\nmissing.png,0\n");
    data.put("x/b.png", "b");
    data.put("a.png", "a");
    let columns = Columns { path: "path".into(), label: "label".into() };
    let table = || Kind::Table(data.path("t.csv"), columns.clone());
    let first = data.of(table(), None);
    assert_eq!(first.sources[0].files, 4);
    data.put("x/b.png", "c");
    data.touch("x/b.png", 9);
    let changed = first.changes(&data.of(table(), Some(&first)));
    assert!(changed[0].contains("such as `x/b.png`"), "{changed:?}");
}

#[test]
fn files_classes_and_vocabularies_are_compared() {
    let data = Data::new();
    (0..3).for_each(|i| data.put(&i.to_string(), &format!("file {i}")));
    let first = data.of(data.files(&["0", "1"]), None);
    let swapped = data.of(data.files(&["1", "0"]), None);
    assert_eq!(first.changes(&swapped).len(), 1, "another order is other data");
    let known = DataFingerprint { classes: vec!["a".into()], vocabulary: Some(3), ..first.clone() };
    let now = DataFingerprint { classes: vec!["b".into()], vocabulary: Some(4), ..first.clone() };
    assert_eq!(
        known.changes(&now),
        ["the classes were [a] and are [b]", "the tokens in the vocabulary were 3 and are 4"]
    );
    let text = serde_json::to_string(&known).unwrap();
    assert_eq!(serde_json::from_str::<DataFingerprint>(&text).unwrap(), known);
    let one = |name: &str| Input::file("data.train", data.path(name));
    let cache = Cache::at(data.path("cache"));
    let sources = of(vec![one("0"), one("1"), one("2")], None, &cache, &Unwatched).unwrap();
    assert_eq!(sources.len(), 3);
    let more = DataFingerprint { sources, ..DataFingerprint::default() };
    let changed = first.changes(&more);
    assert!(changed[0].starts_with("`data.train` was `"), "{changed:?}");
    // So many that they are hashed as one.
    (0..=NAMED).for_each(|i| data.put(&format!("many/{i}"), "x"));
    let many: Vec<Input> =
        (0..=NAMED).map(|i| Input::file("data.train", data.path(&format!("many/{i}")))).collect();
    let sources = of(many, None, &cache, &Unwatched).unwrap();
    assert_eq!((sources.len(), sources[0].files), (1, NAMED as u64 + 1));
}

#[test]
fn drawn_samples_are_their_settings() {
    let data = Data::new();
    let of = |text: &str| data.of(Kind::Settings(text.into()), None);
    assert_eq!(of("a").changes(&of("a")), [""; 0]);
    assert_eq!(of("a").changes(&of("b")).len(), 1);
}
