//! Pictures in files of their own: a folder a class, a table of paths and labels, or tar files.
//!
//! [`Set::open`] finds them and reads their headers, which say how much memory decoding takes; [`Images`] decodes
//! and transforms one when it is asked for. Packed tar files can only be read forward: [`Packed`] gives their
//! pictures as shards. A picture that cannot be used is a fault of one record, with its path.

mod decode;
mod exif;
mod header;
mod listing;
mod names;
mod packed;
mod table;
mod tar;

#[cfg(test)]
mod fixtures;

pub use listing::each_in_folder;
pub use names::Names;
pub use packed::Packed;
pub use table::{Columns, each_in_table};

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;

use self::decode::Opened;
use self::header::Header;
use self::listing::Listing;
use super::picture::{Large, Largest, Lent, Picture, Pipeline, Pixels, Pool, Scratch, scratch_bytes};
use super::{DataError, Features, Input, Key, Opening, Row, Slice, Source, Target, files, fingerprint};
use crate::regular;

/// How pictures are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Of a sample: 1 for grey, 3 for colour.
    pub channels: usize,
    /// (height, width) of a sample.
    pub size: [usize; 2],
    /// A picture that says it has more is not decoded.
    pub max_pixels: u64,
    pub columns: Columns,
    /// Threads that read at once.
    pub readers: usize,
}

/// The pictures of a training or validation set.
pub struct Set {
    listing: Listing,
    /// Opened tar files, by place; none for folders.
    archives: Vec<Option<File>>,
    options: Options,
    pub packed: bool,
    seen: Seen,
    large: Arc<Large>,
}

/// What the headers say.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    pictures: u64,
    /// The smallest and the largest sides, in pixels.
    least: [usize; 2],
    most: [usize; 2],
    /// Bytes that a reader takes for all but the largest pictures.
    each: u64,
}

/// What a header says of a picture, by the memory it takes.
#[derive(Clone, Copy, Debug)]
struct Looked {
    index: usize,
    header: Option<Header>,
    bytes: u64,
}

/// Of so many pictures one may be read alone because it takes more memory than the others do.
const ALONE: usize = 16;

/// Pictures whose headers are read between two reports.
const STEP: usize = 4096;

impl Set {
    /// Finds the pictures of `files`: folders of class folders, tables (.csv, .tsv) and tar files. With
    /// `classes`, those of another set, theirs are the only ones and keep their numbers.
    pub fn open(
        files: &[PathBuf],
        options: Options,
        classes: Option<&Names>,
        opening: &Opening,
    ) -> Result<Self, DataError> {
        let files = files::find(files)?;
        let (mut listing, mut packed, mut by_folder) = (Listing::default(), Vec::new(), false);
        for file in &files {
            match Kind::of(file)? {
                Kind::Folders => {
                    listing.add_folders(file)?;
                    by_folder = true;
                    packed.push(false);
                }
                Kind::Table => {
                    listing.add_table(file, &options.columns)?;
                    packed.push(false);
                }
                Kind::Tar => {
                    // Where some are tar files, the others have no place in one.
                    listing.spans.resize(listing.len(), Default::default());
                    let (is_packed, folders) = listing.add_tar(file, options.channels, opening)?;
                    by_folder |= folders;
                    packed.push(is_packed);
                }
            }
        }
        if packed.contains(&true) && packed.contains(&false) {
            let value = "both packed archives and others".into();
            let wanted = "a set is read forward or in any order; unpack the archives or pack all";
            return Err(DataError::Setting { name: "train", value, wanted });
        }
        if !listing.spans.is_empty() {
            listing.spans.resize(listing.len(), Default::default());
        }
        match classes {
            None => listing.number_classes(!by_folder),
            Some(names) => listing.number_classes_as(names).map_err(|class| DataError::NoSamples {
                set: format!("class `{class}` of the validation set"),
                why: "the training set has no such class".into(),
            })?,
        }
        if listing.bytes() > opening.max_bytes {
            let (file, bytes, limit) = (files[0].clone(), listing.bytes(), opening.max_bytes);
            return Err(DataError::TooLarge { file, bytes, limit });
        }
        let packed = packed.contains(&true);
        let open = |place: &PathBuf| match place.is_file() {
            true if !packed => regular::open(place).map(Some).map_err(DataError::io(place)),
            _ => Ok(None),
        };
        let archives = listing.places.iter().map(open).collect::<Result<_, _>>()?;
        let large = opening.large.clone();
        let mut set = Self { listing, archives, options, packed, seen: Seen::default(), large };
        set.look(opening);
        Ok(set)
    }

