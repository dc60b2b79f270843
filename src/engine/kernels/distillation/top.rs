//! The soft loss against a teacher of which only the largest logits of each row are known, and the sum of the others:
//! `T^2 KL` over those classes and one more for all the rest, summed over rows.

use std::ops::Range;

use candle_core::{DType, Result, Tensor};
use candle_nn::ops::log_softmax;

use super::{row_weight, row_weights};
use crate::kernels::parallel::{ParallelChunks, ParallelItems};
use crate::kernels::{Elem, Real, cpu, reference};
use crate::{vectorised, with_elem};

/// The largest logits of rows, less the largest of their row.
pub struct TopLogits {
    /// (rows, k), u32: the classes of these logits, ascending in each row.
    pub classes: Tensor,
    /// (rows, k), f32.
    pub logits: Tensor,
    /// (rows), f32: log-sum-exp of the other logits over the temperature. Unused if k is the number of classes.
    pub rest: Tensor,
}

/// What rows of logits are compared with.
#[derive(Clone, Copy)]
pub struct TopSoftTargets<'a> {
    pub teacher: &'a TopLogits,
    /// Those of the cross-entropy: rows to ignore, and weights of rows.
    pub targets: &'a Tensor,
    pub temperature: f64,
}

/// Bytes of temporaries in candle's operations.
pub fn workspace(dtype: DType, rows: usize, classes: usize, k: usize, runs_cpu_kernel: bool) -> u64 {
    if runs_cpu_kernel {
        return 0;
    }
    // Of 16-bit types the logits in f32, and the logits over the temperature.
    let (dtype, logits) = match dtype {
        DType::F32 | DType::F64 => (dtype, classes),
        _ => (DType::F32, 2 * classes),
    };
    let per_row = if k == classes {
        // The top logits of both, the log-probabilities of the student, and the softmax of the teacher in four steps.
        logits + 7 * k
    } else {
        // Besides, what is far below every logit, the other logits and their probabilities; these in two steps.
        logits + 3 * k + (2 * classes + 5 * (k + 1)).max(3 * classes)
    };
    // Maxima, sums and weights of rows.
    cpu::size_in_bytes(dtype, (per_row + 6) * rows)
}

/// Log-probabilities of the top classes, and of all others as one if there are any.
struct Buckets {
    /// (rows, k or k + 1)
    student: Tensor,
    teacher: Tensor,
    /// (rows, classes): probabilities among the others, 0 for the top classes. `None` if there are no others.
    among_others: Option<Tensor>,
}

