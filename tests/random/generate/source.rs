//! `[data]`: every kind of source with its files, and the matching batch and set sizes.

use toml::Table;

use super::{ModelAndData, SampleShape, Scale, TableExt, int_array, model, string_array, table_of_kind};
use crate::random::data::{
    ColumnSpec, DataSpec, FileCodec, IdxSpec, ImageLayout, ImageSpec, RowCounts, TableFormat, TableSpec,
};
use crate::random::draw::Draw;

/// The sources a model accepts.
fn sources(model: &str) -> &'static [&'static str] {
    match model {
        "mlp" | "layers" => &["csv", "parquet", "shapes", "idx", "images"],
        "gpt" | "llama" => &["text", "tokens", "jsonl", "text-synthetic"],
        // Texts with a class.
        "bert" => &["jsonl", "text-synthetic"],
        _ => &["shapes", "idx", "images"],
    }
}

/// Draws the data, then a model for it. `heavy`: larger batches than usual.
pub fn model_and_data(draw: &mut Draw, scale: Scale, name: &str, heavy: bool) -> ModelAndData {
    let source = draw.pick(sources(name));
    let deep = matches!(name, "resnet" | "mobilenet");
    let batch_size = match scale {
        Scale::Small if deep => draw.log_uniform(1..=6),
        Scale::Small if heavy => draw.within(40..=120),
        Scale::Small => draw.log_uniform(1..=40),
        Scale::Large => draw.log_uniform(4..=256),
    };
    let mut source = SourceBuilder {
        heavy,
        draw,
        scale,
        model: name,
        batch: batch_size,
        data: table_of_kind(source),
        classes: true,
    };
    let (sample, files, train_samples) = source.build();
    let SourceBuilder { mut data, classes, batch: batch_size, .. } = source;
    set_loader_keys(draw, &mut data);
    let model = model::model(draw, scale, name, &sample, batch_size);
    let most_updates = match scale {
        Scale::Small if deep => 2,
        Scale::Small if heavy => 3,
        Scale::Small => 6,
        Scale::Large => 16,
    };
    ModelAndData { model, data, files, train_samples, classes, most_updates, batch_size }
}

/// The keys that every kind shares.
fn set_loader_keys(draw: &mut Draw, data: &mut Table) {
    if draw.chance(0.3) {
        data.set("shuffle", draw.chance(0.5));
    }
    if draw.chance(0.5) {
        data.number("workers", draw.within(0..=4));
    }
    if draw.chance(0.5) {
        data.set("prefetch", draw.pick(&["auto", "64KiB", "1MiB", "9MiB", "1%"]));
    }
    if draw.chance(0.4) {
        data.set("shuffle_buffer", draw.pick(&["1KiB", "100KB", "3MiB", "64MiB"]));
    }
    if draw.chance(0.2) && !data.contains_key("on_bad_record") {
        data.set("on_bad_record", draw.pick(&["fail", "skip"]));
    }
    if draw.chance(0.1) && !data.contains_key("max_bad_records") {
        data.number("max_bad_records", 1000);
    }
}

pub struct SourceBuilder<'a> {
    pub draw: &'a mut Draw,
    pub scale: Scale,
    pub model: &'a str,
    /// Micro-batch size; smaller if samples are large.
    pub batch: usize,
    pub data: Table,
    pub classes: bool,
    pub heavy: bool,
}

