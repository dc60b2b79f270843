//! Indexes the images in tar archives by walking the headers once, and caches the index.
//!
//! The class of a member comes from the member `NAME.cls` beside it, as in WebDataset, or from its folder. Offsets
//! count uncompressed bytes: a plain archive supports random access, a compressed one is read from the start.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Component, Path, PathBuf};

use tar::{Archive, Entry};

use super::header::ImageHeader;
use super::listing::{Extent, ImageListing, is_hidden, is_image};
use super::set_folders::{is_set_name, several_sets};
use crate::base::regular_file;
use crate::cache::CacheKey;
use crate::files::{self, FileCompression};
use crate::{DataError, DatasetContext};

/// Prefix of an image in a compressed archive that is searched for its header, in bytes.
const MAX_HEADER_BYTES: u64 = 1 << 20;

/// Maximum label length in bytes; a longer member is not a label.
const MAX_LABEL_BYTES: u64 = 1 << 10;

/// The images of one archive, in order.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct MemberIndex {
    members: Vec<ArchiveMember>,
    ignored: u64,
}

#[derive(Debug, PartialEq, Eq)]
struct ArchiveMember {
    path: String,
    label: String,
    /// Whether the label is the folder name.
    by_folder: bool,
    extent: Extent,
    /// Header, parsed during the pass over a compressed archive.
    header: Option<ImageHeader>,
}

impl ArchiveMember {
    /// Whether its label is a list.
    fn is_list(&self) -> bool {
        !self.by_folder && self.label.starts_with('[') && self.label.ends_with(']')
    }
}

impl ImageListing {
    /// Adds the images of the archive `file`. Returns whether it is compressed, and whether classes come from folders.
    pub fn add_tar(
        &mut self,
        file: &Path,
        channels: usize,
        ctx: &DatasetContext,
    ) -> Result<(bool, bool), DataError> {
        let (compression, length) = files::compression(file)?;
        let cache_key =
            CacheKey::new(&[file.to_owned()], &format!("tar, lists of labels, headers for {channels}"))?;
        let build_index = || MemberIndex::build(file, (compression, length), channels, ctx);
        let make = |out: &mut BufWriter<File>| build_index()?.write(out, file);
        let cached = ctx.cache.get_or_create("tar-index", cache_key, make)?;
        let index = match MemberIndex::read(&cached) {
            Some(index) => index,
            // The cached index is damaged: rebuild it.
            None => build_index()?,
        };
        let compressed = compression != FileCompression::Uncompressed;
        if compressed {
            // `headers` stays parallel to the images: a dataset that mixes plain and compressed archives is refused.
            self.headers.extend(index.members.iter().map(|member| member.header));
        }
        Ok((compressed, self.add_members(file, &index)?))
    }

    /// Adds the members of the archive `file`. Returns whether classes come from folders.
    pub(super) fn add_members(&mut self, file: &Path, index: &MemberIndex) -> Result<bool, DataError> {
        if index.members.is_empty() {
            return Err(DataError::Table {
                file: file.to_owned(),
                place: String::new(),
                problem: "no member has an image extension".into(),
                hint: "an archive has images in a folder for each class, or with a `.cls` member beside each",
            });
        }
        self.add_container(file);
        for member in &index.members {
            let class = self.class_names.intern(&member.label);
            self.has_lists |= member.is_list();
            self.add(OsStr::new(&member.path), class);
            self.extents.push(member.extent);
        }
        if index.ignored > 0 {
            self.ignored.0 += index.ignored - 1;
            self.ignore(file.to_owned());
        }
        Ok(index.members.iter().any(|member| member.by_folder))
    }
}

