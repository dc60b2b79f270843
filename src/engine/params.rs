//! Parameters, gradients and running statistics, each one flat buffer with named views.
//!
//! A model declares what it needs in a [`ParamRegistry`]; that alone determines the layout, so planning allocates
//! nothing. [`ParamStore`](crate::param_store::ParamStore) holds the buffers. Trained parameters come first, so that
//! gradients and optimizer state are as long as those; within a group matrices come first, so that weight decay applies
//! to one range; then names are in order. An update is one pass per group, and a job without `train.groups` has one.

pub mod int8;
pub mod matrices;
pub mod rules;
pub mod units;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

pub use int8::{Int8Layout, Int8Slot, ScaleGrid};
pub use matrices::MatrixLayer;
pub use rules::{ParamRules, RulesError, matching_layers, near_names};
pub use units::{UnitGroup, UnitSlice};

/// A parameter, by declaration order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ParamId {
    pub index: usize,
    /// Training updates it: it has a gradient and optimizer state. If not, it is frozen.
    pub trained: bool,
}

/// A running statistic, by declaration order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StatId(pub usize);

/// Initialization of a parameter; every value is a function of the seed, the name and the index.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ParamInit {
    Constant(f64),
    /// Uniform in [-bound, bound].
    Uniform(f64),
    /// Normal with mean 0 and this standard deviation.
    Normal(f64),
}

/// Memory format of a parameter in the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryFormat {
    /// In the order of the declared shape.
    Contiguous,
    /// A convolution weight declared as (out, in, height, width), like in PyTorch, and stored as (out, height, width,
    /// in) because images are channels-last.
    ChannelsLast,
}

/// The running statistic with the range of the activations at a point of a network.
pub fn activation_range_name(point: &str) -> String {
    format!("{point}{ACTIVATION_RANGE}")
}

const ACTIVATION_RANGE: &str = ".activation_range";

/// What layers do with a tensor of two or more dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorUse {
    /// Multiplied with inputs: (out, in) or (out, in, height, width).
    Weight,
    /// The same as (in, out).
    TransposedWeight,
    /// Rows are looked up or added: an embedding.
    Table,
}

#[derive(Clone, Debug)]
pub struct TensorSpec {
    pub name: String,
    /// The shape in checkpoints, as PyTorch declares it.
    pub shape: Vec<usize>,
    pub init: ParamInit,
    pub memory_format: MemoryFormat,
    pub usage: TensorUse,
}

impl TensorSpec {
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of inputs of a weight, of channels for a filter.
    fn inputs(&self) -> usize {
        let axis = if self.usage == TensorUse::TransposedWeight { 0 } else { 1 };
        self.shape.get(axis).copied().unwrap_or(1)
    }

    /// Whether it is the range of activations, see [`activation_range_name`].
    pub fn is_activation_range(&self) -> bool {
        self.name.ends_with(ACTIVATION_RANGE)
    }

    /// Whether layers multiply inputs with it: a matrix or filters, no bias, norm or embedding.
    fn is_matrix(&self) -> bool {
        self.shape.len() >= 2 && self.usage != TensorUse::Table
    }

    /// The shape of the view in the buffer.
    pub fn stored_shape(&self) -> Vec<usize> {
        match (self.memory_format, self.shape.as_slice()) {
            (MemoryFormat::ChannelsLast, &[o, i, h, w]) => vec![o, h, w, i],
            _ => self.shape.clone(),
        }
    }
}

/// A name that was declared twice.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("two parameters are named `{0}`")]
pub struct DuplicateName(pub String);

/// The declarations of a model, before anything is allocated.
#[derive(Clone, Debug, Default)]
pub struct ParamRegistry {
    params: Vec<TensorSpec>,
    placements: Vec<Placement>,
    stats: Vec<TensorSpec>,
    rules: ParamRules,
    matrices: Vec<MatrixLayer>,
    /// Pairs of a parameter and another name that it has.
    aliases: Vec<(String, String)>,
}

/// Where a parameter belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    trained: bool,
    /// 0, or one more than the index of the job's group.
    group: usize,
    /// `[prune]` may set its weights to zero.
    pruned: bool,
    /// `[quantize]` rounds its weights.
    quantized: bool,
}

impl Placement {
    const DEFAULT: Self = Self { trained: true, group: 0, pruned: false, quantized: false };
}

