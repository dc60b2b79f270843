//! Host access to a tensor's values, wherever the tensor is. For checkpoints and comparisons, not for kernels.

use std::borrow::Cow;
use std::ops::Deref;

use candle_core::{Result, Tensor, WithDType};

use super::cpu::{self, View, WithDTypeMut};

/// Values borrowed from a host tensor, or copied from a device.
pub enum HostSlice<'a, T> {
    Borrowed(View<'a, T>),
    Owned(Vec<T>),
}

impl<T: WithDType> Deref for HostSlice<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            HostSlice::Borrowed(view) => view,
            HostSlice::Owned(values) => values,
        }
    }
}

/// The values of a contiguous tensor.
pub fn read<T: WithDType>(tensor: &Tensor) -> Result<HostSlice<'_, T>> {
    match tensor.device().is_cpu() {
        true => Ok(HostSlice::Borrowed(cpu::view(tensor)?)),
        false => Ok(HostSlice::Owned(to_vec(tensor)?)),
    }
}

/// Copies the values of a contiguous tensor, and nothing else of its storage.
pub fn to_vec<T: WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    on_cuda!(tensor, |_device| super::cuda::to_host(tensor));
    tensor.flatten_all()?.to_vec1()
}

/// Lets `body` write all values of a contiguous tensor; `body` must not read them.
pub fn write<T: WithDTypeMut, R>(tensor: &Tensor, body: impl FnOnce(&mut [T]) -> R) -> Result<R> {
    if tensor.device().is_cpu() {
        return cpu::with_slice_mut(tensor, body);
    }
    let mut values = vec![T::zero(); tensor.elem_count()];
    let result = body(&mut values);
    upload(tensor, values.into())?;
    Ok(result)
}

/// Copies values to a tensor that is not on the host.
fn upload<T: WithDType>(tensor: &Tensor, values: Cow<[T]>) -> Result<()> {
    on_cuda!(tensor, |_device| super::cuda::from_host(tensor, &values));
    tensor.slice_set(&Tensor::from_slice(&values, tensor.shape(), tensor.device())?, 0, 0)
}
