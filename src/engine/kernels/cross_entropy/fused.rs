//! Training on Hopper: the epilogue of the logits GEMM writes exponentials and their row sums, so no separate softmax
//! pass reads the logits. The normalization of each row is applied elsewhere: to the input before the weight-gradient
//! GEMM, and to the result of the input-gradient GEMM.
//!
//! The exponentials of a row are relative to the logit of its target, so the loss is the logarithm of their sum. They
//! are clamped to 2^100. A loss above 69 is therefore reported too low, and its gradient treats all classes that far
//! above the target alike.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use super::{LinearCrossEntropy, fused_column_tiles};
use crate::kernels::cuda::cublaslt::{Addend, Epilogue, GpuMat, matmul};
use crate::kernels::cuda::{RawStream, check_status, pointer, stream, uninit};
use crate::kernels::linear::{WeightBiasGrads, hopper};

/// Buffers for training chunks of rows.
pub struct HopperCrossEntropy<'a> {
    weight: &'a Tensor,
    /// (tiles, chunk): sums of exponentials.
    exp_sums: Tensor,
    /// (chunk): the logits of the targets, later the factor of each row.
    factors: Tensor,
    /// (chunk, width): the input times the factor of its row.
    scaled_x: Tensor,
}

/// A chunk of rows: input, logits, gradient of the input, targets, and where to write the metrics of each row.
pub struct CrossEntropyChunk<'a> {
    pub x: GpuMat<'a>,
    pub logits: GpuMat<'a>,
    /// `None` if the input needs no gradient.
    pub dx: Option<GpuMat<'a>>,
    pub targets: *const u32,
    pub row_ptrs: (*mut f64, *mut f64, *mut u32),
}

impl<'a> HopperCrossEntropy<'a> {
    /// `None` if the Hopper kernel does not support the head.
    pub fn new(
        head: &LinearCrossEntropy<'a>,
        device: &CudaDevice,
        x: &Tensor,
        chunk: usize,
    ) -> Result<Option<Self>> {
        if !head.is_plain_softmax() || !hopper::supports_logits(x, head.weight, chunk)? {
            return Ok(None);
        }
        let (classes, width) = head.weight.dims2()?;
        Ok(Some(Self {
            weight: head.weight,
            exp_sums: uninit(device, DType::F32, (fused_column_tiles(classes), chunk))?,
            factors: uninit(device, DType::F32, chunk)?,
            scaled_x: uninit(device, x.dtype(), (chunk, width))?,
        }))
    }

    pub fn forward_backward(
        &self,
        device: &CudaDevice,
        chunk: CrossEntropyChunk,
        scale: f64,
        grads: &WeightBiasGrads,
    ) -> Result<()> {
        let (classes, width) = self.weight.dims2()?;
        let CrossEntropyChunk { x, logits, dx, targets, row_ptrs: (loss, weight, hits) } = chunk;
        let (rows, padded_classes) = (x.rows, logits.cols);
        let (n, stream) = (rows as c_int, stream(device));
        let factors = pointer(&self.factors)?.cast();
        // SAFETY: `x`, the targets and the factors have `n` rows, and `weight` has a row per class.
        check_status("cross_entropy_target_logits", unsafe {
            let w = pointer(self.weight)?;
            cross_entropy_target_logits(
                x.data()?,
                w,
                targets,
                factors,
                n,
                width as c_int,
                classes as c_int,
                stream,
            )
        })?;
        hopper::exp_logits(device, x, self.weight, &self.factors, logits, &self.exp_sums)?;
        let args = CrossEntropyFinalizeArgs {
            exp_sums: pointer(&self.exp_sums)?.cast(),
            logits: logits.data()?,
            targets,
            x: x.data()?,
            scaled_x: pointer(&self.scaled_x)?,
            factors,
            loss,
            weight,
            hits,
            scale,
            rows: n,
            stride: logits.stride as c_int,
            classes: classes as c_int,
            tiles: fused_column_tiles(classes) as c_int,
            width: width as c_int,
        };
        // SAFETY: as above, and `exp_sums` holds a value per tile and row.
        check_status("cross_entropy_finalize", unsafe { cross_entropy_finalize(&args, stream) })?;
        let scaled_x = GpuMat::new(&self.scaled_x, rows, width);
        if let Some(dweight) = grads.weight {
            let into = GpuMat::new(dweight, padded_classes, width);
            matmul(&into, logits.t(), scaled_x, Addend::Output, Epilogue::Identity)?;
        }
        let Some(dx) = dx else { return Ok(()) };
        matmul(
            &dx,
            logits,
            GpuMat::new(self.weight, padded_classes, width),
            Addend::Zero,
            Epilogue::Identity,
        )?;
        // SAFETY: as above.
        check_status("cross_entropy_scale_rows", unsafe {
            cross_entropy_scale_rows(dx.data()?, factors, n, width as c_int, stream)
        })
    }
}

