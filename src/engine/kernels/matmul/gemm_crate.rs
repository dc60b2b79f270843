//! GEMMs by the `gemm` crate, with the vector width of the dispatch, but no wider than AVX2.
//!
//! The crate would choose the width by the CPU. On x86-64 this module calls its kernels directly.

use gemm::Parallelism;

use super::{MatView, Threading};
#[cfg(target_arch = "x86_64")]
use crate::kernels::dispatch::{Dispatch, dispatch};

macro_rules! blocked {
    ($T:ident, $kernels:ident, $lanes:literal) => {
        /// `out = a b`, or `out += a b` with `accumulate`.
        ///
        /// # Safety
        /// The operands lie inside their slices, and `out` has room for every (i, j) at `i * stride + j`.
        pub unsafe fn $T(
            out: &mut [$T],
            stride: usize,
            a: MatView<$T>,
            b: MatView<$T>,
            accumulate: bool,
            threading: Threading,
        ) {
            let parallelism =
                if threading == Threading::Parallel { Parallelism::Rayon(0) } else { Parallelism::None };
            let (m, k, n) = (a.rows, a.cols, b.cols);
            #[cfg(target_arch = "x86_64")]
            {
                // The kernels are fastest where the result is column-major, so compute the transpose.
                macro_rules! with {
                    ($module:ident, $simd:ident, $width:expr) => {{
                        use gemm_common::simd::{MixedSimd, $simd};
                        use $kernels::microkernel::$module::$T::{H_M, H_N, H_UKR, MR_DIV_N, NR, UKR};
                        let Some(simd) = <$simd as MixedSimd<$T, $T, $T, $T>>::try_new() else {
                            unreachable!("the dispatch has these vectors")
                        };
                        // SAFETY: the caller upholds the same contract.
                        unsafe {
                            gemm_common::gemm::gemm_basic_generic::<
                                _,
                                $T,
                                { $width },
                                { MR_DIV_N * $width },
                                NR,
                                MR_DIV_N,
                                H_M,
                                H_N,
                            >(
                                simd,
                                n,
                                m,
                                k,
                                out.as_mut_ptr(),
                                stride as isize,
                                1,
                                accumulate,
                                b.data.as_ptr(),
                                b.row_stride as isize,
                                b.col_stride as isize,
                                a.data.as_ptr(),
                                a.row_stride as isize,
                                a.col_stride as isize,
                                1.0,
                                1.0,
                                false,
                                false,
                                false,
                                |a, b, c| a * b + c,
                                &UKR,
                                &H_UKR,
                                false,
                                parallelism,
                            )
                        }
                    }};
                }
                match dispatch() {
                    Dispatch::Portable => with!(scalar, Scalar, 1),
                    _ => with!(fma, V3, $lanes),
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            // SAFETY: the caller upholds the same contract.
            unsafe {
                gemm::gemm(
                    m,
                    n,
                    k,
                    out.as_mut_ptr(),
                    1,
                    stride as isize,
                    accumulate,
                    a.data.as_ptr(),
                    a.col_stride as isize,
                    a.row_stride as isize,
                    b.data.as_ptr(),
                    b.col_stride as isize,
                    b.row_stride as isize,
                    1.0,
                    1.0,
                    false,
                    false,
                    false,
                    parallelism,
                )
            }
        }
    };
}

blocked!(f32, gemm_f32, 8);
blocked!(f64, gemm_f64, 4);
