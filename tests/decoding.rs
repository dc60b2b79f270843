//! What decoding images really takes, as the allocator counts it. Alone in its process, so that nothing else
//! allocates meanwhile.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use trainer::data::images::{ImageDataset, ImageFiles, ImageOptions, LabelColumns};
use trainer::data::transforms::{Augmentation, Normalise, Pipeline, RandomResizedCrop, ResizeMode};
use trainer::data::{BatchRow, Dataset, DatasetContext, SampleKey, SliceMut, cache::Cache};
use trainer::memory::measure::{self, CountingAllocator};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Buffers, decoders and the resizer together stay within what the dataset declares.
#[test]
fn decoding_takes_no_more_than_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let noise = |i: usize| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes();
    let rgb: Vec<u8> = (0..900 * 700).flat_map(|i| noise(i / 9)[..3].to_vec()).collect();
    let mut webp = Vec::new();
    image_webp::WebPEncoder::new(&mut webp).encode(&rgb, 900, 700, image_webp::ColorType::Rgb8).unwrap();
    let mut png = Vec::new();
    let mut encoder = png::Encoder::new(&mut png, 900, 700);
    encoder.set_color(png::ColorType::Rgba);
    let rgba: Vec<u8> = (0..900 * 700).flat_map(noise).collect();
    encoder.write_header().unwrap().write_image_data(&rgba).unwrap();
    let mut files = vec![("png", png), ("webp", webp)];
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
        let columns = LabelColumns { path: "path".into(), label: "label".into() };
        let options =
            ImageOptions { channels: 3, size: [224, 224], max_pixels: 1 << 20, columns, readers: 1 };
        let opening =
            DatasetContext { cache: Cache::at(folder.path().join("cache")), ..DatasetContext::default() };
        let set = Arc::new(ImageFiles::open(&[root], options, None, &opening).unwrap());
        let resized_crop = Some(RandomResizedCrop { scale: [0.5, 1.0], ratio: [0.75, 1.33] });
        let augment = Augmentation { resized_crop, horizontal_flip: 0.5, ..Augmentation::default() };
        let pipeline = Pipeline::new([224, 224, 3], ResizeMode::Stretch, Normalise::default()).unwrap();
        let set = ImageDataset::new(set, pipeline.augmented(augment).unwrap());
        let (mut values, mut class) = (vec![0.0; 224 * 224 * 3], [0]);
        let before = measure::live_bytes();
        measure::take_recent_peak();
        for epoch in 0..3 {
            let mut row =
                BatchRow { input: SliceMut::F32(&mut values), target: SliceMut::U32(&mut class), length: 0 };
            set.read(0, SampleKey { seed: 1, epoch, sample: 0 }, &mut row).unwrap();
        }
        let took = measure::take_recent_peak() - before;
        println!("{ending}: {took} bytes of {}", set.resident_bytes());
        assert!(took <= set.resident_bytes(), "{ending}: {took} of {}", set.resident_bytes());
        assert!(took > 100_000, "{ending}: {took} is not what decoding takes");
    }
}