impl MemberIndex {
    fn build(
        file: &Path,
        (compression, length): (FileCompression, u64),
        channels: usize,
        ctx: &DatasetContext,
    ) -> Result<Self, DataError> {
        let activity = format!("listing the images in {}", file.display());
        let fault = |error| files::read_error(file, error);
        let mut found = MemberScan::default();
        if compression == FileCompression::Uncompressed {
            // Seek from header to header without reading the content.
            let mut archive = Archive::new(regular_file::open(file).map_err(DataError::io(file))?);
            for entry in archive.entries_with_seek().map_err(fault)? {
                let at = found.add(entry.map_err(fault)?, None, file)?;
                if at > length {
                    return Err(DataError::Truncated { file: file.to_owned(), declared: at, found: length });
                }
                ctx.observer.report(&activity, at, length);
            }
        } else {
            let mut archive = Archive::new(files::open(file)?);
            for entry in archive.entries().map_err(fault)? {
                let mut entry = entry.map_err(fault)?;
                // The compressed position is unknown here, so progress is measured in uncompressed bytes.
                let at = entry.raw_file_position().saturating_add(entry.size());
                ctx.observer.report(&activity, at.min(length), length.max(at));
                let mut header = None;
                if !found.is_label(&entry) {
                    let mut prefix = Vec::new();
                    if found.is_image(&entry) {
                        entry.by_ref().take(MAX_HEADER_BYTES).read_to_end(&mut prefix).map_err(fault)?;
                        header = ImageHeader::parse(&prefix, channels);
                    }
                    // A compressed archive has to be read through anyway, which also detects truncation.
                    let rest = std::io::copy(&mut entry, &mut std::io::sink()).map_err(fault)?;
                    let read = prefix.len() as u64 + rest;
                    if read < entry.size() {
                        let found = entry.raw_file_position() + read;
                        return Err(DataError::Truncated { file: file.to_owned(), declared: at, found });
                    }
                }
                found.add(entry, header, file)?;
            }
        }
        ctx.observer.report(&activity, length, length);
        found.into_index(file)
    }

    fn write(&self, out: &mut BufWriter<File>, file: &Path) -> Result<(), DataError> {
        let mut write = || -> std::io::Result<()> {
            let number = |out: &mut BufWriter<File>, n: u64| out.write_all(&n.to_le_bytes());
            number(out, self.members.len() as u64)?;
            number(out, self.ignored)?;
            for member in &self.members {
                for n in [member.extent.start, member.extent.len, member.by_folder as u64] {
                    number(out, n)?;
                }
                for n in member.header.map_or([0; 5], ImageHeader::to_words) {
                    number(out, n)?;
                }
                for text in [&member.path, &member.label] {
                    number(out, text.len() as u64)?;
                    out.write_all(text.as_bytes())?;
                }
            }
            Ok(())
        };
        write().map_err(DataError::write(file))
    }

    /// `None` if the file is not what `write` produced.
    fn read(path: &Path) -> Option<Self> {
        let bytes = std::fs::read(path).ok()?;
        let mut rest = &bytes[..];
        let number = |rest: &mut &[u8]| {
            let (head, tail) = rest.split_first_chunk::<8>()?;
            *rest = tail;
            Some(u64::from_le_bytes(*head))
        };
        let text = |rest: &mut &[u8]| {
            let len = usize::try_from(number(rest)?).ok()?;
            let (head, tail) = rest.split_at_checked(len)?;
            *rest = tail;
            Some(str::from_utf8(head).ok()?.to_owned())
        };
        let (count, ignored) = (number(&mut rest)?, number(&mut rest)?);
        let mut members = Vec::new();
        for _ in 0..count {
            let extent = Extent { start: number(&mut rest)?, len: number(&mut rest)?, inflated: None };
            let by_folder = number(&mut rest)? == 1;
            let mut header = [0; 5];
            for n in &mut header {
                *n = number(&mut rest)?;
            }
            let header = ImageHeader::from_words(header);
            let (path, label) = (text(&mut rest)?, text(&mut rest)?);
            members.push(ArchiveMember { path, label, by_folder, extent, header });
        }
        rest.is_empty().then_some(Self { members, ignored })
    }
}

/// Members found so far.
#[derive(Default)]
pub(super) struct MemberScan {
    images: Vec<(PathBuf, Extent, Option<ImageHeader>)>,
    /// Keyed by member path up to the first dot of the file name, as WebDataset groups members.
    labels: HashMap<PathBuf, (LabelKind, String)>,
    ignored: u64,
}

/// A member that holds the label of the image beside it; the first kind wins if there are several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LabelKind {
    /// The label as text.
    Cls,
    /// An object with a field `label`, `labels`, `cls` or `class`: a value, or a list of labels.
    Json,
    /// The label as text, unless it is long: then it is a caption.
    Txt,
}

