//! Batches on their way to a card: what a carrier holds, asked for and given back.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Tensor};

use super::Wanted;
use crate::data::{self, Values};
use crate::features::Palette;
use crate::kernels::cuda::carrier::{self, Carrier, PARTS, Part};
use crate::kernels::update::round_into;
use crate::kernels::{cuda, keys, palette};
use crate::layers::network::{Batch, StepError};
use crate::memory::estimate::STAGED;
use crate::memory::{Reservation, Role};
use crate::train::engine::Ledgers;

pub struct Staged {
    device: CudaDevice,
    ledgers: Ledgers,
    /// With the right to its buffers, on the card and here.
    carrier: RefCell<Option<(Carrier, [Reservation; 2])>>,
    tables: RefCell<Option<(Arc<Palette>, Tensor)>>,
}

impl Staged {
    /// None where the CPU computes.
    pub fn new(device: &Device, ledgers: &Ledgers) -> Option<Self> {
        let Device::Cuda(device) = device else { return None };
        Some(Self {
            device: device.clone(),
            ledgers: ledgers.clone(),
            carrier: RefCell::default(),
            tables: RefCell::default(),
        })
    }

    pub fn clear(&self) {
        self.carrier.take();
    }

    /// As [`Staging::prepare`](super::Staging::prepare).
    pub fn prepare(&self, batch: &data::Batch, wanted: Wanted) -> Result<(), StepError> {
        self.with_parts(batch, &wanted, |parts| {
            let held = self.carrier.take().filter(|(carrier, _)| carrier.fits(parts));
            self.carrier.replace(Some(held.map_or_else(|| self.room(parts), Ok)?));
            Ok(())
        })
    }

    /// As [`Staging::tensors`](super::Staging::tensors).
    pub fn tensors(&self, batch: &data::Batch, wanted: Wanted) -> Result<Batch, StepError> {
        self.with_parts(batch, &wanted, |parts| {
            let held = self.carrier.take().filter(|(carrier, _)| carrier.fits(parts));
            let (mut carrier, holds) = held.map_or_else(|| self.room(parts), Ok)?;
            let made = carrier.carry(parts, |arrived| {
                let fresh = |dtype, like: &Tensor| cuda::fresh(&self.device, dtype, like.shape());
                let [inputs, targets, staged] = arrived else { candle_core::bail!("three parts arrive") };
                let made = Batch {
                    inputs: fresh(wanted.dtype, inputs)?,
                    targets: fresh(targets.dtype(), targets)?,
                    staged: Some(fresh(DType::U32, staged)?),
                };
                match &batch.inputs {
                    Values::U8(_, palette) => palette::expand(inputs, &self.tables(palette)?, &made.inputs)?,
                    Values::F32(_) => round_into(inputs, &made.inputs)?,
                    Values::U32(_) => cuda::copy_into(&self.device, inputs, &made.inputs)?,
                }
                cuda::copy_into(&self.device, targets, &made.targets)?;
                made.staged.iter().try_for_each(|to| cuda::copy_into(&self.device, staged, to))?;
                Ok(made)
            });
            self.carrier.replace(Some((carrier, holds)));
            Ok(made?)
        })
    }

    fn with_parts<R>(
        &self,
        batch: &data::Batch,
        wanted: &Wanted,
        body: impl FnOnce(&[Part; PARTS]) -> R,
    ) -> R {
        let known = keys::staged(batch.epoch, &batch.ids, &batch.lengths);
        let words = Part {
            bytes: bytemuck::cast_slice(&known),
            row: 4 * known.len(),
            kept: 4 * known.len(),
            dtype: DType::U32,
            shape: vec![known.len()],
        };
        body(&[
            part(&batch.inputs, wanted.inputs.clone()),
            part(&batch.targets, wanted.targets.clone()),
            words,
        ])
    }

    /// A palette on the card, (channels, 256), uploaded when it is another than before.
    fn tables(&self, palette: &Arc<Palette>) -> candle_core::Result<Tensor> {
        let held = self.tables.take().filter(|(held, _)| held == palette);
        let upload = || {
            let tables = palette.tables.as_flattened();
            Tensor::from_slice(tables, (palette.tables.len(), 256), &Device::Cuda(self.device.clone()))
        };
        let tables = held.map_or_else(upload, |(_, tables)| Ok(tables))?;
        self.tables.replace(Some((palette.clone(), tables.clone())));
        Ok(tables)
    }

    fn room(&self, parts: &[Part; PARTS]) -> Result<(Carrier, [Reservation; 2]), StepError> {
        let bytes = carrier::bytes(parts) as u64;
        let there = self.ledgers.tensors.reserve(Role::Batch, STAGED, bytes)?;
        let here = self.ledgers.host.reserve(Role::DataPipeline, STAGED, bytes)?;
        Ok((Carrier::new(&self.device, parts)?, [there, here]))
    }
}

fn part(values: &Values, shape: Vec<usize>) -> Part<'_> {
    let (bytes, dtype) = match values {
        Values::U8(values, _) => (values.as_slice(), DType::U8),
        Values::F32(values) => (bytemuck::cast_slice(values), DType::F32),
        Values::U32(values) => (bytemuck::cast_slice(values), DType::U32),
    };
    let (rows, size) = (shape[0].max(1), dtype.size_in_bytes());
    let kept = shape[1..].iter().product::<usize>() * size;
    Part { bytes, row: bytes.len() / rows, kept, dtype, shape }
}
