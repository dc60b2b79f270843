//! `[model]`: every kind, with odd widths, and lists of layers whose shapes fit together.

use toml::Table;

use super::{SampleShape, Scale, TableExt, int_array, table_of_kind};
use crate::random::draw::Draw;

const ACTIVATIONS: [&str; 4] = ["relu", "gelu", "gelu_tanh", "silu"];

/// A model of this kind for such samples, in batches of `batch` samples.
pub fn model(draw: &mut Draw, scale: Scale, name: &str, sample: &SampleShape, batch: usize) -> Table {
    let mut table = table_of_kind(name);
    let large = scale == Scale::Large;
    match (name, sample) {
        ("mlp", _) => set_dense_keys(draw, scale, &mut table, 3),
        ("cnn", &SampleShape::Image(shape)) => {
            set_dense_keys(draw, scale, &mut table, 2);
            let stages = stages(draw, scale, shape);
            let normed = stages.iter().any(|stage| stage["norm"].as_str() == Some("batch"));
            if normed || draw.chance(0.2) {
                norm_group(draw, &mut table, batch);
            }
            if large || draw.chance(0.9) {
                table.set("stages", stages);
            } else {
                // The default stages need 4 x 4 pixels, which every image here has.
                table.remove("norm_group");
            }
        }
        ("gpt" | "llama" | "bert" | "vit", _) => transformer(draw, scale, &mut table, name, sample),
        ("resnet", _) => {
            table.number(
                "depth",
                draw.pick(scale.either(&[18, 18, 18, 18, 18, 18, 18, 18, 34, 50], &[18, 34, 50])),
            );
            stem(draw, scale, &mut table, sample);
            norm_group(draw, &mut table, batch);
        }
        ("mobilenet", _) => {
            table.set("width", scale.either(draw.float(0.1, 0.4), draw.float(0.25, 1.5)));
            stem(draw, scale, &mut table, sample);
            dropout(draw, &mut table, "dropout", 0.6);
            norm_group(draw, &mut table, batch);
        }
        ("layers", sample) => {
            let mut layers = LayersBuilder::new(draw, scale, sample, batch);
            layers.build();
            let layers = layers.tables;
            table.set("layers", layers);
        }
        _ => unreachable!("{name} on {sample:?}"),
    }
    table
}

fn set_dense_keys(draw: &mut Draw, scale: Scale, table: &mut Table, most: usize) {
    // One in fifteen has a single tensor larger than all others together.
    let widest = match draw.chance(0.07) {
        true => scale.either(1500, 8192),
        false => scale.either(70, 1024),
    };
    let hidden: Vec<usize> = (0..draw.within(0..=most)).map(|_| draw.log_uniform(1..=widest)).collect();
    if draw.chance(0.9) || scale == Scale::Small {
        table.set("hidden", int_array(&hidden));
    }
    if draw.chance(0.7) {
        table.set("activation", draw.pick(&ACTIVATIONS));
    }
    dropout(draw, table, "dropout", 0.4);
}

fn dropout(draw: &mut Draw, table: &mut Table, key: &str, chance: f64) {
    if draw.chance(chance) {
        table.set(key, draw.pick(&[0.0, 0.1, 0.25, 0.5]));
    }
}

/// A group within the batch, or any other: the last group of a batch may be smaller.
fn norm_group(draw: &mut Draw, table: &mut Table, batch: usize) {
    if draw.chance(0.9) {
        let group = group(draw, batch);
        table.number("norm_group", group);
    }
}

fn group(draw: &mut Draw, batch: usize) -> usize {
    match draw.below(4) {
        0 => batch,
        1 => draw.within(1..=batch),
        2 => draw.pick(&[2, 3, 4, 5, 8]),
        _ => (1..=batch).rev().find(|g| batch.is_multiple_of(*g) && *g <= 8).unwrap_or(1),
    }
}

fn stem(draw: &mut Draw, scale: Scale, table: &mut Table, sample: &SampleShape) {
    let SampleShape::Image([height, width, _]) = sample else { return };
    // A larger image at full resolution throughout takes seconds.
    let most = scale.either(12 * 12, 48 * 48);
    match draw.chance(0.5) && height * width <= most {
        true => table.set("stem", "small"),
        false if draw.chance(0.5) => table.set("stem", "imagenet"),
        false => table,
    };
}

