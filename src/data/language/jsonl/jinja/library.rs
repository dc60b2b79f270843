//! What templates can call: filters, functions, and the methods of Python's strings and dictionaries.

use std::cmp::Ordering;

use super::expression::Arguments;
use super::value::{EvalResult, TextBuilder, Value, render_error};
use super::{Interpreter, Result};

/// Maximum number of items `range` returns.
const MAX_RANGE_ITEMS: i64 = 100_000;

impl<'t> Interpreter<'t> {
    pub fn call_function(&mut self, name: &str, given: &Arguments<'t>) -> EvalResult<'t> {
        match name {
            "range" => {
                let (start, stop) = match (given.get_int(0, ""), given.get_int(1, "")) {
                    (Some(stop), None) => (0, stop),
                    (Some(start), Some(stop)) => (start, stop),
                    _ => return render_error("`range` expects whole numbers"),
                };
                let step = given.get_int(2, "").unwrap_or(1);
                if step == 0 {
                    return render_error("`range` cannot step by 0");
                }
                let distance = if step > 0 { stop.saturating_sub(start) } else { start.saturating_sub(stop) };
                let count = distance.max(0).saturating_add(step.saturating_abs() - 1) / step.saturating_abs();
                if count > MAX_RANGE_ITEMS {
                    return render_error(format!("`range` has more than {MAX_RANGE_ITEMS} items"));
                }
                self.meter.check_bytes(count as usize * size_of::<Value>())?;
                self.meter.list((0..count).map(|i| Value::Int(start + i * step)).collect())
            }
            "namespace" | "dict" => {
                let mut entries = Vec::new();
                if let Some(Value::Map(map)) = given.positional.first() {
                    self.meter.check_bytes(map.entries.len() * 2 * size_of::<Value>())?;
                    entries.extend(map.entries.iter().cloned());
                }
                for (name, value) in &given.named {
                    entries.push((self.meter.text(*name)?, value.clone()));
                }
                if name == "dict" {
                    return self.meter.map(entries);
                }
                match entries.iter().any(|(_, value)| value.reaches_mutable()) {
                    true => render_error("a namespace cannot contain a namespace, a macro or a loop"),
                    false => self.meter.namespace(entries),
                }
            }
            "raise_exception" => render_error(given.get_str(0, "message").unwrap_or_default()),
            _ => render_error(format!("unknown function `{name}`")),
        }
    }

    pub fn call_method(&mut self, value: &Value<'t>, name: &str, given: &Arguments<'t>) -> EvalResult<'t> {
        let unknown = || render_error(format!("unknown method `{name}` of {}", value.type_name()));
        match value {
            Value::Text(_) => self.text_method(value, name, given),
            Value::Map(map) => match (name, &given.positional[..]) {
                ("get", [key]) => Ok(map.get(key, &self.meter)?.cloned().unwrap_or(Value::None)),
                ("get", [key, other]) => Ok(map.get(key, &self.meter)?.unwrap_or(other).clone()),
                ("keys" | "values" | "items", []) => self.apply_filter(name, value, given),
                _ => match self.attribute(value, name)? {
                    Value::Macro(_) => render_error(format!("`{name}` in a map cannot be called")),
                    _ => unknown(),
                },
            },
            Value::Loop(state) if name == "cycle" && !given.positional.is_empty() => {
                Ok(given.positional[state.at % given.positional.len()].clone())
            }
            Value::Undefined => render_error(format!("`{name}` is called on an undefined value")),
            _ => unknown(),
        }
    }