impl ParamRegistry {
    /// Parameters are frozen and grouped by these rules.
    pub fn with_rules(rules: ParamRules) -> Self {
        Self { rules, ..Self::default() }
    }

    pub fn rules(&self) -> &ParamRules {
        &self.rules
    }

    /// The rules that match `alias` also apply to the parameter `name`, which is declared afterwards.
    pub fn alias(&mut self, name: impl Into<String>, alias: impl Into<String>) {
        self.aliases.push((name.into(), alias.into()));
    }

    fn declare(&mut self, spec: TensorSpec) -> ParamId {
        let aliases = self.aliases.iter().filter(|(name, _)| *name == spec.name).map(|(_, alias)| alias);
        let names: Vec<&str> = std::iter::once(&spec.name).chain(aliases).map(String::as_str).collect();
        let placement = self.rules.place(&names, &spec);
        let id = ParamId { index: self.params.len(), trained: placement.trained };
        self.params.push(spec);
        self.placements.push(placement);
        id
    }

    pub fn param(
        &mut self,
        name: impl Into<String>,
        shape: impl Into<Vec<usize>>,
        init: ParamInit,
    ) -> ParamId {
        let (name, shape, memory_format) = (name.into(), shape.into(), MemoryFormat::Contiguous);
        self.declare(TensorSpec { name, shape, init, memory_format, usage: TensorUse::Weight })
    }

    /// A parameter whose rows are looked up or added: an embedding.
    pub fn table(
        &mut self,
        name: impl Into<String>,
        shape: impl Into<Vec<usize>>,
        init: ParamInit,
    ) -> ParamId {
        let (name, shape, memory_format) = (name.into(), shape.into(), MemoryFormat::Contiguous);
        self.declare(TensorSpec { name, shape, init, memory_format, usage: TensorUse::Table })
    }

    /// A weight that is declared as (in, out).
    pub fn transposed_weight(
        &mut self,
        name: impl Into<String>,
        shape: [usize; 2],
        init: ParamInit,
    ) -> ParamId {
        let (name, shape, memory_format) = (name.into(), shape.into(), MemoryFormat::Contiguous);
        self.declare(TensorSpec { name, shape, init, memory_format, usage: TensorUse::TransposedWeight })
    }

    /// A convolution weight, declared as (out, in, height, width).
    pub fn conv_weight(&mut self, name: impl Into<String>, shape: [usize; 4], init: ParamInit) -> ParamId {
        let (name, shape, memory_format) = (name.into(), shape.into(), MemoryFormat::ChannelsLast);
        self.declare(TensorSpec { name, shape, init, memory_format, usage: TensorUse::Weight })
    }

    /// A statistic that the forward pass updates, not the optimizer.
    pub fn running_stat(&mut self, name: impl Into<String>, len: usize, initial: f64) -> StatId {
        self.stats.push(TensorSpec {
            name: name.into(),
            shape: vec![len],
            init: ParamInit::Constant(initial),
            memory_format: MemoryFormat::Contiguous,
            usage: TensorUse::Weight,
        });
        StatId(self.stats.len() - 1)
    }

    /// Checks that every rule matches a parameter, that one is trained and, if the job prunes, that one is pruned.
    pub fn check_rules(&self) -> Result<(), RulesError> {
        let names = self.params.iter().map(|spec| spec.name.as_str());
        self.rules
            .check(&names.chain(self.aliases.iter().map(|(_, alias)| alias.as_str())).collect::<Vec<_>>())?;
        self.rules.check_ranks(&self.matrices)?;
        let any = |is: fn(&Placement) -> bool| self.placements.is_empty() || self.placements.iter().any(is);
        match (any(|placement| placement.trained), any(|placement| placement.pruned)) {
            (false, _) => Err(RulesError::AllFrozen),
            (true, false) if self.rules.prunes_weights() => Err(RulesError::NothingPruned),
            _ => Ok(()),
        }
    }

    /// Whether the model computes with values that are rounded to 8-bit integers.
    pub fn quantizes(&self) -> bool {
        self.rules.quantizes()
    }

