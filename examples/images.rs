//! Measures the throughput of the loader on image files, which it decodes, resizes, flips and normalises:
//! `cargo run --release --example images -- FOLDER SIZE SECONDS WORKERS [crop]`.
//!
//! Prints one JSON object: images per second, seconds from the start to the first batch, and the number of images.
//! `bench/images.py` compares it with torchvision's `DataLoader`.

use std::sync::Arc;
use std::time::Instant;

use trainer::data::images::{ImageDataset, ImageFiles, ImageOptions, LabelColumns};
use trainer::data::loader::{Loader, LoaderOptions};
use trainer::data::order::{Cursor, Order};
use trainer::data::transforms::{Augmentation, Normalise, Pipeline, RandomResizedCrop, ResizeMode};
use trainer::data::{BatchValues, Dataset, DatasetContext, HostBatch};
use trainer::kernels::pixel_lut;

const BATCH: usize = 32;

/// Converts the bytes of a batch to the normalised values that a model takes, and returns the number of images.
fn normalise_batch(batch: &HostBatch) -> usize {
    if let BatchValues::U8(bytes, tables) = &batch.inputs {
        std::hint::black_box(pixel_lut::expand_bytes::<f32>(tables, bytes));
    }
    batch.ids.len()
}

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder, size, seconds, workers, rest @ ..] = &args[..] else {
        anyhow::bail!("FOLDER SIZE SECONDS WORKERS [crop]")
    };
    let (size, seconds, workers): (usize, f64, usize) = (size.parse()?, seconds.parse()?, workers.parse()?);
    let begun = Instant::now();
    let columns = LabelColumns { path: "path".into(), label: "label".into(), separator: None };
    let options = ImageOptions {
        channels: 3,
        size: [size, size],
        max_pixels: 64_000_000,
        columns,
        multi_label: false,
        readers: workers,
    };
    let image_files = ImageFiles::open(&[folder.into()], options, None, &DatasetContext::default())?;
    let normalise = Normalise { mean: vec![0.485, 0.456, 0.406], std: vec![0.229, 0.224, 0.225] };
    let crop = RandomResizedCrop { scale: [0.08, 1.0], ratio: [0.75, 4.0 / 3.0] };
    let augment = Augmentation {
        horizontal_flip: 0.5,
        resized_crop: rest.first().map(|_| crop),
        ..Augmentation::default()
    };
    let pipeline = Pipeline::new([size, size, 3], ResizeMode::Stretch, normalise)?.augmented(augment)?;
    let dataset = Arc::new(ImageDataset::new(Arc::new(image_files), pipeline));
    let order = Order::new(dataset.len(), BATCH as u64, 1, true)?;
    let start = Cursor { update: 0, done: 0 };
    let loader_options = LoaderOptions { micro_batch: BATCH, max_bytes: 256 << 20, workers, skip_bad: false };
    let mut loader = Loader::start(dataset.clone(), order, start, u64::MAX, loader_options)?;
    let first = loader.next()?.map_or(0, |batch| normalise_batch(&batch));
    let to_first = begun.elapsed().as_secs_f64();
    let (begun, mut images) = (Instant::now(), 0);
    while first > 0 && begun.elapsed().as_secs_f64() < seconds {
        images += loader.next()?.map_or(0, |batch| normalise_batch(&batch));
    }
    let rate = images as f64 / begun.elapsed().as_secs_f64().max(1e-9);
    println!(
        "{{\"images_per_s\": {rate:.1}, \"to_first_batch_s\": {to_first:.3}, \"images\": {}}}",
        dataset.len()
    );
    Ok(())
}
