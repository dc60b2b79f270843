//! The values of a template, each charged to the rendering that makes it.

use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::rc::Rc;

use minijinja::machinery::ast;

use super::Limits;

/// Lists and maps within one another, at most.
const MOST_NESTED: u32 = 64;

/// Why a template cannot go on, and on which of its lines.
#[derive(Debug)]
pub struct Fault {
    pub problem: String,
    pub line: Option<u16>,
}

pub type Result<T> = std::result::Result<T, Fault>;

pub fn fault<T>(problem: impl Into<String>) -> Result<T> {
    Err(Fault { problem: problem.into(), line: None })
}

/// What a rendering uses, against what it may use.
pub struct Meter {
    most: usize,
    bytes: Cell<usize>,
    work: Cell<u64>,
}

impl Meter {
    pub fn new(limits: Limits) -> Rc<Self> {
        Rc::new(Self { most: limits.bytes, bytes: Cell::new(0), work: Cell::new(limits.work) })
    }

    /// Steps that are left.
    pub fn left(&self) -> u64 {
        self.work.get()
    }

    /// Counts `n` steps, each of about the cost of looking up a name.
    pub fn work(&self, n: usize) -> Result<()> {
        match self.work.get().checked_sub(n as u64) {
            Some(left) => {
                self.work.set(left);
                Ok(())
            }
            None => fault("it takes too many steps for one record"),
        }
    }

    /// Refuses what would take the values that are alive above the limit, before it is made. Bytes that are made are
    /// work too, or a loop could make the same ones for ever.
    pub fn room(&self, bytes: usize) -> Result<()> {
        match self.bytes.get().checked_add(bytes).is_some_and(|all| all <= self.most) {
            true => self.work(bytes / 16),
            false => fault(format!("its values take more than {} bytes for one record", self.most)),
        }
    }

    fn charge(self: &Rc<Self>, bytes: usize) -> Result<Charge> {
        self.room(bytes)?;
        self.bytes.set(self.bytes.get() + bytes);
        Ok(Charge { meter: self.clone(), bytes })
    }
}

/// Bytes of a value that is alive.
struct Charge {
    meter: Rc<Meter>,
    bytes: usize,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.meter.bytes.set(self.meter.bytes.get() - self.bytes);
    }
}

#[derive(Clone)]
pub enum Value<'t> {
    Undefined,
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(Rc<Text>),
    List(Rc<List<'t>>),
    Map(Rc<Map<'t>>),
    Space(Rc<Space<'t>>),
    Macro(Rc<Macro<'t>>),
    Loop(Rc<Loop<'t>>),
}

pub struct Text {
    text: String,
    _charge: Charge,
}

pub struct List<'t> {
    pub items: Vec<Value<'t>>,
    inside: Inside,
    _charge: Charge,
}

pub struct Map<'t> {
    pub entries: Vec<(Value<'t>, Value<'t>)>,
    inside: Inside,
    _charge: Charge,
}

/// What a list or a map holds, at any depth.
#[derive(Clone, Copy, Default)]
struct Inside {
    depth: u32,
    /// Whether a value that can be changed is among it.
    refers: bool,
}

/// `namespace()`: the only value that can be changed. None can be reached from itself, so that counting references
/// frees all of them.
pub struct Space<'t> {
    pub entries: RefCell<Vec<(Value<'t>, Value<'t>)>>,
    _charge: Charge,
}

pub struct Macro<'t> {
    pub declared: &'t ast::Macro<'t>,
    /// What it sees besides the outermost names.
    pub captured: Vec<(&'t str, Value<'t>)>,
    _charge: Charge,
}

/// `loop` in a loop's body.
pub struct Loop<'t> {
    pub items: Rc<List<'t>>,
    pub at: usize,
    pub depth: usize,
}

pub type Made<'t> = Result<Value<'t>>;

