//! GEMMs that are too small or too thin for packed operands to pay.
//!
//! A thread packs a panel of the right operand on its stack, multiplies all of its rows of the left one with it, where
//! they are, and goes on to the next.

use super::MatView;
use super::panel::{PANEL_K, PackedPanel, PanelGemm, PanelKernel};
use crate::kernels::Real;
use crate::kernels::cpu::parallel_for;

/// Rows, values of K, and multiplications up to which packing does not pay.
const FEW_ROWS: usize = 384;
const FEW_STEPS: usize = 128;
const FEW_MULTIPLIES: usize = 1 << 26;

/// Whether these are the fastest GEMMs for an (m, n) result over `k` on all threads.
pub(super) fn is_fastest((m, k, n): (usize, usize, usize)) -> bool {
    m <= FEW_ROWS || k <= FEW_STEPS || m.saturating_mul(k).saturating_mul(n) <= FEW_MULTIPLIES
}

/// `out = a b`, or `out += a b` with `accumulate`, in this thread.
///
/// # Safety
/// The CPU has the instructions of `P`, the operands lie inside their slices, and `out` has room for every (i, j) at
/// `i * stride + j`.
pub(super) unsafe fn gemm<R: Real, P: PanelKernel<R, R>>(
    out: &mut [R],
    stride: usize,
    a: MatView<R>,
    b: MatView<R>,
    accumulate: bool,
) {
    // SAFETY: the caller upholds this function's contract.
    unsafe {
        gemm_panels::<R, P>(
            Operands::new(&a, &b),
            (a.rows, a.cols, b.cols),
            out.as_mut_ptr(),
            stride,
            accumulate,
        )
    }
}

/// Like [`gemm`], on all threads: each computes some rows of some columns.
///
/// # Safety
/// As for [`gemm`].
pub(super) unsafe fn gemm_parallel<R: Real, P: PanelKernel<R, R>>(
    out: &mut [R],
    stride: usize,
    a: MatView<R>,
    b: MatView<R>,
    accumulate: bool,
) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    let (rows, columns) = grid((m, k, n), [P::PANEL_COLUMNS, P::LANES], rayon::current_num_threads());
    if (rows, columns) == (m, n) {
        // SAFETY: the caller upholds this function's contract.
        return unsafe { gemm::<R, P>(out, stride, a, b, accumulate) };
    }
    struct SharedOperands<R> {
        o: Operands<R>,
        out: *mut R,
    }
    // SAFETY: the operands are only read, and every thread writes its own rows and columns.
    unsafe impl<R: Real> Sync for SharedOperands<R> {}
    let shared = &SharedOperands { o: Operands::new(&a, &b), out: out.as_mut_ptr() };
    let column_chunks = n.div_ceil(columns);
    parallel_for(m.div_ceil(rows) * column_chunks, &|index| {
        let (row, column) = (index / column_chunks * rows, index % column_chunks * columns);
        let sizes = (rows.min(m - row), k, columns.min(n - column));
        // SAFETY: the caller's contract for all rows and columns holds for some of them.
        unsafe {
            let o = shared.o.from(row, column);
            gemm_panels::<R, P>(o, sizes, shared.out.add(row * stride + column), stride, accumulate)
        }
    });
}

