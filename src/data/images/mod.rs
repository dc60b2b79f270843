//! Image datasets: one folder per class, a table of paths and labels, or tar and zip archives.
//!
//! [`ImageFiles::open`] lists the images and reads their headers, which bound the memory that decoding takes.
//! [`ImageDataset`] decodes and transforms an image on demand. Compressed tar archives can only be read sequentially:
//! [`TarShards`] yields their images as shards. An unusable image is a bad record, reported with its path.

#[cfg(feature = "avif")]
mod avif;
mod bmp;
mod class_names;
mod combined_labels;
mod decode;
mod exif;
mod header;
mod listing;
mod more_formats;
mod other_formats;
mod pnm;
mod set_folders;
mod source_kind;
mod table;
mod tar;
mod tar_shards;
mod tiff_image;
mod zip;

#[cfg(test)]
mod fixtures;

pub use class_names::ClassNames;
pub use listing::walk_image_folder;
pub use source_kind::fingerprint_inputs;
pub use table::{LabelColumns, walk_image_table};
pub use tar_shards::TarShards;

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;

use self::decode::ImageDecoder;
use self::header::ImageHeader;
use self::listing::{Extent, ImageListing};
use self::source_kind::ImageSourceKind;
use super::split::SplitKeys;
use super::transforms::{
    Image, LargeImages, LargestImage, Pipeline, Pixels, Scratch, ScratchGuard, ScratchPool, scratch_bytes,
};
use super::{
    BatchRow, DataError, Dataset, DatasetContext, Features, InputSpec, SampleKey, SliceMut, TargetSpec,
    files, warnings,
};
use crate::base::regular_file;
use crate::base::units::counted;

/// How images are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageOptions {
    /// Channels of a sample: 1 for grayscale, 3 for RGB.
    pub channels: usize,
    /// (height, width) of a sample.
    pub size: [usize; 2],
    /// An image whose header declares more pixels is not decoded.
    pub max_pixels: u64,
    pub columns: LabelColumns,
    /// An image may have any number of labels.
    pub multi_label: bool,
    /// Maximum number of concurrent reader threads.
    pub readers: usize,
}

/// The images of a training or validation set.
pub struct ImageFiles {
    listing: ImageListing,
    /// Open archives by container; `None` for folders.
    archives: Vec<Option<File>>,
    options: ImageOptions,
    pub compressed: bool,
    header_stats: HeaderStats,
    large_images: Arc<LargeImages>,
}

/// The classes of the images.
impl SplitKeys for ImageFiles {
    fn for_each(&self, visit: &mut dyn FnMut(u64) -> Result<(), DataError>) -> Result<(), DataError> {
        (0..self.listing.len()).try_for_each(|index| visit(u64::from(self.listing.class(index))))
    }

    fn name(&self, key: u64, _: u64) -> String {
        self.names().as_slice().get(key as usize).map_or_else(String::new, |name| format!("`{name}`"))
    }
}

/// Summary of all headers.
#[derive(Clone, Copy, Debug, Default)]
struct HeaderStats {
    images: u64,
    /// Minimum and maximum of each side, in pixels.
    min_size: [usize; 2],
    max_size: [usize; 2],
    /// Scratch bytes per reader; enough for all but the largest images.
    bytes_per_reader: u64,
}

/// Decoding memory of an image, from its header.
#[derive(Clone, Copy, Debug)]
struct ImageFootprint {
    index: usize,
    header: Option<ImageHeader>,
    bytes: u64,
}

/// At most one in this many images may exceed the per-reader scratch and be decoded alone.
const EXCLUSIVE_ONE_IN: usize = 16;

/// Headers read between two progress reports.
const HEADER_BATCH: usize = 4096;