impl LabelKind {
    fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "cls" => Some(Self::Cls),
            "json" => Some(Self::Json),
            "txt" => Some(Self::Txt),
            _ => None,
        }
    }

    /// The label in the text of a member; `Ok(None)` if the member holds none, which only a `.cls` must.
    fn label(self, text: std::io::Result<String>) -> Result<Option<String>, String> {
        match (self, text) {
            (Self::Json, Ok(text)) => Ok(json_label(&text)),
            (Self::Json | Self::Txt, Err(_)) => Ok(None),
            (_, Ok(text)) => match text.trim() {
                label if label.len() as u64 > MAX_LABEL_BYTES && self == Self::Txt => Ok(None),
                label if label.len() as u64 > MAX_LABEL_BYTES => {
                    Err(format!("it has more than {MAX_LABEL_BYTES} bytes"))
                }
                "" if self == Self::Txt => Ok(None),
                "" => Err("it is blank".into()),
                label => Ok(Some(label.to_owned())),
            },
            (Self::Cls, Err(error)) => Err(error.to_string()),
        }
    }

    /// Bytes that are read of a member.
    fn max_bytes(self) -> u64 {
        match self {
            Self::Json => MAX_JSON_BYTES,
            Self::Cls | Self::Txt => MAX_LABEL_BYTES + 1,
        }
    }
}

/// Maximum bytes of a `.json` member.
const MAX_JSON_BYTES: u64 = 1 << 20;

fn json_label(text: &str) -> Option<String> {
    let object: serde_json::Value = serde_json::from_str(text).ok()?;
    match ["label", "labels", "cls", "class"].iter().find_map(|name| object.get(name))? {
        serde_json::Value::String(text) if !text.trim().is_empty() => Some(text.trim().to_owned()),
        serde_json::Value::Number(number) => Some(number.to_string()),
        serde_json::Value::Bool(flag) => Some(flag.to_string()),
        list @ serde_json::Value::Array(_) => Some(list.to_string()),
        _ => None,
    }
}

impl MemberScan {
    /// Whether the content of the member is read as a label.
    fn is_label<R: Read>(&self, entry: &Entry<'_, R>) -> bool {
        entry.path().is_ok_and(|path| LabelKind::of(&path).is_some())
    }

    fn is_image<R: Read>(&self, entry: &Entry<'_, R>) -> bool {
        entry.header().entry_type().is_file() && entry.path().is_ok_and(|path| is_image(&path))
    }

    /// Records a member and its header, if one was parsed; returns the offset after it.
    fn add<R: Read>(
        &mut self,
        mut entry: Entry<'_, R>,
        header: Option<ImageHeader>,
        file: &Path,
    ) -> Result<u64, DataError> {
        let extent = Extent { start: entry.raw_file_position(), len: entry.size(), inflated: None };
        let path = entry.path().map_err(|error| files::read_error(file, error))?.into_owned();
        if entry.header().entry_type().is_file() {
            self.add_member(path, extent, header, &mut entry, file)?;
        }
        Ok(extent.start.saturating_add(extent.len))
    }

    /// Records a file of the archive; `content` is read if it is a label.
    pub(super) fn add_member(
        &mut self,
        path: PathBuf,
        extent: Extent,
        header: Option<ImageHeader>,
        content: &mut dyn Read,
        file: &Path,
    ) -> Result<(), DataError> {
        if path.components().any(|part| is_hidden(part.as_os_str()) && part != Component::CurDir) {
            return Ok(());
        }
        if is_image(&path) {
            self.images.push((path, extent, header));
            return Ok(());
        }
        let Some(kind) = LabelKind::of(&path) else {
            self.ignored += 1;
            return Ok(());
        };
        let mut text = String::new();
        let read = content.take(kind.max_bytes()).read_to_string(&mut text);
        let label = kind.label(read.map(|_| text)).map_err(|problem| {
            let problem = format!("expected a label, a word or a number as text: {problem}");
            member_error(file, &path, problem)
        })?;
        match label {
            Some(label) => {
                let place = self.labels.entry(stem(&path)).or_insert_with(|| (kind, label.clone()));
                if kind < place.0 {
                    *place = (kind, label);
                }
            }
            None => self.ignored += 1,
        }
        Ok(())
    }

