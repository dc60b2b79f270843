//! Which pictures there are and what class each has, in a few bytes a picture.
//!
//! Names lie end to end in one buffer. A folder of classes is listed without opening a file or asking for its
//! size; a table of paths and labels is read once.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use super::header::Header;
use super::names::Names;
use crate::data::DataError;

/// Pictures in order, each in a folder or a tar file, with its class.
#[derive(Debug, Default)]
pub struct Listing {
    /// Folders and tar files that pictures lie in.
    pub places: Vec<PathBuf>,
    /// Paths of the pictures below their places, end to end.
    paths: Vec<u8>,
    pictures: Vec<Entry>,
    /// Where each picture lies in its tar file; empty where no place is a tar file.
    pub spans: Vec<Extent>,
    /// The headers of pictures in packed tar files, until they were looked at; empty where no place is packed.
    pub heads: Vec<Option<Header>>,
    pub names: Names,
    /// Files that are no pictures: how many, and the first.
    pub ignored: (u64, Option<PathBuf>),
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Where its path ends in `paths`; it begins where the one before it ends.
    end: u64,
    place: u32,
    class: u32,
}

/// Bytes of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    pub start: u64,
    pub len: u64,
}

/// What a picture's name ends with, in any case.
const ENDINGS: [&str; 7] = ["jpg", "jpeg", "jpe", "jfif", "png", "webp", "jif"];

/// Folders within folders that are followed; a link that leads back would never end.
const MAX_DEPTH: usize = 32;

impl Listing {
    pub fn len(&self) -> usize {
        self.pictures.len()
    }

    pub fn is_empty(&self) -> bool {
        self.pictures.is_empty()
    }

    /// The number of the class of picture `index`.
    pub fn class(&self, index: usize) -> u32 {
        self.pictures[index].class
    }

    pub fn place(&self, index: usize) -> usize {
        self.pictures[index].place as usize
    }

    /// The path of picture `index` below its place.
    pub fn path(&self, index: usize) -> &OsStr {
        let start = index.checked_sub(1).map_or(0, |before| self.pictures[before].end) as usize;
        let bytes = &self.paths[start..self.pictures[index].end as usize];
        // SAFETY: `add` put the encoded bytes of one whole path between these two ends.
        unsafe { OsStr::from_encoded_bytes_unchecked(bytes) }
    }

    /// Pictures of each class.
    pub fn balance(&self) -> Vec<u64> {
        let mut counts = vec![0; self.names.len()];
        self.pictures.iter().for_each(|entry| counts[entry.class as usize] += 1);
        counts
    }

    pub fn bytes(&self) -> u64 {
        let places: usize =
            self.places.iter().map(|place| place.as_os_str().len() + size_of::<PathBuf>()).sum();
        let each =
            self.pictures.capacity() * size_of::<Entry>() + self.spans.capacity() * size_of::<Extent>();
        (places + each + self.paths.capacity()) as u64 + self.names.bytes()
    }

    /// A folder or tar file for the pictures that are added next.
    pub fn open_place(&mut self, place: &Path) {
        self.places.push(place.to_owned());
    }

    /// Adds a picture at `path` below the last place.
    pub fn add(&mut self, path: &OsStr, class: u32) {
        self.paths.extend_from_slice(path.as_encoded_bytes());
        let place = self.places.len().saturating_sub(1) as u32;
        self.pictures.push(Entry { end: self.paths.len() as u64, place, class });
    }

    /// Classes get the numbers that their names have in order: by value where all are numbers and `by_value`.
    pub fn number_classes(&mut self, by_value: bool) {
        let order = self.names.sort(by_value);
        self.pictures.iter_mut().for_each(|entry| entry.class = order[entry.class as usize]);
    }

    /// Gives the classes the numbers they have in `names`, or the name of one that is not there.
    pub fn number_classes_as(&mut self, names: &Names) -> Result<(), String> {
        let order = self.names.numbers_in(names)?;
        self.pictures.iter_mut().for_each(|entry| entry.class = order[entry.class as usize]);
        self.names = names.clone();
        Ok(())
    }

    pub fn ignore(&mut self, path: PathBuf) {
        self.ignored.0 += 1;
        self.ignored.1.get_or_insert(path);
    }

    /// Adds every picture below the folders of `root`, each folder a class, by the order of their names.
    pub fn add_folders(&mut self, root: &Path) -> Result<(), DataError> {
        let mut classes = Vec::new();
        for entry in sorted(root)? {
            match entry.folder {
                true => classes.push(entry.name),
                false => self.ignore(root.join(entry.name)),
            }
        }
        if classes.is_empty() {
            let why = "there is no folder in it; each class is a folder of pictures".into();
            return Err(DataError::NoSamples { set: format!("`{}`", root.display()), why });
        }
        self.open_place(root);
        for name in classes {
            let before = self.len();
            let class = self.names.number(&name.to_string_lossy());
            self.add_below(root, Path::new(&name), class, 0)?;
            if self.len() == before {
                let set = format!("class folder `{}`", root.join(&name).display());
                return Err(DataError::NoSamples {
                    set,
                    why: "no file in it is named as a picture is".into(),
                });
            }
        }
        Ok(())
    }