impl TopSoftTargets<'_> {
    /// Reference implementation: the summed loss. `weights` has one value per row.
    pub fn reference(&self, logits: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let Buckets { student, teacher, .. } = self.buckets(logits)?;
        self.loss(&student, &teacher, weights)
    }

    fn loss(&self, student: &Tensor, teacher: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let divergence = (teacher.exp()? * (teacher - student)?)?.sum(1)?;
        (divergence * weights)?.sum_all()? * self.temperature.powi(2)
    }

    fn buckets(&self, logits: &Tensor) -> Result<Buckets> {
        let classes = logits.dims().last().copied().unwrap_or(1);
        let (dtype, top) = (logits.dtype(), &self.teacher.classes);
        let logits = (logits.reshape(((), classes))? / self.temperature)?;
        let student = logits.gather(top, 1)?;
        let teacher = (self.teacher.logits.to_dtype(dtype)? / self.temperature)?;
        if top.dim(1)? == classes {
            let (student, teacher) = (log_softmax(&student, 1)?, log_softmax(&teacher, 1)?);
            return Ok(Buckets { student, teacher, among_others: None });
        }
        // Far below every logit: its exponential is 0.
        let far = Tensor::full(-1e30, top.shape(), logits.device())?.to_dtype(dtype)?;
        let others = logits.scatter(top, &far, 1)?;
        let rest = others.log_sum_exp(1)?.unsqueeze(1)?;
        let among_others = Some(others.broadcast_sub(&rest)?.exp()?);
        let rest_of_teacher = self.teacher.rest.to_dtype(dtype)?.unsqueeze(1)?;
        Ok(Buckets {
            student: log_softmax(&Tensor::cat(&[&student, &rest], 1)?, 1)?,
            teacher: log_softmax(&Tensor::cat(&[&teacher, &rest_of_teacher], 1)?, 1)?,
            among_others,
        })
    }

    /// Overwrites `logits` with the gradient of `scale` times the summed loss; returns the summed loss, one f64 on the
    /// device.
    pub fn forward_backward(&self, logits: &Tensor, scale: f64) -> Result<Tensor> {
        let rows = self.teacher.classes.dim(0)?;
        if logits.elem_count() != rows * logits.dims().last().copied().unwrap_or(1) {
            candle_core::bail!(
                "distillation: logits of shape {:?}, and {rows} rows of the teacher",
                logits.dims()
            )
        }
        if reference::has_cpu_kernel(logits) {
            let loss = with_elem!(logits.dtype(), T => self.run_cpu::<T>(logits, scale))?;
            return Tensor::new(loss, logits.device());
        }
        let wide = match logits.dtype() {
            DType::F64 => logits.clone(),
            _ => logits.to_dtype(DType::F32)?,
        };
        let weights =
            Tensor::new(row_weights(self.targets, rows)?, logits.device())?.to_dtype(wide.dtype())?;
        let Buckets { student, teacher, among_others } = self.buckets(&wide)?;
        let loss = self.loss(&student, &teacher, &weights)?.to_dtype(DType::F64)?;
        let factor = (weights.unsqueeze(1)? * (scale * self.temperature))?;
        let change = (student.exp()? - teacher.exp()?)?.broadcast_mul(&factor)?;
        let (top, k) = (&self.teacher.classes, self.teacher.classes.dim(1)?);
        let gradient = match among_others {
            Some(others) => others.broadcast_mul(&change.narrow(1, k, 1)?)?,
            None => wide.reshape(((), k))?.zeros_like()?,
        };
        let gradient = gradient.scatter_add(top, &change.narrow(1, 0, k)?.contiguous()?, 1)?;
        logits.slice_set(&gradient.to_dtype(logits.dtype())?.reshape(logits.shape())?, 0, 0)?;
        Ok(loss)
    }

    fn run_cpu<T: Elem>(&self, logits: &Tensor, scale: f64) -> Result<f64> {
        let classes = logits.dims().last().copied().unwrap_or(1);
        let TopLogits { classes: top, logits: values, rest } = self.teacher;
        let (top, values) = (cpu::view::<u32>(top)?, cpu::view::<f32>(values)?);
        let (rest, targets) = (cpu::view::<f32>(rest)?, cpu::view::<u32>(self.targets)?);
        let (k, per_row) = (top.len() / rest.len().max(1), targets.len() / rest.len().max(1));
        let rows = cpu::rows_per_chunk(classes);
        let parts: Vec<f64> = cpu::with_slice_mut::<T, _>(logits, |logits| {
            let chunks = logits.par_chunks_mut(rows * classes).enumerate();
            let sum = |(chunk, logits): (usize, &mut [T])| {
                vectorised!(T, || {
                    let first = chunk * rows;
                    let rows = logits.chunks_exact_mut(classes).enumerate();
                    rows.map(|(i, row)| {
                        let row_of = |len: usize| (first + i) * len..(first + i + 1) * len;
                        let teacher = TopRow {
                            classes: &top[row_of(k)],
                            logits: &values[row_of(k)],
                            rest: rest[first + i],
                        };
                        self.row(row, teacher, row_weight(&targets[row_of(per_row)]), scale)
                    })
                    .sum::<f64>()
                })
            };
            chunks.map_collect(sum)
        })?;
        Ok(parts.into_iter().sum())
    }

    /// Turns a row of logits into its gradient and returns its loss.
    #[inline(always)]
    fn row<T: Elem>(&self, row: &mut [T], teacher: TopRow, weight: f32, scale: f64) -> f64 {
        if weight == 0.0 {
            row.fill(T::default());
            return 0.0;
        }
        let acc = |value: f32| T::Acc::of_f64(value as f64);
        let per_degree = T::Acc::of_f64(1.0 / self.temperature);
        let has_others = teacher.classes.len() < row.len();
        // The largest logit of the teacher is 0.
        let total: T::Acc = teacher.logits.iter().map(|v| (acc(*v) * per_degree).exp()).sum();
        let total = if has_others { total + acc(teacher.rest).exp() } else { total };
        let log_total_of_teacher = total.ln();
        // Of the student, the log-sum-exp of the others, and of all.
        let (mut most, mut rest) = (T::Acc::NEG_INFINITY, T::Acc::NEG_INFINITY);
        if has_others {
            for others in gaps(teacher.classes, row.len()) {
                most = row[others].iter().fold(most, |most, v| most.larger(v.to_acc()));
            }
            let mut total = T::Acc::ZERO;
            for others in gaps(teacher.classes, row.len()) {
                total += row[others].iter().map(|v| ((v.to_acc() - most) * per_degree).exp()).sum::<T::Acc>();
            }
            rest = most * per_degree + total.ln();
        }
        let top = |class: &u32| row[*class as usize].to_acc() * per_degree;
        let highest = teacher.classes.iter().map(top).fold(rest, Real::larger);
        let total: T::Acc = teacher.classes.iter().map(|class| (top(class) - highest).exp()).sum();
        let total = if has_others { total + (rest - highest).exp() } else { total };
        let log_total = highest + total.ln();

        let factor = T::Acc::of_f64(scale * weight as f64 * self.temperature);
        let mut divergence = T::Acc::ZERO;
        let mut compare = |log_p: T::Acc, log_q: T::Acc| {
            let q = log_q.exp();
            divergence += q * (log_q - log_p);
            (log_p.exp() - q) * factor
        };
        if has_others {
            let change = compare(rest - log_total, acc(teacher.rest) - log_total_of_teacher);
            for others in gaps(teacher.classes, row.len()) {
                for value in &mut row[others] {
                    *value = T::from_acc((value.to_acc() * per_degree - rest).exp() * change);
                }
            }
        }
        for (class, logit) in teacher.classes.iter().zip(teacher.logits) {
            let value = &mut row[*class as usize];
            let log_p = value.to_acc() * per_degree - log_total;
            *value = T::from_acc(compare(log_p, acc(*logit) * per_degree - log_total_of_teacher));
        }
        weight as f64 * self.temperature.powi(2) * divergence.as_f64()
    }
}

/// A row of [`TopLogits`].
struct TopRow<'a> {
    classes: &'a [u32],
    logits: &'a [f32],
    rest: f32,
}

/// The ranges of classes between ascending ones, below `len`; some are empty.
fn gaps(classes: &[u32], len: usize) -> impl Iterator<Item = Range<usize>> {
    let starts = std::iter::once(0).chain(classes.iter().map(|class| *class as usize + 1));
    let ends = classes.iter().map(|class| *class as usize).chain([len]);
    starts.zip(ends).map(|(start, end)| start..end)
}
