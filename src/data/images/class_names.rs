//! Class names and their ids.

use std::collections::HashMap;

/// Class names; the id of a name is its position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClassNames {
    names: Vec<String>,
    /// Lookup only: never iterated, so no result depends on hash order.
    ids: HashMap<String, u32>,
}

impl ClassNames {
    /// These names, with the ids of their positions.
    pub fn from_names(names: &[String]) -> Self {
        let mut all = Self::default();
        for name in names {
            all.intern(name);
        }
        all
    }

    pub fn len(&self) -> usize {
        self.names.len()
    }

    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    pub fn as_slice(&self) -> &[String] {
        &self.names
    }

    /// Id of `name`; a new name gets the next id.
    pub fn intern(&mut self, name: &str) -> u32 {
        if let Some(number) = self.ids.get(name) {
            return *number;
        }
        let number = self.names.len() as u32;
        self.names.push(name.to_owned());
        self.ids.insert(name.to_owned(), number);
        number
    }

    /// Sorts the names and returns the new id for each old id. With `by_value`, sorts numerically if all names are
    /// integers.
    pub fn sort(&mut self, by_value: bool) -> Vec<u32> {
        let value = |name: &String| name.parse::<u64>().ok();
        let by_value = by_value && self.names.iter().all(|name| value(name).is_some());
        let mut sorted = std::mem::take(&mut self.names);
        sorted.sort_by(|a, b| if by_value { (value(a), a).cmp(&(value(b), b)) } else { a.cmp(b) });
        let old = std::mem::take(&mut self.ids);
        let mut new = vec![0; sorted.len()];
        for name in sorted {
            let number = self.intern(&name);
            new[old[&name] as usize] = number;
        }
        new
    }

    /// Id in `other` for each name of `self`, or the first name that `other` lacks.
    pub fn ids_in(&self, other: &ClassNames) -> Result<Vec<u32>, String> {
        self.names.iter().map(|name| other.ids.get(name).copied().ok_or_else(|| name.clone())).collect()
    }

    pub fn resident_bytes(&self) -> u64 {
        self.names.iter().map(|name| 2 * name.len() as u64 + 80).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorting_renumbers_and_numbers_sort_by_value_on_request() {
        let names = |list: &[&str]| {
            let mut names = ClassNames::default();
            for name in list {
                names.intern(name);
            }
            names
        };
        let mut words = names(&["dog", "cat", "dog", "ant"]);
        assert_eq!(words.sort(true), [2, 1, 0]);
        assert_eq!(words.as_slice(), ["ant", "cat", "dog"]);
        let mut numbers = names(&["10", "9", "100"]);
        numbers.sort(true);
        assert_eq!(numbers.as_slice(), ["9", "10", "100"]);
        numbers.sort(false);
        assert_eq!(numbers.as_slice(), ["10", "100", "9"]);
        assert_eq!(numbers.intern("9"), 2);
        assert_eq!(names(&["dog", "ant"]).ids_in(&words), Ok(vec![2, 0]));
        assert_eq!(names(&["fox"]).ids_in(&words), Err("fox".into()));
    }
}