    fn text_method(&mut self, value: &Value<'t>, name: &str, given: &Arguments<'t>) -> EvalResult<'t> {
        let text = value.as_str().unwrap_or_default();
        let (first, second) = (given.get_str(0, ""), given.get_str(1, ""));
        let cut = |c: char| first.map_or(c.is_whitespace(), |these| these.contains(c));
        self.meter.spend_steps(text.len() / 16)?;
        match (name, first, second) {
            ("strip", ..) => self.meter.text(text.trim_matches(cut)),
            ("lstrip", ..) => self.meter.text(text.trim_start_matches(cut)),
            ("rstrip", ..) => self.meter.text(text.trim_end_matches(cut)),
            ("upper" | "lower" | "title" | "capitalize", ..) => self.apply_filter(name, value, given),
            ("startswith", Some(start), _) => Ok(Value::Bool(text.starts_with(start))),
            ("endswith", Some(end), _) => Ok(Value::Bool(text.ends_with(end))),
            ("removeprefix", Some(start), _) => self.meter.text(text.strip_prefix(start).unwrap_or(text)),
            ("removesuffix", Some(end), _) => self.meter.text(text.strip_suffix(end).unwrap_or(text)),
            ("replace", Some(from), Some(to)) => self.replace(text, from, to, given.get_int(2, "count")),
            ("find", Some(part), _) => {
                let at = text.find(part).map(|at| text[..at].chars().count() as i64);
                Ok(Value::Int(at.unwrap_or(-1)))
            }
            ("count", Some(part), _) => Ok(Value::Int(text.matches(part).count() as i64)),
            ("split" | "rsplit", ..) => {
                self.split(text, first, given.get_int(1, "maxsplit"), name == "rsplit")
            }
            ("splitlines", ..) => self.text_list(text.lines()),
            ("join", ..) => match given.positional.first() {
                Some(Value::List(list)) => self.join(&list.items, text),
                _ => render_error("`join` expects a list"),
            },
            ("isdigit" | "isnumeric", ..) => {
                Ok(Value::Bool(!text.is_empty() && text.chars().all(char::is_numeric)))
            }
            ("isspace", ..) => Ok(Value::Bool(!text.is_empty() && text.chars().all(char::is_whitespace))),
            _ => render_error(format!("unknown method `{name}` of a string")),
        }
    }

    /// A list of strings.
    fn text_list<'a>(&mut self, texts: impl Iterator<Item = &'a str>) -> EvalResult<'t> {
        let mut all = Vec::new();
        for text in texts {
            all.push(self.meter.text(text)?);
        }
        self.meter.list(all)
    }

    fn split(&mut self, text: &str, at: Option<&str>, most: Option<i64>, from_end: bool) -> EvalResult<'t> {
        let parts = most.and_then(|n| usize::try_from(n).ok()).map_or(usize::MAX, |n| n.saturating_add(1));
        match (at, from_end) {
            (Some(""), _) => render_error("cannot split at an empty separator"),
            (Some(at), false) => self.text_list(text.splitn(parts, at)),
            (Some(at), true) => {
                let mut found: Vec<&str> = text.rsplitn(parts, at).collect();
                found.reverse();
                self.text_list(found.into_iter())
            }
            (None, _) => self.text_list(text.split_whitespace()),
        }
    }

    fn replace(&mut self, text: &str, from: &str, to: &str, most: Option<i64>) -> EvalResult<'t> {
        let most = most.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
        let count = text.matches(from).count().min(most);
        self.meter.check_bytes(text.len().saturating_add(count.saturating_mul(to.len())))?;
        self.meter.text(text.replacen(from, to, most))
    }

    fn join(&mut self, items: &[Value<'t>], between: &str) -> EvalResult<'t> {
        let mut text = TextBuilder::new(&self.meter)?;
        for (i, item) in items.iter().enumerate() {
            text.push(if i > 0 { between } else { "" })?;
            text.push_display(item, false)?;
        }
        Ok(text.into_value())
    }

    pub fn apply_filter(&mut self, name: &str, value: &Value<'t>, given: &Arguments<'t>) -> EvalResult<'t> {
        match name {
            "trim" | "upper" | "lower" | "capitalize" | "title" | "replace" | "indent" | "split"
            | "lines" | "escape" | "e" => self.text_filter(name, value, given),
            "safe" => Ok(value.clone()),
            "string" => {
                let mut text = TextBuilder::new(&self.meter)?;
                text.push_display(value, false)?;
                Ok(text.into_value())
            }
            "tojson" => {
                let mut text = TextBuilder::new(&self.meter)?;
                let indent = given.get_int(0, "indent").and_then(|n| usize::try_from(n).ok());
                text.push_json(value, indent, 0)?;
                Ok(text.into_value())
            }
            "length" | "count" => match value {
                Value::Text(_) => {
                    let text = value.as_str().unwrap_or_default();
                    self.meter.spend_steps(text.len() / 16)?;
                    Ok(Value::Int(text.chars().count() as i64))
                }
                Value::List(list) => Ok(Value::Int(list.items.len() as i64)),
                Value::Map(map) => Ok(Value::Int(map.entries.len() as i64)),
                Value::Undefined => Ok(Value::Int(0)),
                other => render_error(format!("{} has no length", other.type_name())),
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
            "attr" => self.attribute(value, given.get_str(0, "name").unwrap_or_default()),
            "items" | "keys" | "values" | "dictsort" => self.map_filter(name, value),
            _ => self.list_filter(name, value, given),
        }
    }

    fn text_filter(&mut self, name: &str, value: &Value<'t>, given: &Arguments<'t>) -> EvalResult<'t> {
        let mut shown = TextBuilder::new(&self.meter)?;
        shown.push_display(value, false)?;
        let text = shown.into_string();
        // Changing case turns a character into at most three, and escaping turns one into at most five.
        self.meter.check_bytes(6 * text.len())?;
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
            "trim" => match given.get_str(0, "chars") {
                Some(these) => self.meter.text(text.trim_matches(|c| these.contains(c))),
                None => self.meter.text(text.trim()),
            },
            "replace" => match (given.get_str(0, "old"), given.get_str(1, "new")) {
                (Some(from), Some(to)) => self.replace(&text, from, to, given.get_int(2, "count")),
                _ => render_error("`replace` expects two strings"),
            },
            "split" => self.split(&text, given.get_str(0, ""), given.get_int(1, ""), false),
            "lines" => self.text_list(text.lines()),
            "escape" | "e" => {
                let mut escaped = TextBuilder::new(&self.meter)?;
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
                Ok(escaped.into_value())
            }
            _ => {
                let width = given.get_int(0, "width").unwrap_or(4).max(0) as usize;
                let first = given.get(1, "first").is_some_and(Value::is_true);
                let blank = given.get(2, "blank").is_some_and(Value::is_true);
                self.meter.check_bytes(width)?;
                let (spaces, mut indented) = (" ".repeat(width), TextBuilder::new(&self.meter)?);
                for (i, line) in text.split('\n').enumerate() {
                    indented.push(if i > 0 { "\n" } else { "" })?;
                    if (i > 0 || first) && (blank || !line.is_empty()) {
                        indented.push(&spaces)?;
                    }
                    indented.push(line)?;
                }
                Ok(indented.into_value())
            }
        }
    }

    fn number_filter(&mut self, name: &str, value: &Value<'t>, given: &Arguments<'t>) -> EvalResult<'t> {
        let parsed = value.as_str().and_then(|text| text.trim().parse::<f64>().ok());
        let number = value.as_float().or(parsed);
        let other = given.get(0, "default").filter(|_| matches!(name, "int" | "float"));
        let Some(number) = number else {
            return match other {
                Some(other) => Ok(other.clone()),
                None => Ok(if name == "int" { Value::Int(0) } else { Value::Float(0.0) }),
            };
        };
        Ok(match (name, value) {
            ("int", Value::Int(_)) | ("round", Value::Int(_)) => value.clone(),
            ("int", Value::Text(_)) => match value.as_str().and_then(|text| text.trim().parse().ok()) {
                Some(n) => Value::Int(n),
                None => Value::Int(number as i64),
            },
            ("int", _) => Value::Int(number as i64),
            ("abs", Value::Int(n)) => match n.checked_abs() {
                Some(n) => Value::Int(n),
                None => return render_error("the number is too large"),
            },
            ("abs", _) => Value::Float(number.abs()),
            ("round", _) => {
                let scale = 10f64.powi(given.get_int(0, "precision").unwrap_or(0).clamp(-300, 300) as i32);
                Value::Float((number * scale).round_ties_even() / scale)
            }
            _ => Value::Float(number),
        })
    }

    fn map_filter(&mut self, name: &str, value: &Value<'t>) -> EvalResult<'t> {
        let Value::Map(map) = value else {
            return render_error(format!("`{name}` expects a map, got {}", value.type_name()));
        };
        self.meter.check_bytes(map.entries.len() * size_of::<Value>())?;
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

    /// Merge sort by [`Value::compare`], which can fail. The standard library's sorts may panic if the comparison is
    /// not a total order.
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
                if other.compare(&item, &self.meter)? != Ordering::Less {
                    break;
                }
                merged.extend(second.next());
            }
            merged.push(item);
        }
        merged.extend(second);
        Ok(merged)
    }

    fn list_filter(&mut self, name: &str, value: &Value<'t>, given: &Arguments<'t>) -> EvalResult<'t> {
        let list = match name {
            "first" | "last" | "join" | "list" | "reverse" | "sort" | "unique" | "min" | "max" | "sum"
            | "map" | "select" | "reject" | "selectattr" | "rejectattr" => self.iterate(value)?,
            _ => return render_error(format!("unknown filter `{name}`")),
        };
        let items = &list.items;
        self.meter.spend_steps(items.len())?;
        match name {
            "first" => Ok(items.first().cloned().unwrap_or(Value::Undefined)),
            "last" => Ok(items.last().cloned().unwrap_or(Value::Undefined)),
            "join" => {
                let between = given.get_str(0, "d").unwrap_or_default();
                match given.get_str(1, "attribute") {
                    None => self.join(items, between),
                    Some(name) => {
                        let found = items
                            .iter()
                            .map(|item| self.attribute_path(item, name))
                            .collect::<Result<Vec<_>>>()?;
                        self.join(&found, between)
                    }
                }
            }
            "list" => Ok(Value::List(list)),
            "reverse" if value.as_str().is_some() => {
                let text = value.as_str().unwrap_or_default();
                self.meter.check_bytes(text.len())?;
                self.meter.text(text.chars().rev().collect::<String>())
            }
            "map" => self.map_items(items, given),
            "select" | "reject" | "selectattr" | "rejectattr" => self.select_items(name, items, given),
            "min" | "max" => {
                let mut best: Option<&Value<'t>> = None;
                let expected = if name == "min" { Ordering::Less } else { Ordering::Greater };
                for item in items {
                    match best {
                        Some(found) if item.compare(found, &self.meter)? != expected => {}
                        _ => best = Some(item),
                    }
                }
                Ok(best.cloned().unwrap_or(Value::Undefined))
            }
            "sum" => {
                let numbers = items.iter().map(Value::as_float).collect::<Option<Vec<f64>>>();
                let Some(numbers) = numbers else { return render_error("`sum` expects numbers") };
                let whole = items.iter().map(|item| if let Value::Int(n) = item { Some(*n) } else { None });
                match whole.collect::<Option<Vec<i64>>>() {
                    Some(all) => match all.iter().try_fold(0i64, |sum, n| sum.checked_add(*n)) {
                        Some(sum) => Ok(Value::Int(sum)),
                        None => render_error("the sum is too large"),
                    },
                    None => Ok(Value::Float(numbers.iter().sum())),
                }
            }
            _ => {
                self.meter.check_bytes(items.len() * size_of::<Value>())?;
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

    /// Resolves a dotted attribute path such as `function.name`.
    fn attribute_path(&mut self, value: &Value<'t>, path: &str) -> EvalResult<'t> {
        path.split('.').try_fold(value.clone(), |value, name| match value {
            Value::Undefined => Ok(Value::Undefined),
            value => self.attribute(&value, name),
        })
    }

    fn map_items(&mut self, items: &[Value<'t>], given: &Arguments<'t>) -> EvalResult<'t> {
        let mut all = Vec::new();
        if let Some((_, attribute)) = given.named.iter().find(|(name, _)| *name == "attribute") {
            let name = attribute.as_str().unwrap_or_default();
            for item in items {
                all.push(match self.attribute_path(item, name)? {
                    Value::Undefined => given.get(usize::MAX, "default").cloned().unwrap_or(Value::Undefined),
                    found => found,
                });
            }
            return self.meter.list(all);
        }
        let Some(name) = given.get_str(0, "") else {
            return render_error("`map` expects an attribute or a filter");
        };
        let rest = Arguments { positional: given.positional[1..].to_vec(), named: given.named.clone() };
        // The filter may itself be `map`, for nested lists, so this recursion counts towards the depth limit.
        for item in items {
            all.push(self.nested(0, |m| m.apply_filter(name, item, &rest)).map_err(without_line)?);
        }
        self.meter.list(all)
    }

    fn select_items(&mut self, name: &str, items: &[Value<'t>], given: &Arguments<'t>) -> EvalResult<'t> {
        let (attribute, rest) = match (name.ends_with("attr"), &given.positional[..]) {
            (true, [attribute, rest @ ..]) => (attribute.as_str(), rest),
            (true, []) => return render_error(format!("`{name}` expects an attribute")),
            (false, rest) => (None, rest),
        };
        let test = rest.first().and_then(Value::as_str);
        let rest = Arguments { positional: rest.get(1..).unwrap_or_default().to_vec(), named: Vec::new() };
        let mut kept = Vec::new();
        for item in items {
            let value = match attribute {
                Some(path) => self.attribute_path(item, path)?,
                None => item.clone(),
            };
            let passes = match test {
                Some(test) => self.run_test(test, &value, &rest)?,
                None => value.is_true(),
            };
            if passes == name.starts_with("select") {
                kept.push(item.clone());
            }
        }
        self.meter.list(kept)
    }
}

/// Drops the placeholder line 0, so that the enclosing filter sets its own.
fn without_line(fault: super::RenderError) -> super::RenderError {
    super::RenderError { line: fault.line.filter(|line| *line > 0), ..fault }
}