/// `CrossEntropyFinalizeArgs` in finalize.cu.
#[repr(C)]
struct CrossEntropyFinalizeArgs {
    exp_sums: *const f32,
    logits: *mut c_void,
    targets: *const u32,
    x: *const c_void,
    scaled_x: *mut c_void,
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
    fn cross_entropy_target_logits(
        x: *const c_void,
        w: *const c_void,
        targets: *const u32,
        base: *mut f32,
        rows: c_int,
        width: c_int,
        classes: c_int,
        stream: RawStream,
    ) -> c_int;
    fn cross_entropy_finalize(args: *const CrossEntropyFinalizeArgs, stream: RawStream) -> c_int;
    fn cross_entropy_scale_rows(
        x: *mut c_void,
        factors: *const f32,
        rows: c_int,
        width: c_int,
        stream: RawStream,
    ) -> c_int;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::features::IGNORE_INDEX;
    use crate::kernels::cuda::device_of;
    use crate::kernels::metric_sums::MetricSums;
    use crate::kernels::metric_sums::gpu::RowMetrics;
    use crate::layers::gradcheck::{random_tensor, relative_error, test_device, to_f64_vec};

    const ROWS: usize = 4000;
    /// Nine tiles, the last one a third full; not a multiple of any tile or vector size.
    const CLASSES: usize = 2129;
    const WIDTH: usize = 768;
    /// A width for which hopper.cu uses FEW_PIECES.
    const NARROW: usize = 448;
    const SCALE: f64 = 0.5;

    fn random_bf16(shape: &[usize], seed: u64, scale: f64) -> Tensor {
        random_tensor(shape, seed).affine(scale, 0.0).unwrap().to_dtype(DType::BF16).unwrap()
    }

