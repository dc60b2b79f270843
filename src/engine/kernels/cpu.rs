//! Access from candle tensors to plain CPU slices, and the parallel loops over them.
//!
//! Chunk bounds depend on the sizes alone, so a result depends neither on the number of threads nor on their timing.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::{Deref, Range};

use candle_core::{
    CpuStorage, DType, Device, InplaceOp1, Layout, Result, Shape, Storage, StorageRef, Tensor, WithDType,
    bail,
};
use rayon::prelude::*;

use super::{Elem, Real};

/// Elements below which a loop is not worth another thread.
const GRAIN_SIZE: usize = 16 * 1024;

/// The values of a contiguous tensor, borrowed.
pub struct View<'a, T> {
    storage: StorageRef<'a>,
    range: Range<usize>,
    elem: PhantomData<T>,
}

pub fn view<T: WithDType>(tensor: &Tensor) -> Result<View<'_, T>> {
    let (storage, layout) = tensor.storage_and_layout();
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!(
            "CPU kernel: tensor is not contiguous: shape {:?}, strides {:?}",
            layout.dims(),
            layout.stride()
        )
    };
    let Storage::Cpu(cpu) = &*storage else { bail!("CPU kernel: tensor is on another device") };
    T::cpu_storage_as_slice(cpu)?; // checks the dtype once, for `deref`
    Ok(View { storage, range: start..end, elem: PhantomData })
}

impl<T: WithDType> Deref for View<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &*self.storage {
            Storage::Cpu(cpu) => match T::cpu_storage_as_slice(cpu) {
                Ok(slice) => &slice[self.range.clone()],
                Err(_) => unreachable!("`view` checked the type"),
            },
            _ => unreachable!("`view` checked the device"),
        }
    }
}

/// Passes the values of a contiguous tensor to `body` for writing. All views of its storage see the change.
pub fn with_slice_mut<T: WithDTypeMut, R>(tensor: &Tensor, body: impl FnOnce(&mut [T]) -> R) -> Result<R> {
    let (mut body, mut result) = (Some(body), None);
    write_slice(tensor, &mut |slice| result = body.take().map(|body| body(slice)))?;
    match result {
        Some(result) => Ok(result),
        None => bail!("an in-place kernel did not run"),
    }
}

/// What writes the values of a tensor.
type WriteBody<'a, T> = dyn FnMut(&mut [T]) + 'a;

/// Not generic over `body`: candle's `inplace_op1` is a lot of code, and would be compiled for every caller.
fn write_slice<T: WithDTypeMut>(tensor: &Tensor, body: &mut WriteBody<T>) -> Result<()> {
    struct InPlaceWrite<'a, T>(RefCell<&'a mut WriteBody<'a, T>>);

    impl<T: WithDTypeMut> InplaceOp1 for InPlaceWrite<'_, T> {
        fn name(&self) -> &'static str {
            "update"
        }

        fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
            let Some((start, end)) = layout.contiguous_offsets() else {
                bail!("CPU kernel: output tensor is not contiguous: shape {:?}", layout.dims())
            };
            let Some(slice) = T::slice_mut(storage) else {
                bail!("CPU kernel: output tensor is not {:?}", T::DTYPE)
            };
            (self.0.borrow_mut())(&mut slice[start..end]);
            Ok(())
        }
    }

    tensor.inplace_op1(&InPlaceWrite(RefCell::new(body)))
}

/// Types whose storage can be written in place.
pub trait WithDTypeMut: WithDType {
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
}

macro_rules! slices {
    ($($type:ty => $variant:ident),*) => {$(
        impl WithDTypeMut for $type {
            fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                match storage {
                    CpuStorage::$variant(values) => Some(values),
                    _ => None,
                }
            }
        }
    )*};
}
slices!(f32 => F32, f64 => F64, half::bf16 => BF16, half::f16 => F16, u8 => U8, u32 => U32);

/// Uninitialized memory for `len` values. The caller must write every value before anyone reads it. Debug builds fill
/// it with NaN, so tests catch a kernel that breaks this.
pub fn uninit<T: Elem>(len: usize) -> Vec<T> {
    if cfg!(debug_assertions) {
        return vec![T::from_acc(<T::Acc as Real>::of_f64(f64::NAN)); len];
    }
    let mut values = Vec::with_capacity(len);
    // SAFETY: the values are plain numbers without a destructor, the capacity is `len`, and they are written before
    // they are read. Zeroing first would cost a second pass over every activation.
    #[allow(clippy::uninit_vec)]
    unsafe {
        values.set_len(len)
    };
    values
}

