//! Lists images and their classes in a few bytes per image.
//!
//! All paths are concatenated in one buffer. Listing a folder opens only files without an extension, to see whether
//! they are images, and reads no file size; a table of paths and labels is read once.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Read;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use super::class_names::ClassNames;
use super::header::ImageHeader;
use super::set_folders::{ClassFolder, refuse_sets};
use crate::base::regular_file;
use crate::{DataError, labels};

/// Images in order, each in a folder or tar archive, with its class.
#[derive(Debug, Default)]
pub struct ImageListing {
    /// Folders and tar archives that contain the images.
    pub containers: Vec<PathBuf>,
    /// Concatenated image paths, relative to their containers.
    paths: Vec<u8>,
    images: Vec<ListedImage>,
    /// Extent of each image in its archive; empty if no container is an archive.
    pub extents: Vec<Extent>,
    /// Headers of images in compressed archives, parsed while indexing and consumed by the header scan; empty if no
    /// archive is compressed.
    pub headers: Vec<Option<ImageHeader>>,
    /// Classes, or the labels of which an image may have any number.
    pub class_names: ClassNames,
    /// Labels of each class id, if images may have any number of them: a class id is then a set of labels.
    label_sets: Option<Vec<Vec<u32>>>,
    /// Some labels are written as lists.
    pub has_lists: bool,
    /// Files that are not images: their count, and the first one.
    pub ignored: (u64, Option<PathBuf>),
}

#[derive(Clone, Copy, Debug)]
struct ListedImage {
    /// End of its path in `paths`; it starts at the end of the previous path.
    end: u64,
    container: u32,
    class: u32,
}

/// Where the bytes of an image are in an archive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    pub start: u64,
    pub len: u64,
    /// Whether the bytes are deflated, and how many they are then.
    pub inflated: Option<NonZeroU64>,
}

impl Extent {
    /// Bytes of the image.
    pub fn image_bytes(&self) -> u64 {
        self.inflated.map_or(self.len, NonZeroU64::get)
    }
}

/// Image file extensions, matched case-insensitively. Formats that are not read, from `avif` on, are included: such an
/// image is a bad record with a reason, and not silently ignored.
const EXTENSIONS: [&str; 23] = [
    "jpg", "jpeg", "jpe", "jfif", "png", "webp", "jif", "gif", "bmp", "dib", "tif", "tiff", "ppm", "pgm",
    "pbm", "pnm", "avif", "heic", "heif", "jxl", "jp2", "psd", "exr",
];

/// Maximum folder depth; a symlink cycle would never end.
const MAX_DEPTH: usize = 32;

impl ImageListing {
    pub fn len(&self) -> usize {
        self.images.len()
    }

    pub fn is_empty(&self) -> bool {
        self.images.is_empty()
    }

    /// Class id of image `index`.
    pub fn class(&self, index: usize) -> u32 {
        self.images[index].class
    }

    pub fn container(&self, index: usize) -> usize {
        self.images[index].container as usize
    }

    /// Path of image `index` relative to its container.
    pub fn path(&self, index: usize) -> &OsStr {
        let start = index.checked_sub(1).map_or(0, |before| self.images[before].end) as usize;
        let bytes = &self.paths[start..self.images[index].end as usize];
        // SAFETY: `add` is the only writer of `paths`. It appends the encoded bytes of one whole `OsStr` and records
        // the end, so this range is exactly what `as_encoded_bytes` returned.
        unsafe { OsStr::from_encoded_bytes_unchecked(bytes) }
    }

    /// Number of images per class.
    pub fn class_counts(&self) -> Vec<u64> {
        let mut counts = vec![0; self.class_names.len()];
        for entry in &self.images {
            match &self.label_sets {
                Some(sets) => {
                    sets[entry.class as usize].iter().for_each(|label| counts[*label as usize] += 1)
                }
                None => counts[entry.class as usize] += 1,
            }
        }
        counts
    }

    /// Labels of image `index`, if images may have any number of them.
    pub fn labels(&self, index: usize) -> Option<&[u32]> {
        Some(&self.label_sets.as_ref()?[self.images[index].class as usize])
    }

    pub fn is_multi_label(&self) -> bool {
        self.label_sets.is_some()
    }

