//! Pictures a second through the loader, decoded, resized, flipped and normalised:
//! `cargo run --release --example pictures -- FOLDER SIZE SECONDS WORKERS [crop]`.
//!
//! Prints one JSON object: pictures a second, and seconds from the start to the first batch.

use std::sync::Arc;
use std::time::Instant;

use trainer::data::images::{ImageDataset, ImageFiles, ImageOptions, LabelColumns};
use trainer::data::loader::{Loader, LoaderOptions};
use trainer::data::order::{Cursor, Order};
use trainer::data::transforms::{Augmentation, Normalise, Pipeline, RandomResizedCrop, ResizeMode};
use trainer::data::{BatchValues, Dataset, DatasetContext, HostBatch};
use trainer::kernels::pixel_lut;

const BATCH: usize = 32;

/// Pictures of a batch, once their bytes are the normalised values that a model is given.
fn normalised(batch: &HostBatch) -> usize {
    if let BatchValues::U8(bytes, tables) = &batch.inputs {
        std::hint::black_box(pixel_lut::expand_bytes(tables, bytes));
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
    let columns = LabelColumns { path: "path".into(), label: "label".into() };
    let options =
        ImageOptions { channels: 3, size: [size, size], max_pixels: 64_000_000, columns, readers: workers };
    let set = ImageFiles::open(&[folder.into()], options, None, &DatasetContext::default())?;
    let normalise = Normalise { mean: vec![0.485, 0.456, 0.406], std: vec![0.229, 0.224, 0.225] };
    let crop = RandomResizedCrop { scale: [0.08, 1.0], ratio: [0.75, 4.0 / 3.0] };
    let augment = Augmentation {
        horizontal_flip: 0.5,
        resized_crop: rest.first().map(|_| crop),
        ..Augmentation::default()
    };
    let pipeline = Pipeline::new([size, size, 3], ResizeMode::Stretch, normalise)?.augmented(augment)?;
    let source = Arc::new(ImageDataset::new(Arc::new(set), pipeline));
    let order = Order::new(source.len(), BATCH as u64, 1, true)?;
    let start = Cursor { update: 0, done: 0 };
    let reading = LoaderOptions { micro_batch: BATCH, max_bytes: 256 << 20, workers, skip_bad: false };
    let mut loader = Loader::start(source.clone(), order, start, u64::MAX, reading)?;
    let first = loader.next()?.map_or(0, |batch| normalised(&batch));
    let to_first = begun.elapsed().as_secs_f64();
    let (begun, mut pictures) = (Instant::now(), 0);
    while first > 0 && begun.elapsed().as_secs_f64() < seconds {
        pictures += loader.next()?.map_or(0, |batch| normalised(&batch));
    }
    let rate = pictures as f64 / begun.elapsed().as_secs_f64().max(1e-9);
    println!(
        "{{\"pictures_per_s\": {rate:.1}, \"to_first_batch_s\": {to_first:.3}, \"pictures\": {}}}",
        source.len()
    );
    Ok(())
}
