//! Parameters, gradients and running statistics, each one flat buffer with named views.
//!
//! A model declares what it needs in a [`ParamRegistry`]; that alone determines the layout, so planning allocates
//! nothing. [`ParamStore`](crate::param_store::ParamStore) holds the buffers. Matrices come first, and both groups are sorted by name, so that weight
//! decay applies to one range and an update is one pass.

use std::collections::BTreeMap;

/// A parameter, by declaration order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ParamId(pub(crate) usize);

/// A running statistic, by declaration order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StatId(pub(crate) usize);

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

#[derive(Clone, Debug)]
pub struct TensorSpec {
    pub name: String,
    /// The shape in checkpoints, as PyTorch declares it.
    pub shape: Vec<usize>,
    pub init: ParamInit,
    pub memory_format: MemoryFormat,
}

impl TensorSpec {
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
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
    stats: Vec<TensorSpec>,
}

impl ParamRegistry {
    pub fn param(
        &mut self,
        name: impl Into<String>,
        shape: impl Into<Vec<usize>>,
        init: ParamInit,
    ) -> ParamId {
        self.params.push(TensorSpec {
            name: name.into(),
            shape: shape.into(),
            init,
            memory_format: MemoryFormat::Contiguous,
        });
        ParamId(self.params.len() - 1)
    }

    /// A convolution weight, declared as (out, in, height, width).
    pub fn conv_weight(&mut self, name: impl Into<String>, shape: [usize; 4], init: ParamInit) -> ParamId {
        self.params.push(TensorSpec {
            name: name.into(),
            shape: shape.into(),
            init,
            memory_format: MemoryFormat::ChannelsLast,
        });
        ParamId(self.params.len() - 1)
    }

    /// A statistic that the forward pass updates, not the optimizer.
    pub fn running_stat(&mut self, name: impl Into<String>, len: usize, initial: f64) -> StatId {
        self.stats.push(TensorSpec {
            name: name.into(),
            shape: vec![len],
            init: ParamInit::Constant(initial),
            memory_format: MemoryFormat::Contiguous,
        });
        StatId(self.stats.len() - 1)
    }

    /// Lays out all parameters and statistics.
    pub fn into_layout(self) -> Result<ParamLayout, DuplicateName> {
        let mut names = BTreeMap::new();
        for spec in self.params.iter().chain(&self.stats) {
            if names.insert(spec.name.clone(), ()).is_some() {
                return Err(DuplicateName(spec.name.clone()));
            }
        }
        let params = FlatLayout::new(self.params);
        let stats = FlatLayout::new(self.stats);
        Ok(ParamLayout { params, stats })
    }
}

/// The layout of a model's parameters and statistics.
#[derive(Clone, Debug)]
pub struct ParamLayout {
    pub params: FlatLayout,
    pub stats: FlatLayout,
}

/// Named ranges of one buffer.
#[derive(Clone, Debug)]
pub struct FlatLayout {
    /// In declaration order.
    specs: Vec<TensorSpec>,
    /// Offset of each, in declaration order.
    offsets: Vec<usize>,
    /// Indices in buffer order.
    buffer_order: Vec<usize>,
    /// Number of values in the buffer.
    pub len: usize,
    /// How many of them, from the start, belong to matrices: the range of weight decay.
    pub decayed_len: usize,
}

impl FlatLayout {
    fn new(specs: Vec<TensorSpec>) -> Self {
        let mut buffer_order: Vec<usize> = (0..specs.len()).collect();
        buffer_order.sort_by_key(|&i| (specs[i].shape.len() < 2, &specs[i].name));
        let (mut len, mut decayed_len) = (0, 0);
        let mut offsets = vec![0; specs.len()];
        for &i in &buffer_order {
            offsets[i] = len;
            len += specs[i].len();
            if specs[i].shape.len() >= 2 {
                decayed_len = len;
            }
        }
        Self { specs, offsets, buffer_order, len, decayed_len }
    }

    /// Specs and ranges in buffer order.
    pub fn iter(&self) -> impl Iterator<Item = (&TensorSpec, std::ops::Range<usize>)> {
        self.buffer_order
            .iter()
            .map(|&i| (&self.specs[i], self.offsets[i]..self.offsets[i] + self.specs[i].len()))
    }

    /// Specs and offsets in declaration order.
    pub(crate) fn in_declaration_order(&self) -> impl Iterator<Item = (&TensorSpec, usize)> {
        self.specs.iter().zip(self.offsets.iter().copied())
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
        assert_eq!((flat.len, flat.decayed_len), (13, 10));
    }

    #[test]
    fn a_name_is_declared_once() {
        let mut registry = ParamRegistry::default();
        registry.param("a", [1], ParamInit::Constant(0.0));
        registry.running_stat("a", 1, 0.0);
        assert_eq!(registry.into_layout().unwrap_err(), DuplicateName("a".into()));
    }
}
