//! `kind = "layers"`: a network as a list of layers, named by their places: `layers.0.weight`,
//! `layers.3.layers.1.weight` inside a residual group, `layers.3.shortcut.0.weight` beside it.

use super::picture::Filter;
use super::{Builder, ModelError};
use crate::job::{AfterSum, Layer, Layers, Part};
use crate::kernels::{Activation, Clip};
use crate::layers::linear::{Linear, Options};
use crate::layers::squeeze_excite::SqueezeExcite;

pub(super) fn build(model: &Layers, b: &mut Builder) -> Result<(), ModelError> {
    let mut i = 0;
    while let Some(layer) = model.layers.get(i) {
        let name = format!("layers.{i}");
        b.block(&name);
        i += 1;
        match layer {
            Layer::Residual(group) => {
                let act = match group.activation {
                    AfterSum::None => Activation::Identity,
                    AfterSum::Relu => Activation::Relu,
                };
                if group.layers.iter().all(is_view) {
                    return Err(b.refuse(&name, "a branch that computes something"));
                }
                b.residual(
                    &name,
                    |b| parts(b, &format!("{name}.layers"), &group.layers),
                    |b| parts(b, &format!("{name}.shortcut"), &group.shortcut),
                    act,
                )?;
            }
            _ => {
                let next = model.layers.get(i).and_then(activation_of);
                i += add(b, &name, layer, next)? as usize;
            }
        }
    }
    b.block("head");
    b.flatten("head.flatten");
    b.classify(&format!("layers.{i}"), "layers")
}

fn parts(b: &mut Builder, prefix: &str, parts: &[Part]) -> Result<(), ModelError> {
    let layers: Vec<Layer> = parts.iter().cloned().map(Layer::from).collect();
    let mut i = 0;
    while let Some(layer) = layers.get(i) {
        let name = format!("{prefix}.{i}");
        i += 1;
        i += add(b, &name, layer, layers.get(i).and_then(activation_of))? as usize;
    }
    Ok(())
}

/// Whether a part may give the very memory it was given; a sum must not be written over its input.
fn is_view(part: &Part) -> bool {
    matches!(part, Part::Flatten(_)) || matches!(part, Part::Dropout(dropout) if dropout.p == 0.0)
}

fn activation_of(layer: &Layer) -> Option<Activation> {
    Some(match layer {
        Layer::Relu(_) => Activation::Relu,
        Layer::Relu6(_) => Activation::Relu6,
        Layer::Gelu(_) => Activation::Gelu,
        Layer::GeluTanh(_) => Activation::GeluTanh,
        Layer::Silu(_) => Activation::Silu,
        Layer::Sigmoid(_) => Activation::Sigmoid,
        Layer::Tanh(_) => Activation::Tanh,
        _ => return None,
    })
}

/// Adds one layer; whether it took the activation that follows into itself.
fn add(b: &mut Builder, name: &str, layer: &Layer, next: Option<Activation>) -> Result<bool, ModelError> {
    let act = next.unwrap_or(Activation::Identity);
    let clip = Clip::of(act);
    match layer {
        Layer::Linear(linear) => {
            let Some(&inputs) = b.shape.last() else { return Err(b.refuse(name, "at least one value")) };
            if b.shape.len() == 3 {
                return Err(
                    b.refuse(name, "vectors; a `flatten` or `global_pool` layer makes them of pictures")
                );
            }
            let shape = b.shape.clone();
            let options = Options { bias: linear.bias, ..Options::torch(inputs, act) };
            let layer = Linear::new(&mut b.declared, name, &shape, linear.outputs, options);
            b.layer(layer);
            return Ok(next.is_some());
        }
        Layer::Conv(conv) => {
            let filter = Filter {
                outputs: conv.channels,
                kernel: conv.kernel,
                stride: conv.stride,
                padding: conv.padding,
                dilation: conv.dilation,
                groups: conv.groups,
            };
            b.conv(name, filter, conv.bias, act, None)?;
            return Ok(next.is_some());
        }
        Layer::BatchNorm(norm) => {
            b.batch_norm(name, norm.group, clip.unwrap_or(Clip::Nothing));
            return Ok(next.is_some() && clip.is_some());
        }
        Layer::GroupNorm(norm) => {
            b.group_norm(name, norm.groups, clip.unwrap_or(Clip::Nothing))?;
            return Ok(next.is_some() && clip.is_some());
        }
        Layer::MaxPool(pool) => b.max_pool(name, pool.size, pool.stride(), pool.padding)?,
        Layer::AvgPool(pool) => b.avg_pool(name, pool.size, pool.stride(), pool.padding)?,
        Layer::GlobalPool(_) => b.global_pool(name)?,
        Layer::Flatten(_) => b.flatten(name),
        Layer::Dropout(dropout) => b.dropout(name, dropout.p),
        Layer::SqueezeExcite(se) => {
            let shape = b.picture(name)?;
            let hidden = (shape[2] / se.ratio).max(1);
            let layer = SqueezeExcite::new(&mut b.declared, name, shape, hidden, Activation::Relu);
            b.layer(layer);
        }
        Layer::Residual(_) => return Err(b.refuse(name, "no residual group inside another")),
        other => {
            if let Some(act) = activation_of(other) {
                b.activation(name, act);
            }
        }
    }
    Ok(false)
}