    pub(super) fn into_index(mut self, file: &Path) -> Result<MemberIndex, DataError> {
        self.check_sets(file)?;
        self.keep_one_image_per_sample();
        let member = |(path, extent, header): (PathBuf, Extent, Option<ImageHeader>)| {
            let folder =
                path.parent().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
            let sidecar = sidecar(&self.labels, &path).map(str::to_owned);
            let by_folder = sidecar.is_none();
            let Some(label) = sidecar.or(folder) else {
                let problem = "it has no class: it is in no folder, and there is no `.cls`, `.json` or `.txt` \
                               member with a label beside it";
                return Err(member_error(file, &path, problem.into()));
            };
            Ok(ArchiveMember { path: path.to_string_lossy().into_owned(), label, by_folder, extent, header })
        };
        let members = self.images.into_iter().map(member).collect::<Result<_, _>>()?;
        Ok(MemberIndex { members, ignored: self.ignored })
    }
}

impl MemberScan {
    /// Refuses an archive with `train/cat/1.jpg` and `test/cat/1.jpg`, or with `train/1.jpg` and `test/1.jpg` and
    /// no labels: its images are of several sets.
    fn check_sets(&self, file: &Path) -> Result<(), DataError> {
        let folders = |depth: usize| -> BTreeSet<String> {
            let name = |path: &PathBuf| Some(path.ancestors().nth(depth)?.file_name()?.to_str()?.to_owned());
            self.images.iter().filter_map(|(path, ..)| name(path)).collect()
        };
        let classes = folders(1);
        let are_sets = self.labels.is_empty() && classes.iter().all(|name| is_set_name(name));
        let outer = folders(2).into_iter().filter(|name| is_set_name(name)).collect();
        let sets: Vec<String> = if are_sets { classes.into_iter().collect() } else { outer };
        if sets.len() < 2 { Ok(()) } else { Err(several_sets(file, &sets)) }
    }

    /// A sample of WebDataset may have other images than its input, such as the segmentation `1.seg.png` beside
    /// `1.png`: the one with a plain extension is the input.
    fn keep_one_image_per_sample(&mut self) {
        let is_plain = |path: &Path| !path.file_stem().unwrap_or_default().to_string_lossy().contains('.');
        let inputs: HashSet<PathBuf> =
            self.images.iter().filter(|(path, ..)| is_plain(path)).map(|(path, ..)| stem(path)).collect();
        let before = self.images.len();
        let labels = &self.labels;
        self.images.retain(|(path, ..)| {
            is_plain(path) || !inputs.contains(&stem(path)) || sidecar(labels, path).is_none()
        });
        self.ignored += (before - self.images.len()) as u64;
    }
}

/// The label of the member beside an image. A text beside an image in a class folder is its caption.
fn sidecar<'a>(labels: &'a HashMap<PathBuf, (LabelKind, String)>, image: &Path) -> Option<&'a str> {
    let (kind, label) = labels.get(&stem(image))?;
    let in_folder = image.parent().and_then(Path::file_name).is_some();
    (*kind != LabelKind::Txt || !in_folder).then_some(label)
}

fn member_error(file: &Path, member: &Path, problem: String) -> DataError {
    DataError::Record { file: file.to_owned(), place: format!("member {}", member.display()), problem }
}

