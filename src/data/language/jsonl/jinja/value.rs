//! Template values, each charged to the rendering that creates it.

use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::rc::Rc;

use minijinja::machinery::ast;

use super::RenderLimits;

/// Maximum nesting depth of lists and maps.
const MAX_NESTING: u32 = 64;

/// Why a template failed, and on which line.
#[derive(Debug)]
pub struct RenderError {
    pub problem: String,
    pub line: Option<u16>,
    /// Whether the memory budget is the reason.
    pub out_of_memory: bool,
}

pub type Result<T> = std::result::Result<T, RenderError>;

pub fn render_error<T>(problem: impl Into<String>) -> Result<T> {
    Err(RenderError { problem: problem.into(), line: None, out_of_memory: false })
}

/// Resource use of a rendering against its limits.
pub struct Meter {
    max_bytes: usize,
    budget: usize,
    bytes: Cell<usize>,
    steps_left: Cell<u64>,
}

impl Meter {
    pub fn new(limits: RenderLimits) -> Rc<Self> {
        Rc::new(Self {
            max_bytes: limits.bytes,
            budget: limits.budget,
            bytes: Cell::new(0),
            steps_left: Cell::new(limits.steps),
        })
    }

    /// Remaining steps.
    pub fn steps_left(&self) -> u64 {
        self.steps_left.get()
    }

    /// Spends `n` steps, each about the cost of one name lookup.
    pub fn spend_steps(&self, n: usize) -> Result<()> {
        match self.steps_left.get().checked_sub(n as u64) {
            Some(left) => {
                self.steps_left.set(left);
                Ok(())
            }
            None => render_error("it takes too many steps for one record"),
        }
    }

    /// Refuses an allocation that would push the live bytes above the limit. Allocated bytes also cost steps: otherwise
    /// a loop could create and drop values forever.
    pub fn check_bytes(&self, bytes: usize) -> Result<()> {
        let all = self.bytes.get().saturating_add(bytes);
        if all > self.max_bytes.min(self.budget) {
            let problem = format!("its values take more than {} bytes for one record", self.max_bytes);
            return Err(RenderError { problem, line: None, out_of_memory: self.budget < self.max_bytes });
        }
        self.spend_steps(bytes / 16)
    }

    fn charge(self: &Rc<Self>, bytes: usize) -> Result<Charge> {
        self.check_bytes(bytes)?;
        self.bytes.set(self.bytes.get() + bytes);
        Ok(Charge { meter: self.clone(), bytes })
    }
}

/// Charge for a live value; dropping it releases the bytes.
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
    Text(Rc<StringValue>),
    List(Rc<ListValue<'t>>),
    Map(Rc<MapValue<'t>>),
    Namespace(Rc<Namespace<'t>>),
    Macro(Rc<MacroValue<'t>>),
    Loop(Rc<LoopState<'t>>),
}

pub struct StringValue {
    text: String,
    _charge: Charge,
}

pub struct ListValue<'t> {
    pub items: Vec<Value<'t>>,
    nesting: Nesting,
    _charge: Charge,
}

pub struct MapValue<'t> {
    pub entries: Vec<(Value<'t>, Value<'t>)>,
    nesting: Nesting,
    _charge: Charge,
}

/// Properties of the values in a list or map, at any depth.
#[derive(Clone, Copy, Default)]
struct Nesting {
    depth: u32,
    /// Whether it contains a mutable value.
    reaches_mutable: bool,
}

/// `namespace()`, the only mutable value. A namespace can never contain itself, so reference counting frees all of
/// them.
pub struct Namespace<'t> {
    pub entries: RefCell<Vec<(Value<'t>, Value<'t>)>>,
    _charge: Charge,
}

pub struct MacroValue<'t> {
    pub declared: &'t ast::Macro<'t>,
    /// Captured variables, besides the globals.
    pub captured: Vec<(&'t str, Value<'t>)>,
    _charge: Charge,
}

/// The `loop` variable in the body of a loop.
pub struct LoopState<'t> {
    pub items: Rc<ListValue<'t>>,
    pub at: usize,
    pub depth: usize,
}

pub type EvalResult<'t> = Result<Value<'t>>;

impl Nesting {
    fn of<'v, 't: 'v>(values: impl Iterator<Item = &'v Value<'t>>) -> Result<Self> {
        let mut all = Self::default();
        for value in values {
            let one = value.nesting();
            all = Self {
                depth: all.depth.max(one.depth),
                reaches_mutable: all.reaches_mutable | one.reaches_mutable,
            };
        }
        all.depth += 1;
        match all.depth <= MAX_NESTING {
            true => Ok(all),
            false => render_error(format!("its lists are nested more than {MAX_NESTING} deep")),
        }
    }
}

