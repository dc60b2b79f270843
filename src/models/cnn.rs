//! `kind = "cnn"`: convolutions, each with its normalisation, activation and pooling, then dense layers.

use super::picture::Filter;
use super::{Builder, ModelError};
use crate::job::{Cnn, Norm, Stage};
use crate::kernels::{Activation, Clip};

pub(super) fn build(cnn: &Cnn, b: &mut Builder) -> Result<(), ModelError> {
    let act: Activation = cnn.activation.into();
    for (i, stage) in cnn.stages.iter().enumerate() {
        let name = format!("stages.{i}");
        b.block(&name);
        let filter = Filter::same(stage.channels, stage.kernel, stage.stride);
        match stage.norm {
            Norm::None => b.conv(&name, filter, true, act, None)?,
            _ => {
                b.conv(&name, filter, false, Activation::Identity, None)?;
                norm(b, stage, &format!("{name}.norm"), act, cnn.norm_group)?;
            }
        }
        if stage.pool > 1 {
            b.max_pool(&format!("{name}.pool"), stage.pool, stage.pool, 0)?;
        }
    }
    let next = b.dense("layers", 0, &cnn.hidden, act, cnn.dropout);
    b.block("flatten");
    b.flatten("flatten");
    b.classify(&format!("layers.{next}"), "cnn")
}

/// The normalisation with the activation in it where it can be.
fn norm(b: &mut Builder, stage: &Stage, name: &str, act: Activation, group: usize) -> Result<(), ModelError> {
    let clip = Clip::of(act);
    let fused = clip.unwrap_or(Clip::Nothing);
    match stage.norm {
        Norm::None => {}
        Norm::Batch => b.batch_norm(name, group, fused),
        // The largest power of two of groups, up to 32, that divides the channels.
        Norm::Group => b.group_norm(name, 1 << stage.channels.trailing_zeros().min(5), fused)?,
    }
    if clip.is_none() {
        b.activation(&format!("{name}.activation"), act);
    }
    Ok(())
}
