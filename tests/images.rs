//! Jobs on image files, through the binary.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::fixtures;
use crate::harness::{self, gzip, tar, write_files};

/// 60 images of three classes that differ in color.
fn image_files() -> Vec<(String, Vec<u8>)> {
    let image = |i: usize| {
        let mut colour = [(i * 7 % 60) as u8; 4];
        colour[i % 3] = 200;
        let pixels = colour.repeat(20 * 24);
        fixtures::png([20, 24], png::ColorType::Rgba, png::BitDepth::Eight, &pixels)
    };
    (0..60).map(|i| (format!("{}/{i:02}.PNG", ["red", "green", "blue"][i % 3]), image(i))).collect()
}

fn job(train: &str, more: &str) -> String {
    format!(
        "[model]\nkind = 'mlp'\nhidden = [16]\n[data]\nkind = 'images'\ntrain = ['{train}']\nvalid_fraction = 0.2\n\
        image_size = [10, 12]\n{more}\n[train]\nbatch_size = 8\nepochs = 8\n[optimizer]\nlr = 1e-2\n"
    )
}

/// The exit code, the JSON document or last line of stdout, and stderr.
fn trainer(folder: &Path, args: &[&str]) -> (i32, Value, String) {
    let done = harness::trainer(folder, args);
    let text = &done.stdout;
    let last =
        serde_json::from_str(text).or_else(|_| serde_json::from_str(text.lines().last().unwrap_or("null")));
    (done.code().unwrap(), last.unwrap_or_default(), done.stderr)
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
    let images = image_files();
    write_files(&root.join("set"), &images);
    fs::write(root.join("a.tar"), tar(&images)).unwrap();
    fs::write(root.join("a.tar.gz"), gzip(&tar(&images))).unwrap();

    let plain = AUGMENTED.split("mixup").next().unwrap();
    for (train, more) in [("set", AUGMENTED), ("a.tar", AUGMENTED), ("a.tar.gz", plain)] {
        let (code, last, error) = fit(root, &job(train, more));
        assert_eq!(code, 0, "{train}: {error}");
        let accuracy = last["metrics"]["valid.accuracy"].as_f64();
        assert!(accuracy.is_some_and(|a| a > 0.8), "{train}: {last}");
    }
    let (code, last, _) = fit(root, &job("a.tar.gz", AUGMENTED));
    assert_eq!((code, last["error"]["exit_code"].as_i64()), (2, Some(2)), "{last}");
    assert!(last.to_string().contains("compressed archives are read sequentially"), "{last}");
}

#[test]
fn errors_in_images_and_jobs_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write_files(&root.join("set"), &image_files());
    fs::write(root.join("set/red/broken.jpg"), b"no image").unwrap();
    let (code, last, _) = fit(root, &job("set", ""));
    assert_eq!(code, 4, "{last}");
    assert!(last.to_string().contains("set/red/broken.jpg`: it is not a JPEG, PNG, WebP"), "{last}");
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
    assert!(last.to_string().contains("must be [low, high], not [1, 0.5]"), "{last}");
    let (_, last, _) = fit(root, &job("set", "mean = [0.1, 0.2]"));
    assert!(last.to_string().contains("one per channel"), "{last}");

    fs::write(root.join("job.toml"), job("set", "mean = 0.5\nstd = [0.5, 0.5, 0.5]")).unwrap();
    let (code, checked, error) =
        trainer(root, &["check", "job.toml", "--json", "--set", "data.on_bad_record=skip"]);
    assert_eq!(code, 0, "{error}");
    assert!(checked["data"]["target"].as_str().unwrap().contains("3 classes: blue, green, red"), "{checked}");
    assert!(!checked["data"]["balance"].is_null(), "{checked}");
}
