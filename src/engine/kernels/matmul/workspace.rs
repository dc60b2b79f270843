//! What GEMMs and convolutions take besides their operands and results: converted and packed operands, and what each
//! thread keeps. A pure function of the sizes, the type and the dispatch.

use std::sync::LazyLock;

use candle_core::DType;

use super::{Threading, gemv, packed, packs_blocks, panel};
#[cfg(target_arch = "x86_64")]
use super::{amx, with_amx_elem};
use crate::kernels::cpu::acc_bytes;
#[cfg(target_arch = "x86_64")]
use crate::kernels::dispatch::{Dispatch, dispatch};
use crate::kernels::im2col::ConvGeometry;

/// Which operands of a product are transposes of the matrices in memory.
#[derive(Clone, Copy, Debug)]
pub struct Transposed {
    pub a: bool,
    pub b: bool,
}

impl Transposed {
    pub const NONE: Self = Self { a: false, b: false };
    pub const A: Self = Self { a: true, b: false };
    pub const B: Self = Self { a: false, b: true };
}

/// Bytes of temporaries of [`gemm`](super::gemm) for an (m, n) result over `k`: operands converted to the accumulator
/// type where they are stored in another, and packed operands.
pub fn gemm_workspace(
    dtype: DType,
    sizes: (usize, usize, usize),
    transposed: Transposed,
    threading: Threading,
) -> u64 {
    let bytes = parallel_workspace(dtype, sizes, transposed, threading, false);
    let (m, k, n) = sizes;
    bytes.unwrap_or_else(|| if is_narrow(dtype) { acc_bytes(dtype) * (m * k + k * n) } else { 0 }) as u64
}

/// Like [`gemm_workspace`], for [`matmul`](super::matmul) and [`matmul_epilogue`](super::matmul_epilogue).
pub fn matmul_workspace(
    dtype: DType,
    sizes @ (m, _, n): (usize, usize, usize),
    transposed: Transposed,
    threading: Threading,
) -> u64 {
    if let Some(bytes) = parallel_workspace(dtype, sizes, transposed, threading, is_narrow(dtype)) {
        return bytes as u64;
    }
    let sums = if is_narrow(dtype) { acc_bytes(dtype) * m * n } else { 0 };
    gemm_workspace(dtype, sizes, transposed, threading) + sums as u64
}

/// Bytes of a GEMM on all threads that converts no whole operand or result; `None` for one that does, if the type is
/// not its own accumulator type. `rounds`: its result is rounded as it is computed.
fn parallel_workspace(
    dtype: DType,
    sizes @ (m, k, _): (usize, usize, usize),
    transposed: Transposed,
    threading: Threading,
    rounds: bool,
) -> Option<usize> {
    if threading == Threading::Serial {
        return None;
    }
    if gemv::supports_sizes(m, transposed) {
        return Some(gemv::workspace(dtype, m, k) as usize);
    }
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        let bytes = with_amx_elem!(dtype, E => amx::supports::<E>(sizes).then(|| match rounds {
            true => amx::gemm_workspace::<E, E>(sizes, transposed),
            false => amx::gemm_workspace::<E, f32>(sizes, transposed),
        }));
        if bytes.is_some() {
            return bytes;
        }
    }
    let takes_result = !rounds || packed::rounds(k);
    (k > 0 && takes_result && packs_blocks(dtype, sizes))
        .then(|| acc_bytes(dtype) * packed::workspace(sizes, transposed.a || is_narrow(dtype), rounds))
}

/// Whether the accumulator type is wider.
fn is_narrow(dtype: DType) -> bool {
    dtype.size_in_bytes() < acc_bytes(dtype)
}

/// Bytes of temporaries of [`try_conv`](super::try_conv), if it takes this convolution.
pub fn conv_workspace(dtype: DType, g: &ConvGeometry, batch: usize) -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        let bytes = with_amx_elem!(dtype, E => {
            amx::supports_conv::<E>(g, batch).then(|| amx::conv_workspace::<E>(g, batch))
        });
        return bytes.map(|bytes| bytes as u64);
    }
    let _ = (dtype, g, batch);
    None
}

/// Bytes that [`try_conv_weight_gradient`](super::try_conv_weight_gradient) packs its operands into, if it takes this
/// convolution.
pub fn conv_weight_gradient_workspace(dtype: DType, g: &ConvGeometry, batch: usize) -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        let bytes = with_amx_elem!(dtype, E => {
            amx::supports_conv_weight_gradient::<E>(g, batch)
                .then(|| amx::conv_weight_gradient_workspace::<E>(g, batch))
        });
        return bytes.map(|bytes| bytes as u64);
    }
    let _ = (dtype, g, batch);
    None
}

/// Replaces the size of the L2 cache, for tests that compare plans byte by byte.
const L2_BYTES_VAR: &str = "TRAINER_L2_BYTES";

/// Bytes that each thread keeps after its first GEMM by candle, whose `gemm` crate packs into a per-thread buffer the
/// size of the L2 cache.
pub fn gemm_buffer_bytes() -> u64 {
    static BYTES: LazyLock<u64> = LazyLock::new(|| {
        let fixed = std::env::var(L2_BYTES_VAR).ok().and_then(|text| text.parse().ok());
        fixed.unwrap_or(gemm_common::cache::CACHE_INFO[1].cache_bytes as u64)
    });
    *BYTES
}

/// Bytes that GEMMs take on the stack of each thread that computes.
pub fn thread_stack_bytes() -> u64 {
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        return amx::STACK_BYTES.max(panel::STACK_BYTES) as u64;
    }
    panel::STACK_BYTES as u64
}