    /// Lays out all parameters and statistics.
    pub fn into_layout(self) -> Result<ParamLayout, DuplicateName> {
        let mut names = BTreeMap::new();
        for spec in self.params.iter().chain(&self.stats) {
            if names.insert(spec.name.clone(), ()).is_some() {
                return Err(DuplicateName(spec.name.clone()));
            }
        }
        let stats = vec![Placement::DEFAULT; self.stats.len()];
        let stats = FlatLayout::new(self.stats, &stats, &ParamRules::default());
        let params = FlatLayout::new(self.params, &self.placements, &self.rules);
        Ok(ParamLayout { params, stats, matrices: self.matrices, units: Vec::new() })
    }
}

/// The layout of a model's parameters and statistics.
#[derive(Clone, Debug)]
pub struct ParamLayout {
    pub params: FlatLayout,
    pub stats: FlatLayout,
    /// Linear layers and convolutions that are, or may be, factorized.
    pub matrices: Vec<MatrixLayer>,
    /// Channels or heads that `[prune]` may set to zero.
    pub units: Vec<UnitGroup>,
}

impl ParamLayout {
    /// `[prune]` may set the units of these groups to zero, where `rules` allow it.
    pub fn prune_units(&mut self, groups: Vec<UnitGroup>, rules: &ParamRules) -> Result<(), RulesError> {
        let frozen: BTreeSet<&str> = self.params.frozen().map(|(spec, _)| spec.name.as_str()).collect();
        let may_prune = |group: &UnitGroup| {
            let mut tensors = group.slices.iter().map(|slice| slice.tensor.as_str());
            group.units > 1 && tensors.all(|tensor| !frozen.contains(tensor) && !rules.skips(tensor))
        };
        let groups: Vec<UnitGroup> = groups.into_iter().filter(may_prune).collect();
        rules.check_units(&groups)?;
        let tensors: BTreeSet<&str> =
            groups.iter().flat_map(|group| &group.slices).map(|slice| slice.tensor.as_str()).collect();
        let pruned = self.params.specs.iter().map(|spec| tensors.contains(spec.name.as_str()));
        self.params.pruned = pruned.collect();
        self.units = groups;
        Ok(())
    }
}

/// Named ranges of one buffer.
#[derive(Clone, Debug)]
pub struct FlatLayout {
    /// In declaration order.
    specs: Vec<TensorSpec>,
    /// Offset of each, in declaration order.
    offsets: Vec<usize>,
    /// Whether `[prune]` may set weights to zero, in declaration order.
    pruned: Vec<bool>,
    /// Whether `[quantize]` rounds weights, in declaration order.
    quantized: Vec<bool>,
    /// Indices in buffer order.
    buffer_order: Vec<usize>,
    /// Number of values in the buffer.
    pub len: usize,
    /// How many of them, from the start, are trained: as many have a gradient and optimizer state.
    pub trained_len: usize,
    /// The trained values by group, in buffer order. Not empty groups only, except for a buffer without values.
    pub groups: Vec<ParamGroup>,
}

/// Trained parameters that an update treats alike.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamGroup {
    pub range: Range<usize>,
    /// How many of its values, from the start, belong to matrices: the range of weight decay.
    pub decayed_len: usize,
    /// Factor on the learning rate.
    pub lr_scale: f64,
    /// In place of the optimizer's.
    pub weight_decay: Option<f64>,
}

impl FlatLayout {
    fn new(specs: Vec<TensorSpec>, placements: &[Placement], rules: &ParamRules) -> Self {
        let mut buffer_order: Vec<usize> = (0..specs.len()).collect();
        buffer_order.sort_by_key(|&i| {
            let Placement { trained, group, .. } = placements[i];
            (!trained, if trained { group } else { 0 }, specs[i].shape.len() < 2, &specs[i].name)
        });
        let (mut len, mut trained_len) = (0, 0);
        let mut offsets = vec![0; specs.len()];
        let mut groups: Vec<(usize, ParamGroup)> = Vec::new();
        for &i in &buffer_order {
            offsets[i] = len;
            len += specs[i].len();
            let Placement { trained: true, group: number, .. } = placements[i] else { continue };
            trained_len = len;
            if groups.last().is_none_or(|(last, _)| *last != number) {
                groups.push((number, rules.new_group(number, offsets[i])));
            }
            if let Some((_, group)) = groups.last_mut() {
                group.range.end = len;
                if specs[i].shape.len() >= 2 {
                    group.decayed_len = group.range.len();
                }
            }
        }
        let groups = groups.into_iter().map(|(_, group)| group).collect();
        let pruned = placements.iter().map(|placement| placement.pruned).collect();
        let quantized = placements.iter().map(|placement| placement.quantized).collect();
        Self { specs, offsets, pruned, quantized, buffer_order, len, trained_len, groups }
    }

