use proptest::prelude::*;

use super::*;

fn key(sample: u64) -> SampleKey {
    SampleKey { seed: 7, epoch: 3, sample }
}

fn run(pipeline: &Pipeline, size: [usize; 2], bytes: &[u8], key: SampleKey) -> Vec<f32> {
    let mut out = vec![f32::NAN; pipeline.shape().iter().product()];
    let image = Image { height: size[0], width: size[1], pixels: Pixels::Bytes(bytes) };
    pipeline.apply(image, key, &mut Scratch::default(), &mut SliceMut::F32(&mut out)).unwrap();
    out
}

fn units(bytes: &[u8]) -> Vec<f32> {
    bytes.iter().map(|b| *b as f32 / 255.0).collect()
}

fn plain(shape: [usize; 3], fit: ResizeMode) -> Pipeline {
    Pipeline::new(shape, fit, Normalise::default()).unwrap()
}

#[test]
fn normalisation_is_by_channel_and_comes_last() {
    let normalise = Normalise { mean: vec![0.5, 0.0, 1.0], std: vec![0.25, 1.0, 2.0] };
    let pipeline = Pipeline::new([1, 2, 3], ResizeMode::Stretch, normalise).unwrap();
    assert_eq!(run(&pipeline, [1, 2], &[0, 0, 0, 255, 255, 255], key(0)), [-2.0, 0.0, -0.5, 2.0, 1.0, 0.0]);
    // Jitter that changes nothing, but takes the other code path, gives the same result.
    let jitter = ColorJitter { brightness: 1e-12, ..ColorJitter::default() };
    let coloured = pipeline.clone().augmented(Augmentation { jitter, ..Augmentation::default() }).unwrap();
    let bytes: Vec<u8> = (0..6).map(|i| i * 50).collect();
    assert_eq!(run(&coloured, [1, 2], &bytes, key(1)), run(&pipeline, [1, 2], &bytes, key(1)));
    for (mean, std) in [(vec![0.0; 2], vec![1.0]), (vec![f32::NAN], vec![1.0]), (vec![0.0], vec![0.0])] {
        assert!(Pipeline::new([1, 1, 3], ResizeMode::Pad, Normalise { mean, std }).is_err());
    }
}

#[test]
fn flips_mirror_pixels_not_channels() {
    let bytes: Vec<u8> = (0..12).collect();
    let pipeline = plain([2, 2, 3], ResizeMode::Stretch);
    let flipped = |vertical_flip, horizontal_flip| {
        let augment = Augmentation { vertical_flip, horizontal_flip, ..Augmentation::default() };
        run(&pipeline.clone().augmented(augment).unwrap(), [2, 2], &bytes, key(0))
    };
    assert_eq!(flipped(0.0, 1.0), units(&[3, 4, 5, 0, 1, 2, 9, 10, 11, 6, 7, 8]));
    assert_eq!(flipped(1.0, 0.0), units(&[6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5]));
    assert_eq!(flipped(1.0, 1.0), units(&[9, 10, 11, 6, 7, 8, 3, 4, 5, 0, 1, 2]));
    let augment = Augmentation { horizontal_flip: 0.5, ..Augmentation::default() };
    let half = pipeline.augmented(augment).unwrap();
    let flipped_count = (0..1000).filter(|i| run(&half, [2, 2], &bytes, key(*i))[0] != 0.0).count();
    assert!((430..570).contains(&flipped_count), "{flipped_count}");
}