    /// Splits every class name into labels at `separator`. Label ids are those in `known` or, without it, in the order
    /// of names. Returns a label that `known` lacks.
    pub fn split_labels(
        &mut self,
        separator: Option<&str>,
        known: Option<&ClassNames>,
    ) -> Result<(), String> {
        let mut names = ClassNames::default();
        let sets = self.class_names.as_slice().iter().map(|text| labels::split(text, separator));
        let mut sets: Vec<Vec<u32>> =
            sets.map(|set| set.iter().map(|label| names.intern(label)).collect()).collect();
        let order = match known {
            Some(known) => names.ids_in(known)?,
            None => names.sort(true),
        };
        for set in &mut sets {
            set.iter_mut().for_each(|label| *label = order[*label as usize]);
            set.sort_unstable();
            set.dedup();
        }
        self.class_names = known.cloned().unwrap_or(names);
        self.label_sets = Some(sets);
        Ok(())
    }

    pub fn resident_bytes(&self) -> u64 {
        let places: usize =
            self.containers.iter().map(|place| place.as_os_str().len() + size_of::<PathBuf>()).sum();
        let each =
            self.images.capacity() * size_of::<ListedImage>() + self.extents.capacity() * size_of::<Extent>();
        let sets = self.label_sets.iter().flatten().map(|set| size_of::<Vec<u32>>() + 4 * set.capacity());
        (places + each + self.paths.capacity() + sets.sum::<usize>()) as u64
            + self.class_names.resident_bytes()
    }

    /// Adds the folder or tar archive that contains the images added next.
    pub fn add_container(&mut self, container: &Path) {
        self.containers.push(container.to_owned());
    }

    /// Adds an image at `path`, relative to the last container.
    pub fn add(&mut self, path: &OsStr, class: u32) {
        self.paths.extend_from_slice(path.as_encoded_bytes());
        let container = self.containers.len().saturating_sub(1) as u32;
        self.images.push(ListedImage { end: self.paths.len() as u64, container, class });
    }

    /// Renumbers classes in the order of their names. With `by_value`, orders numerically if all names are integers.
    pub fn assign_class_ids(&mut self, by_value: bool) {
        let order = self.class_names.sort(by_value);
        self.images.iter_mut().for_each(|entry| entry.class = order[entry.class as usize]);
    }

    /// Renumbers classes to their ids in `names`, or returns a class that `names` lacks.
    pub fn assign_class_ids_from(&mut self, names: &ClassNames) -> Result<(), String> {
        let order = self.class_names.ids_in(names)?;
        self.images.iter_mut().for_each(|entry| entry.class = order[entry.class as usize]);
        self.class_names = names.clone();
        Ok(())
    }

    pub fn ignore(&mut self, path: PathBuf) {
        self.ignored.0 += 1;
        self.ignored.1.get_or_insert(path);
    }

    /// Adds every image below the subfolders of `root`; each subfolder is a class, in name order.
    pub fn add_folders(&mut self, root: &Path) -> Result<(), DataError> {
        let mut classes = Vec::new();
        for entry in sorted_entries(root)? {
            match entry.is_folder {
                true => classes.push(entry.name),
                false => self.ignore(root.join(entry.name)),
            }
        }
        if classes.is_empty() {
            return Err(DataError::Table {
                file: root.to_owned(),
                place: String::new(),
                problem: "expected a folder of images for each class, and it has no folder".into(),
                hint: "move the images of each class into a folder of its own, \
                       or name a table (.csv) of paths and labels",
            });
        }
        if let [only] = &classes[..] {
            refuse_folder_of_classes(root, only)?;
        }
        let names: Vec<String> = classes.iter().filter_map(|name| name.to_str().map(str::to_owned)).collect();
        refuse_sets(root, &names, |name| class_folder(root, name))?;
        self.add_container(root);
        for name in classes {
            let before = self.len();
            let class = self.class_names.intern(&name.to_string_lossy());
            self.add_recursive(root, Path::new(&name), class, 0)?;
            if self.len() == before {
                return Err(DataError::Table {
                    file: root.join(&name),
                    place: String::new(),
                    problem: "the folder is a class, and no file in it has an image extension".into(),
                    hint: "add images of this class, or move the folder elsewhere",
                });
            }
        }
        Ok(())
    }

    /// Adds every image below a folder, or a single image, with the first class: they have no labels.
    pub fn add_unlabelled(&mut self, path: &Path) -> Result<(), DataError> {
        if path.is_dir() {
            self.add_container(path);
            return self.add_recursive(path, Path::new(""), 0, 0);
        }
        let (folder, name) =
            (path.parent().unwrap_or(Path::new("")), path.file_name().unwrap_or(path.as_os_str()));
        self.add_container(folder);
        self.add(name, 0);
        Ok(())
    }

