//! Names of classes and their numbers.

use std::collections::HashMap;

/// Names, each with the number of its place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    list: Vec<String>,
    /// Only looked up, never gone through: no result depends on its order.
    numbers: HashMap<String, u32>,
}

impl Names {
    pub fn len(&self) -> usize {
        self.list.len()
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub fn list(&self) -> &[String] {
        &self.list
    }

    /// The number of `name`, a new one where it was not met before.
    pub fn number(&mut self, name: &str) -> u32 {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        let number = self.list.len() as u32;
        self.list.push(name.to_owned());
        self.numbers.insert(name.to_owned(), number);
        number
    }

    /// Puts the names in order, by value where all are whole numbers and `by_value`; gives the new number of
    /// each old one.
    pub fn sort(&mut self, by_value: bool) -> Vec<u32> {
        let value = |name: &String| name.parse::<u64>().ok();
        let by_value = by_value && self.list.iter().all(|name| value(name).is_some());
        let mut sorted = std::mem::take(&mut self.list);
        sorted.sort_by(|a, b| if by_value { (value(a), a).cmp(&(value(b), b)) } else { a.cmp(b) });
        let old = std::mem::take(&mut self.numbers);
        let mut new = vec![0; sorted.len()];
        for name in sorted {
            let number = self.number(&name);
            new[old[&name] as usize] = number;
        }
        new
    }

    /// The number that each of these has in `other`, or the first that is not there.
    pub fn numbers_in(&self, other: &Names) -> Result<Vec<u32>, String> {
        self.list.iter().map(|name| other.numbers.get(name).copied().ok_or_else(|| name.clone())).collect()
    }

    pub fn bytes(&self) -> u64 {
        self.list.iter().map(|name| 2 * name.len() as u64 + 80).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorting_renumbers_and_numbers_sort_by_value_where_wished() {
        let names = |list: &[&str]| {
            let mut names = Names::default();
            for name in list {
                names.number(name);
            }
            names
        };
        let mut words = names(&["dog", "cat", "dog", "ant"]);
        assert_eq!(words.sort(true), [2, 1, 0]);
        assert_eq!(words.list(), ["ant", "cat", "dog"]);
        let mut numbers = names(&["10", "9", "100"]);
        numbers.sort(true);
        assert_eq!(numbers.list(), ["9", "10", "100"]);
        numbers.sort(false);
        assert_eq!(numbers.list(), ["10", "100", "9"]);
        assert_eq!(numbers.number("9"), 2);
        assert_eq!(names(&["dog", "ant"]).numbers_in(&words), Ok(vec![2, 0]));
        assert_eq!(names(&["fox"]).numbers_in(&words), Err("fox".into()));
    }
}
