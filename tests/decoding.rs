//! What decoding images really takes, as the allocator counts it.

use std::fs;
use std::sync::Arc;

use trainer::data::images::{ImageDataset, ImageFiles, ImageOptions, LabelColumns};
use trainer::data::transforms::{
    Augmentation, Normalise, Pipeline, RandAugment, RandomAffine, RandomBlur, RandomResizedCrop, ResizeMode,
};
use trainer::data::{BatchRow, Dataset, DatasetContext, SampleKey, SliceMut, cache::Cache};
use trainer::memory::measure;

use crate::fixtures;
use crate::harness::{dataset, ran_in_own_process, skip, write_files};

/// Buffers, decoders and the resizer together stay within what the dataset declares.
#[test]
fn decoding_takes_no_more_than_is_counted() {
    if ran_in_own_process(decoding_takes_no_more_than_is_counted) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let noise = |i: usize| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes();
    let rgb: Vec<u8> = (0..900 * 700).flat_map(|i| noise(i / 9)[..3].to_vec()).collect();
    let webp = fixtures::webp([700, 900], &rgb);
    let rgba: Vec<u8> = (0..900 * 700).flat_map(noise).collect();
    let png = fixtures::png([700, 900], png::ColorType::Rgba, png::BitDepth::Eight, &rgba);
    let mut files = vec![("png", png), ("webp", webp)];
    let signs = dataset("sign-language-digits/Dataset/0");
    match fs::read_dir(&signs).ok().and_then(|mut found| found.next()?.ok()) {
        Some(file) => files.push(("jpg", fs::read(file.path()).unwrap())),
        None => skip(format!("without a JPEG: no `{}`", signs.display())),
    }
    for (ending, bytes) in files {
        let root = folder.path().join(ending);
        write_files(&root, &[(format!("a/x.{ending}"), bytes)]);
        let columns = LabelColumns { path: "path".into(), label: "label".into(), separator: None };
        let options = ImageOptions {
            channels: 3,
            size: [224, 224],
            max_pixels: 1 << 20,
            columns,
            multi_label: false,
            readers: 1,
        };
        let opening =
            DatasetContext { cache: Cache::at(folder.path().join("cache")), ..DatasetContext::default() };
        let set = Arc::new(ImageFiles::open(&[root], options, None, &opening).unwrap());
        let resized_crop = Some(RandomResizedCrop { scale: [0.5, 1.0], ratio: [0.75, 1.33] });
        let augment = Augmentation {
            resized_crop,
            horizontal_flip: 0.5,
            affine: RandomAffine { rotation: 30.0, ..RandomAffine::default() },
            randaugment: Some(RandAugment { operations: 2, magnitude: 9 }),
            blur: Some(RandomBlur { probability: 1.0, kernel: 9, sigma: [0.1, 2.0] }),
            ..Augmentation::default()
        };
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
