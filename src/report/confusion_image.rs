//! A confusion matrix as a PNG: rows are true classes, columns predicted ones, and a cell is the darker the larger its
//! fraction of the row.

use std::io;

/// Width and height of the image, about.
const SIZE: usize = 256;

/// The image, and its width and height.
pub fn png(matrix: &[Vec<u64>]) -> io::Result<(Vec<u8>, u32)> {
    let cell = (SIZE / matrix.len().max(1)).max(2);
    let size = cell * matrix.len();
    let mut pixels = Vec::with_capacity(size * size);
    for row in matrix {
        let of_class = row.iter().sum::<u64>().max(1) as f64;
        let shade = |count: &u64| (255.0 * (1.0 - *count as f64 / of_class)).round() as u8;
        let line: Vec<u8> = row.iter().flat_map(|count| std::iter::repeat_n(shade(count), cell)).collect();
        (0..cell).for_each(|_| pixels.extend_from_slice(&line));
    }
    let mut out = Vec::new();
    let mut encoder = png::Encoder::new(&mut out, size as u32, size as u32);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::Fast);
    encoder.write_header()?.write_image_data(&pixels)?;
    Ok((out, size as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_is_as_dark_as_its_fraction_of_the_row() {
        let (png, size) = png(&[vec![3, 1], vec![0, 5]]).unwrap();
        let mut reader = png::Decoder::new(io::Cursor::new(png)).read_info().unwrap();
        let mut pixels = vec![0; (size * size) as usize];
        reader.next_frame(&mut pixels).unwrap();
        let at = |x: u32, y: u32| pixels[(y * size + x) as usize];
        assert_eq!(size, 256);
        assert_eq!([at(0, 0), at(255, 0), at(0, 255), at(255, 255)], [64, 191, 255, 0]);
    }
}
