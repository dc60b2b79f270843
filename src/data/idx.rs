//! Datasets in the idx format of MNIST and its variants: images in one file, labels in another, each plain, gzip or
//! zstd (detected from the content).
//!
//! Images of an uncompressed file are read on demand; a compressed file is decompressed into memory at one byte per
//! value. Headers are untrusted: an allocation never exceeds what a file of that length can hold.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use super::files::{self, FileCompression, read_error};
use super::transforms::{Augmentation, Image, Normalise, Pipeline, Pixels, ResizeMode, ScratchPool};
use super::{BatchRow, DataError, Dataset, Features, InputSpec, SampleKey, TargetSpec};
use crate::base::regular_file;

/// What to open and how to read it.
#[derive(Clone, Debug)]
pub struct IdxFiles {
    /// Images, (n, height, width) or (n, height, width, channels), one byte per value.
    pub images: PathBuf,
    /// Labels, (n), one byte each.
    pub labels: PathBuf,
    /// Class names; a label is an index into them.
    pub classes: Vec<String>,
    /// What the shape of the images must be; `None` for the training set.
    pub trained_on: Option<TrainedShape>,
    pub normalise: Normalise,
    /// Augmentation of the samples; off for a validation set.
    pub augmentation: Augmentation,
    /// Maximum number of concurrent reader threads.
    pub readers: usize,
    /// Maximum bytes the dataset may keep in memory.
    pub max_bytes: u64,
}

/// The shape of the training images.
#[derive(Clone, Debug)]
pub struct TrainedShape {
    /// The file of the training images.
    pub images: PathBuf,
    /// (height, width, channels).
    pub shape: Vec<usize>,
}

impl TrainedShape {
    /// The shape of the training images in `images`; reads the header only.
    pub fn of(images: &Path) -> Result<Self, DataError> {
        let shape = IdxArray::open_images(images)?.image_shape();
        Ok(Self { images: images.to_owned(), shape: shape.to_vec() })
    }

    /// Refuses images of another shape: their pixels would be read in the wrong places.
    fn check(&self, images: &Path, shape: [usize; 3]) -> Result<(), DataError> {
        if shape[..] == self.shape[..] {
            return Ok(());
        }
        Err(DataError::ImageShapeMismatch {
            file: images.to_owned(),
            shape: shape.to_vec(),
            trained_file: self.images.clone(),
            trained_shape: self.shape.clone(),
        })
    }
}

/// An opened dataset; samples are (height, width, channels).
pub struct IdxDataset {
    pixel_storage: PixelStorage,
    labels: Vec<u8>,
    pipeline: Pipeline,
    pool: ScratchPool,
    features: Features,
}

/// Storage of the pixels of all images.
enum PixelStorage {
    InMemory(Vec<u8>),
    /// An uncompressed file; pixels start at byte `first`.
    OnDisk {
        path: PathBuf,
        file: File,
        first: u64,
    },
}

impl PixelStorage {
    /// Bytes kept in memory.
    fn resident_bytes(&self) -> usize {
        match self {
            PixelStorage::InMemory(values) => values.capacity(),
            PixelStorage::OnDisk { .. } => 0,
        }
    }
}

impl IdxDataset {
    pub fn open(files: &IdxFiles) -> Result<Self, DataError> {
        let images = IdxArray::open_images(&files.images)?;
        let labels = IdxArray::open(&files.labels, "an idx file of labels (1 dimension of bytes)", 1..=1)?;
        if images.dims[0] != labels.dims[0] {
            return Err(DataError::CountMismatch {
                images_file: files.images.clone(),
                images: images.dims[0] as u64,
                labels_file: files.labels.clone(),
                labels: labels.dims[0] as u64,
            });
        }
        if images.bytes == 0 {
            let why = format!("its dimensions are {:?}", images.dims);
            return Err(DataError::NoSamples { set: format!("`{}`", files.images.display()), why });
        }
        let bytes = if images.is_uncompressed() { 0 } else { images.bytes } + labels.bytes;
        if bytes > files.max_bytes {
            return Err(DataError::TooLarge { file: files.images.clone(), bytes, limit: files.max_bytes });
        }
        let shape = images.image_shape();
        if let Some(trained) = &files.trained_on {
            trained.check(&files.images, shape)?;
        }
        let [height, width, channels] = shape;
        let pipeline =
            Pipeline::new([height, width, channels], ResizeMode::Stretch, files.normalise.clone())?
                .augmented(files.augmentation.clone())?;
        // Only augmentation resizes images.
        let each = if pipeline.is_normalize_only() { 0 } else { pipeline.scratch_bytes(height, width, 1) }
            + if images.is_uncompressed() { (height * width * channels) as u64 } else { 0 };
        let pool = ScratchPool::new(files.readers, each);
        let labels = labels.read_all()?;
        if let Some(record) = labels.iter().position(|&label| label as usize >= files.classes.len()) {
            return Err(DataError::Value {
                file: files.labels.clone(),
                record: record as u64,
                column: None,
                value: labels[record].to_string(),
                expected: format!("a class below {}", files.classes.len()),
            });
        }
        let target = TargetSpec::Class { names: files.classes.clone() };
        let palette = pipeline.palette();
        let input = InputSpec::Floats { shape: shape.to_vec() };
        let features = Features { pixel_lut: palette, ..Features::new(input, target) };
        Ok(IdxDataset { pixel_storage: images.into_storage()?, labels, pipeline, pool, features })
    }
}

