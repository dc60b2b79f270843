//! Linear maps of one input, their outputs side by side: `y = [x W1' + b1, x W2' + b2, ...]`.

#[cfg(feature = "cuda")]
mod card;

use candle_core::{DType, Result, Tensor};

#[cfg(feature = "cuda")]
use super::cuda;
use super::linear::{add_all, both, column_sums};
use super::product::{By, Mat, copies_nothing, multiply, packing, round};
use super::{Elem, Real, cpu, reference};
use crate::{vectorised, with_elem};

/// A map: its weight is (out, in), its bias (out).
#[derive(Clone, Copy)]
pub struct Map<'a> {
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
}

/// The maps with the first of the output's columns each.
fn placed<'a>(maps: &[Map<'a>]) -> Result<(Vec<(usize, Map<'a>)>, usize)> {
    let mut columns = 0;
    let mut placed = Vec::with_capacity(maps.len());
    for map in maps {
        placed.push((columns, *map));
        columns += map.weight.dim(0)?;
    }
    Ok((placed, columns))
}

/// The reference.
pub fn reference(x: &Tensor, maps: &[Map]) -> Result<Tensor> {
    let k = x.dim(x.rank() - 1)?;
    let rows = x.reshape((x.elem_count() / k, k))?;
    let one = |map: &Map| {
        let y = rows.matmul(&map.weight.t()?)?;
        map.bias.map_or(Ok(y.clone()), |bias| y.broadcast_add(bias))
    };
    let y = Tensor::cat(&maps.iter().map(one).collect::<Result<Vec<_>>>()?, 1)?;
    y.reshape([&x.dims()[..x.rank() - 1], &[y.dim(1)?]].concat())
}

pub fn forward(x: &Tensor, maps: &[Map]) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(device) = cuda::of(x) {
        return card::forward(device, x, maps);
    }
    if !reference::has_body(x) {
        return reference(x, maps);
    }
    with_elem!(x.dtype(), T => forward_cpu::<T>(x, maps))
}

fn forward_cpu<T: Elem>(x: &Tensor, maps: &[Map]) -> Result<Tensor> {
    let ((maps, n), k) = (placed(maps)?, x.dim(x.rank() - 1)?);
    let values = cpu::view::<T>(x)?;
    let rows = values.len() / k;
    let mut y = cpu::fresh::<T>(rows * n);
    let mut wide = vec![T::Acc::ZERO; if T::as_acc_mut(&mut y).is_none() { rows * n } else { 0 }];
    let out = T::as_acc_mut(&mut y).unwrap_or(&mut wide);
    for (first, map) in &maps {
        let w = cpu::view::<T>(map.weight)?;
        let w = Mat::new(&w, w.len() / k, k).t();
        multiply::<T>(&mut out[*first..], n, Mat::new(&values, rows, k), w, false, By::All);
    }
    if !wide.is_empty() {
        round(&wide, &mut y, By::All);
    }
    let mut biases = Vec::with_capacity(maps.len());
    for (first, map) in &maps {
        if let Some(bias) = map.bias {
            biases.push((*first, cpu::view::<T>(bias)?));
        }
    }
    if !biases.is_empty() {
        let biases: Vec<(usize, &[T])> = biases.iter().map(|(first, bias)| (*first, &**bias)).collect();
        cpu::for_rows(&mut y, n, |_, y| {
            vectorised!(T, || {
                for row in y.chunks_exact_mut(n) {
                    for (first, bias) in &biases {
                        let row = row[*first..].iter_mut().zip(*bias);
                        row.for_each(|(y, b)| *y = T::down(y.up() + b.up()));
                    }
                }
            })
        });
    }
    cpu::tensor(y, [&x.dims()[..x.rank() - 1], &[n]].concat())
}

