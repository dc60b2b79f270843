//! Renders chat messages to text with a Jinja template, as Hugging Face tokenizers do.
//!
//! A template sees `messages` (each with `role` and `content`), `bos_token`, `eos_token` and `add_generation_prompt`,
//! and may call `raise_exception`. Blocks are trimmed (`trim_blocks`, `lstrip_blocks`). The size of the record and the
//! memory budget bound what a rendering may use: see [`jinja`](super::jinja).

use std::ops::Range;
use std::rc::Rc;

use super::super::text_memory::TextError;
use super::jinja::{Meter, ParsedTemplate, RenderLimits, Result as JinjaResult, Value};

/// Built-in templates by name.
pub const BUILTIN_TEMPLATES: [(&str, &str); 5] = [
    (
        "chatml",
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}\
         {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    ),
    (
        "llama2",
        "{% set talk = namespace(system='') %}\
         {% for m in messages %}\
         {% if m.role == 'system' %}{% set talk.system = '<<SYS>>\\n' + m.content.strip() + '\\n<</SYS>>\\n\\n' %}\
         {% elif m.role == 'user' %}\
         {{ bos_token + '[INST] ' + talk.system + m.content.strip() + ' [/INST]' }}{% set talk.system = '' %}\
         {% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}\
         {% else %}{{ raise_exception('it knows no role ' + m.role) }}{% endif %}\
         {% endfor %}",
    ),
    (
        "llama3",
        "{{ bos_token }}{% for m in messages %}\
         {{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content.strip() + '<|eot_id|>' }}\
         {% endfor %}\
         {% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    ),
    (
        "gemma",
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}\
         {{ raise_exception('it knows no role system') }}{% endif %}\
         {{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content.strip() }}\
         {{ '<end_of_turn>\\n' }}{% endfor %}\
         {% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
    ),
    (
        "plain",
        "{% for m in messages %}{{ m.role + ': ' + m.content.strip() + '\\n' }}{% endfor %}\
         {% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}",
    ),
];

/// One chat message.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatMessage {
    pub role: String,
    /// `None` beside tool calls.
    pub content: Option<String>,
    /// Other fields that templates know: `tool_calls`, `name` and so on.
    pub more: Vec<(&'static str, serde_json::Value)>,
    /// Whether the loss may include it; the dataset can exclude an answer.
    pub learned: bool,
}

impl ChatMessage {
    pub fn new(role: &str, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: Some(content.into()), more: Vec::new(), learned: true }
    }

    /// Bytes of its texts.
    fn bytes(&self) -> usize {
        let more: usize = self.more.iter().map(|(name, value)| name.len() + json_text_bytes(value)).sum();
        self.role.len() + self.content.as_ref().map_or(0, String::len) + more
    }

    /// The message for built-in templates. They know no developer role, reasoning or tool calls: reasoning and calls
    /// become text in the form of Hermes and Qwen.
    fn simplified(&self) -> Self {
        let role = if self.role == "developer" { "system" } else { self.role.as_str() };
        let mut content = self.content.clone().unwrap_or_default();
        let reasoning = |(name, _): &&(&str, serde_json::Value)| REASONING_FIELDS.contains(name);
        if let Some(text) = self.more.iter().find(reasoning).and_then(|(_, value)| value.as_str()) {
            content = format!("<think>\n{}\n</think>\n\n{content}", text.trim_matches('\n'));
        }
        for call in self.more.iter().flat_map(|(name, value)| tool_calls(name, value)) {
            if !content.is_empty() {
                content.push('\n');
            }
            content += &format!("<tool_call>\n{call}\n</tool_call>");
        }
        Self { learned: self.learned, ..Self::new(role, content) }
    }
}

/// Fields of a message that hold what a model thinks before it answers.
pub const REASONING_FIELDS: [&str; 2] = ["reasoning_content", "thinking"];

/// The calls in a field of a message: `{"name": ..., "arguments": ...}` each.
fn tool_calls(name: &str, value: &serde_json::Value) -> Vec<serde_json::Value> {
    match (name, value) {
        ("tool_calls", serde_json::Value::Array(calls)) => {
            calls.iter().map(|call| call.get("function").unwrap_or(call)).map(call_with_arguments).collect()
        }
        ("function_call", call) => vec![call_with_arguments(call)],
        _ => Vec::new(),
    }
}

/// OpenAI publishes the arguments as a string of JSON; models are trained on the object.
fn call_with_arguments(call: &serde_json::Value) -> serde_json::Value {
    let mut call = call.clone();
    if let Some(arguments) = call.get_mut("arguments")
        && let Some(parsed) = arguments.as_str().and_then(|text| serde_json::from_str(text).ok())
    {
        *arguments = parsed;
    }
    call
}

