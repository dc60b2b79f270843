use std::fs;

use png::{BitDepth, ColorType};
use proptest::prelude::*;

use super::fixtures::{jpeg, png};
use super::*;
use crate::cache::Cache;
use crate::streaming::ShardedDataset;
use crate::transforms::{Augmentation, Normalise, ResizeMode};
use crate::{SliceMut, published_dataset};

fn image_options(channels: usize) -> ImageOptions {
    let columns = LabelColumns { path: "path".into(), label: "label".into(), separator: None };
    ImageOptions { channels, size: [8, 8], max_pixels: 1 << 20, columns, multi_label: false, readers: 2 }
}

fn dataset_context(folder: &Path) -> DatasetContext {
    DatasetContext { cache: Cache::at(folder.join("cache")), ..DatasetContext::default() }
}

fn plain(shape: [usize; 3]) -> Pipeline {
    Pipeline::new(shape, ResizeMode::Stretch, Normalise::default()).unwrap()
}

fn open(files: &[PathBuf], folder: &Path) -> Result<ImageDataset, DataError> {
    ImageFiles::open(files, image_options(1), None, &dataset_context(folder))
        .map(|set| ImageDataset::new(Arc::new(set), plain([8, 8, 1])))
}

fn sample(set: &dyn Dataset, index: u64) -> Result<(Vec<f32>, u32), DataError> {
    let (mut values, mut class) = (vec![f32::NAN; set.features().input_len()], [99]);
    let mut row =
        BatchRow { input: SliceMut::F32(&mut values), target: SliceMut::U32(&mut class), length: 0 };
    set.read(index, SampleKey { seed: 0, epoch: 0, sample: index }, &mut row)?;
    Ok((values, class[0]))
}

/// An image of one constant value.
fn flat(value: u8) -> Vec<u8> {
    jpeg([8, 8], 1, |_, _, _| value, None)
}

fn write(path: &Path, bytes: &[u8]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
}

/// The same four images give the same samples from folders, a table and archives.
#[test]
fn folders_tables_and_archives_give_the_same_samples() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let grey = |value| png([8, 8], ColorType::Grayscale, BitDepth::Eight, &[value; 64]);
    let members: [(&str, Vec<u8>); 4] = [
        ("ant/1.JPG", flat(10)),
        ("ant/2.jpg", grey(20)),
        ("bee/x/3.png", grey(30)),
        ("bee/4.png", flat(40)),
    ];
    for (path, bytes) in &members {
        write(&root.join("set").join(path), bytes);
    }
    let rows: String = members.iter().map(|(path, _)| format!("set/{path},{}\n", &path[..3])).collect();
    write(&root.join("labels.csv"), format!("path,label\n{rows}").as_bytes());
    let with_labels: Vec<(String, Vec<u8>)> = members
        .iter()
        .enumerate()
        .flat_map(|(i, (path, bytes))| {
            [(format!("{i}.png"), bytes.clone()), (format!("{i}.cls"), path[..3].into())]
        })
        .collect();
    let with_labels: Vec<(&str, &[u8])> = with_labels.iter().map(|(a, b)| (&a[..], &b[..])).collect();
    write(&root.join("a.tar"), &tar::tests::tar(&with_labels));
    // The images are deflated, since every other member is.
    let with_readme = [&[("readme.md", &b"x"[..])], &with_labels[..]].concat();
    write(&root.join("a.zip"), &zip::tests::zip(&with_readme));

    let of = |name: &str| {
        let set = open(&[root.join(name)], root).unwrap();
        assert_eq!(set.class_counts(), Some(vec![2, 2]), "{name}");
        assert_eq!(set.features().target, TargetSpec::Class { names: vec!["ant".into(), "bee".into()] });
        let mut samples: Vec<(u32, u32)> = (0..set.len())
            .map(|i| {
                let (values, class) = sample(&set, i).unwrap();
                assert!(values.iter().all(|v| *v == values[0]));
                ((values[0] * 255.0).round() as u32, class)
            })
            .collect();
        samples.sort_unstable();
        samples
    };
    let expected = [(10, 0), (20, 0), (30, 1), (40, 1)];
    for name in ["set", "labels.csv", "a.tar", "a.zip"] {
        assert_eq!(of(name), expected, "{name}");
    }
    let all = ["set", "a.tar", "a.zip", "labels.csv"].map(|name| root.join(name));
    let both = open(&all, root).unwrap();
    assert_eq!((both.len(), both.class_counts()), (16, Some(vec![8, 8])));
    assert!((0..16).all(|i| sample(&both, i).is_ok()));
    assert!(both.resident_bytes() < 4 << 20, "{}", both.resident_bytes());
}