#[test]
fn padding_shifts_and_leaves_black() {
    let (size, padding) = ([5, 4], 2);
    let bytes: Vec<u8> = (1..=20).collect();
    let augment = Augmentation { padding, ..Augmentation::default() };
    let pipeline = plain([5, 4, 1], ResizeMode::Stretch).augmented(augment).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for sample in 0..400 {
        let out = run(&pipeline, size, &bytes, key(sample));
        // Pixel (2, 1) is 10, unless it was cropped; the others keep their distance to it or are black.
        let Some(found) = out.iter().position(|v| *v == 10.0 / 255.0) else { continue };
        let (dy, dx) = ((found / 4) as isize - 2, (found % 4) as isize - 1);
        for y in 0..5isize {
            for x in 0..4isize {
                let (sy, sx) = (y - dy, x - dx);
                let inside = (0..5).contains(&sy) && (0..4).contains(&sx);
                let expected = if inside { bytes[(sy * 4 + sx) as usize] as f32 / 255.0 } else { 0.0 };
                assert_eq!(out[(y * 4 + x) as usize], expected);
            }
        }
        seen.insert((dy, dx));
    }
    // A shift of two to the left crops the pixel; every other shift occurred.
    assert!(seen.len() == 20 && seen.iter().all(|(y, x)| y.abs() <= 2 && x.abs() <= 2), "{seen:?}");
}

#[test]
fn padding_around_a_fitted_image_is_black_as_normalised() {
    let normalise = Normalise { mean: vec![0.5], std: vec![0.5] };
    let pipeline = Pipeline::new([4, 4, 1], ResizeMode::Pad, normalise).unwrap();
    let out = run(&pipeline, [2, 4], &[255; 8], key(0));
    assert_eq!(out, [[-1.0; 4], [1.0; 4], [1.0; 4], [-1.0; 4]].concat());
}

#[test]
fn bytes_and_floats_go_the_same_way() {
    let bytes: Vec<u8> = (0..6 * 5 * 3).map(|i| (i * 37 % 256) as u8).collect();
    let floats = units(&bytes);
    let augment = Augmentation {
        resized_crop: Some(RandomResizedCrop { scale: [0.3, 1.0], ratio: [0.75, 1.33] }),
        horizontal_flip: 0.5,
        padding: 1,
        erasing: Some(RandomErasing { probability: 0.5, area: [0.1, 0.3], ratio: [0.5, 2.0] }),
        ..Augmentation::default()
    };
    let pipeline = plain([4, 4, 3], ResizeMode::Stretch).augmented(augment).unwrap();
    for sample in 0..50 {
        let a = run(&pipeline, [6, 5], &bytes, key(sample));
        let mut b = vec![f32::NAN; 48];
        let image = Image { height: 6, width: 5, pixels: Pixels::Floats(&floats) };
        pipeline.apply(image, key(sample), &mut Scratch::default(), &mut SliceMut::F32(&mut b)).unwrap();
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 2.0 / 255.0), "{a:?} {b:?}");
    }
}

#[test]
fn grey_images_have_no_hue() {
    let jitter = ColorJitter { hue: 0.1, ..ColorJitter::default() };
    let refused =
        plain([4, 4, 1], ResizeMode::Pad).augmented(Augmentation { jitter, ..Augmentation::default() });
    assert!(refused.unwrap_err().to_string().contains("one channel"));
}

