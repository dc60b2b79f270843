//! `kind = "mobilenet"`: MobileNet v2 of Sandler et al., 2018, as torchvision builds and names it
//! (`features.0.0.weight`, `features.2.conv.1.0.weight`, `classifier.1.weight`).

use super::vision::ConvSpec;
use super::{ModelError, NetworkBuilder};
use crate::job::MobilenetConfig;
use crate::kernels::{Activation, ClampActivation};
use crate::params::ParamInit;

/// Per stage: expansion ratio, output channels, number of blocks, stride of the first block.
const STAGES: [(usize, usize, usize, usize); 7] = [
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
];

/// `channels` times the multiplier, rounded to a multiple of 8, never more than 10% below the product.
fn scaled_channels(channels: usize, multiplier: f64) -> usize {
    let target = channels as f64 * multiplier;
    let rounded = (((target + 4.0) as usize) / 8 * 8).max(8);
    if (rounded as f64) < 0.9 * target { rounded + 8 } else { rounded }
}

pub(super) fn build(net: &MobilenetConfig, b: &mut NetworkBuilder) -> Result<(), ModelError> {
    let (group, width) = (net.norm_group, net.width);
    b.begin_block("features.0");
    let stride = net.stem.stride();
    conv_bn_relu6(b, "features.0", ConvSpec::same(scaled_channels(32, width), 3, stride), group)?;
    let mut index = 1;
    for (expand_ratio, outputs, count, stride) in STAGES {
        for i in 0..count {
            let name = format!("features.{index}");
            b.begin_block(&name);
            inverted_residual(
                b,
                &name,
                expand_ratio,
                scaled_channels(outputs, width),
                if i == 0 { stride } else { 1 },
                group,
            )?;
            index += 1;
        }
    }
    let name = format!("features.{index}");
    b.begin_block(&name);
    let channels = b.kept_units(&format!("{name}.0"), scaled_channels(1280, width.max(1.0)))?;
    conv_bn_relu6(b, &name, ConvSpec::same(channels, 1, 1), group)?;
    b.global_pool("pool")?;
    b.dropout("classifier.0", net.dropout);
    b.add_head_with_init("classifier.1", "mobilenet", ParamInit::Normal(0.01), ParamInit::Constant(0.0))
}

/// Convolution, batch norm, ReLU6.
fn conv_bn_relu6(
    b: &mut NetworkBuilder,
    name: &str,
    spec: ConvSpec,
    group_size: usize,
) -> Result<(), ModelError> {
    b.conv_no_bias(&format!("{name}.0"), spec)?;
    b.batch_norm(&format!("{name}.1"), group_size, ClampActivation::Relu6);
    Ok(())
}

/// Expand, depthwise convolution, project; adds the input if the shapes match.
fn inverted_residual(
    b: &mut NetworkBuilder,
    name: &str,
    expand_ratio: usize,
    outputs: usize,
    stride: usize,
    group_size: usize,
) -> Result<(), ModelError> {
    let inputs = b.image_shape(name)?[2];
    let hidden = match expand_ratio {
        // The channels of the block before it.
        1 => inputs,
        _ => b.kept_units(&format!("{name}.conv.0.0"), inputs * expand_ratio)?,
    };
    let branch = |b: &mut NetworkBuilder| {
        let mut next = 0;
        if expand_ratio > 1 {
            conv_bn_relu6(b, &format!("{name}.conv.{next}"), ConvSpec::same(hidden, 1, 1), group_size)?;
            next += 1;
        }
        let depthwise = ConvSpec { groups: hidden, ..ConvSpec::same(hidden, 3, stride) };
        conv_bn_relu6(b, &format!("{name}.conv.{next}"), depthwise, group_size)?;
        b.conv_no_bias(&format!("{name}.conv.{}", next + 1), ConvSpec::same(outputs, 1, 1))?;
        b.batch_norm(&format!("{name}.conv.{}", next + 2), group_size, ClampActivation::Identity);
        Ok(())
    };
    match stride == 1 && inputs == outputs {
        true => b.residual(name, branch, |_| Ok(()), Activation::Identity),
        false => branch(b),
    }
}