impl Meter {
    pub fn text<'t>(self: &Rc<Self>, text: impl Into<String>) -> EvalResult<'t> {
        let text = text.into();
        Ok(Value::Text(Rc::new(StringValue {
            _charge: self.charge(text.len() + size_of::<StringValue>())?,
            text,
        })))
    }

    pub fn list<'t>(self: &Rc<Self>, items: Vec<Value<'t>>) -> EvalResult<'t> {
        Ok(Value::List(self.list_items(items)?))
    }

    pub fn list_items<'t>(self: &Rc<Self>, items: Vec<Value<'t>>) -> Result<Rc<ListValue<'t>>> {
        let bytes = size_of::<ListValue>() + items.len() * size_of::<Value>();
        let _charge = self.charge(bytes)?;
        Ok(Rc::new(ListValue { nesting: Nesting::of(items.iter())?, items, _charge }))
    }

    pub fn map<'t>(self: &Rc<Self>, entries: Vec<(Value<'t>, Value<'t>)>) -> EvalResult<'t> {
        let bytes = size_of::<MapValue>() + entries.len() * 2 * size_of::<Value>();
        let _charge = self.charge(bytes)?;
        let inside = Nesting::of(entries.iter().flat_map(|(key, value)| [key, value]))?;
        Ok(Value::Map(Rc::new(MapValue { entries, nesting: inside, _charge })))
    }

    pub fn namespace<'t>(self: &Rc<Self>, entries: Vec<(Value<'t>, Value<'t>)>) -> EvalResult<'t> {
        let _charge = self.charge(size_of::<Namespace>() + entries.len() * 2 * size_of::<Value>())?;
        Ok(Value::Namespace(Rc::new(Namespace { entries: RefCell::new(entries), _charge })))
    }

    pub fn macro_value<'t>(
        self: &Rc<Self>,
        declared: &'t ast::Macro<'t>,
        captured: Vec<(&'t str, Value<'t>)>,
    ) -> EvalResult<'t> {
        let _charge = self.charge(size_of::<MacroValue>() + captured.len() * size_of::<(&str, Value)>())?;
        Ok(Value::Macro(Rc::new(MacroValue { declared, captured, _charge })))
    }
}

impl<'t> Value<'t> {
    fn nesting(&self) -> Nesting {
        match self {
            Value::List(list) => list.nesting,
            Value::Map(map) => map.nesting,
            Value::Namespace(_) | Value::Macro(_) | Value::Loop(_) => {
                Nesting { depth: 0, reaches_mutable: true }
            }
            _ => Nesting::default(),
        }
    }

    /// Whether it may contain a mutable value.
    pub fn reaches_mutable(&self) -> bool {
        self.nesting().reaches_mutable
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::Text(text) => Some(&text.text),
            _ => None,
        }
    }

    pub fn type_name(&self) -> &'static str {
        match self {
            Value::Undefined => "undefined",
            Value::None => "none",
            Value::Bool(_) => "a boolean",
            Value::Int(_) | Value::Float(_) => "a number",
            Value::Text(_) => "a string",
            Value::List(_) => "a list",
            Value::Map(_) => "a map",
            Value::Namespace(_) => "a namespace",
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
            Value::Namespace(_) | Value::Macro(_) | Value::Loop(_) => true,
        }
    }

    pub fn as_int(&self) -> Option<i64> {
        match self {
            Value::Int(n) => Some(*n),
            Value::Bool(flag) => Some(i64::from(*flag)),
            Value::Float(x) if x.fract() == 0.0 && x.abs() < 9e15 => Some(*x as i64),
            _ => None,
        }
    }

    pub fn as_float(&self) -> Option<f64> {
        match self {
            Value::Float(x) => Some(*x),
            other => other.as_int().map(|n| n as f64),
        }
    }

    /// Equality. `meter` charges every comparison, since a list may contain the same sublist exponentially often.
    pub fn equals(&self, other: &Value<'t>, meter: &Meter) -> Result<bool> {
        meter.spend_steps(1)?;
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
                meter.spend_steps(a.text.len().min(b.text.len()) / 16)?;
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
            (Value::Namespace(a), Value::Namespace(b)) => Rc::ptr_eq(a, b),
            (Value::Macro(a), Value::Macro(b)) => Rc::ptr_eq(a, b),
            _ => match (self.as_float(), other.as_float()) {
                (Some(a), Some(b)) => match (self.as_int(), other.as_int()) {
                    (Some(a), Some(b)) => a == b,
                    _ => a == b,
                },
                _ => false,
            },
        })
    }

    /// Order of two comparable values.
    pub fn compare(&self, other: &Value<'t>, meter: &Meter) -> Result<Ordering> {
        meter.spend_steps(1)?;
        if let (Value::Text(a), Value::Text(b)) = (self, other) {
            meter.spend_steps(a.text.len().min(b.text.len()) / 16)?;
            return Ok(a.text.cmp(&b.text));
        }
        if let (Value::List(a), Value::List(b)) = (self, other) {
            for (a, b) in a.items.iter().zip(&b.items) {
                match a.compare(b, meter)? {
                    Ordering::Equal => {}
                    found => return Ok(found),
                }
            }
            return Ok(a.items.len().cmp(&b.items.len()));
        }
        let numbers = self.as_float().zip(other.as_float()).and_then(|(a, b)| a.partial_cmp(&b));
        match numbers {
            Some(order) => Ok(order),
            None => render_error(format!("cannot compare {} and {}", self.type_name(), other.type_name())),
        }
    }
}

