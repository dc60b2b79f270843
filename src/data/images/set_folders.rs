//! Folders that are sets or parts of a dataset, and not classes: `train` and `test_images`, `part1` and `part2`.

use std::path::Path;

use crate::DataError;

/// A folder that would be a class.
pub struct ClassFolder {
    pub folders: Vec<String>,
    pub has_images: bool,
}

/// Whether a folder is named as a set of a dataset: one of the words in its name is `train`, `valid` or `test`.
pub fn is_set_name(name: &str) -> bool {
    const SETS: [&str; 14] = [
        "train",
        "training",
        "trainset",
        "valid",
        "val",
        "validation",
        "valset",
        "dev",
        "eval",
        "evaluation",
        "test",
        "testing",
        "testset",
        "holdout",
    ];
    words(name).iter().any(|word| SETS.contains(&word.as_str()))
}

/// The words of a name in lower case: runs of letters, of which each starts with a capital as in `TrainImages`.
fn words(name: &str) -> Vec<String> {
    let (mut words, mut previous) = (vec![String::new()], ' ');
    for c in name.chars() {
        if !c.is_alphabetic() || c.is_uppercase() && previous.is_lowercase() {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut().filter(|_| c.is_alphabetic()) {
            word.extend(c.to_lowercase());
        }
        previous = c;
    }
    words
}

/// A name without the number or the letter at its end: `part` of `part1`, `part_02` and `part-a`.
pub fn stem(name: &str) -> &str {
    let digits = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let letter =
        name.strip_suffix(|c: char| c.is_alphabetic()).filter(|rest| rest.ends_with(['-', '_', ' ']));
    match digits.len() < name.len() {
        true => digits.trim_end_matches(['-', '_', ' ', '.']),
        false => letter.map_or(name, |rest| rest.trim_end_matches(['-', '_', ' '])),
    }
}

/// The error for images in the folders of several sets.
pub fn several_sets(file: &Path, sets: &[String]) -> DataError {
    DataError::Table {
        file: file.to_owned(),
        place: String::new(),
        problem: format!("its folders {} are sets, and not classes", quoted(sets)),
        hint: "name the folder of each set, with a folder for each class in it: `train = [\"photos/train\"]` and \
               `valid = [\"photos/valid\"]`",
    }
}

fn quoted(names: &[String]) -> String {
    const MAX_SHOWN: usize = 4;
    let shown: Vec<String> = names.iter().take(MAX_SHOWN).map(|name| format!("`{name}`")).collect();
    shown.join(", ") + if names.len() > MAX_SHOWN { ", ..." } else { "" }
}

/// Refuses a root such as `photos/` of `photos/train/cat` and `photos/valid/cat`, or of `photos/part1/cat` and
/// `photos/part2/cat`, or of `photos/cat/train` and `photos/cat/test`. `read` lists a folder.
pub fn refuse_sets(
    root: &Path,
    names: &[String],
    read: impl Fn(&str) -> Result<ClassFolder, DataError>,
) -> Result<(), DataError> {
    let named: Vec<String> = names.iter().filter(|name| is_set_name(name)).cloned().collect();
    if named.len() > 1 && named.len() == names.len() {
        return Err(several_sets(root, &named));
    }
    // Vehicles may be trains.
    let mut sets = Vec::new();
    for name in named {
        let folder = read(&name)?;
        if !folder.folders.is_empty() && !folder.has_images {
            sets.push(name);
        }
    }
    if sets.len() > 1 {
        return Err(several_sets(root, &sets));
    }
    let Some(first) = names.first() else { return Ok(()) };
    let first_folder = read(first)?;
    let inside: Vec<String> = first_folder.folders.iter().filter(|name| is_set_name(name)).cloned().collect();
    if inside.len() > 1 && inside.len() == first_folder.folders.len() && !first_folder.has_images {
        return Err(DataError::Table {
            file: root.join(first),
            place: String::new(),
            problem: format!("the folder of a class has folders {}, which are sets", quoted(&inside)),
            hint: "make a folder for each set, with those of the classes in it, and name them in `train`, `valid` and `test`",
        });
    }
    let are_alike =
        names.len() > 1 && !stem(first).is_empty() && names.iter().all(|name| stem(name) == stem(first));
    if !are_alike || first_folder.folders.len() < 2 || first_folder.has_images {
        return Ok(());
    }
    for name in &names[1..] {
        let folder = read(name)?;
        if folder.has_images || folder.folders != first_folder.folders {
            return Ok(());
        }
    }
    Err(DataError::Table {
        file: root.to_owned(),
        place: String::new(),
        problem: format!(
            "its folders {} all have the folders {}: they are parts of a dataset, and not classes",
            quoted(names),
            quoted(&first_folder.folders)
        ),
        hint: "name each of them: `train = [\"photos/part1\", \"photos/part2\"]`",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_sets_are_found_in_names() {
        for name in [
            "train",
            "Test",
            "train_set",
            "test-set",
            "training",
            "val_images",
            "images.valid",
            "TrainImages",
            "train2017",
        ] {
            assert!(is_set_name(name), "{name}");
        }
        for name in ["trained", "cat", "valley", "contest", "latest", "device", ""] {
            assert!(!is_set_name(name), "{name}");
        }
        assert_eq!(
            ["part1", "part_02", "part-a", "cat", "7", "Class A"].map(stem),
            ["part", "part", "part", "cat", "", "Class"]
        );
    }

    fn refused(folders: &[(&str, &[&str])]) -> Option<String> {
        let names: Vec<String> = folders.iter().map(|(name, _)| name.to_string()).collect();
        let read = |name: &str| {
            let (_, inside) = folders.iter().find(|(folder, _)| *folder == name).unwrap();
            let inside: Vec<String> = inside.iter().map(|name| name.to_string()).collect();
            Ok(ClassFolder { has_images: inside.is_empty(), folders: inside })
        };
        refuse_sets(Path::new("photos"), &names, read).err().map(|error| error.to_string())
    }

    #[test]
    fn sets_and_parts_are_refused_and_classes_are_not() {
        let classes: &[&str] = &["cat", "dog"];
        let error = refused(&[("test_set", classes), ("training_set", classes), ("notes", &[])]).unwrap();
        assert!(error.contains("`test_set`, `training_set` are sets"), "{error}");
        assert!(refused(&[("test1", &[]), ("train", &[])]).unwrap().contains("are sets"));
        assert!(refused(&[("part1", classes), ("part2", classes)]).unwrap().contains("parts of a dataset"));
        let split: &[&str] = &["test", "train"];
        assert!(
            refused(&[("cat", split), ("dog", split)]).unwrap().contains("the folder of a class has folders")
        );
        for folders in [
            &[("train", classes), ("plane", classes)][..],
            &[("train", classes), ("test", &[]), ("plane", &[])],
            &[("cat", &["female", "male"]), ("dog", &["female", "male"])],
            &[("part1", classes), ("part2", &["cow"])],
            &[("class1", &[]), ("class2", &[])],
            &[("0", classes), ("1", classes)],
        ] {
            assert_eq!(refused(folders), None);
        }
    }
}
