//! Safetensors files, written one tensor at a time.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashMap;

use safetensors::tensor::{View, serialize_to_file};
use safetensors::{Dtype, SafeTensorError};

use super::error::ExportError;
use super::folder::ExportFolder;
use super::weights::{TensorFile, TensorMapping, WeightDtype};
use super::{ExportProgress, ExportSource};

/// The file of the weights in `hf` and `safetensors` exports.
pub(super) const MODEL: &str = "model.safetensors";

/// A tensor that is read and converted when the library asks for its bytes.
struct LazyTensor<'a, 'p> {
    mapping: &'a TensorMapping,
    dtype: WeightDtype,
    state: &'a RefCell<WriteState<'p>>,
}

struct WriteState<'p> {
    weights: TensorFile,
    /// The library cannot report an error of ours: it gets no bytes, and the error is returned in its place.
    error: Option<ExportError>,
    progress: &'p mut dyn ExportProgress,
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
        &self.mapping.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut state = self.state.borrow_mut();
        if state.error.is_some() {
            return Cow::Owned(Vec::new());
        }
        let values = self.mapping.read(&mut state.weights);
        match values.and_then(|values| self.dtype.encode(&self.mapping.target, &values)) {
            Ok(bytes) => {
                state.progress.tensor_written(&self.mapping.target, bytes.len() as u64);
                Cow::Owned(bytes)
            }
            Err(error) => {
                state.error = Some(error);
                Cow::Owned(Vec::new())
            }
        }
    }

    fn data_len(&self) -> usize {
        self.mapping.len() * self.dtype.bytes()
    }
}

/// Writes `model.safetensors`.
pub(super) fn write(
    source: &ExportSource,
    folder: &ExportFolder,
    mappings: &[TensorMapping],
    dtype: WeightDtype,
    progress: &mut dyn ExportProgress,
) -> Result<(), ExportError> {
    let path = folder.path().join(MODEL);
    let weights = TensorFile::open(source.weights)?;
    let state = RefCell::new(WriteState { weights, error: None, progress });
    let tensors = mappings
        .iter()
        .map(|mapping| (mapping.target.as_str(), LazyTensor { mapping, dtype, state: &state }));
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let written = serialize_to_file(tensors, Some(metadata), &path);
    if let Some(error) = state.into_inner().error {
        return Err(error);
    }
    written
        .map_err(|error| match error {
            SafeTensorError::IoError(source) => source,
            other => std::io::Error::other(other),
        })
        .and_then(|()| std::fs::File::open(&path)?.sync_all())
        .map_err(ExportError::io("write", &path))
}