    pub fn names(&self) -> &Names {
        &self.listing.names
    }

    pub fn len(&self) -> u64 {
        self.listing.len() as u64
    }

    pub fn is_empty(&self) -> bool {
        self.listing.is_empty()
    }

    /// Learns from the headers what decoding takes. A picture that is bad is told when it is read.
    fn look(&mut self, opening: &Opening) {
        let heads = std::mem::take(&mut self.listing.heads);
        let doing = format!("reading the headers of {} pictures", self.len());
        let mut looked: Vec<Looked> = Vec::with_capacity(self.listing.len());
        for first in (0..self.listing.len()).step_by(STEP) {
            opening.watch.pass(&doing, first as u64, self.len());
            let end = self.listing.len().min(first + STEP);
            looked.par_extend((first..end).into_par_iter().map(|index| match self.packed {
                true => {
                    self.looked(index, heads.get(index).copied().flatten(), self.listing.spans[index].len)
                }
                false => {
                    let (header, len) = self.read_header(index).unwrap_or_default();
                    self.looked(index, header, len)
                }
            }));
        }
        opening.watch.pass(&doing, self.len(), self.len());
        let mut seen = Seen { least: [usize::MAX; 2], ..Seen::default() };
        for header in looked.iter().filter_map(|looked| looked.header) {
            seen.pictures += 1;
            seen.least = [seen.least[0].min(header.height), seen.least[1].min(header.width)];
            seen.most = [seen.most[0].max(header.height), seen.most[1].max(header.width)];
        }
        looked.sort_by_key(|looked| (std::cmp::Reverse(looked.bytes), looked.index));
        if let Some(&largest) = looked.first() {
            let usual = looked[(looked.len() / ALONE).max(1).min(looked.len() - 1)].bytes;
            // Pictures that are hardly larger than the others need not wait for one another.
            seen.each = if largest.bytes <= 2 * usual { largest.bytes } else { usual };
            let Looked { index, header, bytes } = largest;
            let pixels = header.map_or(0, |header| header.height as u64 * header.width as u64);
            if bytes > seen.each {
                let beyond = bytes - seen.each;
                self.large.expect(Largest { picture: self.path(index), bytes, beyond, pixels });
            }
        }
        self.seen = seen;
    }

    /// What a picture of `len` bytes with this header takes. One that is too large to be decoded takes its file.
    fn looked(&self, index: usize, header: Option<Header>, len: u64) -> Looked {
        let fits = |h: &Header| (h.height as u64).saturating_mul(h.width as u64) <= self.options.max_pixels;
        let header = header.filter(fits);
        // What is too long to be a picture is not read.
        let len = if len <= self.longest() { len } else { 0 };
        Looked { index, header, bytes: self.takes(header, len) }
    }

    /// Bytes that reading a picture takes: the file, the decoder and what is resized.
    fn takes(&self, header: Option<Header>, len: u64) -> u64 {
        let Options { channels, size, .. } = self.options;
        let decoding = header.map_or(0, |header| {
            let turned = [[header.height, header.width], [header.width, header.height]];
            let resized = turned.map(|from| scratch_bytes(from, size, channels));
            header.needs(channels) + resized[0].max(resized[1])
        });
        len + decoding
    }

    /// Bytes of a picture's file at most: no format takes more than a few a pixel.
    fn longest(&self) -> u64 {
        self.options.max_pixels.saturating_mul(8).saturating_add(1 << 20)
    }

