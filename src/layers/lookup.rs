//! The categories of a table's row as learned vectors, behind its numbers. Always the first layer: there is no
//! gradient of its input.

use candle_core::{Result, Tensor};

use super::{At, Cost, Layer, On, Pass, Saved};
use crate::kernels::lookup::{Lookup as Kernel, card_workspace};
use crate::params::{Declared, Init, ParamId};

pub struct Lookup {
    name: String,
    /// Numbers of a sample before its categories.
    numbers: usize,
    tables: Vec<ParamId>,
    /// Rows and columns of each.
    sizes: Vec<(usize, usize)>,
    /// Values of a sample's output.
    outputs: usize,
    parameters: usize,
}

/// Values that a category among `rows` becomes: half as many as there are, rounded up, and at most 50.
pub fn width(rows: usize) -> usize {
    rows.div_ceil(2).clamp(1, 50)
}

impl Lookup {
    /// Tables of `rows` each, called `NAME.0.weight`, `NAME.1.weight` and so on, which begin as
    /// `torch.nn.Embedding` does.
    pub fn new(declared: &mut Declared, name: &str, numbers: usize, rows: &[usize]) -> Self {
        let table = |(i, rows): (usize, &usize)| {
            declared.param(format!("{name}.{i}.weight"), [*rows, width(*rows)], Init::Normal(1.0))
        };
        Self {
            name: name.into(),
            numbers,
            tables: rows.iter().enumerate().map(table).collect(),
            sizes: rows.iter().map(|rows| (*rows, width(*rows))).collect(),
            outputs: numbers + rows.iter().map(|rows| width(*rows)).sum::<usize>(),
            parameters: rows.iter().map(|rows| rows * width(*rows)).sum(),
        }
    }

    fn kernel<'a>(&self, of: impl Fn(ParamId) -> &'a Tensor) -> Kernel<'a> {
        Kernel { numbers: self.numbers, tables: self.tables.iter().map(|id| of(*id)).collect() }
    }
}

impl Layer for Lookup {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        vec![self.outputs]
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, Saved)> {
        Ok((self.kernel(|id| pass.weight(id)).forward(x)?, Saved(vec![x.clone()])))
    }

    fn backward(&self, saved: Saved, dy: Tensor, pass: &Pass, _: bool) -> Result<Option<Tensor>> {
        let grads = self.kernel(|id| pass.grad(id));
        self.kernel(|id| pass.weight(id)).backward(&saved.0[0], &dy, &grads)?;
        Ok(None)
    }

    fn cost(&self, at: At) -> Cost {
        let (forward, backward) = match at.on {
            On::Cpu { .. } => (0, 0),
            On::Cuda { .. } => card_workspace(at.dtype, at.batch, self.numbers, &self.sizes),
        };
        Cost { output: at.bytes(self.outputs), keeps_input: true, forward, backward, ..Cost::default() }
    }

    fn parameters(&self) -> usize {
        self.parameters
    }
}

#[cfg(test)]
mod tests {
    use super::super::Mode;
    use super::super::check::{Subject, autograd_agrees, cost_is_exact, device, differences_agree, flat};
    use super::*;
    use candle_core::DType;
    use proptest::prelude::*;

    /// Numbers, then a place of each table or the one behind it.
    fn samples(batch: usize, numbers: usize, rows: &[usize]) -> Tensor {
        let value = |b: usize, i: usize| match i.checked_sub(numbers) {
            None => (b * 7 + i * 3) as f32 / 5.0 - 1.0,
            Some(table) => ((b * b * 5 + b + table) % (rows[table] + 1)) as f32,
        };
        let inputs = numbers + rows.len();
        let values: Vec<f32> = (0..batch * inputs).map(|i| value(i / inputs, i % inputs)).collect();
        Tensor::from_vec(values, (batch, inputs), &device()).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_are_right(batch in 1usize..9, numbers in 0usize..5, rows in prop::collection::vec(1usize..140, 1..4)) {
            let build = |d: &mut Declared| Box::new(Lookup::new(d, "embeddings", numbers, &rows)) as Box<dyn Layer>;
            let x = samples(batch, numbers, &rows);
            differences_agree(&build, &x);
            autograd_agrees(&build, &x, &|x, p| Kernel { numbers, tables: p.iter().collect() }.reference(x));
            cost_is_exact(&build, &|batch| samples(batch, numbers, &rows));
        }
    }

    #[test]
    fn what_is_unknown_is_zeros_and_places_that_are_none_are_named() {
        let mut declared = Declared::default();
        let layer = Lookup::new(&mut declared, "embeddings", 1, &[4]);
        let subject = Subject::new(declared, DType::F32, 1);
        let pass = subject.pass(Mode::Train);
        let (y, saved) = layer.forward(&Tensor::new(&[[0.5f32, 4.0]], &device()).unwrap(), &pass).unwrap();
        assert_eq!(flat(&y), [0.5, 0.0, 0.0]);
        layer.backward(saved, y.ones_like().unwrap(), &pass, false).unwrap();
        assert!(flat(&subject.store.grads).iter().all(|g| *g == 0.0), "no row learns from it");
        // A card does not look at every place.
        let places: &[f32] = if device().is_cpu() { &[5.0, -1.0, 0.5, f32::NAN] } else { &[] };
        for place in places {
            let x = Tensor::new(&[[0.5f32, *place]], &device()).unwrap();
            let error = layer.forward(&x, &pass).err().unwrap().to_string();
            assert!(error.contains(&format!("place {place} is not in table 0, which has 4 rows")), "{error}");
        }
    }

    #[test]
    fn widths_follow_the_rule() {
        assert_eq!([1, 2, 3, 16, 99, 100, 5000].map(width), [1, 1, 2, 8, 50, 50, 50]);
    }
}
