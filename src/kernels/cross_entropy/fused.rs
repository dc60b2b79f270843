//! Learning by a body for Hopper: the product of the scores leaves their exponentials and the sums of these, and no pass over
//! them follows. What a row is divided by meets the input before the product that makes the weight's gradient, and the result
//! of the one that makes the input's.
//!
//! A row's exponentials are taken from the score of its target on, so that the loss is the logarithm of their sum. None is
//! more than 2^100: a loss beyond 69 is said to be less than it is, and its gradient pulls at all classes that are so far
//! above the target alike.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use super::{Head, fused_tiles};
use crate::kernels::cuda::product::{Mat, Onto, Then, multiply};
use crate::kernels::cuda::{Stream, checked, fresh, pointer, stream};
use crate::kernels::linear::{Grads, hopper};

/// What chunks of rows are learnt with.
pub struct Fused<'a> {
    weight: &'a Tensor,
    /// (tiles, chunk) sums of exponentials.
    sums: Tensor,
    /// (chunk): the targets' scores, then what rows are multiplied with.
    factors: Tensor,
    /// (chunk, width): the input multiplied with that.
    scaled: Tensor,
}

/// Rows to learn: input, scores and the input's gradient; targets and where the tally of each row is left.
pub struct Chunk<'a> {
    pub x: Mat<'a>,
    pub scores: Mat<'a>,
    pub dx: Mat<'a>,
    pub targets: *const u32,
    pub tally: (*mut f64, *mut f64, *mut u32),
}

impl<'a> Fused<'a> {
    /// None where the head is another body's.
    pub fn new(head: &Head<'a>, device: &CudaDevice, x: &Tensor, chunk: usize) -> Result<Option<Self>> {
        if !head.plain() || !hopper::takes_scores(x, head.weight, chunk)? {
            return Ok(None);
        }
        let (classes, width) = head.weight.dims2()?;
        Ok(Some(Self {
            weight: head.weight,
            sums: fresh(device, DType::F32, (fused_tiles(classes), chunk))?,
            factors: fresh(device, DType::F32, chunk)?,
            scaled: fresh(device, x.dtype(), (chunk, width))?,
        }))
    }

    pub fn learn(&self, device: &CudaDevice, chunk: Chunk, scale: f64, grads: &Grads) -> Result<()> {
        let (classes, width) = self.weight.dims2()?;
        let Chunk { x, scores, dx, targets, tally: (loss, weight, hits) } = chunk;
        let (rows, filled) = (x.rows, scores.cols);
        let (n, stream) = (rows as c_int, stream(device));
        let factors = pointer(&self.factors)?.cast();
        // SAFETY: `x` and what is beside it have so many rows, `weight` as many as classes.
        checked("cross_entropy_bases", unsafe {
            let w = pointer(self.weight)?;
            cross_entropy_bases(x.data()?, w, targets, factors, n, width as c_int, classes as c_int, stream)
        })?;
        hopper::scores(device, x, self.weight, &self.factors, scores, &self.sums)?;
        let settled = Settled {
            sums: pointer(&self.sums)?.cast(),
            scores: scores.data()?,
            targets,
            x: x.data()?,
            scaled: pointer(&self.scaled)?,
            factors,
            loss,
            weight,
            hits,
            scale,
            rows: n,
            stride: scores.stride as c_int,
            classes: classes as c_int,
            tiles: fused_tiles(classes) as c_int,
            width: width as c_int,
        };
        // SAFETY: as above, and there is a sum for each tile of a row.
        checked("cross_entropy_settle", unsafe { cross_entropy_settle(&settled, stream) })?;
        let scaled = Mat::new(&self.scaled, rows, width);
        let into = Mat::new(grads.weight, filled, width);
        multiply(&into, scores.t(), scaled, Onto::Itself, Then::Nothing)?;
        multiply(&dx, scores, Mat::new(self.weight, filled, width), Onto::Nothing, Then::Nothing)?;
        // SAFETY: as above.
        checked("cross_entropy_scale", unsafe {
            cross_entropy_scale(dx.data()?, factors, n, width as c_int, stream)
        })
    }
}

/// `Settled` in settle.cu.
#[repr(C)]
struct Settled {
    sums: *const f32,
    scores: *mut c_void,
    targets: *const u32,
    x: *const c_void,
    scaled: *mut c_void,
    factors: *mut f32,
    loss: *mut f64,
    weight: *mut f64,
    hits: *mut u32,
    scale: f64,
    rows: c_int,
    stride: c_int,
    classes: c_int,
    tiles: c_int,
    width: c_int,
}

unsafe extern "C" {
    fn cross_entropy_bases(
        x: *const c_void,
        w: *const c_void,
        targets: *const u32,
        base: *mut f32,
        rows: c_int,
        width: c_int,
        classes: c_int,
        stream: Stream,
    ) -> c_int;
    fn cross_entropy_settle(settled: *const Settled, stream: Stream) -> c_int;
    fn cross_entropy_scale(
        x: *mut c_void,
        factors: *const f32,
        rows: c_int,
        width: c_int,
        stream: Stream,
    ) -> c_int;
}

