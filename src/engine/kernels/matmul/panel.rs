//! What the GEMMs by panels share: a strip of rows is multiplied with a panel, which is some columns of the right
//! operand, packed row by row. `vectors` has the kernels.
//!
//! A sum runs over K in order, so a value depends neither on its neighbors nor on the threads.

use super::CpuEpilogue;
use crate::kernels::Elem;

/// Most rows of a panel that are multiplied at a time.
pub(super) const PANEL_K: usize = 256;
/// Most columns of a panel, and most values of a vector, of any kernel.
pub(super) const MAX_COLUMNS: usize = 64;
pub(super) const MAX_LANES: usize = 16;

/// Room for [`PANEL_K`] rows of [`MAX_COLUMNS`].
#[repr(C, align(64))]
pub(super) struct PackedPanel<R>([[R; MAX_COLUMNS]; PANEL_K]);

/// Bytes of stack that GEMMs by panels take.
pub(super) const STACK_BYTES: usize = size_of::<PackedPanel<f32>>();

/// The kernels of an instruction set, for operands of type `E` and results of type `O`.
///
/// # Safety
/// All methods need the instructions, and pointers to as many values as their counts say.
pub(super) trait PanelKernel<E: Elem, O: Elem<Acc = E::Acc>> {
    /// Values of a vector. A row of a panel is padded with zeros to whole vectors.
    const LANES: usize;
    /// Columns of the widest panel: whole vectors, [`MAX_COLUMNS`] or a part of them.
    const PANEL_COLUMNS: usize;

    /// `to = from`, in the accumulator type.
    unsafe fn widen(from: *const E, to: &mut [E::Acc]);

    /// Packs `cols` columns of `depth` rows. One of the strides, of rows and columns, is 1.
    unsafe fn pack(from: *const E, strides: (usize, usize), depth: usize, cols: usize, to: *mut E::Acc);

    unsafe fn multiply(gemm: &PanelGemm<E::Acc>);

    /// Part of a row of the result: its sums, after the epilogue, rounded once.
    unsafe fn store(sums: *const E::Acc, out: &mut [O], epilogue: Option<RowEpilogue<O>>);
}

/// All rows of a strip times the rows of a panel: the sums begin or increase those in `out`.
pub(super) struct PanelGemm<R> {
    pub rows: usize,
    /// At most [`PANEL_K`].
    pub depth: usize,
    pub columns: usize,
    pub a: *const R,
    /// Strides of the rows and columns of `a`.
    pub a_strides: (usize, usize),
    pub packed: *const R,
    pub out: *mut R,
    pub stride: usize,
    pub accumulate: bool,
}

/// A [`CpuEpilogue`] for part of a row: `clamp(sum + bias) + residual`.
#[derive(Clone, Copy)]
pub(super) struct RowEpilogue<'a, O: Elem> {
    pub bias: Option<&'a [O]>,
    pub bounds: (O::Acc, O::Acc),
    pub residual: Option<&'a [O]>,
}

impl<'a, O: Elem> RowEpilogue<'a, O> {
    /// For `count` values of the result from `at` on, which are in the columns from `column` on.
    pub fn new(epilogue: CpuEpilogue<'a, O>, at: usize, column: usize, count: usize) -> Self {
        Self {
            bias: epilogue.bias.map(|bias| &bias[column..][..count]),
            bounds: epilogue.clamp.bounds(),
            residual: epilogue.residual.map(|residual| &residual[at..][..count]),
        }
    }
}
