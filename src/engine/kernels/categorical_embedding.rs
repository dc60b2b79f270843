//! Embeddings of a sample's categorical columns, concatenated with its numeric columns.

use candle_core::{DType, Result, Tensor, bail};

use super::{Elem, Real, cpu, kernel_timer, reference};
use crate::{vectorised, with_elem};

/// `y[b] = [x[b, ..num_numeric], tables[0][x[b, num_numeric]], tables[1][x[b, num_numeric + 1]], ...]`. `x` is f32
/// whatever the type of the tables. An index equal to a table's row count means "unknown category" and gives zeros.
pub struct CategoricalEmbeddingKernel<'a> {
    pub num_numeric: usize,
    /// (rows, width) each.
    pub tables: Vec<&'a Tensor>,
}

/// Shape of a table and its place in an output row.
struct TableLayout {
    rows: usize,
    width: usize,
    /// First column of its values in an output row.
    offset: usize,
}

/// Row ranges of a table that accumulate gradients in parallel, one thread each.
const GRAD_CHUNKS: usize = 8;

impl CategoricalEmbeddingKernel<'_> {
    /// The tables, and the width of an output row.
    fn sizes(&self) -> Result<(Vec<TableLayout>, usize)> {
        let mut offset = self.num_numeric;
        let table = |tensor: &&Tensor| {
            let (rows, width) = tensor.dims2()?;
            offset += width;
            Ok(TableLayout { rows, width, offset: offset - width })
        };
        let tables = self.tables.iter().map(table).collect::<Result<_>>()?;
        Ok((tables, offset))
    }

    fn dtype(&self, x: &Tensor) -> DType {
        self.tables.first().map_or(x.dtype(), |table| table.dtype())
    }

    /// Reference implementation; `x` is (batch, num_numeric + tables).
    pub fn reference(&self, x: &Tensor) -> Result<Tensor> {
        let mut parts = Vec::new();
        if self.num_numeric > 0 {
            parts.push(x.narrow(1, 0, self.num_numeric)?.to_dtype(self.dtype(x))?);
        }
        for (i, table) in self.tables.iter().enumerate() {
            let indices = x.narrow(1, self.num_numeric + i, 1)?.flatten_all()?.to_dtype(DType::U32)?;
            let unknown = Tensor::zeros((1, table.dim(1)?), table.dtype(), table.device())?;
            parts.push(Tensor::cat(&[table, &unknown], 0)?.index_select(&indices, 0)?);
        }
        Tensor::cat(&parts, 1)
    }

    /// The output is (batch, num_numeric + sum of widths).
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _scope = kernel_timer::enter(module_path!());
        if !reference::has_cpu_kernel(x) {
            return self.reference(x);
        }
        with_elem!(self.dtype(x), T => self.forward_cpu::<T>(x))
    }

    fn forward_cpu<T: Elem>(&self, x: &Tensor) -> Result<Tensor> {
        let ((batch, inputs), (tables, n)) = (x.dims2()?, self.sizes()?);
        let x = cpu::view::<f32>(x)?;
        self.check_indices(&x, inputs, &tables)?;
        let values = self.tables.iter().map(|table| cpu::view::<T>(table)).collect::<Result<Vec<_>>>()?;
        let mut y = cpu::uninit::<T>(batch * n);
        cpu::parallel_for_rows(&mut y, n, |first, y| {
            for (y, x) in y.chunks_exact_mut(n).zip(x[first * inputs..].chunks_exact(inputs)) {
                let (numeric, indices) = x.split_at(self.num_numeric);
                y.iter_mut().zip(numeric).for_each(|(y, x)| *y = T::from_acc(T::Acc::of_f64(f64::from(*x))));
                for ((table, values), index) in tables.iter().zip(&values).zip(indices) {
                    let into = &mut y[table.offset..][..table.width];
                    match values.get(*index as usize * table.width..).and_then(|rest| rest.get(..table.width))
                    {
                        Some(row) => into.copy_from_slice(row),
                        None => into.fill(T::default()),
                    }
                }
            }
        });
        cpu::tensor(y, (batch, n))
    }

    /// Checks that every index is a row of its table or the unknown index right after the last row.
    fn check_indices(&self, x: &[f32], inputs: usize, tables: &[TableLayout]) -> Result<()> {
        if inputs != self.num_numeric + tables.len() {
            bail!("row of {inputs} values, expected {} numeric and {} tables", self.num_numeric, tables.len())
        }
        for x in x.chunks_exact(inputs) {
            for (i, (index, table)) in x[self.num_numeric..].iter().zip(tables).enumerate() {
                if *index != (*index as u32) as f32 || *index as usize > table.rows {
                    bail!("index {index} is not in table {i}, which has {} rows", table.rows)
                }
            }
        }
        Ok(())
    }

    /// Accumulates the gradients of the tables into `grads`, which has `None` for a frozen table.
    pub fn backward(&self, x: &Tensor, dy: &Tensor, grads: &[Option<&Tensor>]) -> Result<()> {
        let _scope = kernel_timer::enter(module_path!());
        if reference::has_cpu_kernel(x) {
            return with_elem!(dy.dtype(), T => self.backward_cpu::<T>(x, dy, grads));
        }
        let found = reference::gradients(&self.tables, dy, |tables| {
            CategoricalEmbeddingKernel { num_numeric: self.num_numeric, tables: tables.iter().collect() }
                .reference(x)
        })?;
        let mut trained = grads.iter().zip(&found).filter_map(|(into, found)| Some(((*into)?, found)));
        trained.try_for_each(|(into, found)| reference::accumulate(into, found))
    }

    /// One thread owns each range of a table's rows and adds the samples in order, so the result is deterministic.
    fn backward_cpu<T: Elem>(&self, x: &Tensor, dy: &Tensor, grads: &[Option<&Tensor>]) -> Result<()> {
        let (inputs, (tables, n)) = (x.dim(1)?, self.sizes()?);
        let (x, dy) = (cpu::view::<f32>(x)?, cpu::view::<T>(dy)?);
        for (i, (table, grads)) in tables.iter().zip(grads).enumerate() {
            let Some(grads) = grads else { continue };
            let rows = table.rows.div_ceil(GRAD_CHUNKS).max(1);
            let indices = || x.chunks_exact(inputs).map(|x| x[self.num_numeric + i] as usize);
            cpu::with_slice_mut::<T::Acc, _>(grads, |grads| {
                cpu::parallel_for_chunks(grads, rows * table.width, |chunk, grads| {
                    for (dy, index) in dy.chunks_exact(n).zip(indices()) {
                        let into = index.checked_sub(chunk * rows).map(|row| row * table.width);
                        if let Some(into) = into.and_then(|at| grads.get_mut(at..at + table.width)) {
                            let dy = &dy[table.offset..][..table.width];
                            vectorised!(T, || into.iter_mut().zip(dy).for_each(|(a, d)| *a += d.to_acc()));
                        }
                    }
                })
            })?;
        }
        Ok(())
    }
}

/// Upper bound in bytes of what the reference allocates beside input and output, (forward, backward), for `batch`
/// samples with `num_numeric` numeric columns and `tables` of (rows, width). GPUs run the reference: there is no CUDA
/// kernel.
pub fn cuda_workspace(
    dtype: DType,
    batch: usize,
    num_numeric: usize,
    tables: &[(usize, usize)],
) -> (u64, u64) {
    let outputs = num_numeric + tables.iter().map(|(_, width)| width).sum::<usize>();
    let padded: usize = tables.iter().map(|(rows, width)| (rows + 2) * width).sum();
    // The parts before concatenation, each table with its zero row, and the indices in two types.
    let forward = cpu::size_in_bytes(dtype, batch * outputs + padded)
        + 8 * (batch * (num_numeric + tables.len())) as u64;
    // The same again, plus its output, its gradient and the sum; then each table's gradient and the value it replaces.
    let backward = forward + cpu::size_in_bytes(dtype, 4 * batch * outputs + 3 * padded) + 8 * padded as u64;
    (forward, backward)
}