    /// Without the initial values that a test replaces: drawing them would take most of its time.
    #[cfg(any(test, feature = "testing"))]
    pub fn with_trained_at_zero(mut self) -> Self {
        let trained = self.offsets.iter().map(|&offset| offset < self.trained_len);
        let specs = self.specs.iter_mut().zip(trained);
        specs
            .filter(|(_, is_trained)| *is_trained)
            .for_each(|(spec, _)| spec.init = ParamInit::Constant(0.0));
        self
    }

    /// Specs and ranges in buffer order.
    pub fn iter(&self) -> impl Iterator<Item = (&TensorSpec, Range<usize>)> {
        self.buffer_order
            .iter()
            .map(|&i| (&self.specs[i], self.offsets[i]..self.offsets[i] + self.specs[i].len()))
    }

    /// The trained ones of [`iter`](Self::iter).
    pub fn trained(&self) -> impl Iterator<Item = (&TensorSpec, Range<usize>)> {
        self.iter().take_while(|(_, range)| range.start < self.trained_len)
    }

    /// The ones of [`trained`](Self::trained) that `[prune]` may set weights of to zero.
    pub fn pruned(&self) -> impl Iterator<Item = (&TensorSpec, Range<usize>)> {
        let pruned = self.buffer_order.iter().map(|&i| self.pruned[i]);
        self.iter().zip(pruned).filter_map(|(param, pruned)| pruned.then_some(param))
    }

    /// Number of values in [`pruned`](Self::pruned).
    pub fn pruned_len(&self) -> usize {
        self.pruned().map(|(_, range)| range.len()).sum()
    }

    /// The ones of [`iter`](Self::iter) that `[quantize]` rounds, frozen ones too.
    pub fn quantized(&self) -> impl Iterator<Item = (&TensorSpec, Range<usize>)> {
        let quantized = self.buffer_order.iter().map(|&i| self.quantized[i]);
        self.iter().zip(quantized).filter_map(|(param, quantized)| quantized.then_some(param))
    }

    /// The frozen ones of [`iter`](Self::iter), with ranges that count from the first of them.
    pub fn frozen(&self) -> impl Iterator<Item = (&TensorSpec, Range<usize>)> {
        self.iter()
            .skip_while(|(_, range)| range.start < self.trained_len)
            .map(|(spec, range)| (spec, range.start - self.trained_len..range.end - self.trained_len))
    }

    /// Specs and offsets in declaration order.
    pub fn in_declaration_order(&self) -> impl Iterator<Item = (&TensorSpec, usize)> {
        self.specs.iter().zip(self.offsets.iter().copied())
    }

    /// Number of values in these parameters.
    pub fn num_values(&self, params: &[ParamId]) -> usize {
        params.iter().map(|param| self.spec(param.index).len()).sum()
    }

