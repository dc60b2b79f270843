//! Jinja tests: what follows `is`, and what `select` and its relatives apply to each item.

use minijinja::machinery::ast::CompareOpKind;

use super::expression::Arguments;
use super::value::{Value, render_error};
use super::{Interpreter, Result};

impl<'t> Interpreter<'t> {
    pub fn run_test(&mut self, name: &str, value: &Value<'t>, given: &Arguments<'t>) -> Result<bool> {
        let cased = |fits: fn(char) -> bool, not: fn(char) -> bool| {
            value.as_str().is_some_and(|text| text.chars().any(fits) && !text.chars().any(not))
        };
        if let Some(text) = value.as_str() {
            self.meter.spend_steps(text.len() / 16)?;
        }
        let compared = match name {
            "eq" | "equalto" | "==" => Some(CompareOpKind::Eq),
            "ne" | "!=" => Some(CompareOpKind::Ne),
            "lt" | "lessthan" | "<" => Some(CompareOpKind::Lt),
            "le" | "<=" => Some(CompareOpKind::Lte),
            "gt" | "greaterthan" | ">" => Some(CompareOpKind::Gt),
            "ge" | ">=" => Some(CompareOpKind::Gte),
            "in" => Some(CompareOpKind::In),
            _ => None,
        };
        if let Some(op) = compared {
            let Some(other) = given.positional.first() else {
                return render_error(format!("`{name}` needs an argument"));
            };
            return self.compare(op, value, other);
        }
        Ok(match name {
            "defined" => !matches!(value, Value::Undefined),
            "undefined" => matches!(value, Value::Undefined),
            "none" => matches!(value, Value::None),
            "boolean" => matches!(value, Value::Bool(_)),
            "true" => matches!(value, Value::Bool(true)),
            "false" => matches!(value, Value::Bool(false)),
            "number" => matches!(value, Value::Int(_) | Value::Float(_)),
            "integer" | "int" => matches!(value, Value::Int(_)),
            "float" => matches!(value, Value::Float(_)),
            "string" => value.as_str().is_some(),
            "sequence" | "iterable" => matches!(value, Value::List(_) | Value::Text(_) | Value::Map(_)),
            "mapping" => matches!(value, Value::Map(_)),
            "callable" => matches!(value, Value::Macro(_)),
            "odd" | "even" => match value.as_int() {
                Some(n) => (n % 2 != 0) == (name == "odd"),
                None => return render_error(format!("{} is not a whole number", value.type_name())),
            },
            "divisibleby" => match (value.as_int(), given.get_int(0, "")) {
                (Some(n), Some(by)) if by != 0 => n.wrapping_rem(by) == 0,
                _ => return render_error("`divisibleby` expects whole numbers"),
            },
            "startingwith" => {
                value.as_str().zip(given.get_str(0, "")).is_some_and(|(text, part)| text.starts_with(part))
            }
            "endingwith" => {
                value.as_str().zip(given.get_str(0, "")).is_some_and(|(text, part)| text.ends_with(part))
            }
            "lower" => cased(char::is_lowercase, char::is_uppercase),
            "upper" => cased(char::is_uppercase, char::is_lowercase),
            _ => return render_error(format!("unknown test `{name}`")),
        })
    }
}