fn stages(draw: &mut Draw, scale: Scale, [height, width, _]: [usize; 3]) -> Vec<Table> {
    let (mut height, mut width) = (height, width);
    let mut stages = Vec::new();
    // Rule: with channels in whole vectors and a wide kernel, threads split a weight gradient by samples, which once
    // ran past the end of a batch they do not divide. On a GPU, three such stages have the largest single tensors.
    if draw.chance(0.25) && height.min(width) >= 16 {
        let (kernel, norm) = (draw.pick(&[3, 5]), draw.pick(&["none", "batch", "batch"]));
        for channels in scale.either([16, 24, 48], [64, 128, 256]).into_iter().take(draw.within(2..=3)) {
            let mut stage = Table::new();
            stage.number("channels", channels).number("kernel", kernel).set("norm", norm);
            stages.push(stage);
        }
        return stages;
    }
    for _ in 0..draw.within(1..=3) {
        let mut stage = Table::new();
        stage.number("channels", draw.log_uniform(1..=scale.either(40, 256)));
        let (kernel, stride) = (draw.within(1..=7), draw.pick(&[1, 1, 1, 2, 3]));
        let after = |side: usize| (side + 2 * (kernel / 2) - kernel) / stride + 1;
        if kernel > height.min(width) + 2 * (kernel / 2) {
            break;
        }
        (height, width) = (after(height), after(width));
        if kernel != 3 {
            stage.number("kernel", kernel);
        }
        if stride != 1 {
            stage.number("stride", stride);
        }
        stage.set("norm", draw.pick(&["none", "batch", "group"]));
        let pool = draw.pick(&[1, 2, 2, 3]);
        if pool <= height.min(width) {
            stage.number("pool", pool);
            (height, width) = (height / pool, width / pool);
        } else {
            stage.number("pool", 1);
        }
        stages.push(stage);
    }
    if stages.is_empty() {
        let mut stage = Table::new();
        stage.number("channels", draw.log_uniform(1..=40)).number("pool", 1).set("norm", "none");
        stages.push(stage);
    }
    stages
}

fn transformer(draw: &mut Draw, scale: Scale, table: &mut Table, name: &str, sample: &SampleShape) {
    let heads = draw.pick(scale.either(&[1, 2, 3, 4], &[1, 2, 4, 6, 8, 12, 16]));
    let head_dim = match scale {
        // Rotary embeddings rotate pairs of values.
        Scale::Small if name == "llama" => 2 * draw.log_uniform(1..=12),
        Scale::Small => draw.log_uniform(1..=24),
        Scale::Large => draw.pick(&[8, 16, 32, 40, 64, 64, 80, 96, 128]),
    };
    let heads = heads.min(1024 / head_dim);
    let width = heads * head_dim;
    table.number("layers", draw.within(1..=scale.either(3, 6))).number("heads", heads).number("width", width);
    match name {
        "llama" => {
            let shared =
                [1, 2, 3, 4, 6, 8].into_iter().filter(|kv| heads.is_multiple_of(*kv)).collect::<Vec<_>>();
            table.number("kv_heads", draw.pick(&shared));
            table.number("hidden", draw.log_uniform(width / 2 + 1..=4 * width));
            if draw.chance(0.3) {
                table.set("rope_theta", draw.pick(&[100.0, 10000.0, 500000.0]));
                table.set("norm_eps", draw.pick(&[1e-6, 1e-5]));
            }
        }
        "bert" => {
            table.number("hidden", draw.log_uniform(width / 2 + 1..=4 * width));
        }
        "vit" => {
            table.number("ratio", draw.within(1..=4));
        }
        _ => {}
    }
    if matches!(name, "gpt" | "llama") && draw.chance(0.6) {
        table.set("tie", draw.chance(0.5));
    }
    if name != "llama" {
        dropout(draw, table, "dropout", 0.6);
    }
    // Dropout may zero a narrow embedding entirely. Each of BERT's layer norms then multiplies its gradient by 1e6:
    // it overflows.
    if name == "bert" && width < 8 {
        table.remove("dropout");
    }
    match *sample {
        SampleShape::Tokens { context } => table.number("context", context),
        SampleShape::Image([height, width, _]) => {
            let divides = |patch: &usize| height.is_multiple_of(*patch) && width.is_multiple_of(*patch);
            let most = scale.either(80, 1100);
            let patches: Vec<usize> = (1..=height.min(width)).filter(divides).collect();
            let few: Vec<usize> =
                patches.iter().copied().filter(|p| (height / p) * (width / p) <= most).collect();
            let patch = if few.is_empty() { patches[patches.len() - 1] } else { draw.pick(&few) };
            table.number("patch", patch)
        }
        SampleShape::Row => unreachable!(),
    };
}

