//! A Jinja interpreter with bounded resources.
//!
//! A chat template comes from a published tokenizer and may be malicious. The parser is `minijinja`'s. Its own engine
//! bounds only the number of instructions, and a single instruction can allocate 100 MB. This module therefore
//! interprets the syntax tree itself and charges every value before it allocates it. [`RenderLimits`] bounds the live
//! bytes and the work of a rendering; constants bound the nesting of tags, calls and values. Exceeding a limit is a
//! [`RenderError`] with the template line.
//!
//! The dialect is Python's Jinja as chat templates use it: strings, lists, maps, namespaces, macros, loops with `break`
//! and `continue`, the filters and methods in `library`, and the tests in `conditions`. A template stands alone:
//! `include`, `import` and `extends` are not supported.

mod conditions;
mod expression;
mod library;
mod value;

use std::rc::Rc;

use minijinja::machinery::{Token, ast, parse, tokenize};
use minijinja::syntax::SyntaxConfig;

use crate::language::text_memory::TextError;
use value::{LoopState, TextBuilder};
pub use value::{Meter, RenderError, Result, Value, render_error};

/// Maximum template size in bytes. The longest published ones have about 30 KB.
pub const MAX_TEMPLATE_BYTES: u64 = 60_000;

/// Maximum tokens per tag and `elif`s per template. The parser recurses once for each, and the tree is as deep.
const MAX_TAG_TOKENS: usize = 1000;
const MAX_ELIFS: usize = 200;

/// Maximum nesting of expressions, statements and calls at run time. A level takes some hundred bytes of stack, up to a
/// few thousand in a debug build.
const MAX_DEPTH: usize = 200;

/// What takes memory, in messages.
const RENDERING: &str = "rendering its chat template";

/// Limits of one rendering.
#[derive(Clone, Copy, Debug)]
pub struct RenderLimits {
    /// Maximum bytes of all live values, including the output.
    pub bytes: usize,
    /// As `bytes`, but set by the memory that is left: exceeding it is not an error of the template or the record.
    pub budget: usize,
    /// Maximum steps; producing sixteen bytes counts as one.
    pub steps: u64,
}

/// A parsed template.
pub struct ParsedTemplate {
    tree: ast::Stmt<'static>,
    /// The source that `tree` borrows. Fields drop in declaration order, so it is dropped after `tree`.
    _source: Box<str>,
}

/// Values by name.
pub type Bindings<'t> = Vec<(&'t str, Value<'t>)>;

impl ParsedTemplate {
    pub fn parse(source: &str) -> std::result::Result<Self, String> {
        if source.len() as u64 > MAX_TEMPLATE_BYTES {
            return Err(format!(
                "it has {} bytes, more than the limit of {MAX_TEMPLATE_BYTES}",
                source.len()
            ));
        }
        let shown = |error: minijinja::Error| match error.line() {
            Some(line) => format!("{error} (line {line} of the template)"),
            None => error.to_string(),
        };
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(shown)?;
        let (mut tokens, mut elifs, mut first) = (0, 0, false);
        for token in tokenize(source, false, syntax.clone()) {
            let (token, span) = token.map_err(shown)?;
            tokens = if matches!(token, Token::TemplateData(_)) { 0 } else { tokens + 1 };
            if matches!(token, Token::VariableStart | Token::BlockStart) {
                tokens = 0;
            }
            elifs += usize::from(first && matches!(token, Token::Ident("elif")));
            first = matches!(token, Token::BlockStart);
            if tokens > MAX_TAG_TOKENS || elifs > MAX_ELIFS {
                let what = if tokens > MAX_TAG_TOKENS { "tag" } else { "chain of `elif`" };
                return Err(format!("a {what} is too long (line {} of the template)", span.start_line));
            }
        }
        let source: Box<str> = source.into();
        // SAFETY: the text is on the heap, so moving the box does not move it. It is never modified, and it outlives
        // the tree: `tree` is declared first, so it is dropped first, and it leaves this type only as a borrow of
        // `self`.
        let borrowed: &'static str = unsafe { &*std::ptr::from_ref::<str>(&source) };
        let tree = parse(borrowed, "template", syntax).map_err(shown)?;
        Ok(Self { tree, _source: source })
    }

    /// Renders the template with the variables that `names` returns. Returns the text and the remaining steps.
    pub fn run<'t>(
        &'t self,
        limits: RenderLimits,
        names: impl FnOnce(&Rc<Meter>) -> Result<Bindings<'t>>,
    ) -> std::result::Result<(String, u64), TextError> {
        let shown = |fault: RenderError| match fault.line {
            _ if fault.out_of_memory => TextError::Memory { what: RENDERING, limit: limits.budget as u64 },
            Some(line) => TextError::Invalid(format!("{} (line {line} of the template)", fault.problem)),
            None => TextError::Invalid(fault.problem),
        };
        let meter = Meter::new(limits);
        let run = || {
            let mut machine = Interpreter {
                scopes: vec![names(&meter)?],
                outputs: Vec::new(),
                depth: 0,
                meter: meter.clone(),
            };
            let ast::Stmt::Template(template) = &self.tree else { return Ok(String::new()) };
            let (text, _) = machine.capture(&template.children)?;
            Ok(text.into_string())
        };
        let text = run().map_err(shown)?;
        Ok((text, meter.steps_left()))
    }
}

