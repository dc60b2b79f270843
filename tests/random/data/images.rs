//! Images: folders, tables and archives of PNG, JPEG and WebP files, and idx files.

use std::fs;
use std::io;
use std::path::Path;

use super::FileCodec;
use crate::fixtures;
use crate::random::draw::Draw;

#[derive(Clone, Debug)]
pub struct ImageSpec {
    pub layout: ImageLayout,
    /// Column names of paths and labels in a table.
    pub columns: [&'static str; 2],
    pub train: usize,
    /// 0: no validation set of its own.
    pub valid: usize,
    pub classes: usize,
    /// The longest side of the largest image; the others are small.
    pub largest: usize,
    /// In an archive, the class is a separate member instead of the folder's name.
    pub labels_in_sidecar: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageLayout {
    Folders,
    Csv,
    Tsv,
    Tar(FileCodec),
}

impl ImageLayout {
    /// Suffix of the set's name.
    pub fn extension(self) -> String {
        match self {
            ImageLayout::Folders => String::new(),
            ImageLayout::Csv => ".csv".into(),
            ImageLayout::Tsv => ".tsv".into(),
            ImageLayout::Tar(packing) => format!(".tar{}", packing.extension()),
        }
    }
}

impl ImageSpec {
    pub fn write(&self, folder: &Path, draw: &mut Draw) -> io::Result<()> {
        for (set, count) in [("train", self.train), ("valid", self.valid)] {
            if count > 0 {
                self.write_set(folder, set, count, draw)?;
            }
        }
        Ok(())
    }

    fn write_set(&self, folder: &Path, set: &str, count: usize, draw: &mut Draw) -> io::Result<()> {
        let path = folder.join(format!("{set}{}", self.layout.extension()));
        let mut rows = Vec::new();
        let mut archive = tar::Builder::new(Vec::new());
        for i in 0..count {
            // In turn, so that every class occurs.
            let class = format!("class {}", i % self.classes);
            let largest = if i == count / 2 { self.largest } else { self.largest.min(60) };
            let (bytes, ending) = image(draw, largest);
            match self.layout {
                ImageLayout::Folders => {
                    let folder = path.join(&class);
                    fs::create_dir_all(&folder)?;
                    fs::write(folder.join(format!("{i:05}.{ending}")), bytes)?;
                }
                ImageLayout::Csv | ImageLayout::Tsv => {
                    let name = format!("{set}-{i:05}.{ending}");
                    fs::write(folder.join(&name), bytes)?;
                    rows.push([name, class]);
                }
                ImageLayout::Tar(_) => {
                    let mut member = |name: String, bytes: &[u8]| {
                        let mut header = tar::Header::new_gnu();
                        header.set_size(bytes.len() as u64);
                        header.set_mode(0o644);
                        archive.append_data(&mut header, name, bytes)
                    };
                    if self.labels_in_sidecar {
                        member(format!("{i:05}.{ending}"), &bytes)?;
                        member(format!("{i:05}.cls"), class.as_bytes())?;
                    } else {
                        member(format!("{class}/{i:05}.{ending}"), &bytes)?;
                    }
                }
            }
        }
        match self.layout {
            ImageLayout::Folders => Ok(()),
            ImageLayout::Tar(packing) => packing.write(&path, &archive.into_inner()?),
            ImageLayout::Csv | ImageLayout::Tsv => {
                let separator = if self.layout == ImageLayout::Csv { "," } else { "\t" };
                let [a, b] = self.columns;
                let mut text = format!("{a}{separator}number{separator}{b}\n");
                for (i, [name, class]) in rows.iter().enumerate() {
                    text += &format!("{name}{separator}{i}{separator}{class}\n");
                }
                fs::write(path, text)
            }
        }
    }
}

/// An image file of random size, colors and format, and its extension.
fn image(draw: &mut Draw, largest: usize) -> (Vec<u8>, &'static str) {
    let sides = match largest > 60 {
        true => [largest, largest * 2 / 3],
        false => [draw.log_uniform(1..=60), draw.log_uniform(1..=60)],
    };
    let [height, width] = sides;
    let start = draw.bits();
    let value = |i: usize| (start.wrapping_mul(i as u64 / 7 + 1) >> 29) as u8;
    let bytes = |channels: usize| (0..height * width * channels).map(value).collect::<Vec<u8>>();
    match draw.below(6) {
        0 => {
            let planes = draw.pick(&[1, 3]);
            let value = |row: usize, column: usize, plane: usize| value(row * 91 + column * 7 + plane);
            (fixtures::jpeg(sides, planes, value, None), "jpg")
        }
        1 => (fixtures::webp(sides, &bytes(3)), "webp"),
        2 => (fixtures::png(sides, png::ColorType::Grayscale, png::BitDepth::Eight, &bytes(1)), "png"),
        3 => (fixtures::png(sides, png::ColorType::Rgba, png::BitDepth::Eight, &bytes(4)), "png"),
        4 => (fixtures::png(sides, png::ColorType::Rgb, png::BitDepth::Sixteen, &bytes(6)), "png"),
        _ => (fixtures::png(sides, png::ColorType::Rgb, png::BitDepth::Eight, &bytes(3)), "png"),
    }
}

#[derive(Clone, Debug)]
pub struct IdxSpec {
    /// (height, width, channels) of an image.
    pub shape: [usize; 3],
    pub train: usize,
    pub valid: usize,
    pub classes: usize,
    pub packing: FileCodec,
}

impl IdxSpec {
    pub fn write(&self, folder: &Path, draw: &mut Draw) -> io::Result<()> {
        for (set, count) in [("train", self.train), ("valid", self.valid)] {
            let file = |what: &str, dims: &[usize], data: Vec<u8>| {
                let mut bytes = vec![0, 0, 8, dims.len() as u8];
                dims.iter().for_each(|&dim| bytes.extend((dim as u32).to_be_bytes()));
                bytes.extend(data);
                self.packing
                    .write(&folder.join(format!("{set}-{what}.idx{}", self.packing.extension())), &bytes)
            };
            let [height, width, channels] = self.shape;
            let dims = [count, height, width, channels];
            let values = (0..dims.iter().product()).map(|_| draw.bits() as u8).collect();
            file("images", if channels == 1 { &dims[..3] } else { &dims }, values)?;
            file("labels", &[count], (0..count).map(|_| draw.below(self.classes) as u8).collect())?;
        }
        Ok(())
    }
}