proptest! {
    /// A sample kept as bytes equals, through its lookup table, the normalized one; a pipeline that changes values has
    /// no lookup table.
    #[test]
    fn bytes_stand_for_the_same_values(
        size in [1usize..30, 1usize..30], out in [1usize..20, 1usize..20], grey: bool, crop: bool,
            padding in 0usize..3, flip in 0.0..1.0f64, sample: u64,
    ) {
        let channels = if grey { 1 } else { 3 };
        let augment = Augmentation {
            resized_crop: crop.then_some(RandomResizedCrop { scale: [0.1, 1.0], ratio: [0.75, 4.0 / 3.0] }),
            padding,
            horizontal_flip: flip,
            vertical_flip: 1.0 - flip,
            affine: RandomAffine { rotation: 90.0 * flip, ..RandomAffine::default() },
            randaugment: crop.then_some(RandAugment { operations: 2, magnitude: 20 }),
            blur: grey.then_some(RandomBlur { probability: 0.5, kernel: 3, sigma: [0.1, 2.0] }),
            ..Augmentation::default()
        };
        let normalise = Normalise { mean: vec![0.4], std: vec![0.3] };
        let pipeline = Pipeline::new([out[0], out[1], channels], ResizeMode::Pad, normalise).unwrap();
        let pipeline = pipeline.augmented(augment.clone()).unwrap();
        let pixels: Vec<u8> = (0..size[0] * size[1] * channels).map(|i| (i * 31 % 251) as u8).collect();
        let image = Image { height: size[0], width: size[1], pixels: Pixels::Bytes(&pixels) };
        let mut bytes = vec![99; out[0] * out[1] * channels];
        pipeline.apply(image, key(sample), &mut Scratch::default(), &mut SliceMut::U8(&mut bytes)).unwrap();
        let palette = pipeline.palette().unwrap();
        let expanded: Vec<f32> = trainer_engine::kernels::pixel_lut::expand_bytes(&palette, &bytes);
        prop_assert_eq!(expanded, run(&pipeline, size, &pixels, key(sample)));
        let jitter = ColorJitter { brightness: 0.1, ..ColorJitter::default() };
        let coloured = pipeline.clone().augmented(Augmentation { jitter, ..augment.clone() }).unwrap();
        prop_assert!(coloured.palette().is_none());
        let erasing = Some(RandomErasing { probability: 0.5, area: [0.1, 0.3], ratio: [0.5, 2.0] });
        let erased = pipeline.augmented(Augmentation { erasing, ..augment }).unwrap();
        prop_assert!(erased.palette().is_none());
    }

    /// The same sample in the same epoch gives the same values, whatever the buffers held before; another epoch gives
    /// other values; all values stay within the normalized range.
    #[test]
    fn a_sample_is_a_function_of_its_key(
        size in [1usize..30, 1usize..30], out in [1usize..20, 1usize..20], seed: u64, sample: u64, grey: bool,
    ) {
        let channels = if grey { 1 } else { 3 };
        let colour = if grey { 0.0 } else { 0.2 };
        let augment = Augmentation {
            resized_crop: Some(RandomResizedCrop { scale: [0.1, 1.0], ratio: [0.75, 4.0 / 3.0] }),
            padding: 2,
            horizontal_flip: 0.5,
            vertical_flip: 0.1,
            affine: RandomAffine { rotation: 20.0, translate: 0.2, scale: [0.5, 1.5], shear: 15.0 },
            randaugment: Some(RandAugment { operations: 2, magnitude: 15 }),
            blur: Some(RandomBlur { probability: 0.5, kernel: 5, sigma: [0.1, 2.0] }),
            plain_first_view: false,
            jitter: ColorJitter { brightness: 0.4, contrast: 0.4, saturation: colour, hue: colour },
            erasing: Some(RandomErasing { probability: 0.5, area: [0.02, 0.33], ratio: [0.3, 3.3] }),
        };
        let normalise = Normalise { mean: vec![0.5], std: vec![0.25] };
        let whole = ResizeMode::CenterCrop { fraction: 1.0 };
            let valid_pipeline = Pipeline::new([out[0], out[1], channels], whole, normalise).unwrap();
        let pipeline = valid_pipeline.clone().augmented(augment).unwrap();
        let bytes: Vec<u8> = (0..size[0] * size[1] * channels).map(|i| (i * 31 % 251) as u8).collect();
        let key = |epoch| SampleKey { seed, epoch, sample };
        let mut used = Scratch::default();
        let image = Image { height: size[0], width: size[1], pixels: Pixels::Bytes(&bytes) };
        let mut reused = vec![f32::NAN; out[0] * out[1] * channels];
        pipeline.apply(image, key(9), &mut used, &mut SliceMut::F32(&mut reused)).unwrap();
        pipeline.apply(image, key(1), &mut used, &mut SliceMut::F32(&mut reused)).unwrap();
        let first = run(&pipeline, size, &bytes, key(1));
        prop_assert_eq!(&first, &reused);
        prop_assert!(first.iter().all(|v| (-2.0..=2.0).contains(v)));
        if size[0] * size[1] > 100 && out[0] * out[1] > 50 {
            prop_assert!((2..6).any(|epoch| run(&pipeline, size, &bytes, key(epoch)) != first));
        }
        // Validation samples never change.
        prop_assert_eq!(run(&valid_pipeline, size, &bytes, key(1)), run(&valid_pipeline, size, &bytes, key(2)));
    }
}