impl Dataset for IdxDataset {
    fn len(&self) -> u64 {
        self.labels.len() as u64
    }

    fn features(&self) -> &Features {
        &self.features
    }

    fn read(&self, index: u64, key: SampleKey, into: &mut BatchRow<'_>) -> Result<(), DataError> {
        let (index, len) = (index as usize, into.input.len());
        let mut scratch = self.pool.acquire();
        let mut read = std::mem::take(&mut scratch.file);
        let pixels = match &self.pixel_storage {
            PixelStorage::InMemory(values) => &values[index * len..(index + 1) * len],
            PixelStorage::OnDisk { path, file, first } => {
                read.reserve_exact(len);
                read.resize(len, 0);
                let at = first + (index * len) as u64;
                files::read_exact_at(file, &mut read, at).map_err(DataError::io(path))?;
                &read
            }
        };
        let [height, width, _] = self.pipeline.shape();
        let image = Image { height, width, pixels: Pixels::Bytes(pixels) };
        let refused = |value| DataError::InvalidSetting {
            name: "augment",
            value,
            expected: "expected one to four channels",
        };
        self.pipeline.apply(image, key, &mut scratch, &mut into.input).map_err(refused)?;
        scratch.file = read;
        into.target.as_u32_mut()[0] = self.labels[index].into();
        Ok(())
    }

    fn resident_bytes(&self) -> u64 {
        (self.pixel_storage.resident_bytes() + self.labels.capacity()) as u64 + self.pool.bytes()
    }

    fn class_counts(&self) -> Option<Vec<u64>> {
        let TargetSpec::Class { names } = &self.features.target else { return None };
        let mut counts = vec![0; names.len()];
        self.labels.iter().for_each(|&label| counts[label as usize] += 1);
        Some(counts)
    }
}

/// A file with a validated header; the reader is positioned at the values.
struct IdxArray {
    file: PathBuf,
    dims: Vec<usize>,
    /// Product of `dims`.
    bytes: u64,
    compression: FileCompression,
    /// Size on disk in bytes.
    file_bytes: u64,
    body: Box<dyn Read + Send>,
}

impl IdxArray {
    fn open_images(file: &Path) -> Result<Self, DataError> {
        Self::open(file, "an idx file of images (3 or 4 dimensions of bytes)", 3..=4)
    }

    fn open(
        file: &Path,
        expected: &'static str,
        rank: std::ops::RangeInclusive<u8>,
    ) -> Result<Self, DataError> {
        let (compression, file_bytes) = files::compression(file)?;
        let mut body = files::open(file)?;

        let magic = read_header(&mut *body, file, 0, 4)?;
        // Two zeros, 8 for unsigned bytes, the number of dimensions.
        if magic[..3] != [0, 0, 8] || !rank.contains(&magic[3]) {
            let found = format!("{:02x} {:02x} {:02x} {:02x}", magic[0], magic[1], magic[2], magic[3]);
            return Err(DataError::WrongFormat { file: file.to_owned(), expected, found });
        }
        let dims = read_header(&mut *body, file, 4, 4 * magic[3] as usize)?;
        let dims: Vec<usize> =
            dims.chunks_exact(4).map(|dim| dim.iter().fold(0, |n, &byte| n << 8 | byte as usize)).collect();
        let bytes = dims.iter().fold(1u64, |product, &dim| product.saturating_mul(dim as u64));

        let possible = match compression {
            FileCompression::Uncompressed => file_bytes,
            // Deflate expands by a factor of at most 1032.
            FileCompression::Gzip => file_bytes.saturating_mul(1032),
            // A block expands to at most 128 KiB and takes at least four bytes.
            FileCompression::Zstd => file_bytes.saturating_mul(1 << 15),
            // A zip file is deflated; bzip2 and xz expand more than the others.
            FileCompression::Zip => file_bytes.saturating_mul(1032),
            FileCompression::Bzip2 | FileCompression::Xz => file_bytes.saturating_mul(1 << 26),
        };
        let declared = bytes.saturating_add(4 + 4 * dims.len() as u64);
        if declared > possible {
            return Err(DataError::Truncated { file: file.to_owned(), declared, found: possible });
        }
        Ok(IdxArray { file: file.to_owned(), dims, bytes, compression, file_bytes, body })
    }