impl ImageFiles {
    /// Lists the images of `files`: class folders, tables (.csv, .tsv), tar archives and zip files. With `classes`,
    /// from another split, only those classes are allowed and they keep their ids.
    pub fn open(
        files: &[PathBuf],
        options: ImageOptions,
        classes: Option<&ClassNames>,
        ctx: &DatasetContext,
    ) -> Result<Self, DataError> {
        let files = files::resolve_patterns(files)?;
        let (mut listing, mut compressed, mut by_folder) = (ImageListing::default(), Vec::new(), false);
        for file in &files {
            match ImageSourceKind::of(file)? {
                ImageSourceKind::Folders => {
                    listing.add_folders(file)?;
                    by_folder = true;
                    compressed.push(false);
                }
                ImageSourceKind::Table => {
                    listing.add_table(file, &options.columns)?;
                    compressed.push(false);
                }
                ImageSourceKind::Zip => {
                    listing.extents.resize(listing.len(), Default::default());
                    by_folder |= listing.add_zip(file)?;
                    compressed.push(false);
                }
                ImageSourceKind::Tar => {
                    // Images outside of archives get an empty extent, so that `extents` stays parallel to the images.
                    listing.extents.resize(listing.len(), Default::default());
                    let (is_packed, folders) = listing.add_tar(file, options.channels, ctx)?;
                    by_folder |= folders;
                    compressed.push(is_packed);
                }
            }
        }
        if compressed.contains(&true) && compressed.contains(&false) {
            let value = "both compressed archives and other files".into();
            let expected =
                "compressed archives are read sequentially, other files at random; decompress the archives";
            return Err(DataError::InvalidSetting { name: "train", value, expected });
        }
        if !listing.extents.is_empty() {
            listing.extents.resize(listing.len(), Default::default());
        }
        let unknown = |class: String| DataError::NoSamples {
            set: format!("class `{class}` of the validation set"),
            why: "the training set has no such class".into(),
        };
        let separator = options.columns.separator.as_deref();
        match classes {
            classes if options.multi_label || listing.has_lists => {
                listing.split_labels(separator, classes).map_err(unknown)?;
            }
            None => listing.assign_class_ids(!by_folder),
            Some(names) => listing.assign_class_ids_from(names).map_err(unknown)?,
        }
        if listing.resident_bytes() > ctx.max_bytes {
            let (file, bytes, limit) = (files[0].clone(), listing.resident_bytes(), ctx.max_bytes);
            return Err(DataError::TooLarge { file, bytes, limit });
        }
        let packed = compressed.contains(&true);
        let open = |place: &PathBuf| match place.is_file() {
            true if !packed => regular_file::open(place).map(Some).map_err(DataError::io(place)),
            _ => Ok(None),
        };
        let archives = listing.containers.iter().map(open).collect::<Result<_, _>>()?;
        let large = ctx.large_images.clone();
        let mut set = Self {
            listing,
            archives,
            options,
            compressed: packed,
            header_stats: HeaderStats::default(),
            large_images: large,
        };
        set.scan_headers(ctx);
        Ok(set)
    }

    /// Lists images without labels: folders, at any depth, and files.
    pub fn open_unlabelled(
        files: &[PathBuf],
        options: ImageOptions,
        classes: &ClassNames,
        ctx: &DatasetContext,
    ) -> Result<Self, DataError> {
        let mut listing = ImageListing::default();
        listing.class_names = classes.clone();
        files::resolve_patterns(files)?.iter().try_for_each(|file| listing.add_unlabelled(file))?;
        if listing.is_empty() {
            return Err(DataError::Table {
                file: files.first().cloned().unwrap_or_default(),
                place: String::new(),
                problem: "no file in it has an image extension".into(),
                hint: "name image files, or folders that contain some",
            });
        }
        let archives = listing.containers.iter().map(|_| None).collect();
        let mut set = Self {
            listing,
            archives,
            options,
            compressed: false,
            header_stats: HeaderStats::default(),
            large_images: ctx.large_images.clone(),
        };
        set.scan_headers(ctx);
        Ok(set)
    }

    pub fn names(&self) -> &ClassNames {
        &self.listing.class_names
    }

    pub fn len(&self) -> u64 {
        self.listing.len() as u64
    }

    pub fn is_empty(&self) -> bool {
        self.listing.is_empty()
    }