    /// The header of picture `index` and its length, where they can be read.
    fn read_header(&self, index: usize) -> std::io::Result<(Option<Header>, u64)> {
        let opened;
        let (file, start, len) = match &self.archives[self.listing.place(index)] {
            Some(archive) => {
                let extent = self.listing.spans[index];
                (archive, extent.start, extent.len)
            }
            None => {
                let path = self.path(index);
                let about = std::fs::metadata(&path)?;
                // Opening a pipe would wait for somebody to write to it.
                if !about.is_file() {
                    return Ok((None, 0));
                }
                opened = File::open(path)?;
                (&opened, 0, about.len())
            }
        };
        let header = Header::read(self.options.channels, |at, into| {
            let there = into.len().min(len.saturating_sub(at) as usize);
            files::read_exact_at(file, &mut into[..there], start + at)?;
            Ok(there)
        })?;
        Ok((header, len))
    }

    fn header<'a>(&self, file: &'a [u8]) -> Result<Opened<'a>, String> {
        Opened::new(file, self.options.channels, self.options.max_pixels)
    }

    /// The bytes of picture `index`; `ask` hears how many they are before they are read.
    fn load(
        &self,
        index: usize,
        into: &mut Vec<u8>,
        ask: impl FnOnce(u64) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let path = self.path(index);
        into.clear();
        let most = self.longest();
        let check = |len: u64| match len <= most {
            true => Ok(()),
            false => Err(self.wrong(index, format!("it has {len} bytes, too many for a picture"))),
        };
        if let Some(archive) = &self.archives[self.listing.place(index)] {
            let extent = self.listing.spans[index];
            check(extent.len)?;
            ask(extent.len)?;
            into.resize(extent.len as usize, 0);
            return files::read_exact_at(archive, into, extent.start).map_err(DataError::io(&path));
        }
        let read = regular::open(&path).and_then(|file| {
            let len = file.metadata()?.len();
            Ok((file, len))
        });
        let (mut file, len) = read.map_err(|error| self.unreadable(index, &path, error))?;
        check(len)?;
        ask(len)?;
        into.reserve_exact(len as usize);
        let read = file.by_ref().take(most).read_to_end(into);
        read.map(drop).map_err(|error| self.unreadable(index, &path, error))
    }

    /// One picture that is not there is a fault of one record.
    fn unreadable(&self, index: usize, path: &Path, error: std::io::Error) -> DataError {
        match error.kind() {
            ErrorKind::NotFound => self.wrong(index, "there is no such file".into()),
            ErrorKind::IsADirectory | ErrorKind::InvalidInput => self.wrong(index, error.to_string()),
            _ => DataError::io(path)(error),
        }
    }

    fn path(&self, index: usize) -> PathBuf {
        self.listing.places[self.listing.place(index)].join(self.listing.path(index))
    }

    fn wrong(&self, index: usize, problem: String) -> DataError {
        if self.listing.spans.get(index).is_some_and(|extent| extent.len > 0) {
            let place = format!("member {}", self.listing.path(index).display());
            return DataError::Record {
                file: self.listing.places[self.listing.place(index)].clone(),
                place,
                problem,
            };
        }
        DataError::Record { file: self.path(index), place: String::new(), problem }
    }

    /// Makes a sample of the bytes of picture `index`.
    fn sample(
        &self,
        index: usize,
        file: &[u8],
        pipeline: &Pipeline,
        key: Key,
        scratch: &mut Lent<'_>,
        into: &mut Row<'_>,
    ) -> Result<(), DataError> {
        let opened = self.header(file).map_err(|problem| self.wrong(index, problem))?;
        scratch.ask(|| self.path(index), self.takes(Some(opened.header), file.len() as u64))?;
        let sample = |scratch: &mut Lent<'_>, values: &mut Slice<'_>| {
            let Scratch { pixels, turned, .. } = &mut **scratch;
            let [height, width] = opened.decode(pixels, turned)?;
            let pixels = std::mem::take(pixels);
            let picture = Picture { height, width, pixels: Pixels::Bytes(&pixels) };
            let applied = pipeline.apply(picture, key, scratch, values);
            scratch.pixels = pixels;
            applied
        };
        sample(scratch, &mut into.input).map_err(|problem| self.wrong(index, problem))?;
        into.target.u32()[0] = self.listing.class(index);
        Ok(())
    }

    fn about(&self) -> Vec<(String, String)> {
        let mut about = Vec::new();
        let Seen { pictures, least, most, .. } = self.seen;
        if pictures > 0 {
            let side = |[h, w]: [usize; 2]| format!("{w} x {h}");
            let sizes =
                if least == most { side(least) } else { format!("{} to {}", side(least), side(most)) };
            about.push(("picture_size".into(), format!("{sizes} (of {pictures} looked at)")));
        }
        if let (ignored @ 1.., Some(first)) = &self.listing.ignored {
            about.push((
                "ignored_files".into(),
                format!("{ignored} that are no pictures, as `{}`", first.display()),
            ));
        }
        about
    }
}

