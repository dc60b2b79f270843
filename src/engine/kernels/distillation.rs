//! The soft loss of knowledge distillation: `T^2 KL(softmax(teacher / T) || softmax(student / T))`, summed over rows.

pub mod top;

use candle_core::{DType, Result, Tensor};
use candle_nn::ops::log_softmax;

use self::top::TopLogits;
use super::parallel::{ParallelChunks, ParallelItems};
use super::{Elem, Real, cpu, host, reference};
use crate::base::features::IGNORE_INDEX;
use crate::{vectorised, with_elem};

/// What is known of a teacher's logits.
#[derive(Clone, Copy)]
pub enum TeacherLogits<'a> {
    /// All of them, with as many values as the student's.
    All(&'a Tensor),
    /// The largest of each row.
    Top(&'a TopLogits),
}

/// What rows of logits are compared with.
#[derive(Clone, Copy)]
pub struct SoftTargets<'a> {
    /// The logits of the teacher, of the shape and dtype of the student's: (..., classes).
    pub teacher: &'a Tensor,
    /// Those of the cross-entropy: rows to ignore, and weights of rows.
    pub targets: &'a Tensor,
    pub temperature: f64,
}

/// Bytes of temporaries in candle's operations.
pub fn workspace(dtype: DType, rows: usize, classes: usize, runs_cpu_kernel: bool) -> u64 {
    if runs_cpu_kernel {
        return 0;
    }
    // Both log-probabilities, a probability, a difference and a product; of 16-bit types, both logits in f32 too. A
    // softmax has the maximum and the sum of each row, and there are the weights and the divergences.
    let (dtype, tensors) = match dtype {
        DType::F32 | DType::F64 => (dtype, 5),
        _ => (DType::F32, 7),
    };
    cpu::size_in_bytes(dtype, (tensors * classes + 4) * rows)
}

impl SoftTargets<'_> {
    /// Reference implementation: the summed loss. `weights` has one value per row.
    pub fn reference(&self, logits: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let [log_p, log_q] = self.log_probabilities(logits)?;
        let divergence = (log_q.exp()? * (log_q - log_p)?)?.sum(1)?;
        (divergence * weights)?.sum_all()? * self.temperature.powi(2)
    }

    /// Log-probabilities of the student and of the teacher at the temperature, (rows, classes).
    fn log_probabilities(&self, logits: &Tensor) -> Result<[Tensor; 2]> {
        let classes = logits.dims().last().copied().unwrap_or(1);
        let of = |logits: &Tensor| log_softmax(&(logits.reshape(((), classes))? / self.temperature)?, 1);
        Ok([of(logits)?, of(self.teacher)?])
    }

    /// Overwrites `logits` with the gradient of `scale` times the summed loss; returns the summed loss, one f64 on the
    /// device.
    pub fn forward_backward(&self, logits: &Tensor, scale: f64) -> Result<Tensor> {
        if logits.shape() != self.teacher.shape() || logits.dtype() != self.teacher.dtype() {
            candle_core::bail!(
                "distillation: logits of shape {:?}, and of shape {:?} of the teacher",
                logits.dims(),
                self.teacher.dims()
            )
        }
        if reference::has_cpu_kernel(logits) {
            let loss = with_elem!(logits.dtype(), T => self.run_cpu::<T>(logits, scale))?;
            return Tensor::new(loss, logits.device());
        }
        let (student, teacher) = match logits.dtype() {
            DType::F64 => (logits.clone(), self.teacher.clone()),
            _ => (logits.to_dtype(DType::F32)?, self.teacher.to_dtype(DType::F32)?),
        };
        let wide = SoftTargets { teacher: &teacher, ..*self };
        let weights = row_weights(self.targets, student.elem_count() / student.dim(student.rank() - 1)?)?;
        let weights = Tensor::new(weights, logits.device())?.to_dtype(student.dtype())?;
        let loss = wide.reference(&student, &weights)?.to_dtype(DType::F64)?;
        let [log_p, log_q] = wide.log_probabilities(&student)?;
        let gradient = (log_p.exp()? - log_q.exp()?)?.broadcast_mul(&weights.unsqueeze(1)?)?;
        let gradient = (gradient * (scale * self.temperature))?.to_dtype(logits.dtype())?;
        logits.slice_set(&gradient.reshape(logits.shape())?, 0, 0)?;
        Ok(loss)
    }

    fn run_cpu<T: Elem>(&self, logits: &Tensor, scale: f64) -> Result<f64> {
        let classes = logits.dims().last().copied().unwrap_or(1);
        let (teacher, targets) = (cpu::view::<T>(self.teacher)?, cpu::view::<u32>(self.targets)?);
        let per_row = targets.len() / (teacher.len() / classes.max(1)).max(1);
        let rows = cpu::rows_per_chunk(classes);
        let parts: Vec<f64> = cpu::with_slice_mut::<T, _>(logits, |logits| {
            let chunks = logits
                .par_chunks_mut(rows * classes)
                .zip(teacher.par_chunks(rows * classes))
                .zip(targets.par_chunks(rows * per_row));
            let sum = |((logits, teacher), targets): ((&mut [T], &[T]), &[u32])| {
                vectorised!(T, || {
                    let rows = logits.chunks_exact_mut(classes).zip(teacher.chunks_exact(classes));
                    let rows = rows.zip(targets.chunks_exact(per_row));
                    rows.map(|((row, teacher), target)| self.row(row, teacher, row_weight(target), scale))
                        .sum::<f64>()
                })
            };
            chunks.map_collect(sum)
        })?;
        Ok(parts.into_iter().sum())
    }

    /// Turns a row of logits into its gradient and returns its loss.
    #[inline(always)]
    fn row<T: Elem>(&self, row: &mut [T], teacher: &[T], weight: f32, scale: f64) -> f64 {
        if weight == 0.0 {
            row.fill(T::default());
            return 0.0;
        }
        let per_degree = T::Acc::of_f64(1.0 / self.temperature);
        // What to subtract from a logit over the temperature for its log-probability.
        let log_total = |logits: &[T]| {
            let most = logits.iter().fold(T::Acc::NEG_INFINITY, |most, v| most.larger(v.to_acc()));
            let total: T::Acc = logits.iter().map(|v| ((v.to_acc() - most) * per_degree).exp()).sum();
            most * per_degree + total.ln()
        };
        let (of_student, of_teacher) = (log_total(row), log_total(teacher));
        let factor = T::Acc::of_f64(scale * weight as f64 * self.temperature);
        let mut divergence = T::Acc::ZERO;
        for (value, teacher) in row.iter_mut().zip(teacher) {
            let log_p = value.to_acc() * per_degree - of_student;
            let log_q = teacher.to_acc() * per_degree - of_teacher;
            let q = log_q.exp();
            divergence += q * (log_q - log_p);
            *value = T::from_acc((log_p.exp() - q) * factor);
        }
        weight as f64 * self.temperature.powi(2) * divergence.as_f64()
    }
}

/// The weight of each row. Copies the targets to the host: passes that distill are not captured as CUDA graphs.
pub fn row_weights(targets: &Tensor, rows: usize) -> Result<Vec<f32>> {
    let targets = host::read::<u32>(targets)?;
    let per_row = targets.len() / rows.max(1);
    Ok(targets.chunks(per_row.max(1)).map(row_weight).collect())
}

/// 0 for a row that is ignored.
fn row_weight(target: &[u32]) -> f32 {
    match *target {
        [IGNORE_INDEX, ..] => 0.0,
        [_, bits] => f32::from_bits(bits),
        _ => 1.0,
    }
}
