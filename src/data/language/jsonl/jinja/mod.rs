//! Templates in Jinja, run within bounds.
//!
//! A template comes with a tokenizer that somebody published, so it may be written to do harm. The parser is
//! `minijinja`'s; its own engine bounds instructions only, and one of those can make 100 MB, so the syntax tree is
//! run here, where every value is charged before it is made: [`Limits`] bounds the bytes alive at any time and the
//! work of a rendering, and constants bound how deep tags, calls and values nest. What goes beyond is a [`Fault`] of
//! the template with its line.
//!
//! The dialect is Python's Jinja as chat templates use it: texts, lists, maps, namespaces, macros, loops with `break`
//! and `continue`, the filters and methods in [`library`], the tests in [`conditions`]. There is one template, so there is nothing to
//! include, import or extend.

mod conditions;
mod expression;
mod library;
mod value;

use std::rc::Rc;

use minijinja::machinery::{Token, ast, parse, tokenize};
use minijinja::syntax::SyntaxConfig;

use value::{Builder, Loop};
pub use value::{Fault, Meter, Result, Value, fault};

/// Bytes of a template, at most. The longest that is published has some 30 KB.
pub const MOST_BYTES: u64 = 60_000;

/// Tokens of one tag, and `elif`s of a template, at most: the parser nests each in the one before, and so does the
/// tree that it makes.
const MOST_TOKENS: usize = 1000;
const MOST_ELIFS: usize = 200;

/// Expressions, statements and calls within one another while a template runs, at most. Some hundred bytes of stack
/// each, up to a few thousand in a debug build.
const MOST_DEPTH: usize = 200;

/// What one rendering may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of all values alive at a time, the output included.
    pub bytes: usize,
    /// Steps, and bytes made by the sixteen.
    pub work: u64,
}

/// A template that was parsed.
pub struct Program {
    tree: ast::Stmt<'static>,
    /// What `tree` borrows from; it is dropped after it.
    _source: Box<str>,
}

/// Values by their names.
pub type Names<'t> = Vec<(&'t str, Value<'t>)>;

impl Program {
    pub fn parse(source: &str) -> std::result::Result<Self, String> {
        if source.len() as u64 > MOST_BYTES {
            return Err(format!("it has {} bytes, and a template has at most {MOST_BYTES}", source.len()));
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
            if tokens > MOST_TOKENS || elifs > MOST_ELIFS {
                let what = if tokens > MOST_TOKENS { "tag" } else { "chain of `elif`" };
                return Err(format!("a {what} is too long (line {} of the template)", span.start_line));
            }
        }
        let source: Box<str> = source.into();
        // SAFETY: the text lies on the heap, is never changed, and outlives the tree, which is dropped before it and
        // leaves this type only as a borrow of `self`.
        let borrowed: &'static str = unsafe { &*std::ptr::from_ref::<str>(&source) };
        let tree = parse(borrowed, "template", syntax).map_err(shown)?;
        Ok(Self { tree, _source: source })
    }

    /// The text that the template makes of the values that `names` gives, and the steps that are left.
    pub fn run<'t>(
        &'t self,
        limits: Limits,
        names: impl FnOnce(&Rc<Meter>) -> Result<Names<'t>>,
    ) -> std::result::Result<(String, u64), String> {
        let shown = |fault: Fault| match fault.line {
            Some(line) => format!("{} (line {line} of the template)", fault.problem),
            None => fault.problem,
        };
        let meter = Meter::new(limits);
        let run = || {
            let mut machine =
                Machine { frames: vec![names(&meter)?], out: Vec::new(), depth: 0, meter: meter.clone() };
            let ast::Stmt::Template(template) = &self.tree else { return Ok(String::new()) };
            let (text, _) = machine.captured(&template.children)?;
            Ok(text.into_string())
        };
        let text = run().map_err(shown)?;
        Ok((text, meter.left()))
    }
}

/// A rendering.
struct Machine<'t> {
    meter: Rc<Meter>,
    /// Names by the scope that set them, the outermost first.
    frames: Vec<Names<'t>>,
    /// The text made so far; more than one while a part of it is captured.
    out: Vec<Builder>,
    depth: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Next,
    Break,
    Continue,
}