    fn add_recursive(
        &mut self,
        root: &Path,
        relative: &Path,
        class: u32,
        depth: usize,
    ) -> Result<(), DataError> {
        let folder = root.join(relative);
        if depth > MAX_DEPTH {
            let why = format!(
                "its folders are nested more than {MAX_DEPTH} deep; a symbolic link may form a cycle"
            );
            return Err(DataError::NoSamples { set: format!("`{}`", folder.display()), why });
        }
        for entry in sorted_entries(&folder)? {
            let path = relative.join(&entry.name);
            if entry.is_folder {
                self.add_recursive(root, &path, class, depth + 1)?;
            } else if is_image_file(root, &path) {
                self.add(path.as_os_str(), class);
            } else {
                self.ignore(root.join(path));
            }
        }
        Ok(())
    }
}

/// Refuses a root whose only folder contains several folders and no image, such as the parent of `images/cat` and
/// `images/dog`: its only class would be `images`.
fn refuse_folder_of_classes(root: &Path, only: &OsStr) -> Result<(), DataError> {
    let inside = sorted_entries(&root.join(only))?;
    let folders = inside.iter().filter(|entry| entry.is_folder).count();
    let images = inside.iter().any(|entry| !entry.is_folder && is_image(Path::new(&entry.name)));
    if folders < 2 || images {
        return Ok(());
    }
    Err(DataError::Table {
        file: root.to_owned(),
        place: String::new(),
        problem: format!(
            "its only folder, `{}`, has {folders} folders and no image: all images would be of one class",
            only.to_string_lossy()
        ),
        hint: "name the folder that contains the folders of the classes",
    })
}

/// What a folder contains.
fn class_folder(root: &Path, name: &str) -> Result<ClassFolder, DataError> {
    let inside = sorted_entries(&root.join(name))?;
    let has_images = inside.iter().any(|entry| !entry.is_folder && is_image(Path::new(&entry.name)));
    let folders = inside.iter().filter(|entry| entry.is_folder);
    let folders = folders.map(|entry| entry.name.to_string_lossy().into_owned()).collect();
    Ok(ClassFolder { folders, has_images })
}

/// Calls `visit` with the path, relative to `root`, of every image that [`ImageListing::add_folders`] adds, in the
/// same order. Holds the names of one folder at a time.
pub fn walk_image_folder(
    root: &Path,
    visit: &mut dyn FnMut(&Path) -> Result<(), DataError>,
) -> Result<(), DataError> {
    for entry in sorted_entries(root)?.into_iter().filter(|entry| entry.is_folder) {
        walk_recursive(root, Path::new(&entry.name), 0, visit)?;
    }
    Ok(())
}

fn walk_recursive(
    root: &Path,
    relative: &Path,
    depth: usize,
    visit: &mut dyn FnMut(&Path) -> Result<(), DataError>,
) -> Result<(), DataError> {
    // Opening the dataset refused deeper folders.
    for entry in sorted_entries(&root.join(relative))?.into_iter().filter(|_| depth <= MAX_DEPTH) {
        let path = relative.join(&entry.name);
        match entry.is_folder {
            true => walk_recursive(root, &path, depth + 1, visit)?,
            false if is_image_file(root, &path) => visit(&path)?,
            false => {}
        }
    }
    Ok(())
}

/// Whether the file has an image extension.
pub fn is_image(path: &Path) -> bool {
    let extension = path.extension().and_then(OsStr::to_str);
    extension.is_some_and(|ending| EXTENSIONS.iter().any(|known| known.eq_ignore_ascii_case(ending)))
}

/// Whether a file in a folder is an image: by its extension or, if it has none, by its first bytes.
fn is_image_file(root: &Path, path: &Path) -> bool {
    if path.extension().is_some() {
        return is_image(path);
    }
    let mut start = [0; 12];
    let read = regular_file::open(&root.join(path)).and_then(|mut file| file.read_exact(&mut start));
    read.is_ok() && ImageHeader::is_known_format(&start)
}

/// Whether the file or folder is metadata and not data, such as `.DS_Store`, an editor's backup, or what macOS adds to
/// archives.
pub fn is_hidden(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b".") || name == "__MACOSX"
}

struct FolderEntry {
    name: OsString,
    is_folder: bool,
}

