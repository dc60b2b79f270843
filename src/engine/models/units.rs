//! Which values of a model form a unit that can be pruned as a whole, a channel or an attention head, and a model's
//! `[model]` without some of them. The names of the groups are those that the builders of the models use.

use crate::job::{Job, ModelConfig, NormKind, PruneConfig, PruneStructure, UnitCounts};
use crate::params::{ParamLayout, TensorSpec, UnitGroup, UnitSlice};

/// The channels or heads of a model, layer by layer.
pub fn unit_groups(model: &ModelConfig, structure: PruneStructure, layout: &ParamLayout) -> Vec<UnitGroup> {
    let mut groups = Groups { layout, found: Vec::new() };
    match structure {
        PruneStructure::Weights | PruneStructure::TwoOfFour => {}
        PruneStructure::Channels => groups.add_channels(model),
        PruneStructure::Heads => groups.add_heads(model),
    }
    groups.found
}

/// The dimension of the outputs, or of the inputs, of a weight.
const OUT: usize = 0;
const IN: usize = 1;

struct Groups<'a> {
    layout: &'a ParamLayout,
    found: Vec<UnitGroup>,
}

impl Groups<'_> {
    fn spec(&self, name: &str) -> Option<&TensorSpec> {
        let all = self.layout.params.iter().chain(self.layout.stats.iter());
        all.map(|(spec, _)| spec).find(|spec| spec.name == name)
    }

    /// Adds the units of a layer: each has `block` values along `axis` of every tensor. The first tensor has every unit
    /// once; biases and norms that the model does not have are left out.
    fn add(&mut self, layer: &str, tensors: Vec<(String, usize, usize)>) {
        let slice = |(tensor, axis, block): (String, usize, usize)| {
            let units = self.spec(&tensor)?.shape.get(axis)? / block;
            Some((units, UnitSlice { tensor, axis, block }))
        };
        let slices: Vec<(usize, UnitSlice)> = tensors.into_iter().filter_map(slice).collect();
        let Some(&(units, _)) = slices.first() else { return };
        let slices = slices.into_iter().map(|(_, slice)| slice).collect();
        self.found.push(UnitGroup { name: layer.to_owned(), units, slices });
    }

    /// The outputs of a linear layer or convolution, the norm after it, and the inputs of the layer that takes them.
    fn add_between(&mut self, layer: &str, norm: Option<&str>, next: &str) {
        let [layer_weight, next_weight] = [layer, next].map(|name| format!("{name}.weight"));
        let size = |tensor: &str, axis: usize| self.spec(tensor).map_or(1, |spec| spec.shape[axis]);
        // A flattened image has all positions of one channel after the other.
        let block = size(&next_weight, IN) / size(&layer_weight, OUT);
        let mut tensors = outputs(layer);
        tensors.extend(norm.into_iter().flat_map(of_norm));
        tensors.push((next_weight, IN, block.max(1)));
        self.add(layer, tensors);
    }

    fn add_channels(&mut self, model: &ModelConfig) {
        match model {
            ModelConfig::Mlp(mlp) => self.add_dense(mlp.hidden.len()),
            ModelConfig::Cnn(cnn) => {
                for (i, stage) in cnn.stages.iter().enumerate() {
                    let name = format!("stages.{i}");
                    let next = match i + 1 < cnn.stages.len() {
                        true => format!("stages.{}", i + 1),
                        false => "layers.0".to_owned(),
                    };
                    match stage.norm {
                        // Its statistics are of several channels.
                        NormKind::Group => {}
                        NormKind::None => self.add_between(&name, None, &next),
                        NormKind::Batch => self.add_between(&name, Some(&format!("{name}.norm")), &next),
                    }
                }
                self.add_dense(cnn.hidden.len());
            }
            ModelConfig::Resnet(_) => {
                let blocks = self.modules(".conv1.weight");
                for block in blocks {
                    let path = |part: &str| format!("{block}.{part}");
                    for i in 1.. {
                        let (conv, norm, next) = (
                            path(&format!("conv{i}")),
                            path(&format!("bn{i}")),
                            path(&format!("conv{}", i + 1)),
                        );
                        if self.spec(&format!("{next}.weight")).is_none() {
                            break;
                        }
                        self.add_between(&conv, Some(&norm), &next);
                    }
                }
            }
            ModelConfig::Mobilenet(_) => {
                // Only blocks that expand have a fourth part: expand, depthwise, project, norm.
                for block in self.modules(".conv.3.weight") {
                    let path = |part: &str| format!("{block}.conv.{part}");
                    let mut tensors = outputs(&path("0.0"));
                    tensors.extend(of_norm(&path("0.1")));
                    tensors.extend(outputs(&path("1.0")));
                    tensors.extend(of_norm(&path("1.1")));
                    tensors.push((path("2.weight"), IN, 1));
                    self.add(&path("0.0"), tensors);
                }
                for last in
                    self.modules(".0.weight").into_iter().filter(|name| name.matches('.').count() == 1)
                {
                    if last != "features.0" {
                        self.add_between(&format!("{last}.0"), Some(&format!("{last}.1")), "classifier.1");
                    }
                }
            }
            ModelConfig::Gpt(gpt) => (0..gpt.layers).for_each(|n| {
                let path = |part: &str| format!("transformer.h.{n}.mlp.{part}");
                // Weights are (in, out).
                let tensors = [("c_fc.weight", 1, 1), ("c_fc.bias", 0, 1), ("c_proj.weight", 0, 1)];
                let tensors = tensors.map(|(part, axis, block)| (path(part), axis, block));
                self.add(&path("c_fc"), tensors.into());
            }),
            ModelConfig::Llama(llama) => (0..llama.layers).for_each(|n| {
                let path = |part: &str| format!("model.layers.{n}.mlp{part}");
                let tensors =
                    [(".down_proj.weight", IN), (".gate_proj.weight", OUT), (".up_proj.weight", OUT)];
                self.add(&path(""), tensors.map(|(part, axis)| (path(part), axis, 1)).into());
            }),
            ModelConfig::Bert(bert) => (0..bert.layers).for_each(|n| {
                let path = |part: &str| format!("bert.encoder.layer.{n}.{part}.dense");
                self.add_between(&path("intermediate"), None, &path("output"));
            }),
            ModelConfig::Vit(vit) => (0..vit.layers).for_each(|n| {
                let path = |part: usize| format!("encoder.layers.encoder_layer_{n}.mlp.{part}");
                self.add_between(&path(0), None, &path(3));
            }),
            ModelConfig::Layers(_) => {}
        }
    }

    /// The hidden units of `layers.0`, `layers.1`, ...
    fn add_dense(&mut self, count: usize) {
        for i in 0..count {
            self.add_between(&format!("layers.{i}"), None, &format!("layers.{}", i + 1));
        }
    }

    /// The modules that have a parameter whose name ends like this, in order.
    fn modules(&self, end: &str) -> Vec<String> {
        let specs = self.layout.params.in_declaration_order().map(|(spec, _)| spec);
        specs.filter_map(|spec| spec.name.strip_suffix(end)).map(str::to_owned).collect()
    }

    fn add_heads(&mut self, model: &ModelConfig) {
        match model {
            ModelConfig::Gpt(gpt) => (0..gpt.layers).for_each(|n| {
                let (name, head) = (format!("transformer.h.{n}.attn"), gpt.width / gpt.heads);
                // Weights are (in, out).
                let tensors = [("c_proj.weight", 0), ("c_attn.weight", 1), ("c_attn.bias", 0)];
                let tensors = tensors.map(|(part, axis)| (format!("{name}.{part}"), axis, head));
                self.add(&name, tensors.into());
            }),
            ModelConfig::Llama(llama) => (0..llama.layers).for_each(|n| {
                let (name, head) = (format!("model.layers.{n}.self_attn"), llama.width / llama.heads);
                let queries = llama.heads / llama.kv_heads * head;
                let tensors = [
                    ("o_proj.weight", IN, queries),
                    ("q_proj.weight", OUT, queries),
                    ("k_proj.weight", OUT, head),
                    ("v_proj.weight", OUT, head),
                ];
                let tensors = tensors.map(|(part, axis, block)| (format!("{name}.{part}"), axis, block));
                self.add(&name, tensors.into());
            }),
            ModelConfig::Bert(bert) => (0..bert.layers).for_each(|n| {
                let (attention, head) =
                    (format!("bert.encoder.layer.{n}.attention"), bert.width / bert.heads);
                let mut tensors = vec![(format!("{attention}.output.dense.weight"), IN, head)];
                for part in ["query", "key", "value"] {
                    let own = ["weight", "bias"].map(|value| format!("{attention}.self.{part}.{value}"));
                    tensors.extend(own.map(|tensor| (tensor, OUT, head)));
                }
                self.add(&format!("{attention}.self"), tensors);
            }),
            ModelConfig::Vit(vit) => (0..vit.layers).for_each(|n| {
                let name = format!("encoder.layers.encoder_layer_{n}.self_attention");
                let tensors = [("out_proj.weight", IN), ("in_proj_weight", OUT), ("in_proj_bias", OUT)];
                let head = vit.width / vit.heads;
                self.add(&name, tensors.map(|(part, axis)| (format!("{name}.{part}"), axis, head)).into());
            }),
            _ => {}
        }
    }
}

