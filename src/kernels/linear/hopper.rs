//! The body for Hopper: products in bf16 with GELU, its slope, or exponentials of scores inside.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::{Before, hopper_fits, hopper_scores, hopper_sums};
use crate::kernels::cuda::product::Mat;
use crate::kernels::cuda::{Stream, checked, pointer, pointer_or_null, room, scratch, stream};

/// Whether `x w` of (rows, deep) and (deep, columns) runs here: what is read, `beside` them too, begins at multiples of 16
/// bytes, which parameters in their flat buffer need not do.
pub fn takes(x: &Tensor, w: Mat, rows: usize, beside: &Tensor) -> Result<bool> {
    Ok(hopper_fits(x.dtype(), rows, w.cols, w.rows) && reads(&[x, w.of, beside])?)
}

/// Whether scores of so many rows of `x` by a (classes, width) weight run here, whose rows are read up to a multiple of 32.
pub fn takes_scores(x: &Tensor, w: &Tensor, rows: usize) -> Result<bool> {
    let (classes, width) = w.dims2()?;
    let whole = classes.next_multiple_of(32) * width <= room(w)?;
    Ok(whole && hopper_scores(x.dtype(), rows, classes, width) && reads(&[x, w])?)
}

fn reads(operands: &[&Tensor]) -> Result<bool> {
    let addresses = operands.iter().map(|t| pointer(t)).collect::<Result<Vec<_>>>()?;
    // SAFETY: it asks what the card can do.
    Ok(addresses.iter().all(|at| (*at as usize).is_multiple_of(16)) && unsafe { linear_hopper_able() } != 0)
}

/// `pre = x w + bias` and `out = gelu(pre)`.
pub fn gelu(
    device: &CudaDevice,
    (x, w, rows): (&Tensor, Mat, usize),
    bias: &Tensor,
    (out, pre): (&Tensor, &Tensor),
) -> Result<()> {
    let (columns, deep, across) = (w.cols as c_int, w.rows as c_int, !w.turned as c_int);
    let [x, w, bias, out, pre] = [pointer(x)?, pointer(w.of)?, pointer(bias)?, pointer(out)?, pointer(pre)?];
    // SAFETY: `x` is (rows, deep), `w` as said, `bias` has the columns, the others rows of them.
    checked("linear_hopper_gelu", unsafe {
        linear_hopper_gelu(x, w, across, bias, out, pre, rows as c_int, columns, deep, stream(device))
    })
}

/// `out = (x w) gelu'(v)` and `v = gelu(v)` of what is `before`, and the sums of `out` onto the gradient of its bias.
pub fn slope(
    device: &CudaDevice,
    (x, w, rows): (&Tensor, Mat, usize),
    before: Before,
    out: &Tensor,
) -> Result<()> {
    let (columns, deep, across) = (w.cols as c_int, w.rows as c_int, !w.turned as c_int);
    let sums = scratch(device, hopper_sums(rows, w.cols))?;
    let [x, w, out, v, sums] =
        [pointer(x)?, pointer(w.of)?, pointer(out)?, pointer(before.v)?, pointer(&sums)?];
    let bias = pointer_or_null(before.bias)?;
    // SAFETY: `x` is (rows, deep), `w` as said, `bias` has the columns, `out` and `v` rows of them, and `sums` has the room.
    checked("linear_hopper_slope", unsafe {
        linear_hopper_slope(x, w, across, out, v, sums, bias, rows as c_int, columns, deep, stream(device))
    })
}

/// `out = exp(x w' - base)` in rows of its stride, `base` a value a row in powers of two, zero from the last of `w`'s rows on,
/// and the sums of every 256 columns of it, (tiles, rows).
pub fn scores(device: &CudaDevice, x: Mat, w: &Tensor, base: &Tensor, out: Mat, sums: &Tensor) -> Result<()> {
    let (classes, width) = w.dims2()?;
    let (base, sums) = (pointer(base)?.cast(), pointer(sums)?.cast());
    let [rows, stride, classes, width] = [x.rows, out.stride, classes, width].map(|n| n as c_int);
    // SAFETY: `x` is (rows, width), `w` (classes, width) with rows behind it, `out` has the rows, as has `base`.
    checked("linear_hopper_scores", unsafe {
        let (x, w, out) = (x.data()?, pointer(w)?, out.data()?);
        linear_hopper_scores(x, w, base, out, stride, sums, rows, classes, width, stream(device))
    })
}