fn stem(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(name.split('.').next().unwrap_or_default())
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cache::Cache;

    /// Builds an archive from names and contents.
    pub fn tar(members: &[(&str, &[u8])]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (path, content) in members {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            builder.append_data(&mut header, path, *content).unwrap();
        }
        builder.into_inner().unwrap()
    }

    fn listed(bytes: &[u8]) -> Result<(ImageListing, bool), DataError> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.tar");
        std::fs::write(&file, bytes).unwrap();
        let ctx =
            DatasetContext { cache: Cache::at(folder.path().join("cache")), ..DatasetContext::default() };
        let mut listing = ImageListing::default();
        let (packed, _) = listing.add_tar(&file, 3, &ctx)?;
        let mut reopened = ImageListing::default();
        reopened.add_tar(&file, 3, &ctx).unwrap();
        assert_eq!(
            (reopened.len(), &reopened.extents, &reopened.class_names),
            (listing.len(), &listing.extents, &listing.class_names)
        );
        Ok((listing, packed))
    }

    fn compressed_variants(bytes: &[u8]) -> [Vec<u8>; 3] {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(bytes).unwrap();
        [bytes.to_vec(), gzip.finish().unwrap(), zstd::encode_all(bytes, 1).unwrap()]
    }

    #[test]
    fn labels_are_sidecars_or_folders_and_positions_are_exact() {
        let long = format!("train/dog/{}.jpg", "x".repeat(150));
        let bytes = tar(&[
            ("train/cat/1.jpg", b"one"),
            (&long, b"two"),
            ("0001.cls", b"7\n"),
            ("0001.seg.png", b"three"),
            ("0001.json", b"{}"),
            (".hidden.jpg", b"no"),
        ]);
        for (i, packed) in compressed_variants(&bytes).into_iter().enumerate() {
            let (listing, is_packed) = listed(&packed).unwrap();
            assert_eq!(is_packed, i > 0);
            let name = |i| listing.class_names.as_slice()[listing.class(i) as usize].as_str();
            assert_eq!((listing.len(), name(0), name(1), name(2)), (3, "cat", "dog", "7"));
            assert_eq!(listing.path(1).to_str(), Some(long.as_str()));
            let content =
                |i: usize| &bytes[listing.extents[i].start as usize..][..listing.extents[i].len as usize];
            assert_eq!((content(0), content(1), content(2)), (&b"one"[..], &b"two"[..], &b"three"[..]));
            assert_eq!(listing.ignored.0, 1);
        }
    }

    #[test]
    fn a_sample_with_several_images_has_one_input() {
        let members: [(&str, &[u8]); 8] = [
            ("0001.seg.png", b"mask"),
            ("0001.png", b"one"),
            ("0001.cls", b"7"),
            ("0002.png", b"two"),
            ("0002.cls", b"8"),
            // Names in a folder of a class may have dots.
            ("cat/a.png", b"three"),
            ("cat/a.1.png", b"four"),
            ("__MACOSX/cat/a.png", b"no"),
        ];
        let bytes = tar(&members);
        let (listing, _) = listed(&bytes).unwrap();
        let paths: Vec<_> = (0..listing.len()).map(|i| listing.path(i).to_str().unwrap()).collect();
        assert_eq!(paths, ["0001.png", "0002.png", "cat/a.png", "cat/a.1.png"]);
        assert_eq!(listing.ignored.0, 1);
        for members in [["p/train/cat/1.png", "p/test/cat/1.png"], ["train/1.png", "test/1.png"]] {
            let members = members.map(|name| (name, &b"x"[..]));
            let error = listed(&tar(&members)).unwrap_err().to_string();
            assert!(error.contains("its folders `test`, `train` are sets"), "{error}");
        }
    }

    #[test]
    fn faults_are_reported() {
        let text = |members: &[(&str, &[u8])]| listed(&tar(members)).unwrap_err().to_string();
        assert!(text(&[("a/notes.txt", b"x")]).contains("no member has an image extension"));
        assert!(text(&[("bare.jpg", b"x")]).contains("member bare.jpg: it has no class"));
        assert!(
            text(&[("a.jpg", b"x"), ("a.cls", b" ")])
                .contains("member a.cls: expected a label, a word or a number as text: it is blank")
        );
        let whole = tar(&[("a/1.jpg", &[7; 2000]), ("a/2.jpg", &[7; 2000])]);
        for packed in compressed_variants(&whole[..3600]) {
            let error = listed(&packed).unwrap_err();
            assert!(matches!(error, DataError::Truncated { .. } | DataError::Corrupt { .. }), "{error}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Archives with arbitrary header values are read or refused; every listed extent is within the file.
        #[test]
        fn mutated_archives_are_read_or_refused(
            edits in prop::collection::vec((0usize..4096, any::<u8>()), 0..6),
            cut in 0usize..4096, which in 0usize..3, inside: bool,
        ) {
            let mutate = |mut bytes: Vec<u8>| {
                for &(at, byte) in &edits {
                    let len = bytes.len();
                    bytes[at % len] = byte;
                }
                bytes.truncate(bytes.len().saturating_sub(cut.saturating_sub(3000)).max(1));
                bytes
            };
            let whole = tar(&[("a/1.jpg", &[7; 600]), ("b/2.png", &[8; 30]), ("b/2.cls", b"4")]);
            let bytes = match inside {
                true => compressed_variants(&mutate(whole))[which].clone(),
                false => mutate(compressed_variants(&whole)[which].clone()),
            };
            if let Ok((listing, false)) = listed(&bytes) {
                prop_assert!(listing.extents.iter().all(|e| e.start + e.len <= bytes.len() as u64));
            }
        }
    }
}
