//! Bindings of the Hopper kernels: bf16 GEMMs with GELU, its derivative, or the exponentials of logits in the epilogue.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::{ActBackward, hopper_column_sums_bytes, hopper_supports, hopper_supports_logits};
use crate::kernels::cuda::cublaslt::GpuMat;
use crate::kernels::cuda::{RawStream, capacity, check_status, pointer, pointer_or_null, scratch, stream};

/// Whether the Hopper kernel takes `x w`, of (rows, k) and (k, columns). It needs operands, `other` included, aligned
/// to 16 bytes; parameters in their flat buffer need not be.
pub fn supports(x: &Tensor, w: GpuMat, rows: usize, other: &Tensor) -> Result<bool> {
    Ok(hopper_supports(x.dtype(), rows, w.cols, w.rows) && can_load(&[x, w.tensor, other])?)
}

/// Whether the Hopper kernel takes the logits of `rows` rows of `x` by a (classes, width) weight. It reads the weight's
/// rows up to a multiple of 32, so that memory must exist.
pub fn supports_logits(x: &Tensor, w: &Tensor, rows: usize) -> Result<bool> {
    let (classes, width) = w.dims2()?;
    let padding_readable = classes.next_multiple_of(32) * width <= capacity(w)?;
    Ok(padding_readable && hopper_supports_logits(x.dtype(), rows, classes, width) && can_load(&[x, w])?)
}

fn can_load(operands: &[&Tensor]) -> Result<bool> {
    let addresses = operands.iter().map(|t| pointer(t)).collect::<Result<Vec<_>>>()?;
    // SAFETY: the call only queries the GPU's capabilities.
    Ok(addresses.iter().all(|at| (*at as usize).is_multiple_of(16))
        && unsafe { linear_hopper_available() } != 0)
}

/// `pre = x w + bias` and `out = gelu(pre)`.
pub fn linear_gelu(
    device: &CudaDevice,
    (x, w, rows): (&Tensor, GpuMat, usize),
    bias: &Tensor,
    (out, pre): (&Tensor, &Tensor),
) -> Result<()> {
    let (columns, k, n_major) = (w.cols as c_int, w.rows as c_int, !w.transposed as c_int);
    let [x, w, bias, out, pre] =
        [pointer(x)?, pointer(w.tensor)?, pointer(bias)?, pointer(out)?, pointer(pre)?];
    // SAFETY: `x` is (rows, k), `w` is (k, columns) as `n_major` states, `bias` has `columns` values, `out` and `pre`
    // are (rows, columns).
    check_status("linear_hopper_gelu", unsafe {
        linear_hopper_gelu(x, w, n_major, bias, out, pre, rows as c_int, columns, k, stream(device))
    })
}

/// `out = (x w) gelu'(v)` and `v = gelu(v)` with the `v` of `act_backward`; adds the column sums of `out` to its bias
/// gradient.
pub fn linear_gelu_backward(
    device: &CudaDevice,
    (x, w, rows): (&Tensor, GpuMat, usize),
    act_backward: ActBackward,
    out: &Tensor,
) -> Result<()> {
    let (columns, k, n_major) = (w.cols as c_int, w.rows as c_int, !w.transposed as c_int);
    let sums = scratch(device, hopper_column_sums_bytes(rows, w.cols))?;
    let [x, w, out, v, sums] =
        [pointer(x)?, pointer(w.tensor)?, pointer(out)?, pointer(act_backward.v)?, pointer(&sums)?];
    let bias = pointer_or_null(act_backward.bias)?;
    // SAFETY: `x` is (rows, k), `w` is (k, columns) as `n_major` states, `bias` has `columns` values, `out` and `v` are
    // (rows, columns), and `sums` has `hopper_column_sums_bytes` bytes.
    check_status("linear_hopper_gelu_backward", unsafe {
        linear_hopper_gelu_backward(
            x,
            w,
            n_major,
            out,
            v,
            sums,
            bias,
            rows as c_int,
            columns,
            k,
            stream(device),
        )
    })
}

/// `out = 2^(log2(e) x w^T - base)`, with the row stride of `out` and one `base` per row; columns past the last class
/// are zero. Also writes the sums over every 256 columns, (tiles, rows).
pub fn exp_logits(
    device: &CudaDevice,
    x: GpuMat,
    w: &Tensor,
    base: &Tensor,
    out: GpuMat,
    sums: &Tensor,
) -> Result<()> {
    let (classes, width) = w.dims2()?;
    let (base, sums) = (pointer(base)?.cast(), pointer(sums)?.cast());
    let [rows, stride, classes, width] = [x.rows, out.stride, classes, width].map(|n| n as c_int);
    // SAFETY: `x` is (rows, width); `w` is (classes, width) with readable memory up to a multiple of 32 rows; `out` and
    // `base` have `rows` rows.
    check_status("linear_hopper_exp_logits", unsafe {
        let (x, w, out) = (x.data()?, pointer(w)?, out.data()?);
        linear_hopper_exp_logits(x, w, base, out, stride, sums, rows, classes, width, stream(device))
    })
}

