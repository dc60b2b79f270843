//! `kind = "cnn"`: convolutions, each with normalization, activation and pooling, then dense layers.

use super::vision::ConvSpec;
use super::{ModelError, NetworkBuilder};
use crate::job::{CnnConfig, NormKind, StageConfig};
use crate::kernels::{Activation, ClampActivation};

pub(super) fn build(cnn: &CnnConfig, b: &mut NetworkBuilder) -> Result<(), ModelError> {
    let act: Activation = cnn.activation.into();
    for (i, stage) in cnn.stages.iter().enumerate() {
        let name = format!("stages.{i}");
        b.begin_block(&name);
        let channels = match stage.norm {
            // Its statistics are of several channels.
            NormKind::Group => stage.channels,
            NormKind::None | NormKind::Batch => b.kept_units(&name, stage.channels)?,
        };
        let spec = ConvSpec::same(channels, stage.kernel, stage.stride);
        match stage.norm {
            NormKind::None => b.conv(&name, spec, true, act, None)?,
            _ => {
                b.conv(&name, spec, false, Activation::Identity, None)?;
                add_norm(b, stage, &format!("{name}.norm"), act, cnn.norm_group)?;
            }
        }
        if stage.pool > 1 {
            b.max_pool(&format!("{name}.pool"), stage.pool, stage.pool, 0)?;
        }
    }
    let next = b.dense_layers("layers", 0, &cnn.hidden, act, cnn.dropout)?;
    b.begin_block("flatten");
    b.flatten("flatten");
    b.add_head(&format!("layers.{next}"), "cnn")
}

/// Adds the normalization, with the activation fused if it can be.
fn add_norm(
    b: &mut NetworkBuilder,
    stage: &StageConfig,
    name: &str,
    act: Activation,
    group_size: usize,
) -> Result<(), ModelError> {
    let clip = ClampActivation::from_activation(act);
    let fused = clip.unwrap_or(ClampActivation::Identity);
    match stage.norm {
        NormKind::None => {}
        NormKind::Batch => b.batch_norm(name, group_size, fused),
        // Number of groups: the largest power of two, up to 32, that divides the channels.
        NormKind::Group => b.group_norm(name, 1 << stage.channels.trailing_zeros().min(5), fused)?,
    }
    if clip.is_none() {
        b.activation(&format!("{name}.activation"), act);
    }
    Ok(())
}
