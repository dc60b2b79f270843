//! Jobs on pictures in files, through the binary, and what decoding really takes.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use serde_json::Value;
use trainer::data::images::{Columns, Images, Options, Set};
use trainer::data::picture::{Augment, Fit, Normalise, Pipeline, ResizedCrop};
use trainer::data::{Key, Opening, Row, Slice, Source, cache::Cache};
use trainer::memory::measure::{self, Counting};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn png(height: usize, width: usize, pixel: impl Fn(usize) -> [u8; 4]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut encoder = png::Encoder::new(&mut out, width as u32, height as u32);
    encoder.set_color(png::ColorType::Rgba);
    let data: Vec<u8> = (0..height * width).flat_map(pixel).collect();
    encoder.write_header().unwrap().write_image_data(&data).unwrap();
    out
}

/// 60 pictures of three classes that differ in their colour.
fn members() -> Vec<(String, Vec<u8>)> {
    let colour = |i: usize| {
        let mut colour = [(i * 7 % 60) as u8; 4];
        colour[i % 3] = 200;
        colour
    };
    (0..60)
        .map(|i| (format!("{}/{i:02}.PNG", ["red", "green", "blue"][i % 3]), png(20, 24, |_| colour(i))))
        .collect()
}

fn write_folder(root: &Path) {
    for (path, bytes) in members() {
        fs::create_dir_all(root.join(&path).parent().unwrap()).unwrap();
        fs::write(root.join(path), bytes).unwrap();
    }
}

fn job(train: &str, more: &str) -> String {
    format!(
        "[model]\nkind = 'mlp'\nhidden = [16]\n[data]\nkind = 'images'\ntrain = ['{train}']\nvalid_share = 0.2\n\
        image_size = [10, 12]\n{more}\n[train]\nbatch_size = 8\nepochs = 8\n[optimizer]\nlr = 1e-2\n"
    )
}

/// The exit code, the document or the last line of stdout, and stderr.
fn trainer(folder: &Path, args: &[&str]) -> (i32, Value, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_trainer")).args(args).current_dir(folder).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let last =
        serde_json::from_str(&text).or_else(|_| serde_json::from_str(text.lines().last().unwrap_or("null")));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code().unwrap(), last.unwrap_or_default(), error)
}

fn fit(folder: &Path, job: &str) -> (i32, Value, String) {
    fs::write(folder.join("job.toml"), job).unwrap();
    trainer(folder, &["fit", "job.toml", "--json", "-q"])
}

const AUGMENTED: &str = "[data.augment]\nrandom_resized_crop = [0.5, 1.0]\nhorizontal_flip = 0.5\ncrop_padding = 1\n\
    brightness = 0.1\nerasing = 0.2\nmixup = 0.2\ncutmix = 1.0\nmix_chance = 0.5\n";

#[test]
fn folders_and_archives_are_learned_augmented_and_mixed() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write_folder(&root.join("set"));
    let mut archive = tar::Builder::new(Vec::new());
    for (path, bytes) in members() {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        archive.append_data(&mut header, path, &bytes[..]).unwrap();
    }
    let archive = archive.into_inner().unwrap();
    fs::write(root.join("a.tar"), &archive).unwrap();
    let mut gzip =
        flate2::write::GzEncoder::new(fs::File::create(root.join("a.tar.gz")).unwrap(), Default::default());
    gzip.write_all(&archive).unwrap();
    gzip.finish().unwrap();

    let plain = AUGMENTED.split("mixup").next().unwrap();
    for (train, more) in [("set", AUGMENTED), ("a.tar", AUGMENTED), ("a.tar.gz", plain)] {
        let (code, last, error) = fit(root, &job(train, more));
        assert_eq!(code, 0, "{train}: {error}");
        let accuracy = last["metrics"]["valid.accuracy"].as_f64();
        assert!(accuracy.is_some_and(|a| a > 0.8), "{train}: {last}");
    }
    let (code, last, _) = fit(root, &job("a.tar.gz", AUGMENTED));
    assert_eq!((code, last["error"]["exit_code"].as_i64()), (4, Some(4)), "{last}");
    assert!(last.to_string().contains("packed archives are read forward"), "{last}");
}