/// Bytes of the texts in a value, and some for each value.
fn json_text_bytes(value: &serde_json::Value) -> usize {
    use serde_json::Value::*;
    BYTES_PER_MESSAGE
        + match value {
            String(text) => text.len(),
            Array(values) => values.iter().map(json_text_bytes).sum(),
            Object(fields) => fields.iter().map(|(name, value)| name.len() + json_text_bytes(value)).sum(),
            Null | Bool(_) | Number(_) => 0,
        }
}

/// A rendered chat and the byte ranges of the assistant's answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedChat {
    pub text: String,
    pub answer_spans: Vec<Range<usize>>,
}

pub struct ChatTemplate {
    program: ParsedTemplate,
    bos: String,
    eos: String,
    is_builtin: bool,
}

/// Byte limit of a rendering: this base, plus `BYTES_PER_BYTE` for each byte of the messages.
const BASE_BYTES: usize = 1 << 20;
const BYTES_PER_BYTE: usize = 16;

/// Bytes counted per message besides its text.
const BYTES_PER_MESSAGE: usize = 128;

/// Renderings of one record that are alive at the same time: the values of one, and three texts.
const LIVE_RENDERINGS: u64 = 4;

/// Step limit for all renderings of one record; a few seconds.
const MAX_STEPS: u64 = 200_000_000;

impl ChatTemplate {
    /// Parses a template; `bos` and `eos` become its `bos_token` and `eos_token`.
    pub fn new(source: &str, bos: String, eos: String) -> Result<Self, String> {
        let is_builtin = BUILTIN_TEMPLATES.iter().any(|(_, known)| *known == source);
        Ok(Self { program: ParsedTemplate::parse(source)?, bos, eos, is_builtin })
    }

    /// Renders `messages` within `budget` bytes; deducts the steps used from `steps_left`.
    fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        budget: usize,
        steps_left: &mut u64,
    ) -> Result<String, TextError> {
        let input = messages.iter().map(|message| message.bytes() + BYTES_PER_MESSAGE).sum::<usize>();
        let limits = RenderLimits { bytes: BASE_BYTES + BYTES_PER_BYTE * input, budget, steps: *steps_left };
        let names = |meter: &Rc<Meter>| {
            let (role, content) = (meter.text("role")?, meter.text("content")?);
            let mut all = Vec::with_capacity(messages.len());
            for m in messages {
                let own_content = match &m.content {
                    Some(text) => meter.text(text.as_str())?,
                    None => Value::None,
                };
                let mut fields =
                    vec![(role.clone(), meter.text(m.role.as_str())?), (content.clone(), own_content)];
                for (name, value) in &m.more {
                    fields.push((meter.text(*name)?, json_value(meter, value)?));
                }
                all.push(meter.map(fields)?);
            }
            Ok(vec![
                ("messages", meter.list(all)?),
                ("add_generation_prompt", Value::Bool(add_generation_prompt)),
                ("bos_token", meter.text(self.bos.as_str())?),
                ("eos_token", meter.text(self.eos.as_str())?),
            ])
        };
        let (text, left) = self.program.run(limits, names)?;
        *steps_left = left;
        Ok(text)
    }

    /// Renders the chat within `limit` bytes, with `to_answer` up to where the assistant's next answer begins. Returns
    /// the problem otherwise.
    pub fn render_text(
        &self,
        messages: &[ChatMessage],
        to_answer: bool,
        limit: u64,
    ) -> Result<String, String> {
        let mut steps_left = MAX_STEPS;
        let budget = usize::try_from(limit / LIVE_RENDERINGS).unwrap_or(usize::MAX);
        self.render(messages, to_answer, budget, &mut steps_left).map_err(|error| match error {
            TextError::Invalid(problem) | TextError::MissingField(problem) => problem,
            TextError::Memory { what, limit } => format!("{what} takes more than {limit} bytes"),
        })
    }

    /// Renders the whole chat. An answer, unless it is excluded from the loss, is the text that an assistant message
    /// adds to the rendering of the messages before it, which is rendered with the generation prompt. Each answer costs
    /// up to two more renderings. All of them take at most `limit` bytes at a time.
    pub fn render_chat(
        &self,
        messages: &[ChatMessage],
        with_answers: bool,
        limit: u64,
    ) -> Result<RenderedChat, TextError> {
        let simplified: Vec<ChatMessage>;
        let messages = match self.is_builtin {
            true => {
                simplified = messages.iter().map(ChatMessage::simplified).collect();
                &simplified[..]
            }
            false => messages,
        };
        let (mut steps_left, budget) = (MAX_STEPS, (limit / LIVE_RENDERINGS) as usize);
        let text = self.render(messages, false, budget, &mut steps_left)?;
        let mut answers: Vec<Range<usize>> = Vec::new();
        let learned = |m: &ChatMessage| with_answers && m.learned && m.role == "assistant";
        for (i, _) in messages.iter().enumerate().filter(|(_, m)| learned(m)) {
            let before = self.render(&messages[..i], true, budget, &mut steps_left)?;
            let after = match i + 1 == messages.len() {
                true => text.clone(),
                false => self.render(&messages[..=i], false, budget, &mut steps_left)?,
            };
            let behind = answers.last().is_none_or(|last| last.end <= before.len());
            if !behind || !after.starts_with(&before) || !text.starts_with(after.trim_end()) {
                let problem = "the template does not render messages one after the other, so that the answers cannot \
                               be located; set `loss = \"all\"`";
                return Err(TextError::Invalid(problem.into()));
            }
            // The template adds trailing whitespace; it is not part of the answer.
            answers.push(before.len()..after.trim_end().len().max(before.len()));
        }
        Ok(RenderedChat { text, answer_spans: answers })
    }
}