impl<'t> Machine<'t> {
    /// Runs `body` one level deeper, and puts the line at hand to its fault.
    fn deeper<T>(&mut self, line: u16, body: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.meter.work(1)?;
        if self.depth >= MOST_DEPTH {
            return Err(Fault { problem: format!("it nests more than {MOST_DEPTH} deep"), line: Some(line) });
        }
        self.depth += 1;
        let done = body(self);
        self.depth -= 1;
        done.map_err(|fault| Fault { line: fault.line.or(Some(line)), ..fault })
    }

    fn emit(&mut self, text: &str) -> Result<()> {
        self.out.last_mut().map_or(Ok(()), |out| out.push(text))
    }

    /// What `body` writes, and how it ended.
    fn captured(&mut self, body: &'t [ast::Stmt<'t>]) -> Result<(Builder, Flow)> {
        self.out.push(Builder::new(&self.meter)?);
        let flow = self.all(body);
        let text = self.out.pop();
        match (flow?, text) {
            (flow, Some(text)) => Ok((text, flow)),
            (flow, None) => Ok((Builder::new(&self.meter)?, flow)),
        }
    }

    fn all(&mut self, body: &'t [ast::Stmt<'t>]) -> Result<Flow> {
        for statement in body {
            let flow = self.statement(statement)?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    fn statement(&mut self, statement: &'t ast::Stmt<'t>) -> Result<Flow> {
        use ast::Stmt;
        match statement {
            Stmt::EmitRaw(raw) => self.emit(raw.raw).map(|()| Flow::Next),
            Stmt::EmitExpr(emit) => self.deeper(emit.span().start_line, |m| {
                let value = m.eval(&emit.expr)?;
                m.out.last_mut().map_or(Ok(()), |out| out.show(&value, false))?;
                Ok(Flow::Next)
            }),
            Stmt::IfCond(cond) => self.deeper(cond.span().start_line, |m| {
                let holds = m.eval(&cond.expr)?.is_true();
                m.all(if holds { &cond.true_body } else { &cond.false_body })
            }),
            Stmt::ForLoop(each) => self.deeper(each.span().start_line, |m| m.each(each)),
            Stmt::Set(set) => self.deeper(set.span().start_line, |m| {
                let value = m.eval(&set.expr)?;
                m.assign(&set.target, value)?;
                Ok(Flow::Next)
            }),
            Stmt::SetBlock(set) => self.deeper(set.span().start_line, |m| {
                let (text, _) = m.captured(&set.body)?;
                let value = m.filtered(set.filter.as_ref(), text.done())?;
                m.assign(&set.target, value)?;
                Ok(Flow::Next)
            }),
            Stmt::FilterBlock(block) => self.deeper(block.span().start_line, |m| {
                let (text, flow) = m.captured(&block.body)?;
                let value = m.filtered(Some(&block.filter), text.done())?;
                m.out.last_mut().map_or(Ok(()), |out| out.show(&value, false))?;
                Ok(flow)
            }),
            Stmt::WithBlock(with) => self.deeper(with.span().start_line, |m| {
                m.frames.push(Vec::new());
                let assigned = with.assignments.iter().try_for_each(|(target, value)| {
                    let value = m.eval(value)?;
                    m.assign(target, value)
                });
                let flow = assigned.and_then(|()| m.all(&with.body));
                m.frames.pop();
                flow
            }),
            Stmt::Macro(declared) => self.deeper(declared.span().start_line, |m| {
                let value = m.declared(declared)?;
                m.put(declared.name, value)?;
                Ok(Flow::Next)
            }),
            Stmt::CallBlock(call) => self.deeper(call.span().start_line, |m| {
                let caller = m.declared(&call.macro_decl)?;
                let value = m.call(&call.call, Some(caller))?;
                m.out.last_mut().map_or(Ok(()), |out| out.show(&value, false))?;
                Ok(Flow::Next)
            }),
            Stmt::Do(call) => {
                self.deeper(call.span().start_line, |m| m.call(&call.call, None).map(|_| Flow::Next))
            }
            Stmt::Break(_) => Ok(Flow::Break),
            Stmt::Continue(_) => Ok(Flow::Continue),
            _ => fault("it uses a tag that has no meaning in a chat template"),
        }
    }

    fn each(&mut self, each: &'t ast::ForLoop<'t>) -> Result<Flow> {
        if each.recursive {
            return fault("recursive loops are not supported; write a macro");
        }
        let all = self.eval(&each.iter)?;
        let mut items = self.iterate(&all)?;
        if let Some(wanted) = &each.filter_expr {
            let mut kept = Vec::new();
            for item in &items.items {
                self.frames.push(Vec::new());
                let holds = self.assign(&each.target, item.clone()).and_then(|()| self.eval(wanted));
                self.frames.pop();
                if holds?.is_true() {
                    kept.push(item.clone());
                }
            }
            items = self.meter.items(kept)?;
        }
        if items.items.is_empty() {
            return self.all(&each.else_body);
        }
        let outer = self.lookup("loop")?;
        let depth = if let Value::Loop(outer) = &outer { outer.depth + 1 } else { 0 };
        for at in 0..items.items.len() {
            self.meter.work(1)?;
            let state = Value::Loop(Rc::new(Loop { items: items.clone(), at, depth }));
            self.frames.push(vec![("loop", state)]);
            let flow = self.assign(&each.target, items.items[at].clone()).and_then(|()| self.all(&each.body));
            self.frames.pop();
            if flow? == Flow::Break {
                break;
            }
        }
        Ok(Flow::Next)
    }

    /// What a loop goes through.
    fn iterate(&mut self, value: &Value<'t>) -> Result<Rc<value::List<'t>>> {
        match value {
            Value::List(list) => Ok(list.clone()),
            Value::Map(map) => {
                let keys = map.entries.iter().map(|(key, _)| key.clone()).collect();
                self.meter.items(keys)
            }
            Value::Text(_) => {
                let text = value.str().unwrap_or_default();
                // Each character is a text of its own.
                self.meter.room(text.len() * 64)?;
                let letters = text.chars().map(|c| self.meter.text(c.to_string()));
                let letters = letters.collect::<Result<Vec<_>>>()?;
                self.meter.items(letters)
            }
            Value::Undefined => self.meter.items(Vec::new()),
            other => fault(format!("{} cannot be gone through", other.kind())),
        }
    }

    fn declared(&mut self, declared: &'t ast::Macro<'t>) -> value::Made<'t> {
        let captured: Names<'t> = self.frames[1..].iter().flatten().cloned().collect();
        self.meter.declared(declared, captured)
    }

    fn assign(&mut self, target: &'t ast::Expr<'t>, value: Value<'t>) -> Result<()> {
        match target {
            ast::Expr::Var(name) => self.put(name.id, value),
            ast::Expr::List(list) => self.unpack(&list.items, &value),
            ast::Expr::Tuple(tuple) => self.unpack(&tuple.items, &value),
            ast::Expr::GetAttr(place) => {
                let Value::Space(space) = self.eval(&place.expr)? else {
                    return fault("only a namespace's attributes can be set");
                };
                if value.refers() {
                    return fault("a namespace cannot hold a namespace, a macro or a loop");
                }
                let mut entries = space.entries.borrow_mut();
                self.meter.work(entries.len())?;
                match entries.iter_mut().find(|(name, _)| name.str() == Some(place.name)) {
                    Some((_, old)) => *old = value,
                    None => entries.push((self.meter.text(place.name)?, value)),
                }
                Ok(())
            }
            _ => fault("nothing can be assigned to this"),
        }
    }

    fn unpack(&mut self, targets: &'t [ast::Expr<'t>], value: &Value<'t>) -> Result<()> {
        let items = self.iterate(value)?;
        if items.items.len() != targets.len() {
            return fault(format!("{} values cannot be unpacked into {}", items.items.len(), targets.len()));
        }
        targets.iter().zip(&items.items).try_for_each(|(target, item)| self.assign(target, item.clone()))
    }

    fn put(&mut self, name: &'t str, value: Value<'t>) -> Result<()> {
        let Some(frame) = self.frames.last_mut() else { return Ok(()) };
        self.meter.work(frame.len())?;
        match frame.iter_mut().find(|(known, _)| *known == name) {
            Some((_, old)) => *old = value,
            None => frame.push((name, value)),
        }
        Ok(())
    }

    fn lookup(&mut self, name: &str) -> Result<Value<'t>> {
        let mut looked = 0;
        let found = self.frames.iter().rev().find_map(|frame| {
            looked += frame.len();
            frame.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone())
        });
        self.meter.work(looked)?;
        Ok(found.unwrap_or(Value::Undefined))
    }
}

#[cfg(test)]
mod tests;
