//! `kind = "resnet"`: residual networks of He et al., 2015, as torchvision builds and names them
//! (`conv1.weight`, `layer2.0.downsample.0.weight`, `fc.weight`); the deep one strides in its 3 x 3.

use super::picture::Filter;
use super::{Builder, ModelError};
use crate::job::{Resnet, Stem};
use crate::kernels::{Activation, Clip};

pub(super) fn build(resnet: &Resnet, b: &mut Builder) -> Result<(), ModelError> {
    let (counts, bottleneck) = match resnet.depth {
        18 => ([2, 2, 2, 2], false),
        34 => ([3, 4, 6, 3], false),
        _ => ([3, 4, 6, 3], true),
    };
    let group = resnet.norm_group;
    b.block("conv1");
    b.filter(
        "conv1",
        Filter::same(64, if resnet.stem == Stem::Small { 3 } else { 7 }, resnet.stem.stride()),
    )?;
    b.batch_norm("bn1", group, Clip::Relu);
    if resnet.stem == Stem::Imagenet {
        b.max_pool("maxpool", 3, 2, 1)?;
    }
    for (stage, count) in counts.into_iter().enumerate() {
        for i in 0..count {
            let name = format!("layer{}.{i}", stage + 1);
            let stride = if i == 0 && stage > 0 { 2 } else { 1 };
            b.block(&name);
            block(b, &name, 64 << stage, stride, bottleneck, group)?;
        }
    }
    b.block("avgpool");
    b.global_pool("avgpool")?;
    b.classify("fc", "resnet")
}

fn block(
    b: &mut Builder,
    name: &str,
    width: usize,
    stride: usize,
    bottleneck: bool,
    group: usize,
) -> Result<(), ModelError> {
    let at = |layer: &str| format!("{name}.{layer}");
    let outputs = if bottleneck { 4 * width } else { width };
    let inputs = b.picture(name)?[2];
    let filters = match bottleneck {
        false => vec![Filter::same(width, 3, stride), Filter::same(width, 3, 1)],
        true => vec![Filter::same(width, 1, 1), Filter::same(width, 3, stride), Filter::same(outputs, 1, 1)],
    };
    let last = filters.len();
    let branch = |b: &mut Builder| {
        for (i, filter) in filters.into_iter().enumerate().map(|(i, f)| (i + 1, f)) {
            b.filter(&at(&format!("conv{i}")), filter)?;
            b.batch_norm(&at(&format!("bn{i}")), group, if i == last { Clip::Nothing } else { Clip::Relu });
        }
        Ok(())
    };
    let shortcut = |b: &mut Builder| {
        if stride > 1 || inputs != outputs {
            b.filter(&at("downsample.0"), Filter::same(outputs, 1, stride))?;
            b.batch_norm(&at("downsample.1"), group, Clip::Nothing);
        }
        Ok(())
    };
    b.residual(name, branch, shortcut, Activation::Relu)
}