/// What the files that a job names are made of, for a fingerprint.
pub fn inputs(
    key: &'static str,
    files: &[PathBuf],
    columns: &Columns,
) -> Result<Vec<fingerprint::Input>, DataError> {
    let kind = |file: PathBuf| {
        Ok(match Kind::of(&file)? {
            Kind::Folders => fingerprint::Kind::Folder(file),
            Kind::Table => fingerprint::Kind::Table(file, columns.clone()),
            Kind::Tar => fingerprint::Kind::Files(vec![file]),
        })
    };
    let inputs =
        files::find(files)?.into_iter().map(|file| Ok(fingerprint::Input { key, kind: kind(file)? }));
    inputs.collect()
}

enum Kind {
    Folders,
    Table,
    Tar,
}

impl Kind {
    /// What a file named in a job is: by its name, since it may be packed.
    fn of(file: &Path) -> Result<Self, DataError> {
        if file.is_dir() {
            return Ok(Kind::Folders);
        }
        let name = file.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        let bare = [".gz", ".zst"].iter().find_map(|packed| name.strip_suffix(packed)).unwrap_or(&name);
        match bare.rsplit('.').next() {
            Some("csv" | "tsv") => Ok(Kind::Table),
            Some("tar" | "tgz" | "tzst") => Ok(Kind::Tar),
            _ => {
                // What is not there at all is told as such.
                std::fs::metadata(file).map_err(DataError::io(file))?;
                let why = "it is no folder, and its name ends in none of .csv, .tsv and .tar".into();
                Err(DataError::NoSamples { set: format!("`{}`", file.display()), why })
            }
        }
    }
}

/// The features of samples with these classes.
fn features(pipeline: &Pipeline, names: &Names) -> Features {
    let (shape, names) = (pipeline.shape().to_vec(), names.list().to_vec());
    let palette = pipeline.palette();
    Features { palette, ..Features::new(Input::Floats { shape }, Target::Class { names }) }
}

/// A set whose pictures can be read in any order.
pub struct Images {
    set: Arc<Set>,
    pipeline: Pipeline,
    features: Features,
    pool: Pool,
}

impl Images {
    pub fn new(set: Arc<Set>, pipeline: Pipeline) -> Self {
        let features = features(&pipeline, set.names());
        let pool = Pool::with_large(set.options.readers, set.seen.each, set.large.clone());
        Self { set, pipeline, features, pool }
    }
}

impl Source for Images {
    fn len(&self) -> u64 {
        self.set.len()
    }

    fn features(&self) -> &Features {
        &self.features
    }

    fn read(&self, index: u64, key: Key, into: &mut Row<'_>) -> Result<(), DataError> {
        let index = index as usize;
        let mut scratch = self.pool.lend();
        let mut file = std::mem::take(&mut scratch.file);
        self.set.load(index, &mut file, |bytes| scratch.ask(|| self.set.path(index), bytes))?;
        let made = self.set.sample(index, &file, &self.pipeline, key, &mut scratch, into);
        scratch.file = file;
        made
    }

    /// The listing and the readers' buffers. What the largest picture takes beyond them is counted once for all sets.
    fn resident_bytes(&self) -> u64 {
        self.set.listing.bytes() + self.pool.bytes()
    }

    fn balance(&self) -> Option<Vec<u64>> {
        Some(self.set.listing.balance())
    }

    fn class(&self, index: u64) -> Option<u32> {
        Some(self.set.listing.class(index as usize))
    }

    fn about(&self) -> Vec<(String, String)> {
        self.set.about()
    }
}

#[cfg(test)]
mod tests;