    /// The spec with this declaration index.
    pub fn spec(&self, index: usize) -> &TensorSpec {
        &self.specs[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_come_first_and_names_are_in_order() {
        let mut registry = ParamRegistry::default();
        registry.param("b.bias", [3], ParamInit::Constant(0.0));
        registry.param("b.weight", [3, 2], ParamInit::Normal(1.0));
        registry.param("a.weight", [2, 2], ParamInit::Normal(1.0));
        let flat = registry.into_layout().unwrap().params;
        let names: Vec<_> = flat.iter().map(|(spec, range)| (spec.name.as_str(), range)).collect();
        assert_eq!(names, [("a.weight", 0..4), ("b.weight", 4..10), ("b.bias", 10..13)]);
        assert_eq!((flat.len, flat.trained_len), (13, 13));
        let group = ParamGroup { range: 0..13, decayed_len: 10, lr_scale: 1.0, weight_decay: None };
        assert_eq!(flat.groups, [group]);
    }

    fn layout(train: &str) -> FlatLayout {
        let mut registry = ParamRegistry::with_rules(ParamRules::new(&train_config(train)));
        registry.alias("a.weight", "tied.weight");
        registry.param("a.weight", [2, 2], ParamInit::Normal(1.0));
        registry.param("b.0.weight", [3, 2], ParamInit::Normal(1.0));
        registry.param("b.0.bias", [3], ParamInit::Constant(0.0));
        registry.param("b.10.weight", [5, 2], ParamInit::Normal(1.0));
        registry.param("head.weight", [1, 2], ParamInit::Normal(1.0));
        registry.param("head.bias", [1], ParamInit::Constant(0.0));
        registry.check_rules().unwrap();
        registry.into_layout().unwrap().params
    }

    pub(super) fn train_config(train: &str) -> crate::job::TrainConfig {
        toml::from_str(&format!("epochs = 1\n{train}")).unwrap()
    }

    fn trained_names(flat: &FlatLayout) -> Vec<&str> {
        flat.trained().map(|(spec, _)| spec.name.as_str()).collect()
    }

    #[test]
    fn frozen_parameters_come_last() {
        let flat = layout("freeze = ['b.*', '*.bias']");
        assert_eq!(trained_names(&flat), ["a.weight", "head.weight"]);
        assert_eq!((flat.len, flat.trained_len), (26, 6));
        let frozen: Vec<_> = flat.frozen().map(|(spec, range)| (spec.name.as_str(), range)).collect();
        let expected =
            [("b.0.weight", 0..6), ("b.10.weight", 6..16), ("b.0.bias", 16..19), ("head.bias", 19..20)];
        assert_eq!(frozen, expected);
    }

    #[test]
    fn the_last_pattern_that_matches_decides() {
        assert_eq!(trained_names(&layout("freeze = ['*', '!head.*']")), ["head.weight", "head.bias"]);
        assert_eq!(trained_names(&layout("freeze = ['*', '!head', 'head.bias']")), ["head.weight"]);
    }

    #[test]
    fn a_pattern_names_a_parameter_or_a_module() {
        let all = ["a.weight", "b.10.weight", "head.weight", "head.bias"];
        assert_eq!(
            trained_names(&layout("freeze = 'b.0'")),
            ["a.weight", "b.10.weight", "head.weight", "head.bias"]
        );
        assert_eq!(trained_names(&layout("freeze = 'b.0.*'")), all);
        assert_eq!(trained_names(&layout("freeze = 'b.?'")), all);
    }

    #[test]
    fn a_tied_parameter_answers_to_both_names() {
        for name in ["a.weight", "tied.weight", "tied"] {
            let flat = layout(&format!("freeze = '{name}'"));
            assert_eq!(
                flat.frozen().map(|(spec, _)| spec.name.as_str()).collect::<Vec<_>>(),
                ["a.weight"],
                "{name}"
            );
        }
    }

    #[test]
    fn groups_are_ranges() {
        let flat = layout(
            "freeze = 'a'\n[[groups]]\nparams = 'b'\nlr_scale = 0.1\n[[groups]]\nparams = ['b.10.*', 'head.bias']\nweight_decay = 0.0",
        );
        let group = |range, decayed_len, lr_scale, weight_decay| ParamGroup {
            range,
            decayed_len,
            lr_scale,
            weight_decay,
        };
        let expected =
            [group(0..2, 2, 1.0, None), group(2..11, 6, 0.1, None), group(11..22, 10, 1.0, Some(0.0))];
        assert_eq!(flat.groups, expected);
        assert_eq!((flat.trained_len, flat.len), (22, 26));
    }

    #[test]
    fn rules_that_match_nothing_are_refused() {
        let error = |train: &str| {
            let mut registry = ParamRegistry::with_rules(ParamRules::new(&train_config(train)));
            for name in ["backbone.0.weight", "backbone.0.bias", "head.weight"] {
                registry.param(name, [1], ParamInit::Constant(0.0));
            }
            registry.check_rules().unwrap_err().to_string()
        };
        let message = error("freeze = 'backbon.*'");
        assert!(message.contains("`backbon.*`") && message.contains("`backbone.0.bias`"), "{message}");
        assert!(error("freeze = ['*', '!haed.*']").contains("`head.weight`"));
        assert!(error("[[groups]]\nparams = 'nothing'").contains("`train.groups`"));
        assert_eq!(error("freeze = ['backbone', 'head']"), RulesError::AllFrozen.to_string());
    }

    #[test]
    fn a_name_is_declared_once() {
        let mut registry = ParamRegistry::default();
        registry.param("a", [1], ParamInit::Constant(0.0));
        registry.running_stat("a", 1, 0.0);
        assert_eq!(registry.into_layout().unwrap_err(), DuplicateName("a".into()));
    }
}
