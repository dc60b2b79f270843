use png::{BitDepth, ColorType};
use proptest::prelude::*;

use super::super::fixtures::{GRADIENT_AT, jpeg, lossy_webp, png, progressive_jpeg, webp};
use super::*;

const MAX_PIXELS: u64 = 1 << 20;

fn decode(file: &[u8], channels: usize) -> Result<([usize; 2], Vec<u8>), String> {
    let (mut pixels, mut spare) = (Vec::new(), Vec::new());
    let opened = ImageDecoder::new(file, channels, MAX_PIXELS)?;
    let needs = opened.header.decode_bytes(channels);
    let size = opened.decode(&mut pixels, &mut spare)?;
    assert_eq!(pixels.len(), size[0] * size[1] * channels);
    assert!((pixels.capacity() + spare.capacity()) as u64 <= needs);
    Ok((size, pixels))
}

#[test]
fn jpegs_of_every_colour() {
    // Two blocks side by side; the width cuts the second one.
    let grey = jpeg([8, 12], 1, |_, column, _| if column == 0 { 40 } else { 200 }, None);
    let expected: Vec<u8> = (0..8 * 12).map(|i| if i % 12 < 8 { 40 } else { 200 }).collect();
    assert_eq!(decode(&grey, 1).unwrap(), ([8, 12], expected.clone()));
    let (_, colour) = decode(&grey, 3).unwrap();
    assert!(colour.chunks(3).zip(&expected).all(|(pixel, v)| pixel == [*v; 3]));

    // Luma 100 with red chroma 160: red is 100 + 1.402 * 32 = 145, green 100 - 0.714 * 32 = 77, blue 100.
    let red = jpeg([8, 8], 3, |_, _, c| [100, 128, 160][c], None);
    let (_, pixels) = decode(&red, 3).unwrap();
    assert!(
        pixels.chunks(3).all(|p| p[0].abs_diff(145) < 2 && p[1].abs_diff(77) < 2 && p[2].abs_diff(100) < 2)
    );
    assert_eq!(decode(&red, 1).unwrap().1, [100; 64]);

    // Adobe's inverted CMYK: 255 in all planes is white, and a channel is its plane times the black plane.
    let cmyk = jpeg([8, 8], 4, |_, _, c| [255, 128, 0, 128][c], None);
    let (_, pixels) = decode(&cmyk, 3).unwrap();
    assert!(
        pixels.chunks(3).all(|p| p[0].abs_diff(128) < 2 && p[1].abs_diff(64) < 2 && p[2] < 2),
        "{pixels:?}"
    );
    assert_eq!(decode(&cmyk, 1).unwrap().1.len(), 64);
}

#[test]
fn other_encoders_files_read_as_they_read_them() {
    for (file, expected) in [progressive_jpeg(), lossy_webp()] {
        let (size, pixels) = decode(&file, 3).unwrap();
        assert_eq!(size, [12, 20]);
        for ([row, column], expected) in GRADIENT_AT.into_iter().zip(expected) {
            let pixel = &pixels[(row * 20 + column) * 3..][..3];
            // Decoders differ in rounding and in chroma interpolation.
            assert!(pixel.iter().zip(expected).all(|(a, b)| a.abs_diff(b) <= 3), "{pixel:?} {expected:?}");
        }
    }
}

#[test]
fn orientation_is_applied() {
    let value = |row: usize, column: usize, _: usize| (50 * row + 100 * column) as u8;
    let rotated = jpeg([16, 24], 1, value, Some(exif::tests::block(6, false)));
    let (size, pixels) = decode(&rotated, 1).unwrap();
    // Orientation 6: the last stored row becomes the first column.
    assert_eq!(size, [24, 16]);
    assert_eq!([pixels[0], pixels[15], pixels[23 * 16], pixels[23 * 16 + 15]], [50, 0, 250, 200]);
}

