//! What templates can call: filters, functions and the methods of Python's strings and dictionaries.

use std::cmp::Ordering;

use super::expression::Arguments;
use super::value::{Builder, Made, Value, fault};
use super::{Machine, Result};

/// Numbers that `range` gives, at most.
const MOST_NUMBERS: i64 = 100_000;

impl<'t> Machine<'t> {
    pub fn function(&mut self, name: &str, given: &Arguments<'t>) -> Made<'t> {
        match name {
            "range" => {
                let (start, stop) = match (given.int(0, ""), given.int(1, "")) {
                    (Some(stop), None) => (0, stop),
                    (Some(start), Some(stop)) => (start, stop),
                    _ => return fault("`range` takes whole numbers"),
                };
                let step = given.int(2, "").unwrap_or(1);
                if step == 0 {
                    return fault("`range` cannot step by 0");
                }
                let distance = if step > 0 { stop.saturating_sub(start) } else { start.saturating_sub(stop) };
                let count = distance.max(0).saturating_add(step.saturating_abs() - 1) / step.saturating_abs();
                if count > MOST_NUMBERS {
                    return fault(format!("`range` gives at most {MOST_NUMBERS} numbers"));
                }
                self.meter.room(count as usize * size_of::<Value>())?;
                self.meter.list((0..count).map(|i| Value::Int(start + i * step)).collect())
            }
            "namespace" | "dict" => {
                let mut entries = Vec::new();
                if let Some(Value::Map(map)) = given.places.first() {
                    self.meter.room(map.entries.len() * 2 * size_of::<Value>())?;
                    entries.extend(map.entries.iter().cloned());
                }
                for (name, value) in &given.names {
                    entries.push((self.meter.text(*name)?, value.clone()));
                }
                if name == "dict" {
                    return self.meter.map(entries);
                }
                match entries.iter().any(|(_, value)| value.refers()) {
                    true => fault("a namespace cannot hold a namespace, a macro or a loop"),
                    false => self.meter.space(entries),
                }
            }
            "raise_exception" => fault(given.str(0, "message").unwrap_or_default()),
            _ => fault(format!("there is no function `{name}`")),
        }
    }

    pub fn method(&mut self, value: &Value<'t>, name: &str, given: &Arguments<'t>) -> Made<'t> {
        let unknown = || fault(format!("there is no method `{name}` of {}", value.kind()));
        match value {
            Value::Text(_) => self.text_method(value, name, given),
            Value::Map(map) => match (name, &given.places[..]) {
                ("get", [key]) => Ok(map.get(key, &self.meter)?.cloned().unwrap_or(Value::None)),
                ("get", [key, other]) => Ok(map.get(key, &self.meter)?.unwrap_or(other).clone()),
                ("keys" | "values" | "items", []) => self.apply(name, value, given),
                _ => match self.attribute(value, name)? {
                    Value::Macro(_) => fault(format!("`{name}` in a map cannot be called")),
                    _ => unknown(),
                },
            },
            Value::Loop(state) if name == "cycle" && !given.places.is_empty() => {
                Ok(given.places[state.at % given.places.len()].clone())
            }
            Value::Undefined => fault(format!("`{name}` is called of something that is undefined")),
            _ => unknown(),
        }
    }