impl Inside {
    fn of<'v, 't: 'v>(values: impl Iterator<Item = &'v Value<'t>>) -> Result<Self> {
        let mut all = Self::default();
        for value in values {
            let one = value.inside();
            all = Self { depth: all.depth.max(one.depth), refers: all.refers | one.refers };
        }
        all.depth += 1;
        match all.depth <= MOST_NESTED {
            true => Ok(all),
            false => fault(format!("its lists lie more than {MOST_NESTED} deep in one another")),
        }
    }
}

impl Meter {
    pub fn text<'t>(self: &Rc<Self>, text: impl Into<String>) -> Made<'t> {
        let text = text.into();
        Ok(Value::Text(Rc::new(Text { _charge: self.charge(text.len() + size_of::<Text>())?, text })))
    }

    pub fn list<'t>(self: &Rc<Self>, items: Vec<Value<'t>>) -> Made<'t> {
        Ok(Value::List(self.items(items)?))
    }

    pub fn items<'t>(self: &Rc<Self>, items: Vec<Value<'t>>) -> Result<Rc<List<'t>>> {
        let bytes = size_of::<List>() + items.len() * size_of::<Value>();
        let _charge = self.charge(bytes)?;
        Ok(Rc::new(List { inside: Inside::of(items.iter())?, items, _charge }))
    }

    pub fn map<'t>(self: &Rc<Self>, entries: Vec<(Value<'t>, Value<'t>)>) -> Made<'t> {
        let bytes = size_of::<Map>() + entries.len() * 2 * size_of::<Value>();
        let _charge = self.charge(bytes)?;
        let inside = Inside::of(entries.iter().flat_map(|(key, value)| [key, value]))?;
        Ok(Value::Map(Rc::new(Map { entries, inside, _charge })))
    }

    pub fn space<'t>(self: &Rc<Self>, entries: Vec<(Value<'t>, Value<'t>)>) -> Made<'t> {
        let _charge = self.charge(size_of::<Space>() + entries.len() * 2 * size_of::<Value>())?;
        Ok(Value::Space(Rc::new(Space { entries: RefCell::new(entries), _charge })))
    }

    pub fn declared<'t>(
        self: &Rc<Self>,
        declared: &'t ast::Macro<'t>,
        captured: Vec<(&'t str, Value<'t>)>,
    ) -> Made<'t> {
        let _charge = self.charge(size_of::<Macro>() + captured.len() * size_of::<(&str, Value)>())?;
        Ok(Value::Macro(Rc::new(Macro { declared, captured, _charge })))
    }
}

impl<'t> Value<'t> {
    fn inside(&self) -> Inside {
        match self {
            Value::List(list) => list.inside,
            Value::Map(map) => map.inside,
            Value::Space(_) | Value::Macro(_) | Value::Loop(_) => Inside { depth: 0, refers: true },
            _ => Inside::default(),
        }
    }

    /// Whether a value that can be changed may be reached from it.
    pub fn refers(&self) -> bool {
        self.inside().refers
    }

    pub fn str(&self) -> Option<&str> {
        match self {
            Value::Text(text) => Some(&text.text),
            _ => None,
        }
    }