    fn add_below(&mut self, root: &Path, below: &Path, class: u32, depth: usize) -> Result<(), DataError> {
        let folder = root.join(below);
        if depth > MAX_DEPTH {
            let why = format!("folders lie in it {MAX_DEPTH} deep; a link may lead back");
            return Err(DataError::NoSamples { set: format!("`{}`", folder.display()), why });
        }
        for entry in sorted(&folder)? {
            let path = below.join(&entry.name);
            if entry.folder {
                self.add_below(root, &path, class, depth + 1)?;
            } else if is_picture(Path::new(&entry.name)) {
                self.add(path.as_os_str(), class);
            } else {
                self.ignore(root.join(path));
            }
        }
        Ok(())
    }
}

/// Calls `visit` with the path below `root` of every image that [`Listing::add_folders`] adds, in the same order.
/// Holds the names of one folder at a time.
pub fn each_in_folder(
    root: &Path,
    visit: &mut dyn FnMut(&Path) -> Result<(), DataError>,
) -> Result<(), DataError> {
    for entry in sorted(root)?.into_iter().filter(|entry| entry.folder) {
        each_below(root, Path::new(&entry.name), 0, visit)?;
    }
    Ok(())
}

fn each_below(
    root: &Path,
    below: &Path,
    depth: usize,
    visit: &mut dyn FnMut(&Path) -> Result<(), DataError>,
) -> Result<(), DataError> {
    // Deeper ones were refused when the set was opened.
    for entry in sorted(&root.join(below))?.into_iter().filter(|_| depth <= MAX_DEPTH) {
        let path = below.join(&entry.name);
        match entry.folder {
            true => each_below(root, &path, depth + 1, visit)?,
            false if is_picture(&path) => visit(&path)?,
            false => {}
        }
    }
    Ok(())
}

/// Whether a file is named as a picture is.
pub fn is_picture(path: &Path) -> bool {
    let ending = path.extension().and_then(OsStr::to_str);
    ending.is_some_and(|ending| ENDINGS.iter().any(|known| known.eq_ignore_ascii_case(ending)))
}

/// Whether nobody means this file, as `.DS_Store` and what an editor leaves.
pub fn is_hidden(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b".")
}

struct Found {
    name: std::ffi::OsString,
    folder: bool,
}

/// What is in a folder and not hidden, by name. Only links are looked at more closely: the folder itself says
/// what is a file.
fn sorted(folder: &Path) -> Result<Vec<Found>, DataError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(DataError::io(folder))? {
        let entry = entry.map_err(DataError::io(folder))?;
        let name = entry.file_name();
        if is_hidden(&name) {
            continue;
        }
        let kind = entry.file_type().map_err(DataError::io(folder))?;
        let folder = if kind.is_symlink() { entry.path().is_dir() } else { kind.is_dir() };
        found.push(Found { name, folder });
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

    fn listed(root: &Path) -> Result<Listing, DataError> {
        let mut listing = Listing::default();
        listing.add_folders(root)?;
        listing.number_classes(false);
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
        for hidden in ["cat/.DS_Store", ".git/x.jpg", "dog/._2.JPG"] {
            touch(&root.join(hidden));
        }
        let listing = listed(root).unwrap();
        let of = |i: usize| (listing.path(i).to_str().unwrap().to_owned(), listing.class(i));
        let all: Vec<_> = (0..listing.len()).map(of).collect();
        let wanted = [("cat/a.webp", 0), ("cat/deep/er/x.Png", 0), ("dog/10.jpeg", 1), ("dog/2.JPG", 1)];
        assert_eq!(all, wanted.map(|(path, class)| (path.to_owned(), class)));
        assert_eq!(listing.names.list(), ["cat", "dog"]);
        assert_eq!((listing.balance(), listing.ignored.0), (vec![2, 2], 2));
        assert_eq!(listing.ignored.1.as_deref(), Some(root.join("readme.md").as_path()));
    }

    #[test]
    fn a_folder_without_pictures_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        touch(&root.join("a.jpg"));
        let text = listed(root).unwrap_err().to_string();
        assert!(text.contains("no folder in it"), "{text}");
        touch(&root.join("cat/a.jpg"));
        fs::create_dir(root.join("dog")).unwrap();
        let text = listed(root).unwrap_err().to_string();
        assert!(text.contains("dog") && text.contains("no file in it is named"), "{text}");
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
