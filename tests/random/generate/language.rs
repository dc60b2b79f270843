//! Sequence sources: synthetic, text, token ids and JSON records.

use super::source::SourceBuilder;
use super::{SampleShape, Scale, TableExt, int_array};
use crate::random::data::{ChatSpec, DataSpec, FileCodec, JsonlSpec, TextSpec, TokenFileSpec, TokenUnits};

impl SourceBuilder<'_> {
    /// Tokens per sample, at least `least`.
    fn context(&mut self, least: usize) -> usize {
        let context = match self.scale {
            Scale::Small => self.draw.log_uniform(1..=70),
            Scale::Large => self.draw.pick(&[33, 64, 127, 128, 256, 300, 512, 1000, 1024, 2048, 4096]),
        };
        let context = context.max(least);
        self.batch = self.batch.min((self.limit(600, 32_768) / context).max(1));
        context
    }

    pub fn text_synthetic(&mut self) -> (SampleShape, DataSpec, usize) {
        let context = self.context(1);
        let (train, valid) = self.set_sizes();
        // Occasionally a vocabulary larger than everything else.
        let vocab = if self.draw.chance(0.1) {
            self.scale.either(20_000, 50_257)
        } else {
            self.draw.log_uniform(2..=300)
        };
        self.data.number("train_samples", train).number("valid_samples", valid).number("vocab", vocab);
        if self.draw.chance(0.2) {
            self.data.number("test_samples", valid);
        }
        if self.model == "bert" {
            self.data.number("classes", self.draw.within(2..=5));
        } else {
            self.classes = false;
            if self.draw.chance(0.2) {
                self.data.number("classes", 0);
            }
        }
        (SampleShape::Tokens { context }, DataSpec::None, train)
    }

    /// How the job tokenizes text.
    fn units(&mut self) -> TokenUnits {
        let token_units = self.draw.pick(&[
            TokenUnits::Characters,
            TokenUnits::Characters,
            TokenUnits::Bytes,
            TokenUnits::Words,
            TokenUnits::Pairs,
        ]);
        match token_units {
            TokenUnits::Characters if self.draw.chance(0.5) => &mut self.data,
            TokenUnits::Characters => self.data.set("tokens", "characters"),
            TokenUnits::Bytes => self.data.set("tokens", "bytes"),
            _ => self.data.set("tokens", "data/tokenizer.json"),
        };
        token_units
    }

    fn separator(&mut self, units: TokenUnits) {
        if self.draw.chance(0.4) {
            let has_end = matches!(units, TokenUnits::Words | TokenUnits::Pairs);
            self.data.set(
                "separator",
                self.draw.pick(if has_end { &["auto", "none", "<|endoftext|>"] } else { &["auto", "none"] }),
            );
        }
    }

    pub fn text(&mut self) -> (SampleShape, DataSpec, usize) {
        self.classes = false;
        let context = self.context(1);
        let (samples, measured) = self.set_sizes();
        let units = self.units();
        self.separator(units);
        if self.draw.chance(0.6) {
            self.data.set("windows", self.draw.pick(&["fixed", "random"]));
        }
        // A word has up to eight characters and a space; the validation split needs a window too.
        let each = if units == TokenUnits::Words { 12 } else { 2 };
        let total = each * (context + 1) * (samples + 12);
        let train = self.split_counts(total, each * (context + 2) * 6);
        let own = self.draw.chance(0.4);
        let valid = if own { vec![each * (context + 1) * (measured + 2)] } else { Vec::new() };
        self.files("txt", train.len(), valid.len());
        if !own && !self.data.contains_key("fold") {
            self.data.set("valid_fraction", 0.3);
        }
        (SampleShape::Tokens { context }, DataSpec::Text(TextSpec { train, valid, units }), samples)
    }

    pub fn tokens(&mut self) -> (SampleShape, DataSpec, usize) {
        self.classes = false;
        let context = self.context(1);
        let (samples, measured) = self.set_sizes();
        let (wide, header) = (self.draw.chance(0.4), self.draw.chance(0.4));
        // A tokenizer provides the vocabulary size if the job does not.
        let named = self.draw.chance(0.2);
        let most = if named {
            TokenUnits::PAIRS
        } else if wide {
            self.scale.either(300, 70_000)
        } else {
            300
        };
        let vocab = self.draw.log_uniform(2..=most);
        if self.draw.chance(0.5) {
            // Without a header, the zeros of small ids reveal 32 bits.
            self.data.set("dtype", self.draw.pick(&["auto", if wide { "u32" } else { "u16" }]));
        }
        if named {
            self.data.set("tokenizer", "data/tokenizer.json");
        } else if self.draw.chance(0.5) {
            self.data.number("vocab", vocab + self.draw.below(9));
        }
        if self.draw.chance(0.6) {
            self.data.set("windows", self.draw.pick(&["fixed", "random"]));
        }
        let train = self.split_counts((context + 1) * (samples + 9), 4 * (context + 1));
        let own = self.draw.chance(0.4);
        let valid = if own { vec![(context + 1) * (measured + 1)] } else { Vec::new() };
        self.files("bin", train.len(), valid.len());
        if !own && !self.data.contains_key("fold") {
            self.data.set("valid_fraction", 0.3);
        }
        (
            SampleShape::Tokens { context },
            DataSpec::Tokens(TokenFileSpec {
                train,
                valid,
                vocab,
                u32_ids: wide,
                id_bytes: None,
                header,
                with_tokenizer: named,
            }),
            samples,
        )
    }

    pub fn jsonl(&mut self) -> (SampleShape, DataSpec, usize) {
        // Room for the longest template's own words and an answer.
        let chat = self.model != "bert" && self.draw.chance(0.4);
        let context = self.context(if chat { 170 } else { 4 });
        let (train, valid) = self.set_sizes();
        let units = self.units();
        self.separator(units);
        let labels = if self.model == "bert" { self.draw.within(2..=4) } else { 0 };
        self.classes = labels > 0;
        let (train, valid) =
            if labels > 0 { (train.max(15 * labels), valid.max(labels)) } else { (train.max(8), valid) };
        let mut chats = None;
        if chat {
            let mut templates = vec!["chatml", "llama2", "llama3", "gemma", "plain", "jinja", "file"];
            if matches!(units, TokenUnits::Words | TokenUnits::Pairs) {
                templates.push("auto");
            }
            let template = self.draw.pick(&templates);
            self.data.set("messages", "talk");
            match template {
                "jinja" => self.data.set("template", ChatSpec::JINJA),
                "file" => self.data.set("template", "data/template.jinja"),
                name if name != "chatml" || self.draw.chance(0.5) => self.data.set("template", name),
                _ => &mut self.data,
            };
            if self.draw.chance(0.6) {
                self.data.set("loss", self.draw.pick(&["answers", "all"]));
            }
            // An answer may lie beyond the last position.
            self.data.set("on_bad_record", "skip").number("max_bad_records", 1000);
            chats = Some(ChatSpec { file: template == "file", format: "messages" });
        } else if self.draw.chance(0.3) {
            self.data.set("field", "body");
        }
        if labels > 0 {
            self.data.set("label", "mood");
        }
        let pack = labels == 0 && self.draw.chance(0.3);
        if pack || (labels == 0 && self.draw.chance(0.2)) {
            self.data.set("pack", pack);
        }
        if !pack {
            if self.draw.chance(0.4) {
                let mut buckets: Vec<usize> =
                    (0..self.draw.within(1..=3)).map(|_| self.draw.within(1..=context)).collect();
                buckets.push(context);
                buckets.sort_unstable();
                buckets.dedup();
                self.data.set("buckets", int_array(&buckets));
            }
            if self.draw.chance(0.5) {
                // A context of a few tokens would refuse every record.
                let too_long = match context < 16 {
                    true => "cut",
                    false => self.draw.pick(if labels > 0 {
                        &["cut", "refuse"]
                    } else {
                        &["cut", "split", "refuse"]
                    }),
                };
                self.data.set("too_long", too_long);
                if too_long == "refuse" {
                    self.data.set("on_bad_record", "skip").number("max_bad_records", 1000);
                }
            }
        }
        let own = self.draw.chance(0.4);
        let packing = self.draw.pick(&[FileCodec::Plain, FileCodec::Plain, FileCodec::Gzip, FileCodec::Zstd]);
        // Packed records fill whole windows.
        let (train, valid) = if pack { (train * 2 + 120, valid + 40) } else { (train, valid) };
        let files = self.split_counts(train, 8);
        // All of a few records may be too long, and an empty set is refused.
        let valid = if own { vec![valid.max(16)] } else { Vec::new() };
        self.files(&format!("jsonl{}", packing.extension()), files.len(), valid.len());
        let field = if self.data.contains_key("field") { "body" } else { "text" };
        // A text is the group of its record.
        let group = (chats.is_none() && !pack).then(|| field.to_owned());
        let kinds: &[&str] = match (pack, labels) {
            (false, 1..) => &["random", "stratified", "last"],
            _ => &["random", "last"],
        };
        self.split(kinds, group);
        let files =
            JsonlSpec { train: files, valid, longest: context * 3 / 2, units, field, labels, chats, packing };
        (SampleShape::Tokens { context }, DataSpec::Jsonl(files), train)
    }
}
