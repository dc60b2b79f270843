//! `kind = "mobilenet"`: MobileNet v2 of Sandler et al., 2018, as torchvision builds and names it
//! (`features.0.0.weight`, `features.2.conv.1.0.weight`, `classifier.1.weight`).

use super::picture::Filter;
use super::{Builder, ModelError};
use crate::job::Mobilenet;
use crate::kernels::{Activation, Clip};
use crate::params::Init;

/// How much wider a block is inside, its outputs, how often it stands, its first stride.
const STAGES: [(usize, usize, usize, usize); 7] = [
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
];

/// `channels` times the multiplier, to the nearest multiple of 8, never more than a tenth below.
fn scaled(channels: usize, multiplier: f64) -> usize {
    let wanted = channels as f64 * multiplier;
    let near = (((wanted + 4.0) as usize) / 8 * 8).max(8);
    if (near as f64) < 0.9 * wanted { near + 8 } else { near }
}

pub(super) fn build(net: &Mobilenet, b: &mut Builder) -> Result<(), ModelError> {
    let (group, width) = (net.norm_group, net.width);
    b.block("features.0");
    let stride = net.stem.stride();
    unit(b, "features.0", Filter::same(scaled(32, width), 3, stride), group)?;
    let mut index = 1;
    for (wider, outputs, count, stride) in STAGES {
        for i in 0..count {
            let name = format!("features.{index}");
            b.block(&name);
            inverted(b, &name, wider, scaled(outputs, width), if i == 0 { stride } else { 1 }, group)?;
            index += 1;
        }
    }
    let name = format!("features.{index}");
    b.block(&name);
    unit(b, &name, Filter::same(scaled(1280, width.max(1.0)), 1, 1), group)?;
    b.global_pool("pool")?;
    b.dropout("classifier.0", net.dropout);
    b.classify_from("classifier.1", "mobilenet", Init::Normal(0.01), Init::Constant(0.0))
}

/// Convolution, batch norm, ReLU6.
fn unit(b: &mut Builder, name: &str, filter: Filter, group: usize) -> Result<(), ModelError> {
    b.filter(&format!("{name}.0"), filter)?;
    b.batch_norm(&format!("{name}.1"), group, Clip::Relu6);
    Ok(())
}

/// Widen, filter each channel by itself, narrow; added to its input where the two are of one shape.
fn inverted(
    b: &mut Builder,
    name: &str,
    wider: usize,
    outputs: usize,
    stride: usize,
    group: usize,
) -> Result<(), ModelError> {
    let inputs = b.picture(name)?[2];
    let inside = inputs * wider;
    let branch = |b: &mut Builder| {
        let mut next = 0;
        if wider > 1 {
            unit(b, &format!("{name}.conv.{next}"), Filter::same(inside, 1, 1), group)?;
            next += 1;
        }
        let each = Filter { groups: inside, ..Filter::same(inside, 3, stride) };
        unit(b, &format!("{name}.conv.{next}"), each, group)?;
        b.filter(&format!("{name}.conv.{}", next + 1), Filter::same(outputs, 1, 1))?;
        b.batch_norm(&format!("{name}.conv.{}", next + 2), group, Clip::Nothing);
        Ok(())
    };
    match stride == 1 && inputs == outputs {
        true => b.residual(name, branch, |_| Ok(()), Activation::Identity),
        false => branch(b),
    }
}