#[test]
fn pngs_of_every_colour_and_depth() {
    type ImageCase = (ColorType, BitDepth, &'static [u8], [[u8; 3]; 2]);
    let cases: [ImageCase; 6] = [
        (ColorType::Grayscale, BitDepth::Eight, &[7, 200], [[7; 3], [200; 3]]),
        (ColorType::Grayscale, BitDepth::One, &[0b0100_0000], [[0; 3], [255; 3]]),
        (ColorType::GrayscaleAlpha, BitDepth::Eight, &[9, 0, 90, 255], [[9; 3], [90; 3]]),
        (ColorType::Rgba, BitDepth::Eight, &[1, 2, 3, 0, 4, 5, 6, 255], [[1, 2, 3], [4, 5, 6]]),
        (ColorType::Indexed, BitDepth::Two, &[0b0111_0000], [[255, 0, 0], [10, 20, 30]]),
        (
            ColorType::Rgb,
            BitDepth::Sixteen,
            &[1, 255, 2, 0, 3, 0, 254, 1, 255, 255, 0, 0],
            [[1, 2, 3], [254, 255, 0]],
        ),
    ];
    for (colour, depth, data, expected) in cases {
        let file = png([1, 2], colour, depth, data);
        assert_eq!(decode(&file, 3).unwrap(), ([1, 2], expected.concat()), "{colour:?} {depth:?}");
        let grey = decode(&file, 1).unwrap().1;
        let luma =
            |p: [u8; 3]| (0.299 * p[0] as f64 + 0.587 * p[1] as f64 + 0.114 * p[2] as f64).round() as u8;
        assert_eq!(grey, expected.map(luma), "{colour:?} {depth:?}");
    }
}

#[test]
fn a_webp_without_loss_is_itself() {
    let pixels: Vec<u8> = (0..5 * 7 * 3).map(|i| (i * 11 % 256) as u8).collect();
    assert_eq!(decode(&webp([5, 7], &pixels), 3).unwrap(), ([5, 7], pixels));
}

#[test]
fn what_is_no_image_says_why() {
    let error = |file: &[u8]| decode(file, 3).unwrap_err();
    assert_eq!(error(b""), "it is empty");
    assert_eq!(
        error(b"hello"),
        "it is not a JPEG, PNG, WebP, GIF, BMP, TIFF or PNM file: it starts with 68 65 6c 6c"
    );
    let grey = jpeg([64, 64], 1, |row, column, _| (row * column) as u8, None);
    let small = png([20, 20], ColorType::Grayscale, BitDepth::Eight, &[1; 400]);
    let lossy = lossy_webp().0;
    for file in [&grey, &small, &lossy, &progressive_jpeg().0] {
        for keep in [12, 30, file.len() / 2, file.len() * 3 / 4] {
            assert!(error(&file[..keep]).contains("damaged"), "{keep} of {}", file.len());
        }
    }
}

#[test]
fn promises_are_believed_up_to_a_number_of_pixels() {
    let error = |file: &[u8], most| ImageDecoder::new(file, 3, most).err().unwrap();
    let grey = jpeg([64, 64], 1, |_, _, _| 1, None);
    assert_eq!(error(&grey, 4095), "its header declares 64 x 64 pixels, more than `max_pixels`, 4095");
    assert!(ImageDecoder::new(&grey, 3, 4096).is_ok());
    // Headers that declare 50,000 x 50,000 pixels, followed by a few bytes of data.
    let mut bomb = png([1, 1], ColorType::Grayscale, BitDepth::Eight, &[1]);
    bomb[16..24].copy_from_slice(&[0, 0, 0xc3, 0x50, 0, 0, 0xc3, 0x50]);
    let mut crc = flate2::Crc::new();
    crc.update(&bomb[12..29]);
    bomb[29..33].copy_from_slice(&crc.sum().to_be_bytes());
    assert!(error(&bomb, MAX_PIXELS).contains("50000 x 50000"), "{}", error(&bomb, MAX_PIXELS));
    // A 20 x 12 container around a frame that declares 16383 x 16383.
    let mut frame = lossy_webp().0;
    let at = frame.windows(3).position(|w| w == [0x9d, 0x01, 0x2a]).unwrap() + 3;
    frame[at..at + 4].copy_from_slice(&[0xff, 0x3f, 0xff, 0x3f]);
    assert!(error(&frame, MAX_PIXELS).contains("16383 x 16383"), "{}", error(&frame, MAX_PIXELS));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    /// Mutated files are decoded or refused, without a panic and within the pixel limit.
    #[test]
    fn mutated_files_are_decoded_or_refused(
        which in 0usize..7, edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(), whole: bool, grey: bool,
    ) {
        let mut file = match which {
            0 => jpeg([16, 24], 1, |r, c, _| (r * 40 + c * 30) as u8, Some(exif::tests::block(6, false))),
            1 => jpeg([16, 8], 3, |r, c, p| (r * 40 + c * 30 + p * 50) as u8, None),
            2 => jpeg([8, 8], 4, |_, _, p| (p * 50) as u8, None),
            3 => progressive_jpeg().0,
            4 => png([9, 5], ColorType::Indexed, BitDepth::Eight, &[2; 45]),
            5 => webp([5, 7], &(0..105).map(|i| i * 2).collect::<Vec<u8>>()),
            _ => lossy_webp().0,
        };
        for (at, byte) in edits {
            let len = file.len();
            file[at.index(len)] = byte;
        }
        if !whole {
            file.truncate(cut.index(file.len()));
        }
        if let Ok(([height, width], _)) = decode(&file, if grey { 1 } else { 3 }) {
            prop_assert!((height * width) as u64 <= MAX_PIXELS);
        }
    }
}

/// Images as Pillow writes them, pixel by pixel as Pillow reads them; see `scripts/make-test-data.py`.
#[test]
fn images_are_decoded_as_pillow_decodes_them() {
    compare_with_pillow("images.json", 0);
}

/// The conversion to RGB rounds, and chroma is interpolated, in other ways than libavif's.
#[cfg(feature = "avif")]
#[test]
fn avif_is_decoded_as_pillow_decodes_it() {
    compare_with_pillow("avif.json", 6);
}

#[cfg(not(feature = "avif"))]
#[test]
fn avif_is_refused_with_the_feature_that_reads_it() {
    let file = include_bytes!("../../../../tests/data/images/full.avif");
    let refused = decode(file, 3).unwrap_err();
    assert!(refused.contains("AVIF") && refused.contains("--features avif"), "{refused}");
}

fn compare_with_pillow(list: &str, tolerance: u8) {
    #[derive(serde::Deserialize)]
    struct Expected {
        file: String,
        size: [usize; 2],
        rgb: Vec<u8>,
    }
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/images");
    let listed = std::fs::read(folder.join(list)).unwrap();
    let listed: Vec<Expected> = serde_json::from_slice(&listed).unwrap();
    assert!(listed.len() >= 5);
    for Expected { file: name, size, rgb } in listed {
        let file = std::fs::read(folder.join(&name)).unwrap();
        let decoder = ImageDecoder::new(&file, 3, 1000).unwrap_or_else(|error| panic!("{name}: {error}"));
        let (mut pixels, mut scratch) = (Vec::new(), Vec::new());
        let found =
            decoder.decode(&mut pixels, &mut scratch).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(found, size, "{name}");
        let most = pixels.iter().zip(&rgb).map(|(a, b)| a.abs_diff(*b)).max();
        assert!(
            pixels.len() == rgb.len() && most <= Some(tolerance),
            "{name}: {most:?}\n{pixels:?}\n{rgb:?}"
        );
        // Any shorter file is refused or decoded, without a panic.
        for end in (0..file.len()).step_by(7) {
            if let Ok(decoder) = ImageDecoder::new(&file[..end], 3, 1000) {
                drop(decoder.decode(&mut pixels, &mut scratch));
            }
        }
    }
}