    fn head(weight: &Tensor) -> LinearCrossEntropy<'_> {
        LinearCrossEntropy { weight, bias: None, smoothing: 0.0, focal_gamma: 0.0, class_weights: None }
    }

    fn targets(of: impl Fn(usize) -> u32) -> Tensor {
        Tensor::from_vec((0..ROWS).map(of).collect::<Vec<u32>>(), ROWS, &test_device()).unwrap()
    }

    /// A weight that is a view with more rows behind it; `None` without a Hopper GPU.
    fn weight(width: usize) -> Option<Tensor> {
        let weight = random_bf16(&[CLASSES + 40, width], 2, 0.05).narrow(0, 0, CLASSES).unwrap();
        let x = random_bf16(&[ROWS, width], 1, 1.0);
        let there = device_of(&x)
            .is_some_and(|gpu| HopperCrossEntropy::new(&head(&weight), gpu, &x, ROWS).unwrap().is_some());
        if !there {
            println!("skipped: no Hopper GPU (TRAINER_TEST_DEVICE=cuda)");
        }
        there.then_some(weight)
    }

    /// The metric sums and the gradients of input and weight.
    fn forward_backward(weight: &Tensor, x: &Tensor, targets: &Tensor) -> (MetricSums, Tensor, Tensor) {
        let grad = Tensor::zeros((CLASSES + 40, x.dims()[1]), DType::F32, &test_device()).unwrap();
        let grad = grad.narrow(0, 0, CLASSES).unwrap();
        let grads = WeightBiasGrads { weight: Some(&grad), bias: None };
        let (metrics, dx) = head(weight).forward_backward(x, targets, SCALE, &grads, true).unwrap();
        (metrics.read().unwrap(), dx.unwrap(), grad)
    }

    #[test]
    fn gradients_are_those_of_the_reference() {
        for width in [WIDTH, NARROW] {
            follows_the_reference(width);
        }
    }

    fn follows_the_reference(width: usize) {
        let Some(weight) = weight(width) else { return };
        let x = random_bf16(&[ROWS, width], 1, 8.0);
        let class = |row: usize| (row * 5 % CLASSES) as u32;
        let given = targets(|row| if row % 3 == 1 { IGNORE_INDEX } else { class(row) });
        let (metrics, dx, grad) = forward_backward(&weight, &x, &given);

        let learnt: Vec<u32> = (0..ROWS as u32).filter(|row| row % 3 != 1).collect();
        let classes: Vec<u32> = learnt.iter().map(|row| class(*row as usize)).collect();
        let rows = Tensor::from_vec(learnt.clone(), learnt.len(), &test_device()).unwrap();
        let classes = Tensor::from_vec(classes, learnt.len(), &test_device()).unwrap();
        let leaf = |t: &Tensor| candle_core::Var::from_tensor(&t.to_dtype(DType::F64).unwrap()).unwrap();
        let (x, w) = (leaf(&x.index_select(&rows, 0).unwrap()), leaf(&weight));
        let wanted = head(&w).reference(&x, &classes).unwrap();
        let loss = wanted.to_scalar::<f64>().unwrap();
        assert!((metrics.loss - loss).abs() < 1e-3 * loss, "{} is not {loss}", metrics.loss);
        assert_eq!((metrics.count, metrics.weight), (learnt.len() as u64, learnt.len() as f64));
        let grads = (wanted * SCALE).unwrap().backward().unwrap();
        for (what, ours, var) in [("x", &dx.index_select(&rows, 0).unwrap(), &x), ("w", &grad, &w)] {
            let far = relative_error(&to_f64_vec(ours), &to_f64_vec(grads.get(var).unwrap()));
            assert!(far < 8e-3, "{what}: {far}");
        }
        let ignored: Vec<u32> = (0..ROWS as u32).filter(|row| row % 3 == 1).collect();
        let ignored = Tensor::from_vec(ignored.clone(), ignored.len(), &test_device()).unwrap();
        assert!(to_f64_vec(&dx.index_select(&ignored, 0).unwrap()).iter().all(|d| *d == 0.0));
    }

    /// A weight without rows behind it uses the other implementation. Both agree.
    #[test]
    fn both_bodies_agree() {
        let Some(weight) = weight(WIDTH) else { return };
        let x = random_bf16(&[ROWS, WIDTH], 1, 8.0);
        let given = targets(|row| (row * 7 % CLASSES) as u32);
        let alone = weight.affine(1.0, 0.0).unwrap();
        assert!(!hopper::supports_logits(&x, &alone, ROWS).unwrap());
        let (one, other) = (forward_backward(&weight, &x, &given), forward_backward(&alone, &x, &given));
        assert!((one.0.loss - other.0.loss).abs() < 1e-3 * other.0.loss);
        for (a, b) in [(one.1, other.1), (one.2, other.2)] {
            let far = relative_error(&to_f64_vec(&a), &to_f64_vec(&b));
            assert!(far < 3e-2, "{far}");
        }
    }

    /// The last of several chunks may be shorter. Without padding columns behind the classes, GEMMs are split in two,
    /// and the first part is rounded.
    #[test]
    fn chunks_sum_to_the_whole_batch() {
        for (columns, near) in [(CLASSES.next_multiple_of(8), 4e-3), (CLASSES, 2e-2)] {
            check_chunked(columns, near);
        }
    }

    fn check_chunked(columns: usize, near: f64) {
        let Some(weight) = weight(WIDTH) else { return };
        let x = random_bf16(&[ROWS, WIDTH], 1, 8.0);
        let given = targets(|row| (row * 7 % CLASSES) as u32);
        let (metrics, dx, grad) = forward_backward(&weight, &x, &given);

        let gpu = device_of(&x).unwrap();
        let fused = HopperCrossEntropy::new(&head(&weight), gpu, &x, ROWS).unwrap().unwrap();
        let row_metrics = RowMetrics::new(gpu, ROWS).unwrap();
        let stride = super::super::cuda_logit_stride(CLASSES);
        let logits = uninit(gpu, DType::BF16, ROWS * stride).unwrap();
        let sums = Tensor::zeros((CLASSES + 40, WIDTH), DType::F32, &test_device()).unwrap();
        let (into, sums) = (dx.zeros_like().unwrap(), sums.narrow(0, 0, CLASSES).unwrap());
        for (first, rows) in [(0, 3700), (3700, 300)] {
            let part = |of| GpuMat { offset: first * WIDTH, rows, ..GpuMat::new(of, ROWS, WIDTH) };
            let chunk = CrossEntropyChunk {
                x: part(&x),
                logits: GpuMat { rows, cols: columns, ..GpuMat::new(&logits, ROWS, stride) },
                dx: Some(part(&into)),
                targets: pointer(&given).unwrap().cast::<u32>().wrapping_add(first),
                row_ptrs: row_metrics.row_ptrs(first).unwrap(),
            };
            fused
                .forward_backward(gpu, chunk, SCALE, &WeightBiasGrads { weight: Some(&sums), bias: None })
                .unwrap();
        }
        let total = row_metrics.reduce(gpu).unwrap().read().unwrap();
        assert_eq!((total.loss, total.count), (metrics.loss, metrics.count));
        for (a, b) in [(into, dx), (sums, grad)] {
            let far = relative_error(&to_f64_vec(&a), &to_f64_vec(&b));
            assert!(far < near, "{far} with {columns} columns");
        }
    }

    #[test]
    fn a_target_that_is_certain_costs_nothing() {
        let Some(weight) = weight(WIDTH) else { return };
        let given = targets(|row| (row * 7 % CLASSES) as u32);
        let x = weight.index_select(&given, 0).unwrap().affine(50.0, 0.0).unwrap();
        let (metrics, dx, _) = forward_backward(&weight, &x, &given);
        assert!((0.0..1e-6).contains(&metrics.mean_loss()), "{}", metrics.mean_loss());
        assert!(to_f64_vec(&dx).iter().all(|d| d.abs() < 1e-6));
    }

    #[test]
    fn targets_far_below_others_and_none_at_all() {
        let Some(weight) = weight(WIDTH) else { return };
        let given = targets(|row| (row * 5 % CLASSES) as u32);
        let (metrics, dx, grad) = forward_backward(&weight, &random_bf16(&[ROWS, WIDTH], 1, 300.0), &given);
        let mean = metrics.mean_loss();
        assert!((69.0..80.0).contains(&mean), "{mean}");
        assert!([dx, grad].iter().all(|g| to_f64_vec(g).iter().all(|d| d.is_finite())));

        let x = random_bf16(&[ROWS, WIDTH], 1, 1.0);
        let wrong = targets(|row| if row == 7 { CLASSES as u32 } else { 0 });
        let (metrics, dx, _) = forward_backward(&weight, &x, &wrong);
        assert!(metrics.loss.is_nan(), "a class that is not there");
        assert!(to_f64_vec(&dx).iter().all(|d| d.is_finite()));

        let nan = Tensor::full(f32::NAN, (1, WIDTH), &test_device()).unwrap().to_dtype(DType::BF16).unwrap();
        let x = Tensor::cat(&[&nan, &x.narrow(0, 1, ROWS - 1).unwrap()], 0).unwrap();
        let (metrics, dx, grad) = forward_backward(&weight, &x, &given);
        assert!(metrics.loss.is_nan() && [dx, grad].iter().all(|g| to_f64_vec(g).iter().any(|d| d.is_nan())));
    }
}