impl SourceBuilder<'_> {
    /// The samples, their files, and the number of training samples.
    fn build(&mut self) -> (SampleShape, DataSpec, usize) {
        let kind = self.data["kind"].as_str().unwrap_or_default().to_owned();
        match kind.as_str() {
            "csv" | "parquet" => self.table(kind == "csv"),
            "shapes" => self.shapes(),
            "idx" => self.idx(),
            "images" => self.images(),
            "text" => self.text(),
            "tokens" => self.tokens(),
            "jsonl" => self.jsonl(),
            _ => self.text_synthetic(),
        }
    }

    /// Limit on pixels or tokens per micro-batch.
    pub fn limit(&self, small: usize, large: usize) -> usize {
        self.scale.either(if self.heavy { 6 * small } else { small }, large)
    }

    /// Whether a single update takes about a second.
    fn is_deep_model(&self) -> bool {
        matches!(self.model, "resnet" | "mobilenet")
    }

    /// Sizes of the training and validation sets: rarely whole batches.
    pub fn set_sizes(&mut self) -> (usize, usize) {
        if self.is_deep_model() && self.scale == Scale::Small {
            return (self.draw.within(2..=2 * self.batch + 3), self.draw.within(1..=5));
        }
        if self.heavy {
            return (2 * self.batch + self.draw.below(self.batch), self.draw.log_uniform(1..=self.batch));
        }
        let train = self.draw.log_uniform(self.batch.max(2)..=self.scale.either(4, 6) * self.batch + 9);
        (train, self.draw.log_uniform(1..=train))
    }

    /// Names the training files, and validation files or a fraction of the training set. A pattern may stand for
    /// several.
    pub fn files(&mut self, ending: &str, train: usize, valid: usize) {
        let names = |set: &str, count: usize| match count {
            1 => vec![format!("data/{set}-0.{ending}")],
            count if count % 2 == 0 => vec![format!("data/{set}-*.{ending}")],
            count => (0..count).map(|i| format!("data/{set}-{i}.{ending}")).collect(),
        };
        self.data.set("train", string_array(&names("train", train)));
        if valid > 0 {
            self.data.set("valid", string_array(&names("valid", valid)));
        } else if self.draw.chance(0.2) {
            self.data.set("fold", self.draw.pick(&["1/3", "2/3", "3/3", "1/2"]));
        } else if self.draw.chance(0.7) {
            self.data.set("valid_fraction", self.draw.pick(&[0.1, 0.15, 0.25, 0.4]));
        }
        self.test_set(string_array(&names("train", train)));
    }

    /// A test set: any files, or a fraction of the training set.
    fn test_set(&mut self, files: toml::Value) {
        match self.draw.below(7) {
            0 => self.data.set("test", files),
            1 => self.data.set("test_fraction", 0.1),
            _ => &mut self.data,
        };
    }

    /// How the samples are split, if they are.
    pub fn split(&mut self, kinds: &[&'static str], group: Option<String>) {
        let is_split = !self.data.contains_key("valid") || self.data.contains_key("test_fraction");
        match group {
            Some(group) if is_split && self.draw.chance(0.2) => drop(self.data.set("group", group)),
            _ if is_split && self.draw.chance(0.5) => drop(self.data.set("split", self.draw.pick(kinds))),
            _ => {}
        }
    }

    /// Splits a count over one to three files.
    pub fn split_counts(&mut self, count: usize, least: usize) -> Vec<usize> {
        let files = self.draw.within(1..=3).min((count / least).max(1));
        (0..files).map(|i| count / files + usize::from(i < count % files)).collect()
    }

    fn table(&mut self, csv: bool) -> (SampleShape, DataSpec, usize) {
        // The training rows have every class and category, whatever the split.
        let rows = self.set_sizes().0.max(60);
        let own = self.draw.chance(0.4);
        let missing = if self.draw.chance(0.4) { 0.1 } else { 0.0 };
        // Occasionally a wide table.
        let widest = if self.draw.chance(0.1) { 400 } else { 12 };
        let numbers = self.draw.log_uniform(1..=widest);
        let categories = if self.draw.chance(0.5) { self.draw.within(1..=3) } else { 0 };
        let mut columns: Vec<ColumnSpec> = (0..numbers).map(|_| ColumnSpec::Number { missing }).collect();
        for _ in 0..categories {
            let values = self.draw.within(2..=6);
            let at = self.draw.below(columns.len() + 1);
            columns.insert(at, ColumnSpec::Category { values, missing });
        }
        self.classes = self.draw.chance(0.6);
        let targets = if self.classes { 1 } else { self.draw.pick(&[1, 1, 2, 5]) };
        let target = match self.classes {
            true => ColumnSpec::Class { classes: self.draw.within(2..=4), text: self.draw.chance(0.5) },
            false => ColumnSpec::Number { missing: 0.0 },
        };
        let first = columns.len();
        columns.extend(vec![target; targets]);

        let header = !csv || self.draw.chance(0.8);
        let name = |i: usize| if header { format!("column_{i}") } else { i.to_string() };
        let format = if csv { self.csv(header) } else { self.parquet() };
        let ending = format.extension();
        match targets {
            1 => self.data.set("target", name(first)),
            _ => {
                let names: Vec<String> = (first..first + targets).map(name).collect();
                self.data.set("target", string_array(&names))
            }
        };
        // Unless the job says so, the first rows decide.
        if self.draw.chance(0.5) {
            self.data.set("task", if self.classes { "classes" } else { "values" });
        } else if self.draw.chance(0.3) {
            self.data.set("task", "auto");
        }
        if let ColumnSpec::Class { classes, text } = columns[first]
            && self.draw.chance(0.3)
        {
            let names: Vec<String> = (0..classes).map(|class| ColumnSpec::class(class, text)).collect();
            self.data.set("classes", string_array(&names));
        }
        if missing > 0.0 {
            self.data.set("on_missing", self.draw.pick(&["mean", "zero"]));
            if self.draw.chance(0.5) {
                self.data.set("missing_flags", self.draw.chance(0.5));
            }
        } else if self.draw.chance(0.2) {
            self.data.set("on_missing", "error");
        }
        let is = |wanted: fn(&ColumnSpec) -> bool| {
            (0..first).filter(|i| wanted(&columns[*i])).map(name).collect::<Vec<_>>()
        };
        let (of_numbers, of_categories) = (
            is(|c| matches!(c, ColumnSpec::Number { .. })),
            is(|c| matches!(c, ColumnSpec::Category { .. })),
        );
        if self.draw.chance(0.2) {
            self.data.set("categorical", string_array(&of_categories));
        }
        if self.draw.chance(0.2) {
            self.data.set("numeric", string_array(&of_numbers));
        }
        if of_numbers.len() > 2 {
            match self.draw.below(4) {
                0 => self.data.set("ignore", string_array(&of_numbers[..1])),
                1 => self.data.set("columns", string_array(&of_numbers[..2])),
                _ => &mut self.data,
            };
        }
        if self.draw.chance(0.5) {
            self.data.set("encode", self.draw.pick(&["one_hot", "embed"]));
        }
        for (key, chance) in
            [("standardise", 0.3), ("max_categories", 0.1), ("trim", 0.1), ("on_unknown", 0.3)]
        {
            if self.draw.chance(chance) {
                match key {
                    "standardise" => self.data.set(key, self.draw.chance(0.5)),
                    "max_categories" => self.data.number(key, 50),
                    "trim" => self.data.set(key, "."),
                    _ => self.data.set(key, self.draw.pick(&["zeros", "error"])),
                };
            }
        }
        if self.draw.chance(0.1) {
            self.data.set("missing", string_array(&["".into(), "NA".into()]));
        }
        let train = self.split_counts(rows, 20);
        let valid = if own { vec![60 + self.draw.below(20)] } else { Vec::new() };
        self.files(&ending, train.len(), valid.len());
        let group = of_numbers.last().filter(|_| of_numbers.len() > 1).cloned();
        let kinds: &[&str] =
            if self.classes { &["random", "stratified", "last"] } else { &["random", "last"] };
        self.split(kinds, group);
        let files = TableSpec { format, columns, header, rows: RowCounts { train, valid } };
        (SampleShape::Row, DataSpec::Table(files), rows)
    }

    fn csv(&mut self, header: bool) -> TableFormat {
        let delimiter = self.draw.pick(&[",", ",", ";", "|", "tab", "space"]);
        if delimiter != "," || self.draw.chance(0.2) {
            self.data.set("delimiter", delimiter);
        }
        if !header || self.draw.chance(0.2) {
            self.data.set("header", header);
        }
        let skip_lines = if self.draw.chance(0.2) { self.draw.within(1..=3) } else { 0 };
        if skip_lines > 0 {
            self.data.number("skip_lines", skip_lines);
        }
        let packing = self.draw.pick(&[FileCodec::Plain, FileCodec::Plain, FileCodec::Gzip, FileCodec::Zstd]);
        TableFormat::Csv { delimiter, skip_lines, packing, style: Default::default() }
    }

    fn parquet(&mut self) -> TableFormat {
        let compression = self.draw.pick(&["none", "snappy", "gzip", "lz4", "zstd"]);
        TableFormat::Parquet {
            compression,
            dictionary: self.draw.chance(0.5),
            group: self.draw.pick(&[7, 33, 1000]),
        }
    }

    /// Height and width of a sample; multiples of a patch for vision transformers.
    fn image_sides(&mut self, square: bool) -> [usize; 2] {
        let unit = if self.model == "vit" { self.draw.within(3..=8) } else { 1 };
        let range = match self.scale {
            Scale::Small if self.is_deep_model() => 5..=24,
            Scale::Small => 5..=36,
            Scale::Large => 24..=128,
        };
        let side = |draw: &mut Draw| (draw.within(range.clone()) / unit).max(1) * unit;
        let height = side(self.draw);
        let width = if square || self.draw.chance(0.5) { height } else { side(self.draw) };
        self.batch = self.batch.min((self.limit(20_000, 1_100_000) / (height * width)).max(2));
        [height, width]
    }

    fn shapes(&mut self) -> (SampleShape, DataSpec, usize) {
        let side = self.image_sides(true)[0].max(16);
        let (train, valid) = self.set_sizes();
        // The side is at least sixteen, and a multiple of the patch size.
        self.data.number("train_samples", train).number("valid_samples", valid).number("image_size", side);
        if self.draw.chance(0.2) {
            self.data.number("test_samples", valid);
        }
        self.augment(1);
        (SampleShape::Image([side, side, 1]), DataSpec::None, train)
    }

    fn idx(&mut self) -> (SampleShape, DataSpec, usize) {
        let [height, width] = self.image_sides(false);
        let (train, valid) = self.set_sizes();
        let channels = self.draw.pick(&[1, 1, 3]);
        let classes = self.draw.within(2..=12);
        let packing = self.draw.pick(&[FileCodec::Plain, FileCodec::Gzip]);
        let ending = packing.extension();
        for (key, name) in [
            ("train_images", "train-images"),
            ("train_labels", "train-labels"),
            ("valid_images", "valid-images"),
            ("valid_labels", "valid-labels"),
        ] {
            self.data.set(key, format!("data/{name}.idx{ending}"));
        }
        if self.draw.chance(0.2) {
            for (key, name) in [("test_images", "train-images"), ("test_labels", "train-labels")] {
                self.data.set(key, format!("data/{name}.idx{ending}"));
            }
        }
        if classes != 10 || self.draw.chance(0.5) {
            self.data.number("classes", classes);
        }
        self.normalise(channels);
        self.augment(channels);
        let shape = [height, width, channels];
        (SampleShape::Image(shape), DataSpec::Idx(IdxSpec { shape, train, valid, classes, packing }), train)
    }

    fn normalise(&mut self, channels: usize) {
        if self.draw.chance(0.3) {
            match self.draw.chance(0.5) {
                true => self.data.set("mean", 0.5).set("std", 0.25),
                false => self.data.set("mean", vec![0.4; channels]).set("std", vec![0.3; channels]),
            };
        }
    }

    fn images(&mut self) -> (SampleShape, DataSpec, usize) {
        let [height, width] = self.image_sides(false);
        let (train, valid) = self.set_sizes();
        let classes = self.draw.within(2..=4);
        // Every class has training images, whatever the split.
        let train = train.max(12 * classes);
        match height == width && self.draw.chance(0.5) {
            true => self.data.number("image_size", height),
            false => self.data.set("image_size", int_array(&[height, width])),
        };
        let channels = self.draw.pick(&[1, 3, 3]);
        if channels == 1 || self.draw.chance(0.5) {
            self.data.number("channels", channels);
        }
        if self.draw.chance(0.5) {
            self.data.set("fit", self.draw.pick(&["crop", "pad", "stretch"]));
        }
        if self.draw.chance(0.2) {
            self.data.set("crop_fraction", self.draw.pick(&[0.5, 0.875, 1.0]));
        }
        if self.draw.chance(0.5) {
            self.data.set("normalise", self.draw.pick(&["imagenet", "half", "none"]));
        }
        self.normalise(channels);
        if self.draw.chance(0.1) {
            self.data.number("max_pixels", 8_000_000);
        }
        let layout = self.draw.pick(&[
            ImageLayout::Folders,
            ImageLayout::Folders,
            ImageLayout::Csv,
            ImageLayout::Tsv,
            ImageLayout::Tar(FileCodec::Plain),
            ImageLayout::Tar(FileCodec::Gzip),
            ImageLayout::Tar(FileCodec::Zstd),
        ]);
        let table = matches!(layout, ImageLayout::Csv | ImageLayout::Tsv);
        let columns = match table && self.draw.chance(0.3) {
            true => {
                self.data.set("path_column", "image").set("label_column", "what");
                ["image", "what"]
            }
            false => ["path", "label"],
        };
        let own = self.draw.chance(0.5);
        let name = |set: &str| string_array(&[format!("data/{set}{}", layout.extension())]);
        self.data.set("train", name("train"));
        if own {
            self.data.set("valid", name("valid"));
        } else if self.draw.chance(0.2) {
            self.data.set("fold", self.draw.pick(&["1/2", "2/3"]));
        } else if self.draw.chance(0.5) {
            self.data.set("valid_fraction", 0.2);
        }
        self.test_set(name("train"));
        self.split(&["random", "stratified", "last"], None);
        // One large image among small ones: decoding takes more than a sample does.
        let largest = if self.draw.chance(0.2) { self.scale.either(900, 2500) } else { 60 };
        self.augment(channels);
        let valid = if own { valid.max(classes) } else { 0 };
        let files = ImageSpec {
            layout,
            columns,
            train,
            valid,
            classes,
            largest,
            labels_in_sidecar: self.draw.chance(0.5),
        };
        (SampleShape::Image([height, width, channels]), DataSpec::Images(files), train)
    }

    /// Half of the datasets have no augmentation.
    fn augment(&mut self, channels: usize) {
        if self.draw.chance(0.5) {
            return;
        }
        let mut augment = Table::new();
        let keys = [
            "random_resized_crop",
            "crop_ratio",
            "crop_padding",
            "horizontal_flip",
            "vertical_flip",
            "rotation",
            "translate",
            "scale",
            "shear",
            "randaugment",
            "randaugment_magnitude",
            "blur",
            "blur_kernel",
            "blur_sigma",
            "brightness",
            "contrast",
            "saturation",
            "hue",
            "erasing",
            "erasing_area",
            "erasing_ratio",
            "mixup",
            "cutmix",
            "mix_chance",
        ];
        for key in keys {
            if !self.draw.chance(0.25) {
                continue;
            }
            match key {
                // Grayscale images have no color: a job that would change it is refused.
                "saturation" | "hue" if channels == 1 => &mut augment,
                "random_resized_crop" => augment.set(key, vec![self.draw.float(0.05, 0.5), 1.0]),
                "crop_ratio" | "erasing_ratio" => augment.set(key, vec![0.5, 2.0]),
                "erasing_area" => augment.set(key, vec![0.02, 0.4]),
                "rotation" | "shear" => augment.set(key, self.draw.pick(&[5.0, 30.0, 80.0])),
                "scale" => augment.set(key, vec![self.draw.float(0.2, 1.0), self.draw.float(1.0, 3.0)]),
                "randaugment" => augment.number(key, self.draw.within(1..=4)),
                "randaugment_magnitude" => augment.number(key, self.draw.within(0..=30)),
                "blur_kernel" => augment.number(key, self.draw.pick(&[1, 3, 9, 31])),
                "blur_sigma" => augment.set(key, vec![self.draw.float(0.05, 0.5), self.draw.float(0.5, 6.0)]),
                "crop_padding" => augment.number(key, self.draw.within(1..=6)),
                "mixup" | "cutmix" => augment.set(key, self.draw.pick(&[0.2, 1.0])),
                "hue" => augment.set(key, self.draw.pick(&[0.1, 0.5])),
                "horizontal_flip" | "vertical_flip" | "erasing" | "blur" | "mix_chance" => {
                    augment.set(key, self.draw.pick(&[0.3, 0.5, 1.0]))
                }
                _ => augment.set(key, self.draw.float(0.1, 0.8)),
            };
        }
        if !augment.is_empty() {
            self.data.set("augment", augment);
        }
    }
}
