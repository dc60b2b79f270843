//! What GEMMs and convolutions take besides their operands and results: converted and packed operands, and what each
//! thread keeps. A pure function of the sizes, the type and the dispatch.

use std::sync::LazyLock;

use candle_core::DType;

use super::{Threading, gemv, uses_avx512};
#[cfg(target_arch = "x86_64")]
use super::{amx, avx512, avx512_packed, packs_blocks, with_amx_elem};
use crate::kernels::cpu::acc_bytes;
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
/// type where they are stored in another, and packed operands. Excludes the buffers that each thread keeps:
/// [`thread_buffer_bytes`].
pub fn gemm_workspace(
    dtype: DType,
    (m, k, n): (usize, usize, usize),
    transposed: Transposed,
    threading: Threading,
) -> u64 {
    if threading == Threading::Parallel && gemv::supports_sizes(m, transposed) {
        return gemv::workspace(dtype, m, k);
    }
    #[cfg(target_arch = "x86_64")]
    if threading == Threading::Parallel && dispatch() == Dispatch::Amx {
        let bytes = with_amx_elem!(dtype, E => {
            amx::supports::<E>((m, k, n)).then(|| amx::gemm_workspace::<E, f32>((m, k, n), transposed) as u64)
        });
        if let Some(bytes) = bytes {
            return bytes;
        }
    }
    #[cfg(target_arch = "x86_64")]
    if threading == Threading::Parallel && packs_blocks(dtype, (m, k, n)) {
        let bytes =
            with_amx_elem!(dtype, E => Some(avx512_packed::workspace::<E, f32>((m, k, n), transposed.a)));
        return bytes.map_or(0, |bytes| bytes as u64);
    }
    let GemmTile { height, width, depth } = GemmTile::of(dtype);
    // Where `a` is a transpose, K runs over the samples, and a smaller batch may be cut into longer slices.
    let depth = if transposed.a { k.min(depth) } else { slice_depth(k, depth) };
    // Mirrors what `gemm` 0.19 does. It computes the transposed result, packs slices of at most KC of K, and packs `a`
    // where its rows have a long stride and `b` where it is narrow.
    let packed = || {
        let a = n > height * if transposed.a { 2 } else { gemm::get_rhs_packing_threshold() };
        let b = n <= 16 * height;
        let a = if a { (depth * m.next_multiple_of(width)).min(MAX_PACKED) } else { 0 };
        a + if b { depth * n.next_multiple_of(height) } else { 0 }
    };
    let converted = match converted_depth(dtype, (k, n), threading) {
        all if all == k => k * n,
        // Fewer samples may be converted at once.
        _ if transposed.a => MAX_CONVERTED.max(depth * n),
        _ => depth * n,
    };
    let packed = if uses_avx512(dtype) { 0 } else { packed() };
    (acc_bytes(dtype) * (packed + converted_elements(dtype, m * k + converted))) as u64
}

/// Like [`gemm_workspace`], for [`matmul`](super::matmul) and [`matmul_epilogue`](super::matmul_epilogue).
pub fn matmul_workspace(
    dtype: DType,
    (m, k, n): (usize, usize, usize),
    transposed: Transposed,
    threading: Threading,
) -> u64 {
    if threading == Threading::Parallel && gemv::supports_sizes(m, transposed) {
        return gemv::workspace(dtype, m, k);
    }
    #[cfg(target_arch = "x86_64")]
    if threading == Threading::Parallel && dispatch() == Dispatch::Amx {
        let bytes = with_amx_elem!(dtype, E => {
            amx::supports::<E>((m, k, n)).then(|| amx::gemm_workspace::<E, E>((m, k, n), transposed) as u64)
        });
        if let Some(bytes) = bytes {
            return bytes;
        }
    }
    #[cfg(target_arch = "x86_64")]
    if threading == Threading::Parallel && packs_blocks(dtype, (m, k, n)) && avx512_packed::rounds(k) {
        let bytes =
            with_amx_elem!(dtype, E => Some(avx512_packed::workspace::<E, E>((m, k, n), transposed.a)));
        return bytes.map_or(0, |bytes| bytes as u64);
    }
    gemm_workspace(dtype, (m, k, n), transposed, threading)
        + (acc_bytes(dtype) * converted_elements(dtype, m * n)) as u64
}

/// Values of `b` that are converted at a time, if it has more: they are in cache when they are multiplied.
const MAX_CONVERTED: usize = 1 << 19;

/// Values of `a` that are packed at a time, if it has more rows: `gemm` would pack as many as fit into the last cache,
/// which is another number of bytes on every machine.
const MAX_PACKED: usize = 1 << 21;

/// Rows of an operand with `k` columns that are multiplied at a time, so that no more is packed.
pub(super) fn max_packed_rows(dtype: DType, k: usize) -> usize {
    let GemmTile { width, depth, .. } = GemmTile::of(dtype);
    MAX_PACKED / slice_depth(k, depth).max(1) / width * width
}

/// Rows of a (k, n) right operand that are converted at a time: a slice of K as the `gemm` crate cuts it, or all.
pub(super) fn converted_depth(dtype: DType, (k, n): (usize, usize), threading: Threading) -> usize {
    let is_small = k * n <= MAX_CONVERTED || converted_elements(dtype, 1) == 0;
    if is_small || threading == Threading::Serial { k } else { slice_depth(k, GemmTile::of(dtype).depth) }
}

/// The length of slices of K that are at most `longest`.
fn slice_depth(k: usize, longest: usize) -> usize {
    k.div_ceil(k.div_ceil(longest).max(1))
}

/// The tile of the result that a kernel of `gemm` 0.19 keeps in registers, transposed as it computes it, and the
/// longest slice of K.
struct GemmTile {
    height: usize,
    width: usize,
    depth: usize,
}

impl GemmTile {
    fn of(dtype: DType) -> Self {
        let size = acc_bytes(dtype);
        match dispatch() {
            Dispatch::Portable => Self { height: 2, width: 4, depth: 2048 },
            _ => Self { height: 2 * 32 / size, width: 6, depth: 1024 },
        }
    }
}

/// How many of `values` elements a GEMM converts to another type.
fn converted_elements(dtype: DType, values: usize) -> usize {
    if acc_bytes(dtype) == dtype.size_in_bytes() { 0 } else { values }
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

/// Bytes that each thread keeps after its first GEMM of this type.
pub fn thread_buffer_bytes(dtype: DType) -> u64 {
    if uses_avx512(dtype) { 0 } else { gemm_buffer_bytes() }
}

/// Replaces the size of the L2 cache, for tests that compare plans byte by byte.
const L2_BYTES_VAR: &str = "TRAINER_L2_BYTES";

/// Bytes that each thread keeps after its first GEMM by `gemm`, as candle's are: it packs into a per-thread buffer the
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
    return match dispatch() {
        Dispatch::Amx => amx::STACK_BYTES as u64,
        Dispatch::Avx512 => avx512::STACK_BYTES as u64,
        Dispatch::Avx2 | Dispatch::Portable => 0,
    };
    #[cfg(not(target_arch = "x86_64"))]
    return 0;
}