/// Augmentations of bytes that change nothing, with all operations whose magnitude 0 is the identity.
#[test]
fn nothing_drawn_is_the_identity() {
    for shape @ [height, width, channels] in [[1, 1, 1], [1, 1, 3], [7, 5, 3], [2, 9, 1], [33, 31, 3]] {
        let bytes: Vec<u8> = (0..height * width * channels).map(|i| (i * 97 % 255) as u8).collect();
        let augment = Augmentation {
            affine: RandomAffine { rotation: 1e-300, ..RandomAffine::default() },
            blur: Some(RandomBlur { probability: 1.0, kernel: 1, sigma: [1.0, 2.0] }),
            ..Augmentation::default()
        };
        let pipeline = plain(shape, ResizeMode::Stretch).augmented(augment).unwrap();
        assert_eq!(run(&pipeline, [height, width], &bytes, key(1)), units(&bytes));
        for operation in randaugment::Operation::ALL {
            use randaugment::Operation::{AutoContrast, Equalize};
            let (mut image, mut spare) = (bytes.clone(), Vec::new());
            operation.apply(0, true, shape, &mut image, &mut spare);
            assert!(
                image == bytes || matches!(operation, AutoContrast | Equalize),
                "{operation:?} {shape:?}"
            );
        }
    }
}

#[test]
fn randaugment_needs_gray_or_rgb() {
    let randaugment = Some(RandAugment { operations: 2, magnitude: 9 });
    let augment = Augmentation { randaugment, ..Augmentation::default() };
    let refused = plain([4, 4, 2], ResizeMode::Stretch).augmented(augment);
    assert!(refused.unwrap_err().to_string().contains("one or three channels"));
}

#[test]
fn the_first_view_is_plain_and_the_others_differ() {
    let bytes: Vec<u8> = (0..75).map(|i| i * 3).collect();
    let augment = Augmentation {
        affine: RandomAffine { rotation: 90.0, ..RandomAffine::default() },
        plain_first_view: true,
        ..Augmentation::default()
    };
    let pipeline = plain([5, 5, 3], ResizeMode::Stretch).augmented(augment).unwrap();
    let view = |epoch| run(&pipeline, [5, 5], &bytes, SampleKey { epoch, ..key(4) });
    assert_eq!(view(0), units(&bytes));
    assert!(view(1) != view(0) && view(2) != view(1) && view(1) == view(1));
}

/// The buffers take what the plan says, for every size and combination.
#[test]
fn scratch_is_as_planned() {
    for shape @ [height, width, channels] in [[1, 1, 1], [31, 17, 3], [64, 40, 1]] {
        let bytes = vec![7; height * width * channels];
        for (affine, randaugment, blur) in [(true, false, false), (false, true, true), (false, false, true)] {
            let augment = Augmentation {
                affine: RandomAffine { rotation: if affine { 30.0 } else { 0.0 }, ..Default::default() },
                randaugment: randaugment.then_some(RandAugment { operations: 16, magnitude: 30 }),
                blur: blur.then_some(RandomBlur { probability: 1.0, kernel: 5, sigma: [1.0, 2.0] }),
                ..Augmentation::default()
            };
            let pipeline = plain(shape, ResizeMode::Stretch).augmented(augment).unwrap();
            let mut scratch = Scratch::default();
            let mut out = vec![0.0; bytes.len()];
            for sample in 0..20 {
                let image = Image { height, width, pixels: Pixels::Bytes(&bytes) };
                pipeline.apply(image, key(sample), &mut scratch, &mut SliceMut::F32(&mut out)).unwrap();
            }
            let [image, spare] = [&scratch.augment.image, &scratch.augment.spare].map(Vec::capacity);
            let held = image + spare + 4 * scratch.augment.rows.capacity();
            // The smallest allocation of a vector of bytes is 8.
            let planned = pipeline.augment_bytes().max(24 + 4 * 4) as usize;
            assert!(held > 0 && held <= planned, "{held} {planned}");
        }
    }
}
