//! `kind = "layers"`: a network as a list of layers, named by index: `layers.0.weight`, `layers.3.layers.1.weight` in
//! the branch of a residual group, `layers.3.shortcut.0.weight` in its shortcut.

use super::vision::ConvSpec;
use super::{ModelError, NetworkBuilder};
use crate::job::{BranchLayerConfig, LayerConfig, LayersConfig, ResidualActivation};
use crate::kernels::{Activation, ClampActivation};
use crate::layers::linear::LinearOptions;
use crate::layers::squeeze_excite::SqueezeExcite;

pub(super) fn build(model: &LayersConfig, b: &mut NetworkBuilder) -> Result<(), ModelError> {
    let mut i = 0;
    while let Some(layer) = model.layers.get(i) {
        let name = format!("layers.{i}");
        b.begin_block(&name);
        i += 1;
        match layer {
            LayerConfig::Residual(group) => {
                let act = match group.activation {
                    ResidualActivation::None => Activation::Identity,
                    ResidualActivation::Relu => Activation::Relu,
                };
                if group.layers.iter().all(is_view) {
                    return Err(b.shape_error(
                        &name,
                        "a branch with layers other than `flatten` and `dropout` with p = 0",
                    ));
                }
                b.residual(
                    &name,
                    |b| add_branch(b, &format!("{name}.layers"), &group.layers),
                    |b| add_branch(b, &format!("{name}.shortcut"), &group.shortcut),
                    act,
                )?;
            }
            _ => {
                let next = model.layers.get(i).and_then(activation_of);
                i += add_layer(b, &name, layer, next)? as usize;
            }
        }
    }
    b.begin_block("head");
    b.flatten("head.flatten");
    b.add_head(&format!("layers.{i}"), "layers")
}

fn add_branch(b: &mut NetworkBuilder, prefix: &str, branch: &[BranchLayerConfig]) -> Result<(), ModelError> {
    let layers: Vec<LayerConfig> = branch.iter().cloned().map(LayerConfig::from).collect();
    let mut i = 0;
    while let Some(layer) = layers.get(i) {
        let name = format!("{prefix}.{i}");
        i += 1;
        i += add_layer(b, &name, layer, layers.get(i).and_then(activation_of))? as usize;
    }
    Ok(())
}

/// Whether a layer may return a view of its input; the residual sum must not overwrite that.
fn is_view(layer: &BranchLayerConfig) -> bool {
    matches!(layer, BranchLayerConfig::Flatten(_))
        || matches!(layer, BranchLayerConfig::Dropout(dropout) if dropout.p == 0.0)
}

fn activation_of(layer: &LayerConfig) -> Option<Activation> {
    Some(match layer {
        LayerConfig::Relu(_) => Activation::Relu,
        LayerConfig::Relu6(_) => Activation::Relu6,
        LayerConfig::Gelu(_) => Activation::Gelu,
        LayerConfig::GeluTanh(_) => Activation::GeluTanh,
        LayerConfig::Silu(_) => Activation::Silu,
        LayerConfig::Sigmoid(_) => Activation::Sigmoid,
        LayerConfig::Tanh(_) => Activation::Tanh,
        _ => return None,
    })
}

/// Adds one layer; returns whether it fused the activation that follows.
fn add_layer(
    b: &mut NetworkBuilder,
    name: &str,
    layer: &LayerConfig,
    next: Option<Activation>,
) -> Result<bool, ModelError> {
    let act = next.unwrap_or(Activation::Identity);
    let clip = ClampActivation::from_activation(act);
    match layer {
        LayerConfig::Linear(linear) => {
            let Some(&inputs) = b.shape.last() else { return Err(b.shape_error(name, "at least one value")) };
            if b.shape.len() == 3 {
                return Err(b.shape_error(name, "vectors (add a `flatten` or `global_pool` layer before it)"));
            }
            let options = LinearOptions { bias: linear.bias, ..LinearOptions::torch_default(inputs, act) };
            b.linear(name, linear.outputs, options);
            return Ok(next.is_some());
        }
        LayerConfig::Conv(conv) => {
            let spec = ConvSpec {
                outputs: conv.channels,
                kernel: conv.kernel,
                stride: conv.stride,
                padding: conv.padding,
                dilation: conv.dilation,
                groups: conv.groups,
            };
            b.conv(name, spec, conv.bias, act, None)?;
            return Ok(next.is_some());
        }
        LayerConfig::BatchNorm(norm) => {
            b.batch_norm(name, norm.group, clip.unwrap_or(ClampActivation::Identity));
            return Ok(next.is_some() && clip.is_some());
        }
        LayerConfig::GroupNorm(norm) => {
            b.group_norm(name, norm.groups, clip.unwrap_or(ClampActivation::Identity))?;
            return Ok(next.is_some() && clip.is_some());
        }
        LayerConfig::MaxPool(pool) => b.max_pool(name, pool.size, pool.stride(), pool.padding)?,
        LayerConfig::AvgPool(pool) => b.avg_pool(name, pool.size, pool.stride(), pool.padding)?,
        LayerConfig::GlobalPool(_) => b.global_pool(name)?,
        LayerConfig::Flatten(_) => b.flatten(name),
        LayerConfig::Dropout(dropout) => b.dropout(name, dropout.p),
        LayerConfig::SqueezeExcite(se) => {
            let shape = b.image_shape(name)?;
            let hidden = (shape[2] / se.ratio).max(1);
            let layer = SqueezeExcite::new(&mut b.registry, name, shape, hidden, Activation::Relu);
            b.push_layer(layer);
        }
        LayerConfig::Residual(_) => return Err(b.shape_error(name, "no residual group inside another")),
        LayerConfig::Relu(_)
        | LayerConfig::Relu6(_)
        | LayerConfig::Gelu(_)
        | LayerConfig::GeluTanh(_)
        | LayerConfig::Silu(_)
        | LayerConfig::Sigmoid(_)
        | LayerConfig::Tanh(_) => {
            if let Some(act) = activation_of(layer) {
                b.activation(name, act);
            }
        }
    }
    Ok(false)
}