#[test]
fn compressed_archives_are_read_forward_and_give_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let names: Vec<String> = (0..9).map(|i| format!("{}/{i}.jpg", ["ant", "bee"][i % 2])).collect();
    let bytes: Vec<Vec<u8>> = (0..9).map(|i| flat(10 * i)).collect();
    let members = |range: std::ops::Range<usize>| -> Vec<(&str, &[u8])> {
        range.map(|i| (&names[i][..], &bytes[i][..])).collect()
    };
    let archives = [tar::tests::tar(&members(0..5)), tar::tests::tar(&members(5..9))];
    for (i, archive) in archives.iter().enumerate() {
        write(&root.join(format!("{i}.tar")), archive);
        write(&root.join(format!("{i}.tar.zst")), &zstd::encode_all(&archive[..], 1).unwrap());
    }
    let plain_set = open(&[root.join("[01].tar")], root).unwrap();
    let set =
        ImageFiles::open(&[root.join("*.tar.zst")], image_options(1), None, &dataset_context(root)).unwrap();
    assert!(set.compressed);
    let packed = TarShards::new(Arc::new(set), plain([8, 8, 1]));
    assert_eq!(packed.blocks().iter().map(|b| (b.shard, b.records)).collect::<Vec<_>>(), [(0, 5), (1, 4)]);
    let mut index = 0;
    for shard in 0..2 {
        let mut records = packed.open(shard).unwrap();
        let (mut record, mut total) = (Vec::new(), 0);
        while records.next(&mut record).unwrap() {
            let (mut values, mut class) = (vec![0.0; 64], [9]);
            let mut row =
                BatchRow { input: SliceMut::F32(&mut values), target: SliceMut::U32(&mut class), length: 0 };
            let key = SampleKey { seed: 0, epoch: 0, sample: index };
            packed.decode(&record, index, key, &mut row).unwrap();
            assert_eq!((values, class[0]), sample(&plain_set, index).unwrap());
            index += 1;
            total += record.len() as u64;
            record.clear();
        }
        assert_eq!(total, packed.blocks()[shard as usize].bytes);
    }
    assert_eq!(index, 9);
    let mixture = ImageFiles::open(
        &[root.join("0.tar"), root.join("1.tar.zst")],
        image_options(1),
        None,
        &dataset_context(root),
    );
    let error = mixture.err().unwrap().to_string();
    assert!(error.contains("both compressed archives and other files"), "{error}");
}

#[test]
fn a_bad_image_is_one_bad_record_with_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let whole = jpeg([64, 64], 1, |row, column, _| (row * column) as u8, None);
    let cases: [(&str, &[u8], &str); 4] = [
        ("a/cut.jpg", &whole[..whole.len() / 2], "damaged JPEG"),
        ("a/empty.png", b"", "it is empty"),
        ("a/text.jpg", b"not an image", "it is not a JPEG"),
        ("a/good.jpg", &whole, ""),
    ];
    for (path, bytes, _) in cases {
        write(&root.join("set").join(path), bytes);
    }
    let set = open(&[root.join("set")], root).unwrap();
    for (i, name) in ["a/cut.jpg", "a/empty.png", "a/good.jpg", "a/text.jpg"].into_iter().enumerate() {
        let (_, _, expected) = cases.iter().find(|case| case.0 == name).unwrap();
        match sample(&set, i as u64) {
            Ok(_) => assert_eq!(*expected, "", "{name}"),
            Err(error) => {
                let text = error.to_string();
                assert!(error.is_bad_record() && text.contains(name) && text.contains(expected), "{text}");
            }
        }
    }
    fs::remove_file(root.join("set/a/good.jpg")).unwrap();
    let error = sample(&set, 2).unwrap_err();
    assert!(error.is_bad_record() && error.to_string().contains("no such file"), "{error}");
    write(&root.join("labels.csv"), b"path,label\nmissing.jpg,x\n");
    let missing = sample(&open(&[root.join("labels.csv")], root).unwrap(), 0).unwrap_err();
    assert!(missing.is_bad_record() && missing.to_string().contains("missing.jpg"), "{missing}");
    write(&root.join("bad.tar"), &tar::tests::tar(&[("a/cut.jpg", &whole[..150])]));
    let cut = sample(&open(&[root.join("bad.tar")], root).unwrap(), 0).unwrap_err();
    assert!(
        cut.is_bad_record() && cut.to_string().contains("bad.tar`, member a/cut.jpg: it is a damaged"),
        "{cut}"
    );
}