    /// Reads all headers to bound decoding memory. A bad image is reported when it is read, not here.
    fn scan_headers(&mut self, ctx: &DatasetContext) {
        let headers = std::mem::take(&mut self.listing.headers);
        let activity = format!("reading the headers of {}", counted(self.len(), "image"));
        let mut footprints: Vec<ImageFootprint> = Vec::with_capacity(self.listing.len());
        for first in (0..self.listing.len()).step_by(HEADER_BATCH) {
            ctx.observer.report(&activity, first as u64, self.len());
            let end = self.listing.len().min(first + HEADER_BATCH);
            footprints.par_extend((first..end).into_par_iter().map(|index| match self.compressed {
                true => self.footprint(
                    index,
                    headers.get(index).copied().flatten(),
                    self.listing.extents[index].len,
                ),
                false => {
                    let (header, len) = self.read_header(index).unwrap_or_default();
                    self.footprint(index, header, len)
                }
            }));
        }
        ctx.observer.report(&activity, self.len(), self.len());
        let mut stats = HeaderStats { min_size: [usize::MAX; 2], ..HeaderStats::default() };
        for header in footprints.iter().filter_map(|looked| looked.header) {
            stats.images += 1;
            stats.min_size = [stats.min_size[0].min(header.height), stats.min_size[1].min(header.width)];
            stats.max_size = [stats.max_size[0].max(header.height), stats.max_size[1].max(header.width)];
        }
        footprints.sort_by_key(|looked| (std::cmp::Reverse(looked.bytes), looked.index));
        if let Some(&largest) = footprints.first() {
            let typical =
                footprints[(footprints.len() / EXCLUSIVE_ONE_IN).max(1).min(footprints.len() - 1)].bytes;
            // If the largest image takes at most twice the typical one, reserve for it: serializing readers would cost
            // more.
            stats.bytes_per_reader = if largest.bytes <= 2 * typical { largest.bytes } else { typical };
            let ImageFootprint { index, header, bytes } = largest;
            let pixels = header.map_or(0, |header| header.height as u64 * header.width as u64);
            if bytes > stats.bytes_per_reader {
                let extra_bytes = bytes - stats.bytes_per_reader;
                self.large_images.register(LargestImage {
                    path: self.path(index),
                    bytes,
                    extra_bytes,
                    pixels,
                });
            }
        }
        self.header_stats = stats;
    }

    /// Footprint of an image of `len` bytes with this header. If the image has too many pixels to be decoded, only its
    /// file counts.
    fn footprint(&self, index: usize, header: Option<ImageHeader>, len: u64) -> ImageFootprint {
        let fits =
            |h: &ImageHeader| (h.height as u64).saturating_mul(h.width as u64) <= self.options.max_pixels;
        let header = header.filter(fits);
        // A file that is too long for an image is never read.
        let len = if len <= self.max_file_bytes() { len } else { 0 };
        ImageFootprint { index, header, bytes: self.decode_memory(header, len) }
    }

    /// Bytes needed to read an image: the file, the decoder and the resized image.
    fn decode_memory(&self, header: Option<ImageHeader>, len: u64) -> u64 {
        let ImageOptions { channels, size, .. } = self.options;
        let decoding = header.map_or(0, |header| {
            let orientations = [[header.height, header.width], [header.width, header.height]];
            let resized = orientations.map(|from| scratch_bytes(from, size, channels));
            header.decode_bytes(channels) + resized[0].max(resized[1])
        });
        len + decoding
    }

    /// Upper bound on an image file: no format takes more than a few bytes per pixel.
    fn max_file_bytes(&self) -> u64 {
        self.options.max_pixels.saturating_mul(8).saturating_add(1 << 20)
    }

    /// Header and file length of image `index`, if readable.
    fn read_header(&self, index: usize) -> std::io::Result<(Option<ImageHeader>, u64)> {
        let opened;
        let (file, extent) = match &self.archives[self.listing.container(index)] {
            Some(archive) => (archive, self.listing.extents[index]),
            None => {
                let path = self.path(index);
                let about = std::fs::metadata(&path)?;
                // Opening a FIFO would block until a writer appears.
                if !about.is_file() {
                    return Ok((None, 0));
                }
                opened = File::open(path)?;
                (&opened, Extent { len: about.len(), ..Extent::default() })
            }
        };
        let header = ImageHeader::read(self.options.channels, |at, into| {
            let readable = into.len().min(extent.image_bytes().saturating_sub(at) as usize);
            let into = &mut into[..readable];
            match extent.inflated {
                None => files::read_exact_at(file, into, extent.start + at)?,
                // The first read covers the header of nearly every image; another one inflates from the start again.
                Some(_) => {
                    let mut member = zip::member_reader(file, extent);
                    std::io::copy(&mut member.by_ref().take(at), &mut std::io::sink())?;
                    member.read_exact(into)?;
                }
            }
            Ok(readable)
        })?;
        Ok((header, extent.image_bytes()))
    }

