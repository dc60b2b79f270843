//! AMX, the matrix unit of newer x86 processors: a block of a product by it.
//!
//! It multiplies tiles of bf16 and adds up in f32. Values of bf16 are multiplied as they are. An f16 is exactly the sum
//! of two values of bf16 (see `split`), and of the four products of two such sums the three largest are made: what is left
//! out is 2^-16 of a product at most, a thirty-second of what rounding one factor to f16 took. An f32 is exactly the sum of
//! three, and of the nine products the six largest are made: what is left out is 2^-23 of a product at most, as much as
//! rounding it to f32 would take. A tile's 32 products are added up apart before they meet the running sum, so the sums are
//! rounded less often than one by one.

use std::arch::asm;

/// Rows and columns of a tile of sums.
pub(super) const TILE_DIM: usize = 16;
/// Inner sums of a tile.
pub(super) const TILE_K: usize = 32;
/// Bytes of a tile. A panel (of [`TILE_DIM`] rows or columns) has one for each part of its values for [`TILE_K`] inner sums, the
/// largest part first.
pub(super) const TILE_BYTES: usize = 1024;

/// The unit, ready for use by this thread until dropped.
pub(super) struct TileConfigGuard(std::marker::PhantomData<*const ()>);

/// Tiles in use.
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

    /// Makes, or with `add` adds to, the sums of a panel of rows and one of columns over `steps` times [`TILE_K`] inner
    /// sums: [`TILE_DIM`] rows of as many, `stride` bytes apart.
    ///
    /// # Safety
    /// There is a step at least, the panels have `steps` times `PARTS` tiles, and `multiply_panels` has room, all aligned to 64.
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
        // Tile 0 is the sums, 1 rows, 2 columns. More sums at once would save loads; but where another thread shares the
        // core, few results can wait beside the tiles in use: with five in use a product takes a fifth longer there, with
        // eight twice as long, and alone none is faster. Parts follow each other so that one side changes at a time,
        // the largest product last.
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
        // SAFETY: the panels are as long as promised, and `multiply_panels` has room for a tile.
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
        // SAFETY: nothing of the tiles is wanted any more; the next switch of threads need not keep them.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}