    fn text_method(&mut self, value: &Value<'t>, name: &str, given: &Arguments<'t>) -> Made<'t> {
        let text = value.str().unwrap_or_default();
        let (first, second) = (given.str(0, ""), given.str(1, ""));
        let cut = |c: char| first.map_or(c.is_whitespace(), |these| these.contains(c));
        self.meter.work(text.len() / 16)?;
        match (name, first, second) {
            ("strip", ..) => self.meter.text(text.trim_matches(cut)),
            ("lstrip", ..) => self.meter.text(text.trim_start_matches(cut)),
            ("rstrip", ..) => self.meter.text(text.trim_end_matches(cut)),
            ("upper" | "lower" | "title" | "capitalize", ..) => self.apply(name, value, given),
            ("startswith", Some(start), _) => Ok(Value::Bool(text.starts_with(start))),
            ("endswith", Some(end), _) => Ok(Value::Bool(text.ends_with(end))),
            ("removeprefix", Some(start), _) => self.meter.text(text.strip_prefix(start).unwrap_or(text)),
            ("removesuffix", Some(end), _) => self.meter.text(text.strip_suffix(end).unwrap_or(text)),
            ("replace", Some(from), Some(to)) => self.replaced(text, from, to, given.int(2, "count")),
            ("find", Some(part), _) => {
                let at = text.find(part).map(|at| text[..at].chars().count() as i64);
                Ok(Value::Int(at.unwrap_or(-1)))
            }
            ("count", Some(part), _) => Ok(Value::Int(text.matches(part).count() as i64)),
            ("split" | "rsplit", ..) => self.split(text, first, given.int(1, "maxsplit"), name == "rsplit"),
            ("splitlines", ..) => self.texts(text.lines()),
            ("join", ..) => match given.places.first() {
                Some(Value::List(list)) => self.joined(&list.items, text),
                _ => fault("`join` takes a list"),
            },
            ("isdigit" | "isnumeric", ..) => {
                Ok(Value::Bool(!text.is_empty() && text.chars().all(char::is_numeric)))
            }
            ("isspace", ..) => Ok(Value::Bool(!text.is_empty() && text.chars().all(char::is_whitespace))),
            _ => fault(format!("there is no method `{name}` of a string")),
        }
    }

    /// A list of texts.
    fn texts<'a>(&mut self, texts: impl Iterator<Item = &'a str>) -> Made<'t> {
        let mut all = Vec::new();
        for text in texts {
            all.push(self.meter.text(text)?);
        }
        self.meter.list(all)
    }

    fn split(&mut self, text: &str, at: Option<&str>, most: Option<i64>, from_end: bool) -> Made<'t> {
        let parts = most.and_then(|n| usize::try_from(n).ok()).map_or(usize::MAX, |n| n.saturating_add(1));
        match (at, from_end) {
            (Some(""), _) => fault("a text cannot be split at nothing"),
            (Some(at), false) => self.texts(text.splitn(parts, at)),
            (Some(at), true) => {
                let mut found: Vec<&str> = text.rsplitn(parts, at).collect();
                found.reverse();
                self.texts(found.into_iter())
            }
            (None, _) => self.texts(text.split_whitespace()),
        }
    }

    fn replaced(&mut self, text: &str, from: &str, to: &str, most: Option<i64>) -> Made<'t> {
        let most = most.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
        let count = text.matches(from).count().min(most);
        self.meter.room(text.len().saturating_add(count.saturating_mul(to.len())))?;
        self.meter.text(text.replacen(from, to, most))
    }

    fn joined(&mut self, items: &[Value<'t>], between: &str) -> Made<'t> {
        let mut text = Builder::new(&self.meter)?;
        for (i, item) in items.iter().enumerate() {
            text.push(if i > 0 { between } else { "" })?;
            text.show(item, false)?;
        }
        Ok(text.done())
    }

    pub fn apply(&mut self, name: &str, value: &Value<'t>, given: &Arguments<'t>) -> Made<'t> {
        match name {
            "trim" | "upper" | "lower" | "capitalize" | "title" | "replace" | "indent" | "split"
            | "lines" | "escape" | "e" => self.text_filter(name, value, given),
            "safe" => Ok(value.clone()),
            "string" => {
                let mut text = Builder::new(&self.meter)?;
                text.show(value, false)?;
                Ok(text.done())
            }
            "tojson" => {
                let mut text = Builder::new(&self.meter)?;
                let indent = given.int(0, "indent").and_then(|n| usize::try_from(n).ok());
                text.json(value, indent, 0)?;
                Ok(text.done())
            }
            "length" | "count" => match value {
                Value::Text(_) => {
                    let text = value.str().unwrap_or_default();
                    self.meter.work(text.len() / 16)?;
                    Ok(Value::Int(text.chars().count() as i64))
                }
                Value::List(list) => Ok(Value::Int(list.items.len() as i64)),
                Value::Map(map) => Ok(Value::Int(map.entries.len() as i64)),
                Value::Undefined => Ok(Value::Int(0)),
                other => fault(format!("{} has no length", other.kind())),
            },
            "default" | "d" => {
                let falsy = given.get(1, "boolean").is_some_and(Value::is_true) && !value.is_true();
                match matches!(value, Value::Undefined) || falsy {
                    true => given
                        .get(0, "default_value")
                        .map_or_else(|| self.meter.text(""), |other| Ok(other.clone())),
                    false => Ok(value.clone()),
                }
            }
            "bool" => Ok(Value::Bool(value.is_true())),
            "int" | "float" | "abs" | "round" => self.number_filter(name, value, given),
            "attr" => self.attribute(value, given.str(0, "name").unwrap_or_default()),
            "items" | "keys" | "values" | "dictsort" => self.map_filter(name, value),
            _ => self.list_filter(name, value, given),
        }
    }

    fn text_filter(&mut self, name: &str, value: &Value<'t>, given: &Arguments<'t>) -> Made<'t> {
        let mut shown = Builder::new(&self.meter)?;
        shown.show(value, false)?;
        let text = shown.into_string();
        // No letter grows to more than three when its case changes, and none to more than five when it is escaped.
        self.meter.room(6 * text.len())?;
        let capital = |word: &str| {
            let mut letters = word.chars();
            let first = letters.next().map(|c| c.to_uppercase().to_string()).unwrap_or_default();
            first + &letters.as_str().to_lowercase()
        };
        match name {
            "upper" => self.meter.text(text.to_uppercase()),
            "lower" => self.meter.text(text.to_lowercase()),
            "capitalize" => self.meter.text(capital(&text)),
            "title" => {
                let words = text.split_inclusive(|c: char| !c.is_alphanumeric());
                self.meter.text(words.map(capital).collect::<String>())
            }
            "trim" => match given.str(0, "chars") {
                Some(these) => self.meter.text(text.trim_matches(|c| these.contains(c))),
                None => self.meter.text(text.trim()),
            },
            "replace" => match (given.str(0, "old"), given.str(1, "new")) {
                (Some(from), Some(to)) => self.replaced(&text, from, to, given.int(2, "count")),
                _ => fault("`replace` takes two texts"),
            },
            "split" => self.split(&text, given.str(0, ""), given.int(1, ""), false),
            "lines" => self.texts(text.lines()),
            "escape" | "e" => {
                let mut escaped = Builder::new(&self.meter)?;
                for part in text.split_inclusive(['&', '<', '>', '"', '\'']) {
                    let plain = part.trim_end_matches(['&', '<', '>', '"', '\'']);
                    escaped.push(plain)?;
                    escaped.push(match &part[plain.len()..] {
                        "&" => "&amp;",
                        "<" => "&lt;",
                        ">" => "&gt;",
                        "\"" => "&#34;",
                        "'" => "&#39;",
                        _ => "",
                    })?;
                }
                Ok(escaped.done())
            }
            _ => {
                let width = given.int(0, "width").unwrap_or(4).max(0) as usize;
                let first = given.get(1, "first").is_some_and(Value::is_true);
                let blank = given.get(2, "blank").is_some_and(Value::is_true);
                self.meter.room(width)?;
                let (spaces, mut indented) = (" ".repeat(width), Builder::new(&self.meter)?);
                for (i, line) in text.split('\n').enumerate() {
                    indented.push(if i > 0 { "\n" } else { "" })?;
                    if (i > 0 || first) && (blank || !line.is_empty()) {
                        indented.push(&spaces)?;
                    }
                    indented.push(line)?;
                }
                Ok(indented.done())
            }
        }
    }

    fn number_filter(&mut self, name: &str, value: &Value<'t>, given: &Arguments<'t>) -> Made<'t> {
        let parsed = value.str().and_then(|text| text.trim().parse::<f64>().ok());
        let number = value.float().or(parsed);
        let other = given.get(0, "default").filter(|_| matches!(name, "int" | "float"));
        let Some(number) = number else {
            return match other {
                Some(other) => Ok(other.clone()),
                None => Ok(if name == "int" { Value::Int(0) } else { Value::Float(0.0) }),
            };
        };
        Ok(match (name, value) {
            ("int", Value::Int(_)) | ("round", Value::Int(_)) => value.clone(),
            ("int", Value::Text(_)) => match value.str().and_then(|text| text.trim().parse().ok()) {
                Some(n) => Value::Int(n),
                None => Value::Int(number as i64),
            },
            ("int", _) => Value::Int(number as i64),
            ("abs", Value::Int(n)) => match n.checked_abs() {
                Some(n) => Value::Int(n),
                None => return fault("the number is too large"),
            },
            ("abs", _) => Value::Float(number.abs()),
            ("round", _) => {
                let scale = 10f64.powi(given.int(0, "precision").unwrap_or(0).clamp(-300, 300) as i32);
                Value::Float((number * scale).round_ties_even() / scale)
            }
            _ => Value::Float(number),
        })
    }

    fn map_filter(&mut self, name: &str, value: &Value<'t>) -> Made<'t> {
        let Value::Map(map) = value else {
            return fault(format!("`{name}` takes a map, and this is {}", value.kind()));
        };
        self.meter.room(map.entries.len() * size_of::<Value>())?;
        let mut all = Vec::new();
        for (key, value) in &map.entries {
            all.push(match name {
                "keys" => key.clone(),
                "values" => value.clone(),
                _ => self.meter.list(vec![key.clone(), value.clone()])?,
            });
        }
        if name == "dictsort" {
            all = self.sorted(all)?;
        }
        self.meter.list(all)
    }

    /// Sorted by [`Value::order`], which may fail: the sorts of the standard library panic where an order turns out to
    /// be none.
    fn sorted(&mut self, mut items: Vec<Value<'t>>) -> Result<Vec<Value<'t>>> {
        if items.len() < 2 {
            return Ok(items);
        }
        let second = self.sorted(items.split_off(items.len() / 2))?;
        let first = self.sorted(items)?;
        let (mut merged, mut second) =
            (Vec::with_capacity(first.len() + second.len()), second.into_iter().peekable());
        for item in first {
            while let Some(other) = second.peek() {
                if other.order(&item, &self.meter)? != Ordering::Less {
                    break;
                }
                merged.extend(second.next());
            }
            merged.push(item);
        }
        merged.extend(second);
        Ok(merged)
    }

    fn list_filter(&mut self, name: &str, value: &Value<'t>, given: &Arguments<'t>) -> Made<'t> {
        let list = match name {
            "first" | "last" | "join" | "list" | "reverse" | "sort" | "unique" | "min" | "max" | "sum"
            | "map" | "select" | "reject" | "selectattr" | "rejectattr" => self.iterate(value)?,
            _ => return fault(format!("there is no filter `{name}`")),
        };
        let items = &list.items;
        self.meter.work(items.len())?;
        match name {
            "first" => Ok(items.first().cloned().unwrap_or(Value::Undefined)),
            "last" => Ok(items.last().cloned().unwrap_or(Value::Undefined)),
            "join" => {
                let between = given.str(0, "d").unwrap_or_default();
                match given.str(1, "attribute") {
                    None => self.joined(items, between),
                    Some(name) => {
                        let found =
                            items.iter().map(|item| self.path(item, name)).collect::<Result<Vec<_>>>()?;
                        self.joined(&found, between)
                    }
                }
            }
            "list" => Ok(Value::List(list)),
            "reverse" if value.str().is_some() => {
                let text = value.str().unwrap_or_default();
                self.meter.room(text.len())?;
                self.meter.text(text.chars().rev().collect::<String>())
            }
            "map" => self.mapped(items, given),
            "select" | "reject" | "selectattr" | "rejectattr" => self.selected(name, items, given),
            "min" | "max" => {
                let mut best: Option<&Value<'t>> = None;
                let wanted = if name == "min" { Ordering::Less } else { Ordering::Greater };
                for item in items {
                    match best {
                        Some(found) if item.order(found, &self.meter)? != wanted => {}
                        _ => best = Some(item),
                    }
                }
                Ok(best.cloned().unwrap_or(Value::Undefined))
            }
            "sum" => {
                let numbers = items.iter().map(Value::float).collect::<Option<Vec<f64>>>();
                let Some(numbers) = numbers else { return fault("`sum` takes numbers") };
                let whole = items.iter().map(|item| if let Value::Int(n) = item { Some(*n) } else { None });
                match whole.collect::<Option<Vec<i64>>>() {
                    Some(all) => match all.iter().try_fold(0i64, |sum, n| sum.checked_add(*n)) {
                        Some(sum) => Ok(Value::Int(sum)),
                        None => fault("the sum is too large"),
                    },
                    None => Ok(Value::Float(numbers.iter().sum())),
                }
            }
            _ => {
                self.meter.room(items.len() * size_of::<Value>())?;
                let mut items = items.clone();
                match name {
                    "reverse" => items.reverse(),
                    "sort" => {
                        items = self.sorted(items)?;
                        if given.get(0, "reverse").is_some_and(Value::is_true) {
                            items.reverse();
                        }
                    }
                    _ => {
                        let mut seen: Vec<Value<'t>> = Vec::new();
                        'items: for item in items {
                            for known in &seen {
                                if known.equals(&item, &self.meter)? {
                                    continue 'items;
                                }
                            }
                            seen.push(item);
                        }
                        items = seen;
                    }
                }
                self.meter.list(items)
            }
        }
    }

    /// An attribute of an attribute, as in `function.name`.
    fn path(&mut self, value: &Value<'t>, path: &str) -> Made<'t> {
        path.split('.').try_fold(value.clone(), |value, name| match value {
            Value::Undefined => Ok(Value::Undefined),
            value => self.attribute(&value, name),
        })
    }

    fn mapped(&mut self, items: &[Value<'t>], given: &Arguments<'t>) -> Made<'t> {
        let mut all = Vec::new();
        if let Some((_, attribute)) = given.names.iter().find(|(name, _)| *name == "attribute") {
            let name = attribute.str().unwrap_or_default();
            for item in items {
                all.push(match self.path(item, name)? {
                    Value::Undefined => given.get(usize::MAX, "default").cloned().unwrap_or(Value::Undefined),
                    found => found,
                });
            }
            return self.meter.list(all);
        }
        let Some(name) = given.str(0, "") else { return fault("`map` takes an attribute or a filter") };
        let rest = Arguments { places: given.places[1..].to_vec(), names: given.names.clone() };
        // A filter may be `map` again, of the lists in a list.
        for item in items {
            all.push(self.deeper(0, |m| m.apply(name, item, &rest)).map_err(without_line)?);
        }
        self.meter.list(all)
    }

    fn selected(&mut self, name: &str, items: &[Value<'t>], given: &Arguments<'t>) -> Made<'t> {
        let (attribute, rest) = match (name.ends_with("attr"), &given.places[..]) {
            (true, [attribute, rest @ ..]) => (attribute.str(), rest),
            (true, []) => return fault(format!("`{name}` takes an attribute")),
            (false, rest) => (None, rest),
        };
        let test = rest.first().and_then(Value::str);
        let rest = Arguments { places: rest.get(1..).unwrap_or_default().to_vec(), names: Vec::new() };
        let mut kept = Vec::new();
        for item in items {
            let value = match attribute {
                Some(path) => self.path(item, path)?,
                None => item.clone(),
            };
            let holds = match test {
                Some(test) => self.holds(test, &value, &rest)?,
                None => value.is_true(),
            };
            if holds == name.starts_with("select") {
                kept.push(item.clone());
            }
        }
        self.meter.list(kept)
    }
}

/// The line is that of the filter around it.
fn without_line(fault: super::Fault) -> super::Fault {
    super::Fault { line: fault.line.filter(|line| *line > 0), ..fault }
}