/// Adds the gradients of the maps to `grads`, which lie as the maps do, and returns the input's where
/// it is wanted.
pub fn backward(x: &Tensor, maps: &[Map], dy: &Tensor, grads: &[Map], want: bool) -> Result<Option<Tensor>> {
    #[cfg(feature = "cuda")]
    if let Some(device) = cuda::of(x) {
        return card::backward(device, x, maps, dy, grads, want);
    }
    if reference::has_body(x) {
        return with_elem!(x.dtype(), T => backward_cpu::<T>(x, maps, dy, grads, want));
    }
    let tensors = |maps: &[Map<'_>]| -> Vec<Tensor> {
        maps.iter().flat_map(|map| [Some(map.weight), map.bias]).flatten().cloned().collect()
    };
    let (own, into) = (tensors(maps), tensors(grads));
    let inputs: Vec<&Tensor> = std::iter::once(x).chain(&own).collect();
    let found = reference::gradients(&inputs, dy, |t| {
        let mut rest = t[1..].iter();
        let mut maps = maps.to_vec();
        for map in &mut maps {
            let bias = map.bias.is_some();
            map.weight = rest.next().unwrap_or(map.weight);
            map.bias = if bias { rest.next() } else { None };
        }
        reference(&t[0], &maps)
    })?;
    into.iter().zip(&found[1..]).try_for_each(|(into, found)| reference::accumulate(into, found))?;
    Ok(want.then(|| found[0].clone()))
}

fn backward_cpu<T: Elem>(
    x: &Tensor,
    maps: &[Map],
    dy: &Tensor,
    grads: &[Map],
    want: bool,
) -> Result<Option<Tensor>> {
    let ((maps, n), k) = (placed(maps)?, x.dim(x.rank() - 1)?);
    let (values, d) = (cpu::view::<T>(x)?, cpu::view::<T>(dy)?);
    let (values, d): (&[T], &[T]) = (&values, &d);
    let rows = values.len() / k;
    let sums = if grads.iter().any(|g| g.bias.is_some()) { column_sums(d, n) } else { Vec::new() };
    let of_map = |first: usize, outputs: usize| Mat::strided(&d[first..], rows, outputs, n);
    let weights = || -> Result<()> {
        for ((first, map), grad) in maps.iter().zip(grads) {
            let d = of_map(*first, map.weight.dim(0)?);
            cpu::update::<T::Acc, _>(grad.weight, |dw| {
                multiply::<T>(dw, k, d.t(), Mat::new(values, rows, k), true, By::All)
            })?;
            if let Some(bias) = grad.bias {
                cpu::update::<T::Acc, _>(bias, |into| {
                    for sum in &sums {
                        add_all(into, &[&sum[*first..]]);
                    }
                })?;
            }
        }
        Ok(())
    };
    let input = || -> Result<Vec<T>> {
        let mut dx = cpu::fresh::<T>(rows * k);
        let mut wide = vec![T::Acc::ZERO; if T::as_acc_mut(&mut dx).is_none() { rows * k } else { 0 }];
        let out = T::as_acc_mut(&mut dx).unwrap_or(&mut wide);
        for (i, (first, map)) in maps.iter().enumerate() {
            let w = cpu::view::<T>(map.weight)?;
            let outputs = w.len() / k;
            multiply::<T>(out, k, of_map(*first, outputs), Mat::new(&w, outputs, k), i > 0, By::All);
        }
        if !wide.is_empty() {
            round(&wide, &mut dx, By::All);
        }
        Ok(dx)
    };
    let (done, dx) = both(T::DTYPE, weights, || want.then(input).transpose());
    done?;
    dx?.map(|dx| cpu::tensor(dx, x.shape())).transpose()
}

/// Bytes of temporaries of the forward and of the backward pass of maps from `k` values to these.
pub fn workspace(dtype: DType, rows: usize, k: usize, widths: &[usize]) -> (u64, u64) {
    let acc = cpu::acc_bytes(dtype);
    // Results in the type that is computed in, where it is another.
    let wide = |values: usize| if dtype.size_in_bytes() == acc { 0 } else { (values * acc) as u64 };
    // Columns of one map's gradient are copied with those that lie between them.
    let columns: usize = widths.iter().sum();
    let gaps = if copies_nothing(dtype) { 0 } else { wide(rows * columns) };
    let largest = |packed: &dyn Fn(usize) -> u64| widths.iter().map(|n| packed(*n)).max().unwrap_or(0);
    let output = largest(&|n| packing(dtype, (rows, k, n), false, By::All));
    let input = largest(&|n| packing(dtype, (rows, n, k), false, By::All)) + wide(rows * k) + gaps;
    let weight = largest(&|n| packing(dtype, (n, rows, k), true, By::All)) + gaps;
    let backward = if copies_nothing(dtype) { weight + input } else { weight.max(input) };
    (output + wide(rows * columns), backward)
}