#[test]
fn a_set_that_cannot_be_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write(&root.join("train/cat/1.jpg"), &flat(1));
    write(&root.join("valid/fox/1.jpg"), &flat(1));
    let train =
        ImageFiles::open(&[root.join("train")], image_options(1), None, &dataset_context(root)).unwrap();
    let valid = ImageFiles::open(
        &[root.join("valid")],
        image_options(1),
        Some(train.names()),
        &dataset_context(root),
    );
    assert!(valid.err().unwrap().to_string().contains("class `fox` of the validation set"));
    write(&root.join("images.rar"), b"Rar");
    let text = open(&[root.join("images.rar")], root).err().unwrap().to_string();
    assert!(text.contains("expected a folder, or a file named .csv, .tsv, .tar, .tar.gz"), "{text}");
    assert!(matches!(open(&[root.join("none")], root), Err(DataError::Io { .. })));
    let small = DatasetContext { max_bytes: 10, ..dataset_context(root) };
    let large = ImageFiles::open(&[root.join("train")], image_options(1), None, &small).err().unwrap();
    assert!(large.is_out_of_memory(), "{large}");
}

#[test]
fn a_large_image_is_read_alone_and_its_buffers_are_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for i in 0..40 {
        write(&root.join(format!("set/a/{i:02}.jpg")), &flat(1));
    }
    write(&root.join("set/a/01.jpg"), &jpeg([1000, 1000], 1, |_, _, _| 7, None));
    let set = open(&[root.join("set")], root).unwrap();
    assert_eq!(set.describe()[0].1, "8 x 8 to 1000 x 1000 (40 images probed)");
    let before = set.resident_bytes();
    assert_eq!(sample(&set, 1).unwrap().0, [7.0 / 255.0; 64]);
    assert_eq!(set.resident_bytes(), before);
    assert!(sample(&set, 2).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Training samples are augmented by their key; validation samples never are.
    #[test]
    fn only_the_training_split_is_augmented(seed: u64) {
        let folder = tempfile::tempdir().unwrap();
        write(&folder.path().join("set/a/1.jpg"), &jpeg([24, 24], 1, |r, c, _| (r * 60 + c * 20) as u8, None));
        let context = dataset_context(folder.path());
        let set = ImageFiles::open(&[folder.path().join("set")], image_options(1), None, &context);
        let set = Arc::new(set.unwrap());
        let augment = Augmentation { horizontal_flip: 0.5, padding: 2, ..Augmentation::default() };
        let train = ImageDataset::new(set.clone(), plain([8, 8, 1]).augmented(augment).unwrap());
        let valid = ImageDataset::new(set, plain([8, 8, 1]));
        let read = |set: &ImageDataset, epoch| {
            let (mut values, mut class) = (vec![f32::NAN; 64], [9]);
            let mut row = BatchRow { input: SliceMut::F32(&mut values), target: SliceMut::U32(&mut class), length: 0 };
            set.read(0, SampleKey { seed, epoch, sample: 0 }, &mut row).unwrap();
            values
        };
        prop_assert_eq!(read(&train, 1), read(&train, 1));
        prop_assert!((2..12).any(|epoch| read(&train, epoch) != read(&train, 1)));
        prop_assert_eq!(read(&valid, 1), read(&valid, 2));
    }
}

#[test]
fn sign_language_digits_as_published() {
    let Some(folder) = published_dataset("sign-language-digits") else { return };
    let cache = tempfile::tempdir().unwrap();
    let set =
        ImageFiles::open(&[folder.join("Dataset")], image_options(3), None, &dataset_context(cache.path()))
            .unwrap();
    let set = ImageDataset::new(Arc::new(set), plain([100, 100, 3]));
    assert_eq!(set.len(), 800);
    assert_eq!(set.features().target, TargetSpec::Class { names: (0..10).map(|i| i.to_string()).collect() });
    assert_eq!(set.class_counts().unwrap().iter().sum::<u64>(), 800);
    assert_eq!(set.describe()[0], ("image_size".into(), "100 x 100 (800 images probed)".into()));
    for index in (0..800).step_by(40) {
        let (values, class) = sample(&set, index).unwrap();
        assert!(class < 10 && values.iter().all(|v| (0.0..=1.0).contains(v)));
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        assert!((0.1..0.95).contains(&mean), "{index}: {mean}");
    }
}

