//! Histograms of the trained weights, tensor by tensor in pieces, for the sinks that show them.

use super::context::RunContext;
use crate::kernels::host;
use crate::metrics::histogram::Histogram;
use crate::train::Failure;

/// Values that are on the host at a time, if they are on a GPU.
const PIECE: usize = 16 << 10;

/// Host bytes of a piece, as read and as f64.
pub(in crate::train) const BYTES: u64 = (PIECE * (4 + 8)) as u64;

pub(super) fn report(ctx: &mut RunContext) -> Result<(), Failure> {
    if !ctx.setup.job.log.histograms {
        return Ok(());
    }
    let setup = ctx.setup;
    for (spec, range) in setup.layout.params.trained() {
        let weights = ctx.engine.store.master_weights.clone();
        let histogram = Histogram::of(|each| -> candle_core::Result<()> {
            for start in range.clone().step_by(PIECE) {
                let piece = weights.narrow(0, start, PIECE.min(range.end - start))?;
                each(&host::read::<f32>(&piece)?);
            }
            Ok(())
        })?;
        if let Some(histogram) = histogram {
            ctx.record_histogram(&spec.name, &histogram)?;
        }
    }
    Ok(())
}
