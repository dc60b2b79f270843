//! `kind = "resnet"`: residual networks of He et al., 2015, as torchvision builds and names them (`conv1.weight`,
//! `layer2.0.downsample.0.weight`, `fc.weight`); the bottleneck variant has its stride in the 3 x 3 convolution.

use super::vision::ConvSpec;
use super::{ModelError, NetworkBuilder};
use crate::job::{ResnetConfig, Stem};
use crate::kernels::{Activation, ClampActivation};

pub(super) fn build(resnet: &ResnetConfig, b: &mut NetworkBuilder) -> Result<(), ModelError> {
    let (counts, bottleneck) = match resnet.depth {
        18 => ([2, 2, 2, 2], false),
        34 => ([3, 4, 6, 3], false),
        _ => ([3, 4, 6, 3], true),
    };
    let group = resnet.norm_group;
    b.begin_block("conv1");
    b.conv_no_bias(
        "conv1",
        ConvSpec::same(64, if resnet.stem == Stem::Small { 3 } else { 7 }, resnet.stem.stride()),
    )?;
    b.batch_norm("bn1", group, ClampActivation::Relu);
    if resnet.stem == Stem::Imagenet {
        b.max_pool("maxpool", 3, 2, 1)?;
    }
    for (stage, count) in counts.into_iter().enumerate() {
        for i in 0..count {
            let name = format!("layer{}.{i}", stage + 1);
            let stride = if i == 0 && stage > 0 { 2 } else { 1 };
            b.begin_block(&name);
            residual_block(b, &name, 64 << stage, stride, bottleneck, group)?;
        }
    }
    b.begin_block("avgpool");
    b.global_pool("avgpool")?;
    b.add_head("fc", "resnet")
}

fn residual_block(
    b: &mut NetworkBuilder,
    name: &str,
    width: usize,
    stride: usize,
    bottleneck: bool,
    group_size: usize,
) -> Result<(), ModelError> {
    let path = |layer: &str| format!("{name}.{layer}");
    let outputs = if bottleneck { 4 * width } else { width };
    let inputs = b.image_shape(name)?[2];
    // The channels between two convolutions of the branch.
    let inner = |conv: &str| b.kept_units(&path(conv), width);
    let convs = match bottleneck {
        false => vec![ConvSpec::same(inner("conv1")?, 3, stride), ConvSpec::same(width, 3, 1)],
        true => vec![
            ConvSpec::same(inner("conv1")?, 1, 1),
            ConvSpec::same(inner("conv2")?, 3, stride),
            ConvSpec::same(outputs, 1, 1),
        ],
    };
    let last = convs.len();
    let branch = |b: &mut NetworkBuilder| {
        for (i, spec) in convs.into_iter().enumerate().map(|(i, f)| (i + 1, f)) {
            b.conv_no_bias(&path(&format!("conv{i}")), spec)?;
            b.batch_norm(
                &path(&format!("bn{i}")),
                group_size,
                if i == last { ClampActivation::Identity } else { ClampActivation::Relu },
            );
        }
        Ok(())
    };
    let shortcut = |b: &mut NetworkBuilder| {
        if stride > 1 || inputs != outputs {
            b.conv_no_bias(&path("downsample.0"), ConvSpec::same(outputs, 1, stride))?;
            b.batch_norm(&path("downsample.1"), group_size, ClampActivation::Identity);
        }
        Ok(())
    };
    b.residual(name, branch, shortcut, Activation::Relu)
}