/// Mixup among compressed archives: the same samples whatever the workers and batches, with partners of their window.
#[test]
fn archives_are_mixed_within_their_shuffle_window() {
    use crate::BatchValues;
    use crate::loader::{Loader, LoaderOptions};
    use crate::order::{Cursor, Order};
    use crate::streaming::StreamingDataset;
    use crate::transforms::mix::{MixOptions, MixedDataset};
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for shard in 0..6 {
        let names: Vec<String> = (0..10).map(|i| format!("shard{shard}/{i}.jpg")).collect();
        let bytes: Vec<Vec<u8>> = (0..10).map(|i| flat(10 * i + shard)).collect();
        let members: Vec<(&str, &[u8])> = names.iter().zip(&bytes).map(|(n, b)| (&n[..], &b[..])).collect();
        let archive = zstd::encode_all(&tar::tests::tar(&members)[..], 1).unwrap();
        write(&root.join(format!("{shard}.tar.zst")), &archive);
    }
    let files = || {
        ImageFiles::open(&[root.join("*.tar.zst")], image_options(1), None, &dataset_context(root)).unwrap()
    };
    let shard_bytes = TarShards::new(Arc::new(files()), plain([8, 8, 1])).blocks()[0].bytes;
    // A window has up to two of the archives, each of which is a block.
    let ctx = DatasetContext { seed: 9, shuffle_buffer: 2 * shard_bytes + 200, ..dataset_context(root) };
    let mixing = MixOptions { mixup: 1.0, cutmix: 0.0, probability: 1.0 };
    let deliver = |micro_batch, workers, from| {
        let shards = Arc::new(TarShards::new(Arc::new(files()), plain([8, 8, 1])));
        let streamed = Arc::new(StreamingDataset::new(shards, ctx.shuffle_buffer));
        let mixed = Arc::new(MixedDataset::new(streamed, mixing, workers, &ctx).unwrap());
        let order = Order::for_dataset(mixed.as_ref(), 7, ctx.seed, true, ctx.shuffle_buffer).unwrap();
        let until = 3 * order.updates_per_epoch();
        let options = LoaderOptions { micro_batch, max_bytes: 1 << 20, workers, skip_bad: false };
        let mut loader =
            Loader::start(mixed, order.clone(), Cursor { update: from, done: 0 }, until, options).unwrap();
        let mut samples = Vec::new();
        while let Some(batch) = loader.next().unwrap() {
            let (BatchValues::F32(values), BatchValues::U32(targets)) = (&batch.inputs, &batch.targets)
            else {
                panic!()
            };
            let rows = values.chunks_exact(64).zip(targets.chunks_exact(3));
            samples.extend(rows.zip(&batch.ids).map(|((v, t), id)| (batch.epoch, *id, v[0], t.to_vec())));
        }
        (samples, order)
    };
    let (all, order) = deliver(7, 1, 0);
    assert_eq!(deliver(3, 4, 0).0, all);
    assert_eq!(deliver(7, 2, 5).0, all[35..]);
    let (mut shards_of_windows, mut other_shard) = (Vec::new(), 0);
    for (epoch, id, _, target) in &all {
        // The class is the archive; both are of the window of the sample.
        let position = order.ids(*epoch, 0..60).position(|other| other == *id).unwrap() as u64;
        let (window, _) = order.window_ranges(*epoch, position..position + 1).remove(0);
        let positions = order.window_ranges(*epoch, 0..60).into_iter().find(|(w, _)| *w == window).unwrap().1;
        let shards: std::collections::BTreeSet<u64> =
            order.ids(*epoch, positions).map(|id| id / 10).collect();
        assert!(shards.contains(&u64::from(target[0])) && shards.contains(&u64::from(target[1])));
        other_shard += usize::from(target[0] != target[1]);
        shards_of_windows.push(shards.len());
    }
    assert!(shards_of_windows.contains(&2) && other_shard > 30, "{other_shard}");
}
