//! Image files for tests, encoded here so that no image encoder is a dependency.

/// A baseline JPEG of `components` planes with an optional EXIF block; every 8 x 8 block has a constant value.
pub fn jpeg(
    [height, width]: [usize; 2],
    components: usize,
    value: impl Fn(usize, usize, usize) -> u8,
    exif: Option<Vec<u8>>,
) -> Vec<u8> {
    let mut out = vec![0xff, 0xd8];
    let mut segment = |marker: u8, body: &[u8]| {
        out.extend([0xff, marker]);
        out.extend((body.len() as u16 + 2).to_be_bytes());
        out.extend(body);
    };
    if let Some(exif) = exif {
        segment(0xe1, &[b"Exif\0\0".to_vec(), exif].concat());
    }
    if components == 4 {
        // Adobe's marker segment with transform 0: CMYK, stored inverted.
        segment(0xee, b"Adobe\0\x64\0\0\0\0\0");
    }
    segment(0xdb, &[vec![0], vec![1; 64]].concat());
    let sides = [height as u16, width as u16].map(u16::to_be_bytes).concat();
    let planes: Vec<u8> = (1..=components as u8).flat_map(|id| [id, 0x11, 0]).collect();
    segment(0xc0, &[vec![8], sides, vec![components as u8], planes].concat());
    // Huffman tables: twelve DC difference sizes in four bits each; for AC only end-of-block, in one bit.
    segment(0xc4, &[vec![0x00, 0, 0, 0, 12], vec![0; 12], (0..12).collect()].concat());
    segment(0xc4, &[vec![0x10, 1], vec![0; 15], vec![0]].concat());
    let tables: Vec<u8> = (1..=components as u8).flat_map(|id| [id, 0]).collect();
    segment(0xda, &[vec![components as u8], tables, vec![0, 63, 0]].concat());

    let mut bits = BitWriter::default();
    let mut before = vec![0i32; components];
    for row in 0..height.div_ceil(8) {
        for column in 0..width.div_ceil(8) {
            for (c, before) in before.iter_mut().enumerate() {
                let dc = 8 * (value(row, column, c) as i32 - 128);
                let difference = dc - *before;
                *before = dc;
                let size = 32 - difference.unsigned_abs().leading_zeros();
                bits.put(size, 4);
                let low = if difference < 0 { difference - 1 } else { difference };
                bits.put(low as u32 & ((1 << size) - 1), size);
                bits.put(0, 1);
            }
        }
    }
    bits.put(0x7f, 7);
    out.extend(bits.bytes);
    out.extend([0xff, 0xd9]);
    out
}

#[derive(Default)]
struct BitWriter {
    bytes: Vec<u8>,
    current: u32,
    count: u32,
}

impl BitWriter {
    fn put(&mut self, value: u32, count: u32) {
        for i in (0..count).rev() {
            self.current = self.current << 1 | (value >> i & 1);
            self.count += 1;
            if self.count == 8 {
                self.bytes.push(self.current as u8);
                if self.current == 0xff {
                    self.bytes.push(0);
                }
                (self.current, self.count) = (0, 0);
            }
        }
    }
}

/// Encodes these samples as PNG.
pub fn png(
    [height, width]: [usize; 2],
    colour: png::ColorType,
    depth: png::BitDepth,
    data: &[u8],
) -> Vec<u8> {
    let mut out = Vec::new();
    let mut encoder = png::Encoder::new(&mut out, width as u32, height as u32);
    encoder.set_color(colour);
    encoder.set_depth(depth);
    if colour == png::ColorType::Indexed {
        encoder.set_palette(vec![0, 0, 0, 255, 0, 0, 0, 255, 0, 10, 20, 30]);
        encoder.set_trns(vec![255, 0]);
    }
    encoder.write_header().unwrap().write_image_data(data).unwrap();
    out
}

/// Encodes RGB pixels as lossless WebP.
pub fn webp([height, width]: [usize; 2], rgb: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let encoder = image_webp::WebPEncoder::new(&mut out);
    encoder.encode(rgb, width as u32, height as u32, image_webp::ColorType::Rgb8).unwrap();
    out
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits.chunks(2).map(|d| u8::from_str_radix(str::from_utf8(d).unwrap(), 16).unwrap()).collect()
}

/// A 20 x 12 gradient, (12 x, 20 y, 8 (x + y)), saved by Pillow 13 at the qualities below, and the pixels that Pillow
/// reads back at these (row, column) positions.
pub const GRADIENT_AT: [[usize; 2]; 5] = [[0, 0], [0, 19], [11, 0], [11, 19], [6, 10]];

/// `save("x.webp", quality=20)`
pub fn lossy_webp() -> (Vec<u8>, [[u8; 3]; 5]) {
    let file = hex(
        "524946465600000057454250565038204a000000b003009d012a14000c003f398ebe53af2aa722b00801e027096c00ac3284781821
        e1b1ae6e0000fee421ac3f8e84136a75b1d512be4d3a27cb09eed498df9ff41251f9cccd164fd00000",
    );
    (file, [[0, 11, 3], [206, 12, 155], [12, 216, 113], [234, 226, 235], [122, 121, 128]])
}

/// `save("x.jpg", quality=40, progressive=True, optimize=True)`: multiple scans, subsampled chroma, all coefficients.
pub fn progressive_jpeg() -> (Vec<u8>, [[u8; 3]; 5]) {
    let file = hex(
        "ffd8ffe000104a46494600010100000100010000ffdb004300140e0f120f0d14121012171514181e32211e1c1c1e3d2c2e24324940
        4c4b47404645505a736250556d5645466488656d777b8182814e608d978c7d96737e817cffdb0043011517171e1a1e3b21213b7c53
        46537c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7c7cff
        c2001108000c001403012200021101031101ffc40017000003010000000000000000000000000000030405ffc40016010101010000
        0000000000000000000000030104ffda000c0301000210031000000185f53e1c86909aff00ffc40018100101010101000000000000
        00000000000001021112ffda0008010100010502984c3c2448e3ffc40017110003010000000000000000000000000000010313ffda
        0008010301013f019d59ab3fffc400161101010100000000000000000000000000000111ffda0008010201013f0195afffc4001410
        0100000000000000000000000000000020ffda0008010100063f025fffc40018100101000300000000000000000000000001001011
        21ffda0008010100013f21c79cc71c1d5fffda000c03010002000300000010fb3fffc4001611010101000000000000000000000000
        00000111ffda0008010301013f102993ffc400161101010100000000000000000000000000000111ffda0008010201013f10bb6fff
        c40017100101010100000000000000000000000000516141ffda0008010100013f10c58a24285c27ffd9",
    );
    (file, [[5, 3, 8], [210, 12, 149], [23, 204, 97], [231, 217, 242], [119, 120, 125]])
}