/// State of one rendering.
struct Interpreter<'t> {
    meter: Rc<Meter>,
    /// Variables per scope, outermost first.
    scopes: Vec<Bindings<'t>>,
    /// Output stack; more than one entry while output is captured.
    outputs: Vec<TextBuilder>,
    depth: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Next,
    Break,
    Continue,
}

impl<'t> Interpreter<'t> {
    /// Runs `body` one nesting level deeper; an error without a line gets `line`.
    fn nested<T>(&mut self, line: u16, body: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.meter.spend_steps(1)?;
        if self.depth >= MAX_DEPTH {
            return Err(RenderError {
                problem: format!("it is nested more than {MAX_DEPTH} deep"),
                line: Some(line),
                out_of_memory: false,
            });
        }
        self.depth += 1;
        let done = body(self);
        self.depth -= 1;
        done.map_err(|fault| RenderError { line: fault.line.or(Some(line)), ..fault })
    }

    fn emit(&mut self, text: &str) -> Result<()> {
        self.outputs.last_mut().map_or(Ok(()), |out| out.push(text))
    }

    /// Runs `body` and returns what it wrote and how it ended.
    fn capture(&mut self, body: &'t [ast::Stmt<'t>]) -> Result<(TextBuilder, Flow)> {
        self.outputs.push(TextBuilder::new(&self.meter)?);
        let flow = self.exec_block(body);
        let text = self.outputs.pop();
        match (flow?, text) {
            (flow, Some(text)) => Ok((text, flow)),
            (flow, None) => Ok((TextBuilder::new(&self.meter)?, flow)),
        }
    }

    fn exec_block(&mut self, body: &'t [ast::Stmt<'t>]) -> Result<Flow> {
        for statement in body {
            let flow = self.exec(statement)?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    fn exec(&mut self, statement: &'t ast::Stmt<'t>) -> Result<Flow> {
        use ast::Stmt;
        match statement {
            Stmt::EmitRaw(raw) => self.emit(raw.raw).map(|()| Flow::Next),
            Stmt::EmitExpr(emit) => self.nested(emit.span().start_line, |m| {
                let value = m.eval(&emit.expr)?;
                m.outputs.last_mut().map_or(Ok(()), |out| out.push_display(&value, false))?;
                Ok(Flow::Next)
            }),
            Stmt::IfCond(cond) => self.nested(cond.span().start_line, |m| {
                let condition = m.eval(&cond.expr)?.is_true();
                m.exec_block(if condition { &cond.true_body } else { &cond.false_body })
            }),
            Stmt::ForLoop(each) => self.nested(each.span().start_line, |m| m.exec_for(each)),
            Stmt::Set(set) => self.nested(set.span().start_line, |m| {
                let value = m.eval(&set.expr)?;
                m.assign(&set.target, value)?;
                Ok(Flow::Next)
            }),
            Stmt::SetBlock(set) => self.nested(set.span().start_line, |m| {
                let (text, _) = m.capture(&set.body)?;
                let value = m.apply_filters(set.filter.as_ref(), text.into_value())?;
                m.assign(&set.target, value)?;
                Ok(Flow::Next)
            }),
            Stmt::FilterBlock(block) => self.nested(block.span().start_line, |m| {
                let (text, flow) = m.capture(&block.body)?;
                let value = m.apply_filters(Some(&block.filter), text.into_value())?;
                m.outputs.last_mut().map_or(Ok(()), |out| out.push_display(&value, false))?;
                Ok(flow)
            }),
            Stmt::WithBlock(with) => self.nested(with.span().start_line, |m| {
                m.scopes.push(Vec::new());
                let assigned = with.assignments.iter().try_for_each(|(target, value)| {
                    let value = m.eval(value)?;
                    m.assign(target, value)
                });
                let flow = assigned.and_then(|()| m.exec_block(&with.body));
                m.scopes.pop();
                flow
            }),
            Stmt::Macro(declared) => self.nested(declared.span().start_line, |m| {
                let value = m.declare_macro(declared)?;
                m.set_var(declared.name, value)?;
                Ok(Flow::Next)
            }),
            Stmt::CallBlock(call) => self.nested(call.span().start_line, |m| {
                let caller = m.declare_macro(&call.macro_decl)?;
                let value = m.call(&call.call, Some(caller))?;
                m.outputs.last_mut().map_or(Ok(()), |out| out.push_display(&value, false))?;
                Ok(Flow::Next)
            }),
            Stmt::Do(call) => {
                self.nested(call.span().start_line, |m| m.call(&call.call, None).map(|_| Flow::Next))
            }
            Stmt::Break(_) => Ok(Flow::Break),
            Stmt::Continue(_) => Ok(Flow::Continue),
            _ => render_error("unsupported tag in a chat template"),
        }
    }

    fn exec_for(&mut self, each: &'t ast::ForLoop<'t>) -> Result<Flow> {
        if each.recursive {
            return render_error("recursive loops are not supported; write a macro");
        }
        let all = self.eval(&each.iter)?;
        let mut items = self.iterate(&all)?;
        if let Some(filter) = &each.filter_expr {
            let mut kept = Vec::new();
            for item in &items.items {
                self.scopes.push(Vec::new());
                let condition = self.assign(&each.target, item.clone()).and_then(|()| self.eval(filter));
                self.scopes.pop();
                if condition?.is_true() {
                    kept.push(item.clone());
                }
            }
            items = self.meter.list_items(kept)?;
        }
        if items.items.is_empty() {
            return self.exec_block(&each.else_body);
        }
        let outer = self.lookup("loop")?;
        let depth = if let Value::Loop(outer) = &outer { outer.depth + 1 } else { 0 };
        for at in 0..items.items.len() {
            self.meter.spend_steps(1)?;
            let state = Value::Loop(Rc::new(LoopState { items: items.clone(), at, depth }));
            self.scopes.push(vec![("loop", state)]);
            let flow =
                self.assign(&each.target, items.items[at].clone()).and_then(|()| self.exec_block(&each.body));
            self.scopes.pop();
            if flow? == Flow::Break {
                break;
            }
        }
        Ok(Flow::Next)
    }

    /// Items that a loop iterates over.
    fn iterate(&mut self, value: &Value<'t>) -> Result<Rc<value::ListValue<'t>>> {
        match value {
            Value::List(list) => Ok(list.clone()),
            Value::Map(map) => {
                let keys = map.entries.iter().map(|(key, _)| key.clone()).collect();
                self.meter.list_items(keys)
            }
            Value::Text(_) => {
                let text = value.as_str().unwrap_or_default();
                // Each character becomes a string value of its own.
                self.meter.check_bytes(text.len() * 64)?;
                let letters = text.chars().map(|c| self.meter.text(c.to_string()));
                let letters = letters.collect::<Result<Vec<_>>>()?;
                self.meter.list_items(letters)
            }
            Value::Undefined => self.meter.list_items(Vec::new()),
            other => render_error(format!("cannot iterate over {}", other.type_name())),
        }
    }

    fn declare_macro(&mut self, declared: &'t ast::Macro<'t>) -> value::EvalResult<'t> {
        let captured: Bindings<'t> = self.scopes[1..].iter().flatten().cloned().collect();
        self.meter.macro_value(declared, captured)
    }

    fn assign(&mut self, target: &'t ast::Expr<'t>, value: Value<'t>) -> Result<()> {
        match target {
            ast::Expr::Var(name) => self.set_var(name.id, value),
            ast::Expr::List(list) => self.unpack(&list.items, &value),
            ast::Expr::Tuple(tuple) => self.unpack(&tuple.items, &value),
            ast::Expr::GetAttr(place) => {
                let Value::Namespace(space) = self.eval(&place.expr)? else {
                    return render_error("only a namespace's attributes can be set");
                };
                if value.reaches_mutable() {
                    return render_error("a namespace cannot contain a namespace, a macro or a loop");
                }
                let mut entries = space.entries.borrow_mut();
                self.meter.spend_steps(entries.len())?;
                match entries.iter_mut().find(|(name, _)| name.as_str() == Some(place.name)) {
                    Some((_, old)) => *old = value,
                    None => entries.push((self.meter.text(place.name)?, value)),
                }
                Ok(())
            }
            _ => render_error("cannot assign to this expression"),
        }
    }

    fn unpack(&mut self, targets: &'t [ast::Expr<'t>], value: &Value<'t>) -> Result<()> {
        let items = self.iterate(value)?;
        if items.items.len() != targets.len() {
            return render_error(format!(
                "cannot unpack {} values into {}",
                items.items.len(),
                targets.len()
            ));
        }
        targets.iter().zip(&items.items).try_for_each(|(target, item)| self.assign(target, item.clone()))
    }

    fn set_var(&mut self, name: &'t str, value: Value<'t>) -> Result<()> {
        let Some(frame) = self.scopes.last_mut() else { return Ok(()) };
        self.meter.spend_steps(frame.len())?;
        match frame.iter_mut().find(|(known, _)| *known == name) {
            Some((_, old)) => *old = value,
            None => frame.push((name, value)),
        }
        Ok(())
    }

    fn lookup(&mut self, name: &str) -> Result<Value<'t>> {
        let mut looked = 0;
        let found = self.scopes.iter().rev().find_map(|frame| {
            looked += frame.len();
            frame.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone())
        });
        self.meter.spend_steps(looked)?;
        Ok(found.unwrap_or(Value::Undefined))
    }
}

#[cfg(test)]
mod tests;