/// A value of JSON as a template sees it.
fn json_value<'t>(meter: &Rc<Meter>, value: &serde_json::Value) -> JinjaResult<Value<'t>> {
    Ok(match value {
        serde_json::Value::Null => Value::None,
        serde_json::Value::Bool(flag) => Value::Bool(*flag),
        serde_json::Value::Number(number) => match number.as_i64() {
            Some(whole) => Value::Int(whole),
            None => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        serde_json::Value::String(text) => meter.text(text.as_str())?,
        serde_json::Value::Array(values) => {
            let values: JinjaResult<Vec<_>> = values.iter().map(|value| json_value(meter, value)).collect();
            meter.list(values?)?
        }
        serde_json::Value::Object(fields) => {
            let field = |(name, value): (&String, &serde_json::Value)| {
                Ok((meter.text(name.as_str())?, json_value(meter, value)?))
            };
            let fields: JinjaResult<Vec<_>> = fields.iter().map(field).collect();
            meter.map(fields?)?
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(name: &str, messages: &[(&str, &str)]) -> Result<(String, Vec<String>), String> {
        chat_within(u64::MAX, name, messages).map_err(|error| match error {
            TextError::Invalid(problem) | TextError::MissingField(problem) => problem,
            TextError::Memory { .. } => unreachable!("all memory is left"),
        })
    }

    fn chat_within(
        limit: u64,
        name: &str,
        messages: &[(&str, &str)],
    ) -> Result<(String, Vec<String>), TextError> {
        let source =
            BUILTIN_TEMPLATES.iter().find(|(known, _)| *known == name).map_or(name, |(_, source)| source);
        let template = ChatTemplate::new(source, "<s>".into(), "</s>".into())?;
        let messages: Vec<ChatMessage> =
            messages.iter().map(|&(role, content)| ChatMessage::new(role, content)).collect();
        let RenderedChat { text, answer_spans: answers } = template.render_chat(&messages, true, limit)?;
        let answers = answers.into_iter().map(|range| text[range].to_owned()).collect();
        Ok((text, answers))
    }

    const CHAT: [(&str, &str); 5] = [
        ("system", "Be kind."),
        ("user", " Hi "),
        ("assistant", "Hello!"),
        ("user", "Bye"),
        ("assistant", "Ciao"),
    ];

    #[test]
    fn templates_that_have_names_are_as_published() {
        let (text, answers) = chat("chatml", &CHAT[..3]).unwrap();
        assert_eq!(
            text,
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n\
             <|im_start|>assistant\nHello!<|im_end|>\n"
        );
        assert_eq!(answers, ["Hello!<|im_end|>"]);
        let (text, answers) = chat("llama2", &CHAT).unwrap();
        assert_eq!(
            text,
            "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST] Hello! </s><s>[INST] Bye [/INST] Ciao </s>"
        );
        assert_eq!(answers, [" Hello! </s>", " Ciao </s>"]);
        let (text, answers) = chat("llama3", &CHAT[1..3]).unwrap();
        assert_eq!(
            text,
            "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>\
             <|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
        );
        assert_eq!(answers, ["Hello!<|eot_id|>"]);
        let (text, answers) = chat("gemma", &CHAT[1..3]).unwrap();
        assert_eq!(
            text,
            "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n"
        );
        assert_eq!(answers, ["Hello!<end_of_turn>"]);
        assert_eq!(chat("plain", &CHAT).unwrap().1, [" Hello!", " Ciao"]);
        assert_eq!(chat("gemma", &CHAT).unwrap_err().split(" (").next().unwrap(), "it knows no role system");
    }

    #[test]
    fn tool_calls_are_text_for_a_built_in_template_and_values_for_others() {
        let calls = serde_json::json!([{"function": {"name": "add", "arguments": "{\"a\": 1}"}}]);
        let call = ChatMessage {
            content: None,
            more: vec![("tool_calls", calls)],
            ..ChatMessage::new("assistant", "")
        };
        let messages = [ChatMessage::new("developer", "x"), ChatMessage::new("user", "y"), call];
        let rendered = |source: &str| {
            let template = ChatTemplate::new(source, "".into(), "".into()).unwrap();
            template.render_chat(&messages, true, u64::MAX).unwrap().text
        };
        assert_eq!(
            rendered(BUILTIN_TEMPLATES[4].1),
            "system: x\nuser: y\nassistant: <tool_call>\n{\"name\":\"add\",\"arguments\":{\"a\":1}}\n</tool_call>\n"
        );
        let own = "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.name }}\
                   {% else %}{{ m.role }} {% endif %}{% endfor %}";
        assert_eq!(rendered(own), "developer user add");
    }

    #[test]
    fn reasoning_is_text_for_a_built_in_template() {
        let more = vec![("reasoning_content", serde_json::json!("\n1 + 1\n"))];
        let messages = [ChatMessage { more, ..ChatMessage::new("assistant", "2") }];
        let rendered = |source: &str| {
            let template = ChatTemplate::new(source, "".into(), "".into()).unwrap();
            template.render_chat(&messages, false, u64::MAX).unwrap().text
        };
        assert_eq!(rendered(BUILTIN_TEMPLATES[4].1), "assistant: <think>\n1 + 1\n</think>\n\n2\n");
        assert_eq!(
            rendered("{% for m in messages %}{{ m.reasoning_content | trim }}={{ m.content }}{% endfor %}"),
            "1 + 1=2"
        );
    }

    /// What the record allows is an error of the record; what memory allows is not.
    #[test]
    fn a_rendering_stays_within_the_memory_that_is_left() {
        let messages = [("user", "x")];
        let repeat = |n: usize| format!("{{{{ 'x' * {n} }}}}");
        assert_eq!(chat_within(4 << 20, &repeat(500_000), &messages).unwrap().0.len(), 500_000);
        let error = chat_within(4 << 17, &repeat(500_000), &messages).unwrap_err();
        assert_eq!(error, TextError::Memory { what: "rendering its chat template", limit: 1 << 17 });
        assert!(matches!(chat_within(4 << 30, &repeat(2 << 20), &messages), Err(TextError::Invalid(_))));
        // Whichever limit is lower applies first, however much is asked for at once.
        assert!(matches!(chat_within(4 << 17, &repeat(1 << 40), &messages), Err(TextError::Memory { .. })));
    }

    #[test]
    fn the_dialect_of_published_templates_is_understood() {
        let source = "{% if messages[0]['role'] == 'system' %}
    {% set rest = messages[1:] %}
{% else %}
    {% set rest = messages %}
{% endif %}
{%- for message in rest -%}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must take turns') }}
    {% endif %}
    {{- '[' + message.get('role').upper() + ']' + message['content'] | trim }}
    {%- if message.role == 'assistant' and message.content.startswith('H') %}{{ eos_token }}{% endif %}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '[ASSISTANT]' }}{% endif %}";
        let (text, answers) = chat(source, &CHAT).unwrap();
        assert_eq!(text, "[USER]Hi[ASSISTANT]Hello!</s>[USER]Bye[ASSISTANT]Ciao");
        assert_eq!(answers, ["Hello!</s>", "Ciao"]);
        let wrong = chat(source, &[("user", "a"), ("user", "b")]).unwrap_err();
        assert!(wrong.contains("roles must take turns"), "{wrong}");
        assert!(chat("{{ messages[0].content.nonsense() }}", &CHAT).unwrap_err().contains("nonsense"));
        assert!(chat("{% if %}", &CHAT).unwrap_err().contains("line 1"));
        // A template that prints only the last message.
        assert!(chat("{{ messages[-1].content }}", &CHAT).unwrap_err().contains("answers cannot be located"));
    }
}
