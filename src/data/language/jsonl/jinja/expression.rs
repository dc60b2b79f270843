//! Evaluates expressions: operators, lookups, slices and calls.

use std::cmp::Ordering;
use std::rc::Rc;

use minijinja::machinery::ast::{self, BinOpKind, CallArg, CompareOpKind, Expr, UnaryOpKind};

use super::value::{EvalResult, MacroValue, TextBuilder, Value, render_error};
use super::{Interpreter, Result};

/// Call arguments: positional, then named.
pub struct Arguments<'t> {
    pub positional: Vec<Value<'t>>,
    pub named: Vec<(&'t str, Value<'t>)>,
}

impl<'t> Arguments<'t> {
    /// The positional argument `index`, or the named argument `name`.
    pub fn get(&self, index: usize, name: &str) -> Option<&Value<'t>> {
        let named = || self.named.iter().find(|(known, _)| *known == name).map(|(_, value)| value);
        self.positional.get(index).or_else(named)
    }

    pub fn get_str(&self, index: usize, name: &str) -> Option<&str> {
        self.get(index, name).and_then(Value::as_str)
    }

    pub fn get_int(&self, index: usize, name: &str) -> Option<i64> {
        self.get(index, name).and_then(Value::as_int)
    }
}

impl<'t> Interpreter<'t> {
    pub fn eval(&mut self, expr: &'t Expr<'t>) -> EvalResult<'t> {
        self.nested(expr.span().start_line, |m| m.eval_inner(expr))
    }

    // Every arm calls a separate function. In one function, each nesting level would take the stack frame of the
    // largest arm.
    fn eval_inner(&mut self, expr: &'t Expr<'t>) -> EvalResult<'t> {
        match expr {
            Expr::Var(var) => self.lookup(var.id),
            Expr::Const(constant) => self.constant(&constant.value),
            Expr::UnaryOp(op) => self.unary(op),
            Expr::BinOp(op) => self.binary(op),
            Expr::Compare(compare) => self.eval_compare(compare),
            Expr::IfExpr(cond) => match (self.eval(&cond.test_expr)?.is_true(), &cond.false_expr) {
                (true, _) => self.eval(&cond.true_expr),
                (false, Some(other)) => self.eval(other),
                (false, None) => Ok(Value::Undefined),
            },
            Expr::Filter(filter) => self.eval_filter(filter, None),
            Expr::Test(test) => self.eval_test(test),
            Expr::GetAttr(attr) => {
                let value = self.eval(&attr.expr)?;
                self.attribute(&value, attr.name)
            }
            Expr::GetItem(item) => {
                let value = self.eval(&item.expr)?;
                let key = self.eval(&item.subscript_expr)?;
                self.item(&value, &key)
            }
            Expr::Slice(slice) => self.slice(slice),
            Expr::Call(call) => self.call(call, None),
            Expr::List(list) => self.list(&list.items),
            Expr::Tuple(tuple) => self.list(&tuple.items),
            Expr::Map(map) => self.map(map),
        }
    }

    fn constant(&mut self, value: &minijinja::Value) -> EvalResult<'t> {
        use minijinja::value::ValueKind;
        Ok(match value.kind() {
            ValueKind::None => Value::None,
            ValueKind::Bool => Value::Bool(value.is_true()),
            ValueKind::String => self.meter.text(value.as_str().unwrap_or_default())?,
            ValueKind::Number if value.is_integer() => match i64::try_from(value.clone()) {
                Ok(n) => Value::Int(n),
                Err(_) => return render_error(format!("the number {value} is too large")),
            },
            ValueKind::Number => Value::Float(f64::try_from(value.clone()).unwrap_or(f64::NAN)),
            _ => return render_error("a constant of an unsupported type"),
        })
    }

    fn list(&mut self, items: &'t [Expr<'t>]) -> EvalResult<'t> {
        let items = items.iter().map(|item| self.eval(item)).collect::<Result<Vec<_>>>()?;
        self.meter.list(items)
    }

    fn map(&mut self, map: &'t ast::Map<'t>) -> EvalResult<'t> {
        let mut entries = Vec::with_capacity(map.keys.len());
        for (key, value) in map.keys.iter().zip(&map.values) {
            entries.push((self.eval(key)?, self.eval(value)?));
        }
        self.meter.map(entries)
    }

    fn unary(&mut self, op: &'t ast::UnaryOp<'t>) -> EvalResult<'t> {
        let value = self.eval(&op.expr)?;
        match (&op.op, &value) {
            (UnaryOpKind::Not, _) => Ok(Value::Bool(!value.is_true())),
            (UnaryOpKind::Neg, Value::Float(x)) => Ok(Value::Float(-x)),
            (UnaryOpKind::Neg, _) => match value.as_int().and_then(i64::checked_neg) {
                Some(n) => Ok(Value::Int(n)),
                None => render_error(format!("cannot negate {}", value.type_name())),
            },
        }
    }

    fn binary(&mut self, op: &'t ast::BinOp<'t>) -> EvalResult<'t> {
        let left = self.eval(&op.left)?;
        match (op.op, left.is_true()) {
            (BinOpKind::ScAnd, false) | (BinOpKind::ScOr, true) => return Ok(left),
            (BinOpKind::ScAnd | BinOpKind::ScOr, _) => return self.eval(&op.right),
            _ => {}
        }
        let right = self.eval(&op.right)?;
        self.binary_op(op.op, left, right)
    }

    fn binary_op(&mut self, op: BinOpKind, left: Value<'t>, right: Value<'t>) -> EvalResult<'t> {
        let compared = match op {
            BinOpKind::Eq => CompareOpKind::Eq,
            BinOpKind::Ne => CompareOpKind::Ne,
            BinOpKind::Lt => CompareOpKind::Lt,
            BinOpKind::Lte => CompareOpKind::Lte,
            BinOpKind::Gt => CompareOpKind::Gt,
            BinOpKind::Gte => CompareOpKind::Gte,
            BinOpKind::In => CompareOpKind::In,
            BinOpKind::Concat => {
                let mut text = TextBuilder::new(&self.meter)?;
                text.push_display(&left, false)?;
                text.push_display(&right, false)?;
                return Ok(text.into_value());
            }
            _ => return self.arithmetic(op, left, right),
        };
        self.compare(compared, &left, &right).map(Value::Bool)
    }

    fn arithmetic(&mut self, op: BinOpKind, left: Value<'t>, right: Value<'t>) -> EvalResult<'t> {
        use BinOpKind::{Add, Div, FloorDiv, Mul, Pow, Rem, Sub};
        match (op, &left, &right) {
            (Add, Value::Text(_), Value::Text(_)) => {
                let mut text = TextBuilder::new(&self.meter)?;
                text.push_display(&left, false)?;
                text.push_display(&right, false)?;
                return Ok(text.into_value());
            }
            (Add, Value::List(a), Value::List(b)) => {
                self.meter.check_bytes((a.items.len() + b.items.len()) * size_of::<Value>())?;
                return self.meter.list(a.items.iter().chain(&b.items).cloned().collect());
            }
            (Mul, Value::Text(_) | Value::List(_), times @ Value::Int(_))
            | (Mul, times @ Value::Int(_), Value::Text(_) | Value::List(_)) => {
                let many = if matches!(left, Value::Int(_)) { &right } else { &left };
                return self.repeat(many, times.as_int().unwrap_or(0).max(0) as usize);
            }
            _ => {}
        }
        let whole =
            |value: &Value| matches!(value, Value::Int(_) | Value::Bool(_)).then(|| value.as_int()).flatten();
        if let (Some(a), Some(b)) = (whole(&left), whole(&right)) {
            let done = match op {
                Add => a.checked_add(b),
                Sub => a.checked_sub(b),
                Mul => a.checked_mul(b),
                Div if b != 0 => return Ok(Value::Float(a as f64 / b as f64)),
                FloorDiv => {
                    a.checked_div(b).map(|q| if a % b != 0 && (a < 0) != (b < 0) { q - 1 } else { q })
                }
                Rem => a.checked_rem(b).map(|r| if r != 0 && (r < 0) != (b < 0) { r + b } else { r }),
                Pow if b >= 0 => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
                Pow => return Ok(Value::Float((a as f64).powf(b as f64))),
                _ => None,
            };
            return match done {
                Some(n) => Ok(Value::Int(n)),
                None => {
                    let symbol = operator(op);
                    render_error(format!("cannot compute {a} {symbol} {b}: division by zero or overflow"))
                }
            };
        }
        let (Some(a), Some(b)) = (left.as_float(), right.as_float()) else {
            return render_error(format!(
                "unsupported operands of `{}`: {} and {}",
                operator(op),
                left.type_name(),
                right.type_name()
            ));
        };
        Ok(Value::Float(match op {
            Add => a + b,
            Sub => a - b,
            Mul => a * b,
            Div => a / b,
            FloorDiv => (a / b).floor(),
            Rem => a - b * (a / b).floor(),
            _ => a.powf(b),
        }))
    }

    fn repeat(&mut self, many: &Value<'t>, times: usize) -> EvalResult<'t> {
        match many {
            Value::List(list) => {
                self.meter
                    .check_bytes(list.items.len().saturating_mul(times).saturating_mul(size_of::<Value>()))?;
                let items = (0..times).flat_map(|_| &list.items).cloned().collect();
                self.meter.list(items)
            }
            other => {
                let text = other.as_str().unwrap_or_default();
                self.meter.check_bytes(text.len().saturating_mul(times))?;
                self.meter.text(text.repeat(times))
            }
        }
    }

    fn eval_compare(&mut self, compare: &'t ast::Compare<'t>) -> EvalResult<'t> {
        let mut left = self.eval(&compare.expr)?;
        for op in &compare.ops {
            let right = self.eval(&op.expr)?;
            if !self.compare(op.op, &left, &right)? {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    pub fn compare(&mut self, op: CompareOpKind, left: &Value<'t>, right: &Value<'t>) -> Result<bool> {
        let meter = &self.meter;
        Ok(match op {
            CompareOpKind::Eq => left.equals(right, meter)?,
            CompareOpKind::Ne => !left.equals(right, meter)?,
            CompareOpKind::Lt => left.compare(right, meter)? == Ordering::Less,
            CompareOpKind::Lte => left.compare(right, meter)? != Ordering::Greater,
            CompareOpKind::Gt => left.compare(right, meter)? == Ordering::Greater,
            CompareOpKind::Gte => left.compare(right, meter)? != Ordering::Less,
            CompareOpKind::In => self.contains(right, left)?,
            CompareOpKind::NotIn => !self.contains(right, left)?,
        })
    }

    pub fn contains(&mut self, all: &Value<'t>, one: &Value<'t>) -> Result<bool> {
        match (all, one.as_str()) {
            (Value::Text(_), Some(part)) => {
                let text = all.as_str().unwrap_or_default();
                self.meter.spend_steps((text.len() + part.len()) / 16)?;
                Ok(text.contains(part))
            }
            (Value::List(list), _) => {
                for item in &list.items {
                    if item.equals(one, &self.meter)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            (Value::Map(map), _) => Ok(map.get(one, &self.meter)?.is_some()),
            (Value::Undefined, _) => Ok(false),
            _ => render_error(format!("cannot search in {}", all.type_name())),
        }
    }

    pub fn attribute(&mut self, value: &Value<'t>, name: &str) -> EvalResult<'t> {
        match value {
            Value::Map(map) => {
                self.meter.spend_steps(map.entries.len())?;
                let found = map.entries.iter().find(|(key, _)| key.as_str() == Some(name));
                Ok(found.map_or(Value::Undefined, |(_, value)| value.clone()))
            }
            Value::Namespace(space) => {
                let entries = space.entries.borrow();
                self.meter.spend_steps(entries.len())?;
                let found = entries.iter().find(|(known, _)| known.as_str() == Some(name));
                Ok(found.map_or(Value::Undefined, |(_, value)| value.clone()))
            }
            Value::Loop(state) => {
                let (at, len) = (state.at, state.items.items.len());
                let item = |at: Option<usize>| at.and_then(|at| state.items.items.get(at)).cloned();
                let number = |n: usize| Value::Int(n as i64);
                Ok(match name {
                    "index" => number(at + 1),
                    "index0" => number(at),
                    "revindex" => number(len - at),
                    "revindex0" => number(len - at - 1),
                    "first" => Value::Bool(at == 0),
                    "last" => Value::Bool(at + 1 == len),
                    "length" => number(len),
                    "depth" => number(state.depth + 1),
                    "depth0" => number(state.depth),
                    "previtem" => item(at.checked_sub(1)).unwrap_or(Value::Undefined),
                    "nextitem" => item(Some(at + 1)).unwrap_or(Value::Undefined),
                    _ => Value::Undefined,
                })
            }
            Value::Undefined => render_error(format!("`{name}` of an undefined value")),
            _ => Ok(Value::Undefined),
        }
    }

    pub fn item(&mut self, value: &Value<'t>, key: &Value<'t>) -> EvalResult<'t> {
        let place = |len: usize| {
            let at = key.as_int()?;
            usize::try_from(if at < 0 { at + len as i64 } else { at }).ok()
        };
        match value {
            Value::List(list) => Ok(place(list.items.len())
                .and_then(|at| list.items.get(at))
                .cloned()
                .unwrap_or(Value::Undefined)),
            Value::Map(map) => Ok(map.get(key, &self.meter)?.cloned().unwrap_or(Value::Undefined)),
            Value::Text(_) if key.as_int().is_some() => {
                let text = value.as_str().unwrap_or_default();
                self.meter.spend_steps(text.len() / 16)?;
                let letter = place(text.chars().count()).and_then(|at| text.chars().nth(at));
                letter.map_or(Ok(Value::Undefined), |letter| self.meter.text(letter.to_string()))
            }
            _ => self.attribute(value, key.as_str().unwrap_or_default()),
        }
    }

    fn slice(&mut self, slice: &'t ast::Slice<'t>) -> EvalResult<'t> {
        let value = self.eval(&slice.expr)?;
        let mut bound = |expr: &'t Option<Expr<'t>>| match expr {
            None => Ok(None),
            Some(expr) => match self.eval(expr)? {
                Value::None => Ok(None),
                other => match other.as_int() {
                    Some(n) => Ok(Some(n)),
                    None => render_error(format!("cannot index a list with {}", other.type_name())),
                },
            },
        };
        let (start, stop, step) =
            (bound(&slice.start)?, bound(&slice.stop)?, bound(&slice.step)?.unwrap_or(1));
        if step == 0 {
            return render_error("a slice cannot step by 0");
        }
        let places = |len: usize| {
            let len = len as i64;
            let (least, most) = if step > 0 { (0, len) } else { (-1, len - 1) };
            let bound = |n: i64| (if n < 0 { n.saturating_add(len) } else { n }).clamp(least, most);
            let (start, stop) = match step > 0 {
                true => (start.map_or(0, bound), stop.map_or(len, bound)),
                false => (start.map_or(len - 1, bound), stop.map_or(-1, bound)),
            };
            std::iter::successors(Some(start), move |at| at.checked_add(step))
                .take_while(move |at| if step > 0 { *at < stop } else { *at > stop })
                .map(|at| at as usize)
        };
        match &value {
            Value::List(list) => {
                self.meter.check_bytes(list.items.len() * size_of::<Value>())?;
                let items = places(list.items.len()).map(|at| list.items[at].clone()).collect();
                self.meter.list(items)
            }
            Value::Text(_) => {
                let text = value.as_str().unwrap_or_default();
                self.meter.check_bytes(5 * text.len())?;
                let letters: Vec<char> = text.chars().collect();
                let part: String = places(letters.len()).map(|at| letters[at]).collect();
                self.meter.text(part)
            }
            Value::Undefined | Value::None => self.meter.list(Vec::new()),
            other => render_error(format!("{} cannot be sliced", other.type_name())),
        }
    }

    pub fn arguments(&mut self, given: &'t [CallArg<'t>]) -> Result<Arguments<'t>> {
        let mut all = Arguments { positional: Vec::new(), named: Vec::new() };
        for argument in given {
            match argument {
                CallArg::Pos(value) => all.positional.push(self.eval(value)?),
                CallArg::Kwarg(name, value) => all.named.push((name, self.eval(value)?)),
                CallArg::PosSplat(_) | CallArg::KwargSplat(_) => {
                    return render_error("argument unpacking is not supported");
                }
            }
        }
        Ok(all)
    }

    pub fn call(&mut self, call: &'t ast::Call<'t>, caller: Option<Value<'t>>) -> EvalResult<'t> {
        match &call.expr {
            Expr::Var(name) => match self.lookup(name.id)? {
                Value::Macro(called) => self.call_macro(&called, &call.args, caller),
                Value::Undefined => {
                    let arguments = self.arguments(&call.args)?;
                    self.call_function(name.id, &arguments)
                }
                other => render_error(format!("`{}` is {} and cannot be called", name.id, other.type_name())),
            },
            Expr::GetAttr(attr) => {
                let value = self.eval(&attr.expr)?;
                let arguments = self.arguments(&call.args)?;
                self.call_method(&value, attr.name, &arguments)
            }
            other => match self.eval(other)? {
                Value::Macro(called) => self.call_macro(&called, &call.args, caller),
                value => render_error(format!("{} cannot be called", value.type_name())),
            },
        }
    }

    fn call_macro(
        &mut self,
        called: &Rc<MacroValue<'t>>,
        given: &'t [CallArg<'t>],
        caller: Option<Value<'t>>,
    ) -> EvalResult<'t> {
        let arguments = self.arguments(given)?;
        let declared = called.declared;
        if arguments.positional.len() > declared.args.len() {
            return render_error(format!(
                "the macro `{}` expects at most {} arguments",
                declared.name,
                declared.args.len()
            ));
        }
        let outside = self.scopes.split_off(1);
        self.scopes.push(called.captured.clone());
        self.scopes.push(caller.into_iter().map(|caller| ("caller", caller)).collect());
        let body = |m: &mut Self| {
            m.meter.spend_steps(called.captured.len())?;
            let without = declared.args.len() - declared.defaults.len().min(declared.args.len());
            for (i, target) in declared.args.iter().enumerate() {
                let Expr::Var(name) = target else { continue };
                let value = match (arguments.get(i, name.id), i.checked_sub(without)) {
                    (Some(value), _) => value.clone(),
                    (None, Some(default)) => m.eval(&declared.defaults[default])?,
                    (None, None) => Value::Undefined,
                };
                m.set_var(name.id, value)?;
            }
            m.capture(&declared.body).map(|(text, _)| text.into_value())
        };
        let result = body(self);
        self.scopes.truncate(1);
        self.scopes.extend(outside);
        result
    }

    /// Applies the filters of a block to `value`. The innermost filter in the tree has no input expression; it takes
    /// `value`.
    pub fn apply_filters(&mut self, filters: Option<&'t Expr<'t>>, value: Value<'t>) -> EvalResult<'t> {
        match filters {
            None => Ok(value),
            Some(Expr::Filter(filter)) => self.eval_filter(filter, Some(value)),
            Some(_) => render_error("this is not a filter"),
        }
    }

    fn eval_filter(&mut self, filter: &'t ast::Filter<'t>, begin: Option<Value<'t>>) -> EvalResult<'t> {
        let value = match (&filter.expr, begin) {
            (Some(Expr::Filter(inner)), Some(begin)) => {
                self.nested(inner.span().start_line, |m| m.eval_filter(inner, Some(begin)))?
            }
            (Some(expr), _) => self.eval(expr)?,
            (None, begin) => begin.unwrap_or(Value::Undefined),
        };
        let arguments = self.arguments(&filter.args)?;
        self.apply_filter(filter.name, &value, &arguments)
    }

    fn eval_test(&mut self, test: &'t ast::Test<'t>) -> EvalResult<'t> {
        let value = self.eval(&test.expr)?;
        let arguments = self.arguments(&test.args)?;
        self.run_test(test.name, &value, &arguments).map(Value::Bool)
    }
}

/// An arithmetic operator as templates write it.
fn operator(op: BinOpKind) -> &'static str {
    match op {
        BinOpKind::Add => "+",
        BinOpKind::Sub => "-",
        BinOpKind::Mul => "*",
        BinOpKind::Div => "/",
        BinOpKind::FloorDiv => "//",
        BinOpKind::Rem => "%",
        _ => "**",
    }
}