/// `len` zeros, for a kernel that accumulates.
pub fn zeros<T: Elem>(len: usize) -> Vec<T> {
    vec![T::default(); len]
}

/// A tensor of the values a kernel computed; moves them, does not copy.
pub fn tensor<T: WithDType>(values: Vec<T>, shape: impl Into<Shape>) -> Result<Tensor> {
    Tensor::from_vec(values, shape.into(), &Device::Cpu)
}

/// A slice whose disjoint ranges parallel workers write.
pub(super) struct DisjointSliceMut<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: the contract of `range_mut` keeps two workers from holding overlapping ranges.
unsafe impl<T: Send> Sync for DisjointSliceMut<'_, T> {}

impl<'a, T> DisjointSliceMut<'a, T> {
    pub(super) fn new(all: &'a mut [T]) -> Self {
        Self { start: all.as_mut_ptr(), len: all.len(), slice: PhantomData }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Address of a value.
    pub(super) fn ptr_at(&self, index: usize) -> *const T {
        self.start.wrapping_add(index)
    }

    /// The range `start..start + len`; empty if the whole slice is empty.
    ///
    /// # Safety
    /// No two results that are alive at once may overlap.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn range_mut(&self, start: usize, len: usize) -> &'a mut [T] {
        if self.len == 0 {
            return &mut [];
        }
        assert!(start + len <= self.len, "range exceeds its slice");
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}

/// Bytes of `elements` values of type `dtype`.
pub fn size_in_bytes(dtype: DType, elements: usize) -> u64 {
    (dtype.size_in_bytes() * elements) as u64
}

/// Bytes of the accumulator type that kernels use for `dtype`.
pub fn acc_bytes(dtype: DType) -> usize {
    if dtype == DType::F64 { 8 } else { 4 }
}

/// Number of threads the kernels use.
pub fn threads() -> usize {
    rayon::current_num_threads()
}

/// Rows per chunk of a row-wise loop: enough to be worth a thread.
pub fn rows_per_chunk(width: usize) -> usize {
    (GRAIN_SIZE / width.max(1)).max(1)
}

/// Calls `body` with every index below `count`, in parallel. Not generic over `body`, as rayon would be compiled for
/// every caller.
pub fn parallel_for(count: usize, body: &(dyn Fn(usize) + Sync)) {
    (0..count).into_par_iter().for_each(body);
}

/// The results of `body` for every index below `count`, computed in parallel.
pub fn parallel_map<R: Send>(count: usize, body: &(dyn Fn(usize) -> R + Sync)) -> Vec<R> {
    (0..count).into_par_iter().map(body).collect()
}

/// Calls `body(index, chunk)` on the chunks of `len` values of `all`, in parallel; the last may be shorter.
pub fn parallel_for_chunks<T: Send>(all: &mut [T], len: usize, body: impl Fn(usize, &mut [T]) + Sync) {
    let total = all.len();
    let all = DisjointSliceMut::new(all);
    parallel_for(total.div_ceil(len), &|i| {
        // SAFETY: chunks do not overlap, and each index is called once.
        body(i, unsafe { all.range_mut(i * len, len.min(total - i * len)) })
    });
}

/// Calls `body(first_row, rows)` on chunks of rows of `out`, in parallel.
pub fn parallel_for_rows<T: Send>(out: &mut [T], width: usize, body: impl Fn(usize, &mut [T]) + Sync) {
    let rows = rows_per_chunk(width);
    if out.len() <= rows * width {
        return body(0, out);
    }
    parallel_for_chunks(out, rows * width, |i, chunk| body(i * rows, chunk));
}

/// Runs `$body` with `$T` bound to the element type of `$dtype`.
#[macro_export]
macro_rules! with_elem {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $T = f64;
                $body
            }
            candle_core::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $T = half::f16;
                $body
            }
            other => candle_core::bail!("kernels compute in f32, f64, bf16 or f16, not {other:?}"),
        }
    };
}