#[test]
fn what_is_wrong_with_a_picture_or_a_job_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write_folder(&root.join("set"));
    fs::write(root.join("set/red/broken.jpg"), b"no picture").unwrap();
    let (code, last, _) = fit(root, &job("set", ""));
    assert_eq!(code, 4, "{last}");
    assert!(last.to_string().contains("set/red/broken.jpg`: it is no JPEG, PNG or WebP"), "{last}");
    let (code, last, error) = fit(root, &job("set", "on_bad_record = 'skip'"));
    assert_eq!(code, 0, "{last} {error}");

    let wrong = "[data.augment]\nrandom_resized_crop = [1.0, 0.5]\nhue = 0.7\nmixup = 'much'\n";
    let (code, last, _) = fit(root, &job("set", wrong));
    assert_eq!(code, 2, "{last}");
    let text = last.to_string();
    assert!(
        text.contains("`data.augment.hue` cannot be 0.7") && text.contains("`data.augment.mixup` must be"),
        "{text}"
    );
    let (_, last, _) = fit(root, &job("set", "[data.augment]\nrandom_resized_crop = [1.0, 0.5]\n"));
    assert!(last.to_string().contains("goes from 1 to 0.5"), "{last}");
    let (_, last, _) = fit(root, &job("set", "mean = [0.1, 0.2]"));
    assert!(last.to_string().contains("one for each channel"), "{last}");

    fs::write(root.join("job.toml"), job("set", "mean = 0.5\nstd = [0.5, 0.5, 0.5]")).unwrap();
    let (code, checked, error) =
        trainer(root, &["check", "job.toml", "--json", "--set", "data.on_bad_record=skip"]);
    assert_eq!(code, 0, "{error}");
    assert!(checked["data"]["target"].as_str().unwrap().contains("3 classes: blue, green, red"), "{checked}");
}

/// Buffers, decoders and the resizer together stay within what a set says it keeps.
#[test]
fn decoding_takes_no_more_than_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let noise = |i: usize| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes();
    let rgb: Vec<u8> = (0..900 * 700).flat_map(|i| noise(i / 9)[..3].to_vec()).collect();
    let mut webp = Vec::new();
    image_webp::WebPEncoder::new(&mut webp).encode(&rgb, 900, 700, image_webp::ColorType::Rgb8).unwrap();
    let mut files = vec![("png", png(700, 900, noise)), ("webp", webp)];
    let data = std::env::var_os("TRAINER_DATA").unwrap_or_else(|| "../shared/data".into());
    let signs = Path::new(&data).join("sign-language-digits/Dataset/0");
    match fs::read_dir(&signs).ok().and_then(|mut found| found.next()?.ok()) {
        Some(file) => files.push(("jpg", fs::read(file.path()).unwrap())),
        None => println!("without a JPEG: no `{}`", signs.display()),
    }
    for (ending, bytes) in files {
        let root = folder.path().join(ending);
        fs::create_dir_all(root.join("a")).unwrap();
        fs::write(root.join("a").join(format!("x.{ending}")), bytes).unwrap();
        let columns = Columns { path: "path".into(), label: "label".into() };
        let options = Options { channels: 3, max_pixels: 1 << 20, columns, readers: 1 };
        let opening = Opening { cache: Cache::at(folder.path().join("cache")), ..Opening::default() };
        let set = Arc::new(Set::open(&[root], options, None, &opening).unwrap());
        let resized_crop = Some(ResizedCrop { scale: [0.5, 1.0], ratio: [0.75, 1.33] });
        let augment = Augment { resized_crop, horizontal_flip: 0.5, ..Augment::default() };
        let pipeline = Pipeline::new([224, 224, 3], Fit::Stretch, Normalise::default()).unwrap();
        let set = Images::new(set, pipeline.augmented(augment).unwrap());
        let (mut values, mut class) = (vec![0.0; 224 * 224 * 3], [0]);
        let before = measure::live();
        measure::take_recent_peak();
        for epoch in 0..3 {
            let mut row = Row { input: Slice::F32(&mut values), target: Slice::U32(&mut class), length: 0 };
            set.read(0, Key { seed: 1, epoch, sample: 0 }, &mut row).unwrap();
        }
        let took = measure::take_recent_peak() - before;
        println!("{ending}: {took} bytes of {}", set.resident_bytes());
        // What other tests of this program allocate meanwhile is small.
        assert!(took <= set.resident_bytes() + (256 << 10), "{ending}: {took} of {}", set.resident_bytes());
        assert!(took > 100_000, "{ending}: {took} is not what decoding takes");
    }
}