/// A list of layers under construction; the current shape decides what may follow.
struct LayersBuilder<'a> {
    draw: &'a mut Draw,
    scale: Scale,
    /// (height, width, channels), or a vector.
    shape: Vec<usize>,
    /// Group size of batch norms: one number or its double, so that micro-batches stay small.
    group: usize,
    tables: Vec<Table>,
}

const POINTWISE: [&str; 7] = ["relu", "relu6", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh"];

impl<'a> LayersBuilder<'a> {
    fn new(draw: &'a mut Draw, scale: Scale, sample: &SampleShape, batch: usize) -> Self {
        let group = group(draw, batch);
        let shape = match sample {
            SampleShape::Image(shape) => shape.to_vec(),
            // The input width is unknown until the table is read; the first layer replaces it.
            _ => vec![0],
        };
        Self { draw, scale, shape, group, tables: Vec::new() }
    }

    fn build(&mut self) {
        if self.shape == [0] {
            self.linear();
        }
        for _ in 0..self.draw.within(1..=5) {
            if self.draw.chance(0.3) { self.residual() } else { self.random_layer() }
        }
        if self.shape.len() == 3 {
            // A linear layer over a whole image is the one large tensor of many jobs.
            if self.draw.chance(0.5) && self.shape[0] * self.shape[1] > 1 {
                self.global_pool();
            } else if self.draw.chance(0.5) {
                self.flatten();
            }
        }
        if self.shape.len() == 1 && self.draw.chance(0.5) {
            self.linear();
        }
    }

    fn add(&mut self, layer: Table) {
        self.tables.push(layer);
    }

    fn random_layer(&mut self) {
        let image = self.shape.len() == 3;
        match self.draw.below(if image { 12 } else { 8 }) {
            0 => self.pointwise(),
            1 => self.dropout(),
            2 => self.batch_norm(),
            3 => self.group_norm(),
            4 | 5 if !image => self.linear(),
            6 | 7 if !image => self.pointwise(),
            4..=6 => self.conv(),
            7 => self.pool("max_pool"),
            8 => self.pool("avg_pool"),
            9 | 10 => self.squeeze_excite(),
            _ if self.draw.chance(0.3) => self.flatten(),
            _ => self.conv(),
        }
    }

    fn pointwise(&mut self) {
        let name = self.draw.pick(&POINTWISE);
        self.add(table_of_kind(name));
    }

    fn dropout(&mut self) {
        let mut layer = table_of_kind("dropout");
        if self.draw.chance(0.7) {
            layer.set("p", self.draw.pick(&[0.0, 0.1, 0.3, 0.5]));
        }
        self.add(layer);
    }

    fn batch_norm(&mut self) {
        let mut layer = table_of_kind("batch_norm");
        let times = self.draw.pick(&[1, 1, 1, 2]);
        layer.number("group", times * self.group);
        self.add(layer);
    }

    fn group_norm(&mut self) {
        let channels = self.shape[self.shape.len() - 1];
        let divisors: Vec<usize> = (1..=channels).filter(|g| channels.is_multiple_of(*g)).collect();
        let mut layer = table_of_kind("group_norm");
        layer.number("groups", self.draw.pick(&divisors));
        self.add(layer);
    }

    fn flatten(&mut self) {
        self.add(table_of_kind("flatten"));
        self.shape = vec![self.shape.iter().product()];
    }

    fn linear(&mut self) {
        let outputs = self.draw.log_uniform(1..=self.scale.either(60, 1024));
        self.linear_to(outputs);
    }

    fn linear_to(&mut self, outputs: usize) {
        let mut layer = table_of_kind("linear");
        layer.number("outputs", outputs);
        self.bias(&mut layer);
        self.add(layer);
        self.shape = vec![outputs];
    }

    fn conv(&mut self) {
        let inputs = self.shape[2];
        // Depthwise, grouped or neither.
        let groups = match self.draw.below(4) {
            0 => inputs,
            1 => (1..=inputs).filter(|g| inputs.is_multiple_of(*g)).nth(1).unwrap_or(1),
            _ => 1,
        };
        let most = self.scale.either(32, 256).max(groups) / groups;
        let channels = groups * self.draw.log_uniform(1..=most);
        let (kernel, stride) = (self.draw.within(1..=5), self.draw.pick(&[1, 1, 1, 2, 3]));
        let (padding, dilation) = (self.draw.within(0..=kernel / 2 + 1), self.draw.pick(&[1, 1, 1, 2]));
        let reach = dilation * (kernel - 1) + 1;
        if reach > self.shape[0].min(self.shape[1]) + 2 * padding {
            return self.pointwise();
        }
        let mut layer = table_of_kind("conv");
        layer.number("channels", channels);
        for (key, value, default) in [
            ("kernel", kernel, 3),
            ("stride", stride, 1),
            ("padding", padding, 0),
            ("dilation", dilation, 1),
            ("groups", groups, 1),
        ] {
            if value != default {
                layer.number(key, value);
            }
        }
        self.bias(&mut layer);
        let after = |side: usize| (side + 2 * padding - reach) / stride + 1;
        self.shape = vec![after(self.shape[0]), after(self.shape[1]), channels];
        self.add(layer);
    }

    fn bias(&mut self, layer: &mut Table) {
        if self.draw.chance(0.4) {
            layer.set("bias", self.draw.chance(0.5));
        }
    }

    /// A convolution that keeps height and width, with one or two groups.
    fn conv_to(&mut self, channels: usize) {
        let kernel = self.draw.pick(&[1, 3, 5]);
        let mut layer = table_of_kind("conv");
        if channels.is_multiple_of(2) && self.shape[2].is_multiple_of(2) && self.draw.chance(0.5) {
            layer.number("groups", 2);
        }
        layer.number("channels", channels).number("kernel", kernel).number("padding", kernel / 2);
        self.bias(&mut layer);
        self.add(layer);
        self.shape[2] = channels;
    }

    fn pool(&mut self, name: &str) {
        let size = self.draw.within(1..=3);
        let stride = self.draw.pick(&[0, 0, 1, 2, 3]);
        let padding = self.draw.within(0..=size / 2);
        if size > self.shape[0].min(self.shape[1]) + 2 * padding {
            return self.pointwise();
        }
        let mut layer = table_of_kind(name);
        for (key, value, default) in [("size", size, 2), ("stride", stride, 0), ("padding", padding, 0)] {
            if value != default {
                layer.number(key, value);
            }
        }
        let step = if stride == 0 { size } else { stride };
        let after = |side: usize| (side + 2 * padding - size) / step + 1;
        self.shape = vec![after(self.shape[0]), after(self.shape[1]), self.shape[2]];
        self.add(layer);
    }

    fn squeeze_excite(&mut self) {
        let mut layer = table_of_kind("squeeze_excite");
        if self.draw.chance(0.7) {
            layer.number("ratio", self.draw.pick(&[1, 2, 4, 16]));
        }
        self.add(layer);
    }

    /// A residual block. Its branches keep the shape, or change it freely and end as vectors of one length.
    fn residual(&mut self) {
        let (before, outer) = (self.shape.clone(), std::mem::take(&mut self.tables));
        let shortcut = self.draw.chance(0.6);
        let vectors = shortcut && self.draw.chance(0.6);
        let last = before[before.len() - 1];
        let to = if shortcut { self.draw.log_uniform(1..=24) } else { last };
        let branch = |layers: &mut Self| {
            layers.shape = before.clone();
            for _ in 0..layers.draw.within(0..=3) {
                if vectors { layers.random_layer() } else { layers.shape_preserving_layer() }
            }
            if layers.shape.len() == 3 && vectors {
                match layers.draw.chance(0.5) {
                    true => layers.global_pool(),
                    false => layers.flatten(),
                }
            }
            if layers.shape.len() == 3 {
                layers.conv_to(to)
            } else {
                layers.linear_to(to)
            }
            if layers.draw.chance(0.3) {
                layers.shape_preserving_layer();
            }
            std::mem::take(&mut layers.tables)
        };
        let mut group = table_of_kind("residual");
        group.set("layers", branch(self));
        if shortcut {
            group.set("shortcut", branch(self));
        }
        if self.draw.chance(0.5) {
            group.set("activation", self.draw.pick(&["none", "relu"]));
        }
        self.tables = outer;
        self.add(group);
    }

    /// A layer that keeps the shape.
    fn shape_preserving_layer(&mut self) {
        match self.draw.below(7) {
            0 => self.batch_norm(),
            1 => self.group_norm(),
            2 => self.dropout(),
            3 if self.shape.len() == 3 => self.squeeze_excite(),
            _ => self.pointwise(),
        }
    }

    fn global_pool(&mut self) {
        self.add(table_of_kind("global_pool"));
        self.shape = vec![self.shape[2]];
    }
}