#[cfg(test)]
mod tests {
    use super::super::IGNORE;
    use super::*;
    use crate::kernels::cuda::of;
    use crate::kernels::tally::Tally;
    use crate::kernels::tally::card::Rows;
    use crate::layers::check::{device, distance, flat, random};

    const ROWS: usize = 4000;
    /// Nine tiles, of which the last is a third of one, and no multiple of anything.
    const CLASSES: usize = 2129;
    const WIDTH: usize = 768;
    /// Of few pieces (hopper.cu).
    const NARROW: usize = 448;
    const SCALE: f64 = 0.5;

    fn on_card(shape: &[usize], seed: u64, scale: f64) -> Tensor {
        random(shape, seed).affine(scale, 0.0).unwrap().to_dtype(DType::BF16).unwrap()
    }

    fn head(weight: &Tensor) -> Head<'_> {
        Head { weight, bias: None, smoothing: 0.0, class_weights: None }
    }

    fn targets(of: impl Fn(usize) -> u32) -> Tensor {
        Tensor::from_vec((0..ROWS).map(of).collect::<Vec<u32>>(), ROWS, &device()).unwrap()
    }

    /// A weight with others' rows behind it, none where there is no card that has the body.
    fn weight(width: usize) -> Option<Tensor> {
        let weight = on_card(&[CLASSES + 40, width], 2, 0.05).narrow(0, 0, CLASSES).unwrap();
        let x = on_card(&[ROWS, width], 1, 1.0);
        let there = of(&x).is_some_and(|card| Fused::new(&head(&weight), card, &x, ROWS).unwrap().is_some());
        if !there {
            println!("skipped: no Hopper card to compute on (TRAINER_TEST_DEVICE=cuda)");
        }
        there.then_some(weight)
    }

    /// The tally and the gradients of input and weight.
    fn learn(weight: &Tensor, x: &Tensor, targets: &Tensor) -> (Tally, Tensor, Tensor) {
        let grad = Tensor::zeros((CLASSES + 40, x.dims()[1]), DType::F32, &device()).unwrap();
        let grad = grad.narrow(0, 0, CLASSES).unwrap();
        let grads = Grads { weight: &grad, bias: None };
        let (counted, dx) = head(weight).learn(x, targets, SCALE, &grads).unwrap();
        (counted.read().unwrap(), dx, grad)
    }

    #[test]
    fn gradients_are_those_of_the_reference() {
        for width in [WIDTH, NARROW] {
            follows_the_reference(width);
        }
    }

    fn follows_the_reference(width: usize) {
        let Some(weight) = weight(width) else { return };
        let x = on_card(&[ROWS, width], 1, 8.0);
        let class = |row: usize| (row * 5 % CLASSES) as u32;
        let given = targets(|row| if row % 3 == 1 { IGNORE } else { class(row) });
        let (tally, dx, grad) = learn(&weight, &x, &given);

        let learnt: Vec<u32> = (0..ROWS as u32).filter(|row| row % 3 != 1).collect();
        let classes: Vec<u32> = learnt.iter().map(|row| class(*row as usize)).collect();
        let rows = Tensor::from_vec(learnt.clone(), learnt.len(), &device()).unwrap();
        let classes = Tensor::from_vec(classes, learnt.len(), &device()).unwrap();
        let leaf = |t: &Tensor| candle_core::Var::from_tensor(&t.to_dtype(DType::F64).unwrap()).unwrap();
        let (x, w) = (leaf(&x.index_select(&rows, 0).unwrap()), leaf(&weight));
        let wanted = head(&w).reference(&x, &classes).unwrap();
        let loss = wanted.to_scalar::<f64>().unwrap();
        assert!((tally.loss - loss).abs() < 1e-3 * loss, "{} is not {loss}", tally.loss);
        assert_eq!((tally.count, tally.weight), (learnt.len() as u64, learnt.len() as f64));
        let grads = (wanted * SCALE).unwrap().backward().unwrap();
        for (what, ours, var) in [("x", &dx.index_select(&rows, 0).unwrap(), &x), ("w", &grad, &w)] {
            let far = distance(&flat(ours), &flat(grads.get(var).unwrap()));
            assert!(far < 8e-3, "{what}: {far}");
        }
        let ignored: Vec<u32> = (0..ROWS as u32).filter(|row| row % 3 == 1).collect();
        let ignored = Tensor::from_vec(ignored.clone(), ignored.len(), &device()).unwrap();
        assert!(flat(&dx.index_select(&ignored, 0).unwrap()).iter().all(|d| *d == 0.0));
    }

    /// A weight without rows behind it is another body's, which agrees.
    #[test]
    fn both_bodies_agree() {
        let Some(weight) = weight(WIDTH) else { return };
        let x = on_card(&[ROWS, WIDTH], 1, 8.0);
        let given = targets(|row| (row * 7 % CLASSES) as u32);
        let alone = weight.affine(1.0, 0.0).unwrap();
        assert!(!hopper::takes_scores(&x, &alone, ROWS).unwrap());
        let (one, other) = (learn(&weight, &x, &given), learn(&alone, &x, &given));
        assert!((one.0.loss - other.0.loss).abs() < 1e-3 * other.0.loss);
        for (a, b) in [(one.1, other.1), (one.2, other.2)] {
            let far = distance(&flat(&a), &flat(&b));
            assert!(far < 3e-2, "{far}");
        }
    }

    /// The last of several chunks may be shorter. Without the columns behind the classes, products are cut in two, the first
    /// of which is rounded.
    #[test]
    fn parts_make_the_whole() {
        for (columns, near) in [(CLASSES.next_multiple_of(8), 4e-3), (CLASSES, 2e-2)] {
            in_parts(columns, near);
        }
    }

    fn in_parts(columns: usize, near: f64) {
        let Some(weight) = weight(WIDTH) else { return };
        let x = on_card(&[ROWS, WIDTH], 1, 8.0);
        let given = targets(|row| (row * 7 % CLASSES) as u32);
        let (tally, dx, grad) = learn(&weight, &x, &given);

        let card = of(&x).unwrap();
        let fused = Fused::new(&head(&weight), card, &x, ROWS).unwrap().unwrap();
        let counts = Rows::new(card, ROWS).unwrap();
        let stride = super::super::card_stride(CLASSES);
        let scores = fresh(card, DType::BF16, ROWS * stride).unwrap();
        let sums = Tensor::zeros((CLASSES + 40, WIDTH), DType::F32, &device()).unwrap();
        let (into, sums) = (dx.zeros_like().unwrap(), sums.narrow(0, 0, CLASSES).unwrap());
        for (first, rows) in [(0, 3700), (3700, 300)] {
            let part = |of| Mat { from: first * WIDTH, rows, ..Mat::new(of, ROWS, WIDTH) };
            let chunk = Chunk {
                x: part(&x),
                scores: Mat { rows, cols: columns, ..Mat::new(&scores, ROWS, stride) },
                dx: part(&into),
                targets: pointer(&given).unwrap().cast::<u32>().wrapping_add(first),
                tally: counts.from(first).unwrap(),
            };
            fused.learn(card, chunk, SCALE, &Grads { weight: &sums, bias: None }).unwrap();
        }
        let counted = counts.add(card).unwrap().read().unwrap();
        assert_eq!((counted.loss, counted.count), (tally.loss, tally.count));
        for (a, b) in [(into, dx), (sums, grad)] {
            let far = distance(&flat(&a), &flat(&b));
            assert!(far < near, "{far} with {columns} columns");
        }
    }

    #[test]
    fn a_target_that_is_certain_costs_nothing() {
        let Some(weight) = weight(WIDTH) else { return };
        let given = targets(|row| (row * 7 % CLASSES) as u32);
        let x = weight.index_select(&given, 0).unwrap().affine(50.0, 0.0).unwrap();
        let (tally, dx, _) = learn(&weight, &x, &given);
        assert!((0.0..1e-6).contains(&tally.mean_loss()), "{}", tally.mean_loss());
        assert!(flat(&dx).iter().all(|d| d.abs() < 1e-6));
    }

    #[test]
    fn targets_far_below_others_and_none_at_all() {
        let Some(weight) = weight(WIDTH) else { return };
        let given = targets(|row| (row * 5 % CLASSES) as u32);
        let (tally, dx, grad) = learn(&weight, &on_card(&[ROWS, WIDTH], 1, 300.0), &given);
        let mean = tally.mean_loss();
        assert!((69.0..80.0).contains(&mean), "{mean}");
        assert!([dx, grad].iter().all(|g| flat(g).iter().all(|d| d.is_finite())));

        let x = on_card(&[ROWS, WIDTH], 1, 1.0);
        let wrong = targets(|row| if row == 7 { CLASSES as u32 } else { 0 });
        let (tally, dx, _) = learn(&weight, &x, &wrong);
        assert!(tally.loss.is_nan(), "a class that is not there");
        assert!(flat(&dx).iter().all(|d| d.is_finite()));

        let nan = Tensor::full(f32::NAN, (1, WIDTH), &device()).unwrap().to_dtype(DType::BF16).unwrap();
        let x = Tensor::cat(&[&nan, &x.narrow(0, 1, ROWS - 1).unwrap()], 0).unwrap();
        let (tally, dx, grad) = learn(&weight, &x, &given);
        assert!(tally.loss.is_nan() && [dx, grad].iter().all(|g| flat(g).iter().any(|d| d.is_nan())));
    }
}
