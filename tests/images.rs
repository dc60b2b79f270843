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

    for train in ["set", "a.tar", "a.tar.gz"] {
        let (code, last, error) = fit(root, &job(train, AUGMENTED));
        assert_eq!(code, 0, "{train}: {error}");
        let accuracy = last["metrics"]["valid.accuracy"].as_f64();
        assert!(accuracy.is_some_and(|a| a > 0.8), "{train}: {last}");
    }
}

/// The values of every augmentation, and the partners of mixup among sequentially read archives, do not depend on
/// workers, micro-batches, retries and resumes.
#[test]
fn augmentations_do_not_depend_on_how_a_job_runs() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let images = image_files();
    for (i, part) in images.chunks(10).enumerate() {
        fs::write(root.join(format!("{i}.tar.gz")), gzip(&tar(part))).unwrap();
    }
    let every = "[data.augment]\nrotation = 20\ntranslate = 0.1\nscale = [0.8, 1.2]\nshear = 10\nrandaugment = 2\n\
        randaugment_magnitude = 12\nblur = 0.5\nblur_kernel = 5\nblur_sigma = [0.1, 1.5]\nmixup = 0.4\ncutmix = 1.0\n";
    // A window has a few of the archives.
    let loader = "shuffle_buffer = '3KiB'\n";
    let job = job("*.tar.gz", &format!("{loader}{every}")) + "[log]\nevery_steps = 1\ntensorboard = false\n";
    fs::write(root.join("job.toml"), &job).unwrap();
    let run = |name: &str, more: &[&str], faults: &[(&str, &str)]| {
        let args = [&["fit", "job.toml", "-q", "--run-dir", name], more].concat();
        let mut command = harness::command(root, &args);
        harness::finish(command.envs(faults.iter().copied())).expect(0);
        harness::losses(&harness::events(&root.join(name)))
    };
    let whole = run("whole", &["--set", "data.workers=1"], &[]);
    assert_eq!(run("workers", &["--set", "data.workers=3"], &[]), whole);
    run("killed", &[], &[("TRAINER_FAULT_CRASH", "kill:7")]);
    let state = |name: &str| harness::FinalState::of(&root.join(name));
    state("killed").assert_same(&state("whole"));
    let retried = run("retried", &[], &[("TRAINER_FAULT_OOM", "40")]);
    assert_eq!(retried.len(), whole.len());
    for (a, b) in retried.iter().zip(&whole) {
        assert!((a - b).abs() <= 1e-4 * b.abs(), "{a} {b}");
    }
    let other_buffer = run("buffer", &["--set", "data.shuffle_buffer=\"40KiB\""], &[]);
    assert_ne!(other_buffer, whole);
}