    fn open_decoder<'a>(&self, file: &'a [u8]) -> Result<ImageDecoder<'a>, String> {
        ImageDecoder::new(file, self.options.channels, self.options.max_pixels)
    }

    /// Reads the bytes of image `index`; calls `reserve` with their length first.
    fn load(
        &self,
        index: usize,
        into: &mut Vec<u8>,
        reserve: impl FnOnce(u64) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let path = self.path(index);
        into.clear();
        let max_bytes = self.max_file_bytes();
        let check = |len: u64| match len <= max_bytes {
            true => Ok(()),
            false => Err(self.record_error(index, format!("it has {len} bytes, too many for an image"))),
        };
        if let Some(archive) = &self.archives[self.listing.container(index)] {
            let extent = self.listing.extents[index];
            let len = extent.image_bytes();
            check(len)?;
            reserve(len)?;
            into.resize(len as usize, 0);
            return match extent.inflated {
                None => files::read_exact_at(archive, into, extent.start).map_err(DataError::io(&path)),
                Some(_) => zip::member_reader(archive, extent)
                    .read_exact(into)
                    .map_err(|error| self.record_error(index, format!("it cannot be inflated: {error}"))),
            };
        }
        let read = regular_file::open(&path).and_then(|file| {
            let len = file.metadata()?.len();
            Ok((file, len))
        });
        let (mut file, len) = read.map_err(|error| self.read_error(index, &path, error))?;
        check(len)?;
        reserve(len)?;
        into.reserve_exact(len as usize);
        let read = file.by_ref().take(max_bytes).read_to_end(into);
        read.map(drop).map_err(|error| self.read_error(index, &path, error))
    }

    /// A missing image is a bad record, not a fatal error.
    fn read_error(&self, index: usize, path: &Path, error: std::io::Error) -> DataError {
        match error.kind() {
            ErrorKind::NotFound => self.record_error(index, "no such file".into()),
            ErrorKind::IsADirectory | ErrorKind::InvalidInput => self.record_error(index, error.to_string()),
            _ => DataError::io(path)(error),
        }
    }

    fn path(&self, index: usize) -> PathBuf {
        self.listing.containers[self.listing.container(index)].join(self.listing.path(index))
    }

    fn record_error(&self, index: usize, problem: String) -> DataError {
        if self.listing.extents.get(index).is_some_and(|extent| extent.len > 0) {
            let place = format!("member {}", self.listing.path(index).display());
            return DataError::Record {
                file: self.listing.containers[self.listing.container(index)].clone(),
                place,
                problem,
            };
        }
        DataError::Record { file: self.path(index), place: String::new(), problem }
    }

    /// Decodes and transforms the bytes of image `index`.
    fn decode_sample(
        &self,
        index: usize,
        file: &[u8],
        pipeline: &Pipeline,
        key: SampleKey,
        scratch: &mut ScratchGuard<'_>,
        into: &mut BatchRow<'_>,
    ) -> Result<(), DataError> {
        let opened = self.open_decoder(file).map_err(|problem| self.record_error(index, problem))?;
        let bytes = self.decode_memory(Some(opened.header), file.len() as u64) + pipeline.augment_bytes();
        scratch.reserve(|| self.path(index), bytes)?;
        let sample = |scratch: &mut ScratchGuard<'_>, values: &mut SliceMut<'_>| {
            let Scratch { pixels, converted: turned, .. } = &mut **scratch;
            let [height, width] = opened.decode(pixels, turned)?;
            let pixels = std::mem::take(pixels);
            let image = Image { height, width, pixels: Pixels::Bytes(&pixels) };
            let applied = pipeline.apply(image, key, scratch, values);
            scratch.pixels = pixels;
            applied
        };
        sample(scratch, &mut into.input).map_err(|problem| self.record_error(index, problem))?;
        match self.listing.labels(index) {
            Some(labels) => {
                let target = into.target.as_f32_mut();
                target.fill(0.0);
                labels.iter().for_each(|label| target[*label as usize] = 1.0);
            }
            None => into.target.as_u32_mut()[0] = self.listing.class(index),
        }
        Ok(())
    }

    fn describe(&self) -> Vec<(String, String)> {
        let mut about = Vec::new();
        let HeaderStats { images, min_size, max_size, .. } = self.header_stats;
        if images > 0 {
            let side = |[h, w]: [usize; 2]| format!("{w} x {h}");
            let sizes = if min_size == max_size {
                side(min_size)
            } else {
                format!("{} to {}", side(min_size), side(max_size))
            };
            about.push(("image_size".into(), format!("{sizes} ({} probed)", counted(images, "image"))));
        }
        if let Some((separator, example)) = self.combined_labels() {
            about.push((
                warnings::WARNING.into(),
                format!(
                    "classes such as `{example}` look like lists of labels: set \
                     `label_separator = \"{separator}\"` if an image has any number of them"
                ),
            ));
        }
        if let (ignored @ 1.., Some(first)) = &self.listing.ignored {
            let text = match self.listing.containers.contains(first) {
                true => format!(
                    "{ignored} in `{}`, no images by their names, or other images of a sample (`x.seg.png` beside \
                     `x.png`)",
                    first.display()
                ),
                false => format!("{ignored}, no images by their names, such as `{}`", first.display()),
            };
            about.push(("ignored_files".into(), text));
        }
        about
    }
}