/// Visible entries of a folder, sorted by name. Only symlinks cost a `stat`: the directory entry holds the file type.
fn sorted_entries(folder: &Path) -> Result<Vec<FolderEntry>, DataError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(DataError::io(folder))? {
        let entry = entry.map_err(DataError::io(folder))?;
        let name = entry.file_name();
        if is_hidden(&name) {
            continue;
        }
        let kind = entry.file_type().map_err(DataError::io(folder))?;
        let is_folder = if kind.is_symlink() { entry.path().is_dir() } else { kind.is_dir() };
        found.push(FolderEntry { name, is_folder });
    }
    found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }

    fn listed(root: &Path) -> Result<ImageListing, DataError> {
        let mut listing = ImageListing::default();
        listing.add_folders(root)?;
        listing.assign_class_ids(false);
        Ok(listing)
    }

    #[test]
    fn folders_are_classes_in_the_order_of_their_names() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for path in
            ["dog/2.JPG", "dog/10.jpeg", "cat/deep/er/x.Png", "cat/a.webp", "cat/notes.txt", "readme.md"]
        {
            touch(&root.join(path));
        }
        for hidden in ["cat/.DS_Store", ".git/x.jpg", "dog/._2.JPG", "__MACOSX/dog/2.JPG"] {
            touch(&root.join(hidden));
        }
        let listing = listed(root).unwrap();
        let of = |i: usize| (listing.path(i).to_str().unwrap().to_owned(), listing.class(i));
        let all: Vec<_> = (0..listing.len()).map(of).collect();
        let expected = [("cat/a.webp", 0), ("cat/deep/er/x.Png", 0), ("dog/10.jpeg", 1), ("dog/2.JPG", 1)];
        assert_eq!(all, expected.map(|(path, class)| (path.to_owned(), class)));
        assert_eq!(listing.class_names.as_slice(), ["cat", "dog"]);
        assert_eq!((listing.class_counts(), listing.ignored.0), (vec![2, 2], 2));
        assert_eq!(listing.ignored.1.as_deref(), Some(root.join("readme.md").as_path()));
    }

    #[test]
    fn files_without_an_extension_are_known_by_their_content() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for class in ["a", "b"] {
            touch(&root.join(class).join("x.png"));
        }
        fs::write(root.join("a/one"), b"\x89PNG\r\n\x1a\n----").unwrap();
        fs::write(root.join("a/two"), b"just some text").unwrap();
        let listing = listed(root).unwrap();
        let paths: Vec<_> = (0..listing.len()).map(|i| listing.path(i).to_str().unwrap()).collect();
        assert_eq!((paths, listing.ignored.0), (vec!["a/one", "a/x.png", "b/x.png"], 1));
    }

    #[test]
    fn one_folder_too_high_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        touch(&folder.path().join("images/cat/a.jpg"));
        touch(&folder.path().join("images/dog/b.jpg"));
        let error = listed(folder.path()).unwrap_err();
        assert!(error.to_string().contains("all images would be of one class"), "{error}");
        assert_eq!(listed(&folder.path().join("images")).unwrap().class_names.as_slice(), ["cat", "dog"]);
    }

    #[test]
    fn sets_are_no_classes() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for path in ["train/cat/a.jpg", "train/dog/a.jpg", "Valid/cat/a.jpg", "test/dog/a.jpg"] {
            touch(&root.join(path));
        }
        let error = listed(root).unwrap_err();
        assert!(error.to_string().contains("its folders `Valid`, `test`, `train` are sets"), "{error}");
        assert!(error.hint().unwrap().contains("photos/valid"));
        assert_eq!(listed(&root.join("train")).unwrap().class_names.as_slice(), ["cat", "dog"]);
        // Vehicles may be trains, and classes may have folders.
        let vehicles = root.join("vehicles");
        for path in ["train/red/a.jpg", "plane/red/a.jpg", "test/a.jpg"] {
            touch(&vehicles.join(path));
        }
        assert_eq!(listed(&vehicles).unwrap().len(), 3);
    }

    #[test]
    fn a_folder_without_images_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        touch(&root.join("a.jpg"));
        let text = listed(root).unwrap_err().to_string();
        assert!(text.contains("expected a folder of images for each class, and it has no folder"), "{text}");
        touch(&root.join("cat/a.jpg"));
        fs::create_dir(root.join("dog")).unwrap();
        let text = listed(root).unwrap_err().to_string();
        assert!(text.contains("dog") && text.contains("no file in it has an image extension"), "{text}");
        assert!(matches!(listed(&root.join("none")).unwrap_err(), DataError::Io { .. }));
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_and_a_circle_ends() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        touch(&root.join("real/a.jpg"));
        touch(&root.join("set/cat/b.jpg"));
        std::os::unix::fs::symlink(root.join("real"), root.join("set/cat/more")).unwrap();
        assert_eq!(listed(&root.join("set")).unwrap().len(), 2);
        std::os::unix::fs::symlink(root.join("set"), root.join("set/cat/back")).unwrap();
        assert!(listed(&root.join("set")).is_err());
    }
}