fn outputs(layer: &str) -> Vec<(String, usize, usize)> {
    ["weight", "bias"].map(|part| (format!("{layer}.{part}"), OUT, 1)).into()
}

/// Scale, shift and running statistics.
fn of_norm(norm: &str) -> Vec<(String, usize, usize)> {
    let parts = ["weight", "bias", "running_mean", "running_var"];
    parts.map(|part| (format!("{norm}.{part}"), 0, 1)).into()
}

/// The job of a model that has these units left and prunes no more.
pub fn without_pruned(job: &Job, kept: UnitCounts) -> Job {
    let mut job = job.clone();
    let mut all = job.prune.take().map(|prune| prune.kept).unwrap_or_default();
    all.extend(kept);
    let others = resize(&mut job.model, all);
    job.prune = (!others.is_empty()).then(|| PruneConfig::keeping(others));
    job
}

/// The counts as keys of `[model]`, as far as it has a key for them: what is left has none.
pub(super) fn resize(model: &mut ModelConfig, mut kept: UnitCounts) -> UnitCounts {
    let mut resize = |layer: String, size: &mut usize| {
        if let Some(kept) = kept.remove(&layer) {
            *size = kept;
        }
    };
    match model {
        ModelConfig::Mlp(mlp) => {
            mlp.hidden.iter_mut().enumerate().for_each(|(i, size)| resize(format!("layers.{i}"), size));
        }
        ModelConfig::Cnn(cnn) => {
            let stages = cnn.stages.iter_mut().enumerate();
            stages.for_each(|(i, stage)| resize(format!("stages.{i}"), &mut stage.channels));
            cnn.hidden.iter_mut().enumerate().for_each(|(i, size)| resize(format!("layers.{i}"), size));
        }
        // One key for all layers.
        ModelConfig::Llama(llama) => {
            let layers = llama.layers;
            resize_all(&mut kept, &mut llama.hidden, layers, |n| format!("model.layers.{n}.mlp"));
        }
        ModelConfig::Bert(bert) => {
            let name = |n| format!("bert.encoder.layer.{n}.intermediate.dense");
            resize_all(&mut kept, &mut bert.hidden, bert.layers, name);
        }
        _ => {}
    }
    kept
}

/// Sets `size`, if all layers keep as many units.
fn resize_all(kept: &mut UnitCounts, size: &mut usize, layers: usize, name: impl Fn(usize) -> String) {
    let names: Vec<String> = (0..layers).map(name).collect();
    if let Some(first) = common_count(kept, &names) {
        *size = first;
        kept.retain(|name, _| !names.contains(name));
    }
}

/// The number of units that all of these layers keep, if it is one.
fn common_count(kept: &UnitCounts, layers: &[String]) -> Option<usize> {
    let first = *kept.get(layers.first()?)?;
    layers.iter().all(|layer| kept.get(layer) == Some(&first)).then_some(first)
}
