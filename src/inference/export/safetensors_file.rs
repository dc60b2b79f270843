//! Safetensors files, written one tensor at a time.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::{View, serialize_to_file};
use safetensors::{Dtype, SafeTensorError};

use super::error::ExportError;
use super::weights::WeightDtype;

/// The file of the weights in `hf` and `safetensors` exports.
pub(super) const MODEL: &str = "model.safetensors";

/// Name and shape of a tensor to write.
pub(super) struct TensorHeader<'a> {
    pub name: &'a str,
    pub shape: &'a [usize],
}

/// The values of a tensor, given its place in the list of headers.
type ReadValues<'a> = dyn FnMut(usize) -> Result<Vec<f32>, ExportError> + 'a;

/// A tensor whose values are made when the library asks for its bytes.
struct LazyTensor<'a, 'v> {
    header: &'a TensorHeader<'a>,
    index: usize,
    dtype: WeightDtype,
    state: &'a RefCell<WriteState<'v>>,
}

struct WriteState<'v> {
    values: &'v mut ReadValues<'v>,
    /// The library cannot report an error of ours: it gets no bytes, and the error is returned in its place.
    error: Option<ExportError>,
}

impl View for LazyTensor<'_, '_> {
    fn dtype(&self) -> Dtype {
        match self.dtype {
            WeightDtype::F32 => Dtype::F32,
            WeightDtype::F16 => Dtype::F16,
            WeightDtype::Bf16 => Dtype::BF16,
        }
    }

    fn shape(&self) -> &[usize] {
        self.header.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut state = self.state.borrow_mut();
        if state.error.is_some() {
            return Cow::Owned(Vec::new());
        }
        let values = (state.values)(self.index);
        match values.and_then(|values| self.dtype.encode(self.header.name, &values)) {
            Ok(bytes) => Cow::Owned(bytes),
            Err(error) => {
                state.error = Some(error);
                Cow::Owned(Vec::new())
            }
        }
    }

    fn data_len(&self) -> usize {
        self.header.shape.iter().product::<usize>() * self.dtype.bytes()
    }
}

/// Writes a file, with one tensor in memory at a time, and syncs it.
pub(super) fn write<'v>(
    path: &Path,
    headers: &[TensorHeader],
    dtype: WeightDtype,
    values: &'v mut ReadValues<'v>,
) -> Result<(), ExportError> {
    let state = RefCell::new(WriteState { values, error: None });
    let tensors = headers
        .iter()
        .enumerate()
        .map(|(index, header)| (header.name, LazyTensor { header, index, dtype, state: &state }));
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let written = serialize_to_file(tensors, Some(metadata), path);
    if let Some(error) = state.into_inner().error {
        return Err(error);
    }
    written
        .map_err(|error| match error {
            SafeTensorError::IoError(source) => source,
            other => std::io::Error::other(other),
        })
        .and_then(|()| std::fs::File::open(path)?.sync_all())
        .map_err(ExportError::io("write", path))
}
