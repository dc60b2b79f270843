//! Text, token ids and JSON records, with their tokenizers.

use std::fs;
use std::io;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::FileCodec;
use crate::random::draw::Draw;

/// What a token of a text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenUnits {
    Characters,
    Bytes,
    /// A `tokenizer.json` of whole words.
    Words,
    /// A `tokenizer.json` of byte pairs, in GPT-2's form.
    Pairs,
}

/// Words of every length, some beyond ASCII.
const WORDS: [&str; 24] = [
    "a", "to", "sun", "moon", "river", "stones", "lantern", "mountain", "é", "naïve", "über", "漢字", "of",
    "in", "we", "run", "walk", "slowly", "never", "again", "9", "1024", "x", "zebra",
];

/// A text of at least this many characters; `plain`: ASCII only.
fn random_words(draw: &mut Draw, plain: bool, characters: usize) -> String {
    let (mut text, mut count) = (String::new(), 0);
    // At least two words: a sample has two tokens.
    while count < characters || text.split_whitespace().nth(1).is_none() {
        let word = draw.pick(&WORDS);
        let word = if plain && !word.is_ascii() { "plain" } else { word };
        count += word.chars().count() + 1;
        text += word;
        text.push(draw.pick(&[' ', ' ', ' ', '\n']));
    }
    text
}

impl TokenUnits {
    /// Whether texts must be ASCII: the vocabularies written here cover nothing else.
    fn ascii_only(self) -> bool {
        self == TokenUnits::Pairs
    }

    /// Size of the byte-pair vocabulary.
    pub const PAIRS: usize = 100;

    fn write(self, folder: &Path) -> io::Result<()> {
        let tokenizer = match self {
            TokenUnits::Characters | TokenUnits::Bytes => return Ok(()),
            TokenUnits::Words => {
                let mut vocab = Map::new();
                let all = ["[UNK]", "<|endoftext|>", "user", "assistant", "system"].iter().chain(&WORDS);
                all.for_each(|word| {
                    let next = vocab.len();
                    vocab.insert(word.to_string(), json!(next));
                });
                json!({
                    "pre_tokenizer": { "type": "WhitespaceSplit" }, "post_processor": null, "decoder": null,
                    "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]" },
                })
            }
            TokenUnits::Pairs => {
                let mut vocab = Map::new();
                let mut put = |token: &str| {
                    let next = vocab.len();
                    vocab.entry(token).or_insert(json!(next));
                };
                put("<|endoftext|>");
                // A space and a newline as GPT-2 writes them.
                (33..127u8).map(|byte| (byte as char).to_string()).for_each(|token| put(&token));
                ["\u{120}", "\u{10a}"].iter().for_each(|token| put(token));
                let merges = [["t", "o"], ["i", "n"], ["s", "u"], ["\u{120}", "a"], ["su", "n"], ["e", "r"]];
                merges.iter().for_each(|pair| put(&pair.concat()));
                json!({
                    "pre_tokenizer": {
                        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
                    },
                    "post_processor": null,
                    "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
                    "model": {
                        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
                        "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
                        "merges": merges,
                    },
                })
            }
        };
        let mut whole = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "added_tokens": [{
                "id": tokenizer["model"]["vocab"]["<|endoftext|>"], "content": "<|endoftext|>", "special": true,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            }],
        });
        if let (Value::Object(whole), Value::Object(own)) = (&mut whole, tokenizer) {
            whole.extend(own);
        }
        fs::write(folder.join("tokenizer.json"), whole.to_string())?;
        fs::write(
            folder.join("tokenizer_config.json"),
            json!({ "eos_token": "<|endoftext|>", "chat_template": ChatSpec::JINJA }).to_string(),
        )
    }
}

/// Characters per file.
#[derive(Clone, Debug)]
pub struct TextSpec {
    pub train: Vec<usize>,
    pub valid: Vec<usize>,
    pub units: TokenUnits,
}

impl TextSpec {
    pub fn write(&self, folder: &Path, draw: &mut Draw) -> io::Result<()> {
        self.units.write(folder)?;
        for (set, files) in [("train", &self.train), ("valid", &self.valid)] {
            for (i, &count) in files.iter().enumerate() {
                let text = random_words(draw, self.units.ascii_only(), count);
                fs::write(folder.join(format!("{set}-{i}.txt")), text)?;
            }
        }
        Ok(())
    }
}

/// Ids per file.
#[derive(Clone, Debug)]
pub struct TokenFileSpec {
    pub train: Vec<usize>,
    pub valid: Vec<usize>,
    pub vocab: usize,
    /// 32 bits per id, otherwise 16.
    pub u32_ids: bool,
    /// Other bytes per id.
    pub id_bytes: Option<usize>,
    /// With the header that llm.c writes.
    pub header: bool,
    /// A byte-pair `tokenizer.json` is beside them.
    pub with_tokenizer: bool,
}