/// The rows and columns of an (m, n) result over `k` that one of `threads` computes at a time. The longer side is split
/// first, into whole tiles or whole panels; the other, and panels into vectors, where that is too few for all threads.
fn grid((m, k, n): (usize, usize, usize), [panel, vector]: [usize; 2], threads: usize) -> (usize, usize) {
    /// Multiplications that are worth another thread.
    const MIN_MULTIPLIES_PER_THREAD: usize = 1 << 17;
    /// Rows of whole tiles of every width, and of most.
    const TILE_ROWS: [usize; 2] = [48, 12];
    let wanted = (m * k * n / MIN_MULTIPLIES_PER_THREAD).clamp(1, threads);
    // The length of chunks of whole `granularity`, at most `count` of them.
    let chunk = |size: usize, granularity: usize, count: usize| {
        size.div_ceil(count.min(size.div_ceil(granularity))).next_multiple_of(granularity).min(size)
    };
    let rest = |size: usize, chunk: usize| wanted.div_ceil(size.div_ceil(chunk));
    let (rows, columns) = if m >= n {
        let rows = chunk(m, TILE_ROWS[0], wanted);
        (rows, chunk(n, panel, rest(m, rows)))
    } else {
        let columns = chunk(n, panel, wanted);
        (chunk(m, TILE_ROWS[1], rest(n, columns)), columns)
    };
    match m.div_ceil(rows) * n.div_ceil(columns) < wanted {
        true if m >= n => (chunk(m, TILE_ROWS[1], rest(n, columns)), columns),
        true => (rows, chunk(n, vector, rest(m, rows))),
        false => (rows, columns),
    }
}

/// Where the operands begin, and their strides of rows and columns.
#[derive(Clone, Copy)]
struct Operands<R> {
    a: *const R,
    a_strides: (usize, usize),
    b: *const R,
    b_strides: (usize, usize),
}

impl<R: Real> Operands<R> {
    fn new(a: &MatView<R>, b: &MatView<R>) -> Self {
        Self { a: a.data.as_ptr(), a_strides: a.strides(), b: b.data.as_ptr(), b_strides: b.strides() }
    }

    /// Without the rows of `a` before `row` and the columns of `b` before `column`, which must be in their slices.
    unsafe fn from(&self, row: usize, column: usize) -> Self {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            Self { a: self.a.add(row * self.a_strides.0), b: self.b.add(column * self.b_strides.1), ..*self }
        }
    }
}

unsafe fn gemm_panels<R: Real, P: PanelKernel<R, R>>(
    o: Operands<R>,
    (m, k, n): (usize, usize, usize),
    out: *mut R,
    stride: usize,
    accumulate: bool,
) {
    let mut panel = std::mem::MaybeUninit::<PackedPanel<R>>::uninit();
    let packed = panel.as_mut_ptr().cast::<R>();
    let (k_blocks, vectors) = (k.div_ceil(PANEL_K), n.div_ceil(P::LANES));
    let n_blocks = n.div_ceil(P::PANEL_COLUMNS);
    for d in 0..k_blocks {
        let (from, to) = (k * d / k_blocks, k * (d + 1) / k_blocks);
        for w in 0..n_blocks {
            let start = vectors * w / n_blocks * P::LANES;
            let columns = (vectors * (w + 1) / n_blocks * P::LANES).min(n) - start;
            // SAFETY: rows `from..to` of these columns lie inside `b`, and likewise for `a` and `out`.
            unsafe {
                let b = o.b.add(from * o.b_strides.0 + start * o.b_strides.1);
                P::pack(b, o.b_strides, to - from, columns, packed);
                P::multiply(&PanelGemm {
                    rows: m,
                    depth: to - from,
                    columns,
                    a: o.a.add(from * o.a_strides.1),
                    a_strides: o.a_strides,
                    packed,
                    out: out.add(start),
                    stride,
                    accumulate: accumulate || d > 0,
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_share_results_of_any_shape() {
        for (sizes, threads, expected) in [
            ((1000, 500, 70), 4, (288, 70)),
            ((70, 500, 1000), 4, (70, 256)),
            // Two panels for four threads; vectors for eight.
            ((64, 3136, 128), 4, (36, 64)),
            ((20, 3136, 128), 8, (12, 32)),
            ((100, 3000, 90), 8, (36, 64)),
            // Not worth a second thread.
            ((64, 16, 64), 8, (64, 64)),
        ] {
            assert_eq!(grid(sizes, [64, 16], threads), expected, "{sizes:?}");
        }
    }
}