unsafe extern "C" {
    fn linear_hopper_able() -> c_int;
    fn linear_hopper_scores(
        x: *const c_void,
        w: *const c_void,
        base: *const f32,
        out: *mut c_void,
        stride: c_int,
        sums: *mut f32,
        rows: c_int,
        columns: c_int,
        deep: c_int,
        stream: Stream,
    ) -> c_int;
    fn linear_hopper_gelu(
        x: *const c_void,
        w: *const c_void,
        across: c_int,
        bias: *const c_void,
        out: *mut c_void,
        pre: *mut c_void,
        rows: c_int,
        columns: c_int,
        deep: c_int,
        stream: Stream,
    ) -> c_int;
    fn linear_hopper_slope(
        x: *const c_void,
        w: *const c_void,
        across: c_int,
        out: *mut c_void,
        pre: *mut c_void,
        sums: *mut c_void,
        bias: *mut c_void,
        rows: c_int,
        columns: c_int,
        deep: c_int,
        stream: Stream,
    ) -> c_int;
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::kernels::Activation;
    use crate::kernels::activation;
    use crate::kernels::cuda::of;
    use crate::layers::check::{device, flat, random};

    /// As far as bf16 is from the same in f64.
    const NEAR: f64 = 8e-3;

    fn near(a: &Tensor, b: &Tensor, what: &str) {
        let far = crate::layers::check::distance(&flat(a), &flat(b));
        assert!(far < NEAR, "{what}: {far}");
    }

    fn on_card(shape: &[usize], seed: u64, scale: f64) -> Tensor {
        let values = random(shape, seed).affine(scale, 0.0).unwrap();
        values.to_dtype(DType::BF16).unwrap()
    }

    fn wide(t: &Tensor) -> Tensor {
        t.to_dtype(DType::F64).unwrap()
    }

    /// Both products against plain operations in f64, with rows that fill no tile and none at all of the last pair's second
    /// block, one or several tiles for a block, and more pieces than a tile is finished in.
    #[test]
    fn products_are_right() {
        let device = device();
        // SAFETY: it asks what the card can do.
        if !device.is_cuda() || unsafe { linear_hopper_able() } == 0 {
            println!("skipped: no Hopper card to compute on (TRAINER_TEST_DEVICE=cuda)");
            return;
        }
        for (rows, columns, deep) in
            [(700, 512, 768), (65, 256, 832), (9000, 1024, 1024), (9000, 1024, 448), (300, 512, 384)]
        {
            for across in [false, true] {
                let x = on_card(&[rows, deep], 1, 1.0);
                let stored = if across { [deep, columns] } else { [columns, deep] };
                let w = on_card(&stored, 2, 0.05);
                let mat = Mat::new(&w, stored[0], stored[1]);
                let mat = if across { mat } else { mat.t() };
                let (bias, v) = (on_card(&[columns], 3, 1.0), on_card(&[rows, columns], 4, 2.0));
                let card = of(&x).unwrap();

                let plain = if across { wide(&w) } else { wide(&w).t().unwrap() };
                let product = wide(&x).matmul(&plain).unwrap();
                let given = product.broadcast_add(&wide(&bias)).unwrap();
                let gelu_of = |t: &Tensor| activation::reference::forward(t, Activation::GeluTanh).unwrap();
                let (out, pre) = (v.zeros_like().unwrap(), v.zeros_like().unwrap());
                gelu(card, (&x, mat, rows), &bias, (&out, &pre)).unwrap();
                near(&wide(&pre), &given, "before GELU");
                near(&wide(&out), &gelu_of(&given), "GELU");

                let whole = hopper_fits(DType::BF16, rows, columns, deep);
                assert_eq!(takes(&x, mat, rows, &bias).unwrap(), whole);
                let odd = on_card(&[columns + 1], 3, 1.0).narrow(0, 1, columns).unwrap();
                assert!(!takes(&x, mat, rows, &odd).unwrap(), "a bias between two words");

                let output = gelu_of(&wide(&v));
                let met = candle_core::Var::from_tensor(&wide(&v)).unwrap();
                let slopes = gelu_of(&met).sum_all().unwrap().backward().unwrap();
                let wanted = (product * slopes.get(&met).unwrap()).unwrap();
                let sums = Tensor::ones(columns, DType::F32, &device).unwrap();
                slope(
                    card,
                    (&x, mat, rows),
                    Before { act: Activation::GeluTanh, v: &v, bias: Some(&sums) },
                    &out,
                )
                .unwrap();
                near(&wide(&out), &wanted, "gradient");
                near(&wide(&v), &output, "GELU again");
                let added = (wanted.sum(0).unwrap() + 1.0).unwrap();
                near(&wide(&sums), &added, "bias");
            }
        }
    }
}
