//! Parameters, gradients and running statistics, each one flat buffer of named views.
//!
//! A model declares what it needs ([`Declared`]); that alone says where everything lies, so a plan
//! allocates nothing. [`Store`] holds the buffers. Matrix-shaped parameters come first, each group in
//! the order of the names, so that weight decay is a range and an update is one pass.

mod store;

use std::collections::BTreeMap;

pub use store::Store;

/// A parameter by the order of its declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ParamId(pub(crate) usize);

/// A running statistic by the order of its declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StatId(pub(crate) usize);

/// How a parameter begins; every value is a function of the seed, the name and the position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Constant(f64),
    /// Uniform in [-bound, bound].
    Uniform(f64),
    /// Normal with mean 0 and this standard deviation.
    Normal(f64),
}

/// How the values of a parameter lie in the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lies {
    /// As the named shape says.
    AsNamed,
    /// A convolution's weight, named (out, in, height, width) as other tools have it, kept as
    /// (out, height, width, in) because pictures are kept channels last.
    ChannelsLast,
}

#[derive(Clone, Debug)]
pub struct Spec {
    pub name: String,
    /// The shape other tools know it by.
    pub shape: Vec<usize>,
    pub init: Init,
    pub lies: Lies,
}

impl Spec {
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The shape of the view.
    pub fn stored_shape(&self) -> Vec<usize> {
        match (self.lies, self.shape.as_slice()) {
            (Lies::ChannelsLast, &[o, i, h, w]) => vec![o, h, w, i],
            _ => self.shape.clone(),
        }
    }
}

/// A name declared twice.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("two parameters are named `{0}`")]
pub struct SameName(pub String);

/// What a model declares, before anything is allocated.
#[derive(Clone, Debug, Default)]
pub struct Declared {
    params: Vec<Spec>,
    stats: Vec<Spec>,
}

impl Declared {
    pub fn param(&mut self, name: impl Into<String>, shape: impl Into<Vec<usize>>, init: Init) -> ParamId {
        self.params.push(Spec { name: name.into(), shape: shape.into(), init, lies: Lies::AsNamed });
        ParamId(self.params.len() - 1)
    }

    /// The weight of a convolution: (out, in, height, width) to other tools.
    pub fn filter(&mut self, name: impl Into<String>, shape: [usize; 4], init: Init) -> ParamId {
        self.params.push(Spec { name: name.into(), shape: shape.into(), init, lies: Lies::ChannelsLast });
        ParamId(self.params.len() - 1)
    }

    /// A statistic that training updates but no gradient does.
    pub fn stat(&mut self, name: impl Into<String>, len: usize, initial: f64) -> StatId {
        self.stats.push(Spec {
            name: name.into(),
            shape: vec![len],
            init: Init::Constant(initial),
            lies: Lies::AsNamed,
        });
        StatId(self.stats.len() - 1)
    }

    /// Where everything lies.
    pub fn layout(self) -> Result<Layout, SameName> {
        let mut seen = BTreeMap::new();
        for spec in self.params.iter().chain(&self.stats) {
            if seen.insert(spec.name.clone(), ()).is_some() {
                return Err(SameName(spec.name.clone()));
            }
        }
        let params = Flat::new(self.params);
        let stats = Flat::new(self.stats);
        Ok(Layout { params, stats })
    }
}

/// Where a model's parameters and statistics lie.
#[derive(Clone, Debug)]
pub struct Layout {
    pub params: Flat,
    pub stats: Flat,
}

/// Named ranges of one buffer.
#[derive(Clone, Debug)]
pub struct Flat {
    /// In the order of declaration.
    specs: Vec<Spec>,
    /// Where each begins, in the order of declaration.
    offsets: Vec<usize>,
    /// Indices in the order of the buffer.
    order: Vec<usize>,
    /// Values in the buffer.
    pub len: usize,
    /// Of these, the first so many belong to matrices: the range that weight decay touches.
    pub decayed: usize,
}

impl Flat {
    fn new(specs: Vec<Spec>) -> Self {
        let mut order: Vec<usize> = (0..specs.len()).collect();
        order.sort_by_key(|&i| (specs[i].shape.len() < 2, &specs[i].name));
        let (mut len, mut decayed) = (0, 0);
        let mut offsets = vec![0; specs.len()];
        for &i in &order {
            offsets[i] = len;
            len += specs[i].len();
            if specs[i].shape.len() >= 2 {
                decayed = len;
            }
        }
        Self { specs, offsets, order, len, decayed }
    }

    /// Names and ranges in the order of the buffer.
    pub fn iter(&self) -> impl Iterator<Item = (&Spec, std::ops::Range<usize>)> {
        self.order.iter().map(|&i| (&self.specs[i], self.offsets[i]..self.offsets[i] + self.specs[i].len()))
    }

    /// Names and offsets in the order of declaration.
    fn declared(&self) -> impl Iterator<Item = (&Spec, usize)> {
        self.specs.iter().zip(self.offsets.iter().copied())
    }

    /// The spec of the parameter declared `index`-th.
    pub fn spec(&self, index: usize) -> &Spec {
        &self.specs[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_come_first_and_names_are_in_order() {
        let mut declared = Declared::default();
        declared.param("b.bias", [3], Init::Constant(0.0));
        declared.param("b.weight", [3, 2], Init::Normal(1.0));
        declared.param("a.weight", [2, 2], Init::Normal(1.0));
        let flat = declared.layout().unwrap().params;
        let names: Vec<_> = flat.iter().map(|(spec, range)| (spec.name.as_str(), range)).collect();
        assert_eq!(names, [("a.weight", 0..4), ("b.weight", 4..10), ("b.bias", 10..13)]);
        assert_eq!((flat.len, flat.decayed), (13, 10));
    }

    #[test]
    fn a_name_is_declared_once() {
        let mut declared = Declared::default();
        declared.param("a", [1], Init::Constant(0.0));
        declared.stat("a", 1, 0.0);
        assert_eq!(declared.layout().unwrap_err(), SameName("a".into()));
    }
}