    pub fn kind(&self) -> &'static str {
        match self {
            Value::Undefined => "undefined",
            Value::None => "none",
            Value::Bool(_) => "a boolean",
            Value::Int(_) | Value::Float(_) => "a number",
            Value::Text(_) => "a string",
            Value::List(_) => "a list",
            Value::Map(_) => "a map",
            Value::Space(_) => "a namespace",
            Value::Macro(_) => "a macro",
            Value::Loop(_) => "a loop",
        }
    }

    pub fn is_true(&self) -> bool {
        match self {
            Value::Undefined | Value::None => false,
            Value::Bool(flag) => *flag,
            Value::Int(n) => *n != 0,
            Value::Float(x) => *x != 0.0,
            Value::Text(text) => !text.text.is_empty(),
            Value::List(list) => !list.items.is_empty(),
            Value::Map(map) => !map.entries.is_empty(),
            Value::Space(_) | Value::Macro(_) | Value::Loop(_) => true,
        }
    }

    pub fn int(&self) -> Option<i64> {
        match self {
            Value::Int(n) => Some(*n),
            Value::Bool(flag) => Some(i64::from(*flag)),
            Value::Float(x) if x.fract() == 0.0 && x.abs() < 9e15 => Some(*x as i64),
            _ => None,
        }
    }

    pub fn float(&self) -> Option<f64> {
        match self {
            Value::Float(x) => Some(*x),
            other => other.int().map(|n| n as f64),
        }
    }

    /// Whether two values are equal; `meter` counts what is looked at, since a list may hold itself many times over.
    pub fn equals(&self, other: &Value<'t>, meter: &Meter) -> Result<bool> {
        meter.work(1)?;
        let all = |a: &[Value<'t>], b: &[Value<'t>]| {
            for (a, b) in a.iter().zip(b) {
                if !a.equals(b, meter)? {
                    return Ok(false);
                }
            }
            Ok(a.len() == b.len())
        };
        Ok(match (self, other) {
            (Value::Undefined, Value::Undefined) | (Value::None, Value::None) => true,
            (Value::Text(a), Value::Text(b)) => {
                meter.work(a.text.len().min(b.text.len()) / 16)?;
                a.text == b.text
            }
            (Value::List(a), Value::List(b)) => Rc::ptr_eq(a, b) || all(&a.items, &b.items)?,
            (Value::Map(a), Value::Map(b)) => {
                for (key, value) in &a.entries {
                    match b.get(key, meter)? {
                        Some(found) if found.equals(value, meter)? => {}
                        _ => return Ok(false),
                    }
                }
                a.entries.len() == b.entries.len()
            }
            (Value::Space(a), Value::Space(b)) => Rc::ptr_eq(a, b),
            (Value::Macro(a), Value::Macro(b)) => Rc::ptr_eq(a, b),
            _ => match (self.float(), other.float()) {
                (Some(a), Some(b)) => match (self.int(), other.int()) {
                    (Some(a), Some(b)) => a == b,
                    _ => a == b,
                },
                _ => false,
            },
        })
    }

    /// The order of two values that have one.
    pub fn order(&self, other: &Value<'t>, meter: &Meter) -> Result<Ordering> {
        meter.work(1)?;
        if let (Value::Text(a), Value::Text(b)) = (self, other) {
            meter.work(a.text.len().min(b.text.len()) / 16)?;
            return Ok(a.text.cmp(&b.text));
        }
        if let (Value::List(a), Value::List(b)) = (self, other) {
            for (a, b) in a.items.iter().zip(&b.items) {
                match a.order(b, meter)? {
                    Ordering::Equal => {}
                    found => return Ok(found),
                }
            }
            return Ok(a.items.len().cmp(&b.items.len()));
        }
        let numbers = self.float().zip(other.float()).and_then(|(a, b)| a.partial_cmp(&b));
        match numbers {
            Some(order) => Ok(order),
            None => fault(format!("{} and {} have no order", self.kind(), other.kind())),
        }
    }
}