unsafe extern "C" {
    fn linear_hopper_available() -> c_int;
    fn linear_hopper_exp_logits(
        x: *const c_void,
        w: *const c_void,
        base: *const f32,
        out: *mut c_void,
        stride: c_int,
        sums: *mut f32,
        rows: c_int,
        columns: c_int,
        k: c_int,
        stream: RawStream,
    ) -> c_int;
    fn linear_hopper_gelu(
        x: *const c_void,
        w: *const c_void,
        n_major: c_int,
        bias: *const c_void,
        out: *mut c_void,
        pre: *mut c_void,
        rows: c_int,
        columns: c_int,
        k: c_int,
        stream: RawStream,
    ) -> c_int;
    fn linear_hopper_gelu_backward(
        x: *const c_void,
        w: *const c_void,
        n_major: c_int,
        out: *mut c_void,
        pre: *mut c_void,
        sums: *mut c_void,
        bias: *mut c_void,
        rows: c_int,
        columns: c_int,
        k: c_int,
        stream: RawStream,
    ) -> c_int;
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::kernels::Activation;
    use crate::kernels::activation;
    use crate::kernels::cuda::device_of;
    use crate::layers::gradcheck::{random_tensor, test_device, to_f64_vec};

    /// The error of bf16 against the same computation in f64.
    const TOLERANCE: f64 = 8e-3;

    fn assert_close(a: &Tensor, b: &Tensor, what: &str) {
        let error = crate::layers::gradcheck::relative_error(&to_f64_vec(a), &to_f64_vec(b));
        assert!(error < TOLERANCE, "{what}: {error}");
    }

    fn random_bf16(shape: &[usize], seed: u64, scale: f64) -> Tensor {
        let values = random_tensor(shape, seed).affine(scale, 0.0).unwrap();
        values.to_dtype(DType::BF16).unwrap()
    }

    fn to_f64(t: &Tensor) -> Tensor {
        t.to_dtype(DType::F64).unwrap()
    }

    /// Both GEMMs against plain f64 ops. Covers partial row tiles, a last pair whose second block has no rows, one and
    /// several tiles per block, and more K steps than a tile's epilogue is split into.
    #[test]
    fn products_are_right() {
        let device = test_device();
        // SAFETY: the call only queries the GPU's capabilities.
        if !device.is_cuda() || unsafe { linear_hopper_available() } == 0 {
            println!("skipped: no Hopper GPU (TRAINER_TEST_DEVICE=cuda)");
            return;
        }
        for (rows, columns, k) in
            [(700, 512, 768), (65, 256, 832), (9000, 1024, 1024), (9000, 1024, 448), (300, 512, 384)]
        {
            for n_major in [false, true] {
                let x = random_bf16(&[rows, k], 1, 1.0);
                let stored = if n_major { [k, columns] } else { [columns, k] };
                let w = random_bf16(&stored, 2, 0.05);
                let mat = GpuMat::new(&w, stored[0], stored[1]);
                let mat = if n_major { mat } else { mat.t() };
                let (bias, v) = (random_bf16(&[columns], 3, 1.0), random_bf16(&[rows, columns], 4, 2.0));
                let cuda_device = device_of(&x).unwrap();

                let plain = if n_major { to_f64(&w) } else { to_f64(&w).t().unwrap() };
                let product = to_f64(&x).matmul(&plain).unwrap();
                let preact = product.broadcast_add(&to_f64(&bias)).unwrap();
                let gelu_of = |t: &Tensor| activation::reference::forward(t, Activation::GeluTanh).unwrap();
                let (out, pre) = (v.zeros_like().unwrap(), v.zeros_like().unwrap());
                linear_gelu(cuda_device, (&x, mat, rows), &bias, (&out, &pre)).unwrap();
                assert_close(&to_f64(&pre), &preact, "before GELU");
                assert_close(&to_f64(&out), &gelu_of(&preact), "GELU");

                let supported = hopper_supports(DType::BF16, rows, columns, k);
                assert_eq!(supports(&x, mat, rows, &bias).unwrap(), supported);
                let odd = random_bf16(&[columns + 1], 3, 1.0).narrow(0, 1, columns).unwrap();
                assert!(!supports(&x, mat, rows, &odd).unwrap(), "misaligned bias");

                let output = gelu_of(&to_f64(&v));
                let v_var = candle_core::Var::from_tensor(&to_f64(&v)).unwrap();
                let derivatives = gelu_of(&v_var).sum_all().unwrap().backward().unwrap();
                let expected = (product * derivatives.get(&v_var).unwrap()).unwrap();
                let sums = Tensor::ones(columns, DType::F32, &device).unwrap();
                linear_gelu_backward(
                    cuda_device,
                    (&x, mat, rows),
                    ActBackward { act: Activation::GeluTanh, v: &v, bias: Some(&sums) },
                    &out,
                )
                .unwrap();
                assert_close(&to_f64(&out), &expected, "gradient");
                assert_close(&to_f64(&v), &output, "GELU again");
                let added = (expected.sum(0).unwrap() + 1.0).unwrap();
                assert_close(&to_f64(&sums), &added, "bias");
            }
        }
    }
}
