//! AMX, the matrix unit of recent x86 processors: configuration, and the tile kernel.
//!
//! AMX multiplies bf16 tiles and accumulates in f32. bf16 values are multiplied directly. An f16 is exactly the sum of
//! two bf16 values (see `bf16_split`). Of the four products of two such sums the kernel computes the three largest:
//! what it drops is at most 2^-16 of a product, a thirty-second of the error from rounding one factor to f16. An f32 is
//! exactly the sum of three, and of the nine products the kernel computes the six largest: what it drops is at most
//! 2^-23 of a product, as much as rounding it to f32. AMX adds a tile's 32 products before it adds them to the running
//! sum, so it rounds less often than one-by-one summation.

use std::arch::asm;

/// Rows and columns of a tile of sums.
pub(super) const TILE_DIM: usize = 16;
/// K of a tile.
pub(super) const TILE_K: usize = 32;
/// Bytes of a tile. A panel (of [`TILE_DIM`] rows or columns) has one tile per bf16 part for every [`TILE_K`] of K, the
/// largest part first.
pub(super) const TILE_BYTES: usize = 1024;

/// AMX tile configuration of this thread, released on drop.
pub(super) struct TileConfigGuard(std::marker::PhantomData<*const ()>);

/// Tile registers in use.
const TILES_IN_USE: usize = 3;

#[repr(C, align(64))]
struct TileConfig {
    palette_id: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileConfigGuard {
    /// # Safety
    /// The dispatch is AMX.
    pub(super) unsafe fn new() -> Self {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        row_bytes[..TILES_IN_USE].fill(64);
        rows[..TILES_IN_USE].fill(16);
        let shapes = TileConfig { palette_id: 1, start_row: 0, reserved: [0; 14], row_bytes, rows };
        // SAFETY: palette 1 has eight tiles of up to 16 rows of 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &shapes, options(nostack, readonly)) };
        Self(std::marker::PhantomData)
    }

    /// Computes the [`TILE_DIM`] x [`TILE_DIM`] sums of a row panel and a column panel over `steps` times [`TILE_K`] of
    /// K, or with `add` accumulates into them. Rows of `sums` are `stride` bytes apart.
    ///
    /// # Safety
    /// `steps` is at least 1, each panel has `steps` times `PARTS` tiles, `sums` has room for a tile, and all pointers
    /// are aligned to 64.
    #[inline]
    pub(super) unsafe fn multiply_panels<const PARTS: usize>(
        &self,
        rows: *const u8,
        columns: *const u8,
        steps: usize,
        sums: *mut f32,
        stride: usize,
        add: bool,
    ) {
        // Tile 0 holds the sums, 1 rows, 2 columns. More sums at once would save loads. But where another thread shares
        // the core, few results can wait beside the tiles in use: with five tiles a GEMM takes a fifth longer there,
        // with eight twice as long, and a thread alone on its core gains nothing. The order of parts changes one
        // operand at a time and ends with the largest product.
        macro_rules! run {
            ($($products:literal,)*) => {
                asm!(
                    "tilezero tmm0",
                    "test {add}, {add}",
                    "jz 2f",
                    "tileloadd tmm0, [{sums} + {stride}]",
                    "2:",
                    $($products,)*
                    "add {a}, {step}",
                    "add {b}, {step}",
                    "dec {n}",
                    "jnz 2b",
                    "tilestored [{sums} + {stride}], tmm0",
                    a = inout(reg) rows => _,
                    b = inout(reg) columns => _,
                    n = inout(reg) steps => _,
                    s = in(reg) 64usize,
                    sums = in(reg) sums,
                    stride = in(reg) stride,
                    add = in(reg) add as usize,
                    step = const PARTS * TILE_BYTES,
                    options(nostack),
                )
            };
        }
        // SAFETY: the panels are as long as promised, and `sums` has room for a tile.
        unsafe {
            match PARTS {
                1 => run!(
                    "tileloadd tmm1, [{a} + {s}]",
                    "tileloadd tmm2, [{b} + {s}]",
                    "tdpbf16ps tmm0, tmm1, tmm2",
                ),
                2 => run!(
                    "tileloadd tmm1, [{a} + {s} + 1024]",
                    "tileloadd tmm2, [{b} + {s}]",
                    "tdpbf16ps tmm0, tmm1, tmm2",
                    "tileloadd tmm1, [{a} + {s}]",
                    "tdpbf16ps tmm0, tmm1, tmm2",
                    "tileloadd tmm2, [{b} + {s} + 1024]",
                    "tdpbf16ps tmm0, tmm1, tmm2",
                ),
                _ => run!(
                    "tileloadd tmm1, [{a} + {s} + 2048]",
                    "tileloadd tmm2, [{b} + {s}]",
                    "tdpbf16ps tmm0, tmm1, tmm2",
                    "tileloadd tmm1, [{a} + {s} + 1024]",
                    "tdpbf16ps tmm0, tmm1, tmm2",
                    "tileloadd tmm2, [{b} + {s} + 1024]",
                    "tdpbf16ps tmm0, tmm1, tmm2",
                    "tileloadd tmm1, [{a} + {s}]",
                    "tdpbf16ps tmm0, tmm1, tmm2",
                    "tileloadd tmm2, [{b} + {s} + 2048]",
                    "tdpbf16ps tmm0, tmm1, tmm2",
                    "tileloadd tmm2, [{b} + {s}]",
                    "tdpbf16ps tmm0, tmm1, tmm2",
                ),
            }
        }
    }
}

impl Drop for TileConfigGuard {
    fn drop(&mut self) {
        // SAFETY: no tile is read after this; context switches then need not save tile state.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}