    /// (height, width, channels) of each image.
    fn image_shape(&self) -> [usize; 3] {
        [self.dims[1], self.dims[2], self.dims.get(3).copied().unwrap_or(1)]
    }

    fn is_uncompressed(&self) -> bool {
        self.compression == FileCompression::Uncompressed
    }

    fn header_len(&self) -> u64 {
        4 + 4 * self.dims.len() as u64
    }

    /// The values: a file handle if uncompressed, otherwise decompressed in memory.
    fn into_storage(self) -> Result<PixelStorage, DataError> {
        if !self.is_uncompressed() {
            return self.read_all().map(PixelStorage::InMemory);
        }
        let (first, declared) = (self.header_len(), self.bytes + self.header_len());
        if self.file_bytes != declared {
            return Err(DataError::TrailingBytes { file: self.file, declared });
        }
        let file = regular_file::open(&self.file).map_err(DataError::io(&self.file))?;
        Ok(PixelStorage::OnDisk { path: self.file, file, first })
    }

    fn read_all(mut self) -> Result<Vec<u8>, DataError> {
        let mut values = Vec::new();
        let out_of_memory = |_| DataError::OutOfMemory { bytes: self.bytes };
        values.try_reserve_exact(self.bytes as usize).map_err(out_of_memory)?;
        let header = self.header_len();
        let declared = self.bytes + header;
        let read = (&mut self.body).take(self.bytes).read_to_end(&mut values);
        let found = values.len() as u64 + header;
        match read {
            Ok(_) if found == declared => {}
            Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
                return Err(read_error(&self.file, error));
            }
            _ => return Err(DataError::Truncated { file: self.file, declared, found }),
        }
        match self.body.read(&mut [0]) {
            Ok(0) => Ok(values),
            Ok(_) => Err(DataError::TrailingBytes { file: self.file, declared }),
            Err(error) => Err(read_error(&self.file, error)),
        }
    }
}