impl<'t> MapValue<'t> {
    pub fn get(&self, key: &Value<'t>, meter: &Meter) -> Result<Option<&Value<'t>>> {
        for (known, value) in &self.entries {
            if known.equals(key, meter)? {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }
}

/// A growing string, charged as it grows.
pub struct TextBuilder {
    text: String,
    charge: Charge,
}

impl TextBuilder {
    pub fn new(meter: &Rc<Meter>) -> Result<Self> {
        Ok(Self { text: String::new(), charge: meter.charge(size_of::<StringValue>())? })
    }

    pub fn push(&mut self, more: &str) -> Result<()> {
        let meter = &self.charge.meter;
        meter.check_bytes(more.len())?;
        meter.bytes.set(meter.bytes.get() + more.len());
        self.charge.bytes += more.len();
        self.text += more;
        Ok(())
    }

    pub fn into_value<'t>(self) -> Value<'t> {
        Value::Text(Rc::new(StringValue { text: self.text, _charge: self.charge }))
    }

    pub fn into_string(self) -> String {
        self.text
    }

    /// Formats a value as Python's `str` does; strings within containers are quoted.
    pub fn push_display(&mut self, value: &Value, within: bool) -> Result<()> {
        self.charge.meter.spend_steps(1)?;
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
                    self.push_display(item, true)?;
                }
                self.push("]")
            }
            Value::Map(map) => {
                self.push("{")?;
                for (i, (key, value)) in map.entries.iter().enumerate() {
                    self.push(if i > 0 { ", " } else { "" })?;
                    self.push_display(key, true)?;
                    self.push(": ")?;
                    self.push_display(value, true)?;
                }
                self.push("}")
            }
            Value::Namespace(_) | Value::Macro(_) | Value::Loop(_) => {
                self.push(&format!("<{}>", value.type_name()))
            }
        }
    }

    /// Formats a value as Python's `json.dumps` does, with `indent` spaces per level; `None` prints one line.
    pub fn push_json(&mut self, value: &Value, indent: Option<usize>, level: usize) -> Result<()> {
        self.charge.meter.spend_steps(1)?;
        let parts: (&str, &str, Vec<(Option<&Value>, &Value)>) = match value {
            Value::Undefined | Value::None => return self.push("null"),
            Value::Bool(flag) => return self.push(if *flag { "true" } else { "false" }),
            Value::Int(n) => return self.push(&n.to_string()),
            Value::Float(x) => return self.push(&format!("{x:?}")),
            Value::Text(text) => {
                self.charge.meter.check_bytes(6 * text.text.len())?;
                return self.push(&serde_json::Value::from(text.text.as_str()).to_string());
            }
            Value::List(list) => ("[", "]", list.items.iter().map(|item| (None, item)).collect()),
            Value::Map(map) => ("{", "}", map.entries.iter().map(|(k, v)| (Some(k), v)).collect()),
            Value::Namespace(_) | Value::Macro(_) | Value::Loop(_) => {
                return render_error(format!("{} cannot be written as JSON", value.type_name()));
            }
        };
        let (open, close, items) = parts;
        self.push(open)?;
        let empty = items.is_empty();
        for (i, (key, item)) in items.into_iter().enumerate() {
            match indent {
                Some(spaces) => {
                    self.push(if i > 0 { "," } else { "" })?;
                    self.push_newline(spaces.saturating_mul(level + 1))?;
                }
                None => self.push(if i > 0 { ", " } else { "" })?,
            }
            if let Some(key) = key {
                match key {
                    Value::Text(_) => self.push_json(key, None, 0)?,
                    other => {
                        self.push("\"")?;
                        self.push_json(other, None, 0)?;
                        self.push("\"")?;
                    }
                }
                self.push(": ")?;
            }
            self.push_json(item, indent, level + 1)?;
        }
        if let (Some(spaces), false) = (indent, empty) {
            self.push_newline(spaces.saturating_mul(level))?;
        }
        self.push(close)
    }

    /// A newline and `spaces` spaces.
    fn push_newline(&mut self, spaces: usize) -> Result<()> {
        self.charge.meter.check_bytes(spaces)?;
        self.push("\n")?;
        self.push(&" ".repeat(spaces))
    }
}