/// Features of samples with these classes.
fn features(pipeline: &Pipeline, listing: &ImageListing) -> Features {
    let (shape, names) = (pipeline.shape().to_vec(), listing.class_names.as_slice().to_vec());
    let palette = pipeline.palette();
    let target = match listing.is_multi_label() {
        true => TargetSpec::MultiLabel { names },
        false => TargetSpec::Class { names },
    };
    Features { pixel_lut: palette, ..Features::new(InputSpec::Floats { shape }, target) }
}

/// Images that support random access.
pub struct ImageDataset {
    image_files: Arc<ImageFiles>,
    pipeline: Pipeline,
    features: Features,
    pool: ScratchPool,
}

impl ImageDataset {
    pub fn new(image_files: Arc<ImageFiles>, pipeline: Pipeline) -> Self {
        let features = features(&pipeline, &image_files.listing);
        let pool = ScratchPool::with_large_images(
            image_files.options.readers,
            image_files.header_stats.bytes_per_reader + pipeline.augment_bytes(),
            image_files.large_images.clone(),
        );
        Self { image_files, pipeline, features, pool }
    }
}

impl Dataset for ImageDataset {
    fn len(&self) -> u64 {
        self.image_files.len()
    }

    fn features(&self) -> &Features {
        &self.features
    }

    fn read(&self, index: u64, key: SampleKey, into: &mut BatchRow<'_>) -> Result<(), DataError> {
        let index = index as usize;
        let mut scratch = self.pool.acquire();
        let mut file = std::mem::take(&mut scratch.file);
        self.image_files
            .load(index, &mut file, |bytes| scratch.reserve(|| self.image_files.path(index), bytes))?;
        let decoded = self.image_files.decode_sample(index, &file, &self.pipeline, key, &mut scratch, into);
        scratch.file = file;
        decoded
    }

    /// The listing and the readers' buffers. The extra memory of the largest image is counted once for all datasets.
    fn resident_bytes(&self) -> u64 {
        self.image_files.listing.resident_bytes() + self.pool.bytes()
    }

    fn class_counts(&self) -> Option<Vec<u64>> {
        Some(self.image_files.listing.class_counts())
    }

    fn class(&self, index: u64) -> Option<u32> {
        let listing = &self.image_files.listing;
        (!listing.is_multi_label()).then(|| listing.class(index as usize))
    }

    fn sample_name(&self, index: u64) -> Option<String> {
        Some(self.image_files.path(index as usize).display().to_string())
    }

    fn describe(&self) -> Vec<(String, String)> {
        self.image_files.describe()
    }
}

#[cfg(test)]
mod tests;