/// Reads `count` header bytes at offset `at`.
fn read_header(body: &mut dyn Read, file: &Path, at: usize, count: usize) -> Result<Vec<u8>, DataError> {
    let mut bytes = Vec::with_capacity(count);
    match body.take(count as u64).read_to_end(&mut bytes) {
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => Err(read_error(file, error)),
        _ if bytes.len() == count => Ok(bytes),
        _ => {
            let (declared, found) = ((at + count) as u64, (at + bytes.len()) as u64);
            Err(DataError::Truncated { file: file.to_owned(), declared, found })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::{Compression, write::GzEncoder};
    use proptest::prelude::*;

    use super::*;
    use crate::{SliceMut, published_dataset};

    fn idx(dims: &[u32], values: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0, 0, 8, dims.len() as u8];
        dims.iter().for_each(|dim| bytes.extend(dim.to_be_bytes()));
        bytes.extend(values);
        bytes
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    /// Writes both files into `folder`; the dataset may keep 1 MiB in memory.
    fn write(folder: &Path, images: &[u8], labels: &[u8]) -> IdxFiles {
        let files = IdxFiles {
            images: folder.join("images"),
            labels: folder.join("labels"),
            classes: (0..10).map(|c| c.to_string()).collect(),
            trained_on: None,
            normalise: Normalise::default(),
            augmentation: Augmentation::default(),
            readers: 1,
            max_bytes: 1 << 20,
        };
        std::fs::write(&files.images, images).unwrap();
        std::fs::write(&files.labels, labels).unwrap();
        files
    }

    fn open(images: &[u8], labels: &[u8]) -> Result<IdxDataset, DataError> {
        let folder = tempfile::tempdir().unwrap();
        IdxDataset::open(&write(folder.path(), images, labels))
    }

    fn read(set: &dyn Dataset, index: u64) -> Result<(Vec<f32>, u32), DataError> {
        let (mut pixels, mut label) = (vec![f32::NAN; set.features().input_len()], [99]);
        let mut row =
            BatchRow { input: SliceMut::F32(&mut pixels), target: SliceMut::U32(&mut label), length: 0 };
        set.read(index, SampleKey { seed: 0, epoch: 0, sample: index }, &mut row)?;
        Ok((pixels, label[0]))
    }

    fn sample(set: &dyn Dataset, index: u64) -> (Vec<f32>, u32) {
        read(set, index).unwrap()
    }

    fn images() -> Vec<u8> {
        idx(&[3, 2, 2], &[0, 51, 102, 153, 204, 255, 0, 255, 1, 2, 3, 4])
    }

    fn labels() -> Vec<u8> {
        idx(&[3], &[7, 0, 9])
    }

    #[test]
    fn plain_and_gzip_read_the_same() {
        for (a, b) in [(images(), labels()), (gzip(&images()), labels()), (gzip(&images()), gzip(&labels()))]
        {
            let set = open(&a, &b).unwrap();
            // Labels, plus one image buffer for an uncompressed file or all pixels for a compressed one.
            let pixels = if a == images() { 4 } else { 12 };
            assert_eq!((set.len(), set.resident_bytes()), (3, 3 + pixels));
            assert_eq!(set.features().input, InputSpec::Floats { shape: vec![2, 2, 1] });
            assert_eq!(sample(&set, 0), (vec![0.0, 0.2, 0.4, 0.6], 7));
            assert_eq!(sample(&set, 1), (vec![0.8, 1.0, 0.0, 1.0], 0));
            assert_eq!(sample(&set, 2).1, 9);
        }
        let colour = open(&idx(&[1, 1, 2, 3], &[1, 2, 3, 4, 5, 6]), &idx(&[1], &[0])).unwrap();
        assert_eq!(colour.features().input, InputSpec::Floats { shape: vec![1, 2, 3] });
    }

    /// As many pixels in another shape would be read without an error, and scrambled.
    #[test]
    fn images_of_another_shape_than_those_of_training_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let trained = folder.path().join("trained");
        for (trained_images, wrong) in [
            (idx(&[1, 2, 3], &[0; 6]), Some("[2, 3, 1]")),
            (idx(&[1, 4, 1], &[0; 4]), Some("[4, 1, 1]")),
            (idx(&[1, 2, 2, 2], &[0; 8]), Some("[2, 2, 2]")),
            (idx(&[1, 2, 2], &[0; 4]), None),
            (gzip(&idx(&[1, 2, 2, 1], &[0; 4])), None),
        ] {
            std::fs::write(&trained, trained_images).unwrap();
            let trained_on = Some(TrainedShape::of(&trained).unwrap());
            let files = IdxFiles { trained_on, ..write(folder.path(), &images(), &labels()) };
            match (IdxDataset::open(&files), wrong) {
                (Ok(_), None) => {}
                (Err(error), Some(shape)) => {
                    let text = error.to_string();
                    assert!(matches!(error, DataError::ImageShapeMismatch { .. }), "{text}");
                    assert!(text.contains("images` have shape [2, 2, 1]"), "{text}");
                    assert!(text.contains(&format!("trained` have shape {shape}")), "{text}");
                    assert!(error.hint().is_some(), "{text}");
                }
                (Ok(_), Some(_)) => panic!("{:?} was accepted", files.trained_on),
                (Err(error), None) => panic!("{error}"),
            }
        }
    }

    #[test]
    fn augmentation_is_of_the_sample_and_the_epoch() {
        let folder = tempfile::tempdir().unwrap();
        let files = write(folder.path(), &images(), &labels());
        let files = IdxFiles {
            augmentation: Augmentation { horizontal_flip: 1.0, ..Augmentation::default() },
            ..files
        };
        assert_eq!(sample(&IdxDataset::open(&files).unwrap(), 0), (vec![0.2, 0.0, 0.6, 0.4], 7));
    }

    /// An uncompressed file is read image by image, so its size is not bounded by memory.
    #[test]
    fn a_plain_file_may_be_larger_than_the_memory() {
        let folder = tempfile::tempdir().unwrap();
        let mut pixels = vec![0; 3 << 20];
        pixels[(2 << 20) + 5] = 255;
        let files = write(folder.path(), &idx(&[3, 1024, 1024], &pixels), &labels());
        let set = IdxDataset::open(&files).unwrap();
        assert_eq!(set.resident_bytes(), 3 + (1 << 20), "the labels, and a buffer for an image");
        let (last, label) = sample(&set, 2);
        assert_eq!((last.iter().sum::<f32>(), last[5], label), (1.0, 1.0, 9));
        // Truncate the file after it was opened.
        std::fs::File::options().write(true).open(&files.images).unwrap().set_len(2 << 20).unwrap();
        assert_eq!(sample(&set, 0).1, 7);
        let error = read(&set, 2).unwrap_err().to_string();
        assert!(error.contains("images"), "{error}");
    }

    #[test]
    fn every_error_is_named_with_its_values() {
        let cases: [(&str, Vec<u8>, Vec<u8>, &str); 12] = [
            ("empty", vec![], labels(), "images` is empty"),
            ("cut header", images()[..9].to_vec(), labels(), "declares 16 bytes, and it has at most 9"),
            ("cut values", images()[..20].to_vec(), labels(), "declares 28 bytes, and it has at most 20"),
            ("cut gzip", gzip(&images())[..20].to_vec(), labels(), "images"),
            (
                "trailing",
                [images(), vec![0]].concat(),
                labels(),
                "has trailing bytes: its header declares only 28",
            ),
            ("swapped", labels(), images(), "starts with 00 00 08 01"),
            ("not idx", b"P5 28 28".to_vec(), labels(), "starts with 50 35 20 32"),
            ("counts", images(), idx(&[2], &[1, 2]), "has 3 images, but"),
            ("label", images(), idx(&[3], &[1, 2, 10]), "labels`, record 2: `10` is not a class below 10"),
            ("none", idx(&[0, 2, 2], &[]), idx(&[0], &[]), "has no samples"),
            ("no pixels", idx(&[3, 0, 2], &[]), labels(), "[3, 0, 2]"),
            ("bomb", gzip(&idx(&[3, 1 << 31, 1 << 31], &[])), labels(), "is truncated"),
        ];
        for (name, images, labels, text) in cases {
            let error = open(&images, &labels).err().unwrap();
            assert!(error.to_string().contains(text), "{name}: {error}");
            assert!(error.hint().is_some(), "{name}");
        }
        let error = open(&gzip(&idx(&[3, 1024, 1024], &vec![0; 3 << 20])), &labels()).err().unwrap();
        assert!(matches!(error, DataError::TooLarge { bytes: 3145731, limit: 1048576, .. }), "{error}");
        assert!(error.is_out_of_memory());
    }

    proptest! {
        /// Mutated files are read or refused, and no allocation exceeds what the file can hold.
        #[test]
        fn mutated_files_are_read_or_refused(
            compress: bool, labels_too: bool, cut in 0usize..60,
            edits in prop::collection::vec((0usize..60, any::<u8>()), 0..4),
        ) {
            let mutate = |mut bytes: Vec<u8>| {
                let cut = cut.min(bytes.len());
                bytes.truncate(bytes.len() - cut.saturating_sub(30));
                for &(at, byte) in &edits {
                    if let Some(place) = bytes.get_mut(at) {
                        *place = byte;
                    }
                }
                bytes
            };
            let pack = |bytes: Vec<u8>| if compress { gzip(&bytes) } else { bytes };
            // Edits before compression corrupt the idx header; edits after it corrupt the compressed stream.
            let inside = open(&pack(mutate(images())), &if labels_too { mutate(labels()) } else { labels() });
            let outside = open(&mutate(pack(images())), &labels());
            for set in [inside, outside].into_iter().flatten() {
                prop_assert!(set.resident_bytes() <= 60 * 1032);
                (0..set.len()).for_each(|i| drop(sample(&set, i)));
            }
        }
    }

    #[test]
    fn mnist_as_published() {
        let Some(folder) = published_dataset("mnist") else { return };
        let set = IdxDataset::open(&IdxFiles {
            images: folder.join("t10k-images-idx3-ubyte.gz"),
            labels: folder.join("t10k-labels-idx1-ubyte.gz"),
            classes: (0..10).map(|c| c.to_string()).collect(),
            trained_on: None,
            normalise: Normalise { mean: vec![0.1307], std: vec![0.3081] },
            augmentation: Augmentation::default(),
            readers: 1,
            max_bytes: 8 << 20,
        })
        .unwrap();
        assert_eq!((set.len(), set.resident_bytes()), (10_000, 10_000 * 785));
        assert_eq!(set.features().input, InputSpec::Floats { shape: vec![28, 28, 1] });
        let first: Vec<u32> = (0..10).map(|i| sample(&set, i).1).collect();
        assert_eq!(first, [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]);
        // Normalizing by the published training-set mean and standard deviation centers the test set as well.
        let mean = (0..10_000).map(|i| sample(&set, i).0.iter().sum::<f32>() / 784.0).sum::<f32>() / 1e4;
        assert!(mean.abs() < 0.02, "{mean}");
    }
}