/// Predictions averaged over an image and its mirror image are the mean of the predictions of both files; views drawn
/// from the job's augmentations are the same every time, whatever the batch size.
#[test]
fn test_time_augmentation_averages_probabilities() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    // A bright half on the side of the class.
    let pixels = |i: usize, mirrored: bool| -> Vec<u8> {
        let value = |y: usize, x: usize| {
            let x = if mirrored { 11 - x } else { x };
            if (x < 6) == i.is_multiple_of(2) {
                120 + 9 * y as u8 + (i * 7 % 25) as u8
            } else {
                (x * 5 + i % 30) as u8
            }
        };
        (0..10).flat_map(|y| (0..12).flat_map(move |x| [value(y, x); 3])).collect()
    };
    let png = |i, mirrored| {
        fixtures::png([10, 12], png::ColorType::Rgb, png::BitDepth::Eight, &pixels(i, mirrored))
    };
    let name = |i: usize| format!("{}/{i:02}.png", ["left", "right"][i % 2]);
    for (set, mirrored) in [("set", false), ("mirrored", true)] {
        let files: Vec<_> = (0..40).map(|i| (name(i), png(i, mirrored))).collect();
        write_files(&root.join(set), &files);
    }
    let augment = "[data.augment]\nrotation = 15\ntranslate = 0.2\n";
    fs::write(root.join("job.toml"), job("set", augment).replace("epochs = 8", "epochs = 2")).unwrap();
    harness::trainer(root, &["fit", "job.toml", "-q", "--run-dir", "run"]).expect(0);
    let predict = |set: &str, more: &[&str]| -> Vec<Vec<f64>> {
        let args = [&["predict", "run", set, "-q", "--probabilities"], more].concat();
        let text = harness::trainer(root, &args).expect(0).stdout;
        let numbers = |line: &str| line.split(',').skip(3).take(2).map(|p| p.parse().unwrap()).collect();
        text.lines().skip(1).map(numbers).collect()
    };
    let (plain, mirrored, both) =
        (predict("set", &[]), predict("mirrored", &[]), predict("set", &["--tta", "flip"]));
    assert_eq!((plain.len(), both.len()), (40, 40));
    for ((a, b), mean) in plain.iter().zip(&mirrored).zip(&both) {
        for class in 0..2 {
            assert!(((a[class] + b[class]) / 2.0 - mean[class]).abs() < 1e-5, "{a:?} {b:?} {mean:?}");
        }
    }
    let views = predict("set", &["--tta", "5"]);
    assert_eq!(predict("set", &["--tta", "5", "--batch-size", "7"]).len(), 40);
    for (a, b) in predict("set", &["--tta", "5", "--batch-size", "3"]).iter().zip(&views) {
        assert!((a[0] - b[0]).abs() < 1e-5, "{a:?} {b:?}");
    }
    assert!(views != plain && views != both);

    let eval = |more: &[&str]| harness::trainer(root, &[&["eval", "run", "--json", "-q"], more].concat());
    let (without, with) = (eval(&[]).expect(0).json(), eval(&["--tta", "flip"]).expect(0).json());
    assert_eq!((&without["samples"], &with["samples"]), (&Value::from(8), &Value::from(8)));
    assert_ne!(without["metrics"]["log_loss"], with["metrics"]["log_loss"]);
    let packed = root.join("labelled.tar.gz");
    let files: Vec<_> = (0..40).map(|i| (name(i), png(i, false))).collect();
    fs::write(&packed, gzip(&tar(&files))).unwrap();
    let by_data =
        |data: &str| eval(&["--tta", "5", "--data", data]).expect(0).json()["metrics"]["accuracy"].clone();
    assert_eq!(by_data("labelled.tar.gz"), by_data("set"));

    // One bad image is one row with an error, whatever the number of views.
    fs::write(root.join("set/left/zz.png"), b"no image").unwrap();
    let args = ["predict", "run", "set", "-q", "--tta", "3", "--set", "data.on_bad_record=skip"];
    let text = harness::trainer(root, &args).expect(4).stdout;
    assert_eq!((text.lines().count(), text.matches("it is not a JPEG").count()), (42, 1), "{text}");

    for value in ["1", "0", "mirror"] {
        let refused = harness::trainer(root, &["predict", "run", "set", "--tta", value]).expect(2).stderr;
        assert!(refused.contains("expected `flip` or a number of views"), "{refused}");
    }
    fs::write(root.join("job.toml"), job("mirrored", "").replace("epochs = 8", "epochs = 1")).unwrap();
    harness::trainer(root, &["fit", "job.toml", "-q", "--run-dir", "plain"]).expect(0);
    let refused = harness::trainer(root, &["eval", "plain", "--tta", "4"]).expect(2).stderr;
    assert!(refused.contains("its `[data.augment]` has none") && refused.contains("--tta flip"), "{refused}");
    harness::trainer(root, &["eval", "plain", "--tta", "flip"]).expect(0);
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
    fs::write(root.join("set/red/broken.jpg"), b"\0\0\0\x20ftypavif\0\0\0\0avifmif1miafMA1B").unwrap();
    fs::rename(root.join("set/red/broken.jpg"), root.join("set/red/new.avif")).unwrap();
    let (code, last, _) = fit(root, &job("set", ""));
    assert_eq!(code, 4, "{last}");
    assert!(
        last.to_string()
            .contains("new.avif`: it is of the format AVIF, which needs a build with `--features avif`"),
        "{last}"
    );
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
    let wrong = "[data.augment]\nscale = [1.2, 0.8]\nblur_kernel = 4\n";
    let text = fit(root, &job("set", wrong)).1.to_string();
    assert!(
        text.contains("`data.augment.scale` must be [low, high]") && text.contains("must be odd, not 4"),
        "{text}"
    );
    let (_, last, _) = fit(root, &job("set", "mean = [0.1, 0.2]"));
    assert!(last.to_string().contains("one per channel"), "{last}");

    fs::write(root.join("job.toml"), job("set", "mean = 0.5\nstd = [0.5, 0.5, 0.5]")).unwrap();
    let (code, checked, error) =
        trainer(root, &["check", "job.toml", "--json", "--set", "data.on_bad_record=skip"]);
    assert_eq!(code, 0, "{error}");
    assert!(checked["data"]["target"].as_str().unwrap().contains("3 classes: blue, green, red"), "{checked}");
    assert!(!checked["data"]["balance"].is_null(), "{checked}");
}