impl TokenFileSpec {
    pub fn write(&self, folder: &Path, draw: &mut Draw) -> io::Result<()> {
        if self.with_tokenizer {
            TokenUnits::Pairs.write(folder)?;
        }
        for (set, files) in [("train", &self.train), ("valid", &self.valid)] {
            for (i, &count) in files.iter().enumerate() {
                let mut bytes = Vec::new();
                if self.header {
                    let mut words = [0u32; 256];
                    words[..2].copy_from_slice(if self.u32_ids {
                        &[20_240_801, 7]
                    } else {
                        &[20_240_520, 1]
                    });
                    words[2] = count as u32;
                    words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
                }
                for _ in 0..count {
                    let id = draw.below(self.vocab) as u32;
                    match (self.id_bytes, self.u32_ids) {
                        (Some(width), _) => bytes.extend(&u64::from(id).to_le_bytes()[..width]),
                        (None, true) => bytes.extend(id.to_le_bytes()),
                        (None, false) => bytes.extend((id as u16).to_le_bytes()),
                    }
                }
                fs::write(folder.join(format!("{set}-{i}.bin")), bytes)?;
            }
        }
        Ok(())
    }
}

/// Records per file.
#[derive(Clone, Debug)]
pub struct JsonlSpec {
    pub train: Vec<usize>,
    pub valid: Vec<usize>,
    /// Approximate characters of the longest text.
    pub longest: usize,
    pub units: TokenUnits,
    /// The text field.
    pub field: &'static str,
    /// Classes of texts; 0: none.
    pub labels: usize,
    pub chats: Option<ChatSpec>,
    pub packing: FileCodec,
}

/// Conversations instead of texts.
#[derive(Clone, Debug)]
pub struct ChatSpec {
    /// The template is a file.
    pub file: bool,
    /// The job's `chat`.
    pub format: &'static str,
}

impl ChatSpec {
    pub const JINJA: &str =
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}";

    fn record(&self, draw: &mut Draw, plain: bool, longest: usize) -> Value {
        let say = |draw: &mut Draw| {
            let length = draw.log_uniform(1..=longest / 4 + 2);
            random_words(draw, plain, length).trim().to_owned()
        };
        let turns: Vec<[String; 2]> = (0..draw.within(1..=2)).map(|_| [say(draw), say(draw)]).collect();
        let list = |roles: [&str; 2], role: &str, content: &str| {
            let message = |i: usize, text: &String| json!({ role: roles[i], content: text });
            turns.iter().flat_map(|turn| [message(0, &turn[0]), message(1, &turn[1])]).collect::<Vec<_>>()
        };
        let [question, answer] = &turns[0];
        match self.format {
            "sharegpt" => json!({ "talk": list(["human", "gpt"], "from", "value") }),
            "alpaca" => json!({ "instruction": question, "input": "", "output": answer }),
            "prompt_completion" => json!({ "prompt": question, "completion": answer }),
            _ => json!({ "talk": list(["user", "assistant"], "role", "content") }),
        }
    }
}

impl JsonlSpec {
    pub fn write(&self, folder: &Path, draw: &mut Draw) -> io::Result<()> {
        self.units.write(folder)?;
        if self.chats.as_ref().is_some_and(|chats| chats.file) {
            fs::write(folder.join("template.jinja"), ChatSpec::JINJA)?;
        }
        for (set, files) in [("train", &self.train), ("valid", &self.valid)] {
            for (i, &count) in files.iter().enumerate() {
                let mut lines = String::new();
                for record in 0..count {
                    lines += &format!("{}\n", self.record(draw, record));
                }
                let path = folder.join(format!("{set}-{i}.jsonl{}", self.packing.extension()));
                self.packing.write(&path, lines.as_bytes())?;
            }
        }
        Ok(())
    }

    fn record(&self, draw: &mut Draw, number: usize) -> Value {
        let plain = self.units.ascii_only();
        if let Some(chats) = &self.chats {
            return chats.record(draw, plain, self.longest);
        }
        // At least two characters: one to read and one to predict.
        let length = draw.log_uniform(3..=self.longest.max(4));
        let mut record = Map::new();
        record.insert(self.field.into(), json!(random_words(draw, plain, length)));
        if self.labels > 0 {
            record.insert("mood".into(), json!(format!("mood {}", (number + draw.below(2)) % self.labels)));
        }
        Value::Object(record)
    }
}