impl<'t> Map<'t> {
    pub fn get(&self, key: &Value<'t>, meter: &Meter) -> Result<Option<&Value<'t>>> {
        for (known, value) in &self.entries {
            if known.equals(key, meter)? {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }
}

/// A text that grows, charged as it does.
pub struct Builder {
    text: String,
    charge: Charge,
}

impl Builder {
    pub fn new(meter: &Rc<Meter>) -> Result<Self> {
        Ok(Self { text: String::new(), charge: meter.charge(size_of::<Text>())? })
    }

    pub fn push(&mut self, more: &str) -> Result<()> {
        let meter = &self.charge.meter;
        meter.room(more.len())?;
        meter.bytes.set(meter.bytes.get() + more.len());
        self.charge.bytes += more.len();
        self.text += more;
        Ok(())
    }

    pub fn done<'t>(self) -> Value<'t> {
        Value::Text(Rc::new(Text { text: self.text, _charge: self.charge }))
    }

    pub fn into_string(self) -> String {
        self.text
    }

    /// A value as Python's `str` has it; texts within others are quoted.
    pub fn show(&mut self, value: &Value, within: bool) -> Result<()> {
        self.charge.meter.work(1)?;
        match value {
            Value::Undefined => Ok(()),
            Value::None => self.push("None"),
            Value::Bool(flag) => self.push(if *flag { "True" } else { "False" }),
            Value::Int(n) => self.push(&n.to_string()),
            Value::Float(x) => self.push(&format!("{x:?}")),
            Value::Text(text) if !within => self.push(&text.text),
            Value::Text(text) => {
                let quote = if text.text.contains('\'') && !text.text.contains('"') { "\"" } else { "'" };
                self.push(quote)?;
                for part in text.text.split_inclusive(['\\', '\'', '\n', '\t', '\r']) {
                    let (plain, last) = match part.char_indices().next_back() {
                        Some((at, c)) if "\\\n\t\r".contains(c) || (c == '\'' && quote == "'") => {
                            (&part[..at], c)
                        }
                        _ => (part, ' '),
                    };
                    self.push(plain)?;
                    self.push(match last {
                        '\\' => "\\\\",
                        '\'' => "\\'",
                        '\n' => "\\n",
                        '\t' => "\\t",
                        '\r' => "\\r",
                        _ => "",
                    })?;
                }
                self.push(quote)
            }
            Value::List(list) => {
                self.push("[")?;
                for (i, item) in list.items.iter().enumerate() {
                    self.push(if i > 0 { ", " } else { "" })?;
                    self.show(item, true)?;
                }
                self.push("]")
            }
            Value::Map(map) => {
                self.push("{")?;
                for (i, (key, value)) in map.entries.iter().enumerate() {
                    self.push(if i > 0 { ", " } else { "" })?;
                    self.show(key, true)?;
                    self.push(": ")?;
                    self.show(value, true)?;
                }
                self.push("}")
            }
            Value::Space(_) | Value::Macro(_) | Value::Loop(_) => self.push(&format!("<{}>", value.kind())),
        }
    }

    /// A value as Python's `json.dumps` has it; `indent` spaces a level, on one line without.
    pub fn json(&mut self, value: &Value, indent: Option<usize>, level: usize) -> Result<()> {
        self.charge.meter.work(1)?;
        let parts: (&str, &str, Vec<(Option<&Value>, &Value)>) = match value {
            Value::Undefined | Value::None => return self.push("null"),
            Value::Bool(flag) => return self.push(if *flag { "true" } else { "false" }),
            Value::Int(n) => return self.push(&n.to_string()),
            Value::Float(x) => return self.push(&format!("{x:?}")),
            Value::Text(text) => {
                self.charge.meter.room(6 * text.text.len())?;
                return self.push(&serde_json::Value::from(text.text.as_str()).to_string());
            }
            Value::List(list) => ("[", "]", list.items.iter().map(|item| (None, item)).collect()),
            Value::Map(map) => ("{", "}", map.entries.iter().map(|(k, v)| (Some(k), v)).collect()),
            Value::Space(_) | Value::Macro(_) | Value::Loop(_) => {
                return fault(format!("{} cannot be written as JSON", value.kind()));
            }
        };
        let (open, close, items) = parts;
        self.push(open)?;
        let empty = items.is_empty();
        for (i, (key, item)) in items.into_iter().enumerate() {
            match indent {
                Some(spaces) => {
                    self.push(if i > 0 { "," } else { "" })?;
                    self.line(spaces.saturating_mul(level + 1))?;
                }
                None => self.push(if i > 0 { ", " } else { "" })?,
            }
            if let Some(key) = key {
                match key {
                    Value::Text(_) => self.json(key, None, 0)?,
                    other => {
                        self.push("\"")?;
                        self.json(other, None, 0)?;
                        self.push("\"")?;
                    }
                }
                self.push(": ")?;
            }
            self.json(item, indent, level + 1)?;
        }
        if let (Some(spaces), false) = (indent, empty) {
            self.line(spaces.saturating_mul(level))?;
        }
        self.push(close)
    }

    /// A new line and `spaces`.
    fn line(&mut self, spaces: usize) -> Result<()> {
        self.charge.meter.room(spaces)?;
        self.push("\n")?;
        self.push(&" ".repeat(spaces))
    }
}
