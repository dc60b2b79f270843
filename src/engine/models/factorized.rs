//! Linear layers and convolutions, each as one layer or, if `[lowrank]` gives it a rank, as two.

use super::NetworkBuilder;
use crate::kernels::Activation;
use crate::kernels::im2col::ConvGeometry;
use crate::kernels::linear::WeightLayout;
use crate::layers::conv::Conv2d;
use crate::layers::linear::{Linear, LinearOptions};
use crate::params::{MatrixLayer, ParamInit, TensorUse};

impl NetworkBuilder {
    /// A linear layer over the last dimension.
    pub(super) fn linear(&mut self, name: &str, outputs: usize, options: LinearOptions) {
        self.linear_with_param_names(name, param_names(name), outputs, options);
    }

    /// As [`linear`](Self::linear), with explicit names for weight and bias.
    pub(super) fn linear_with_param_names(
        &mut self,
        name: &str,
        names: [String; 2],
        outputs: usize,
        options: LinearOptions,
    ) {
        let inputs = self.shape.last().copied().unwrap_or(1);
        let (shape, usage) = match options.weight_layout {
            WeightLayout::OutIn => (vec![outputs, inputs], TensorUse::Weight),
            WeightLayout::InOut => (vec![inputs, outputs], TensorUse::TransposedWeight),
        };
        let Some(rank) = self.registry.matrix_layer(name, names.clone(), shape, usage, options.bias) else {
            let input = self.shape.clone();
            let layer = Linear::with_param_names(&mut self.registry, name, names, &input, outputs, options);
            return self.push_layer(layer);
        };
        let options = LinearOptions { init: options.init.of_factors(rank), ..options };
        let reduce = LinearOptions { bias: false, act: Activation::Identity, ..options };
        let [first, second] = MatrixLayer::factor_names(name);
        for (name, outputs, options) in [(first, rank, reduce), (second, outputs, options)] {
            let input = self.shape.clone();
            let layer = Linear::new(&mut self.registry, &name, &input, outputs, options);
            self.push_layer(layer);
        }
    }

    /// A convolution; weight and bias are initialized as PyTorch does if there is no `init`.
    pub(super) fn conv_layer(
        &mut self,
        name: &str,
        geometry: ConvGeometry,
        bias: bool,
        act: Activation,
        init: Option<ParamInit>,
    ) {
        let g = geometry;
        let fan_in = (g.in_channels / g.groups * g.kernel * g.kernel) as f64;
        let init = init.unwrap_or(ParamInit::Uniform(1.0 / fan_in.sqrt()));
        let shape = vec![g.out_channels, g.in_channels, g.kernel, g.kernel];
        let rank = match g.groups {
            1 => self.registry.matrix_layer(name, param_names(name), shape, TensorUse::Weight, bias),
            _ => None,
        };
        let Some(rank) = rank else {
            let conv = Conv2d::with_init(&mut self.registry, name, g, bias, act, init);
            return self.push_layer(conv);
        };
        let init = init.of_factors(rank);
        let [first, second] = MatrixLayer::factor_names(name);
        let reduce = ConvGeometry { out_channels: rank, ..g };
        let (height, width) = g.output();
        let pointwise = ConvGeometry {
            height,
            width,
            in_channels: rank,
            kernel: 1,
            stride: 1,
            padding: 0,
            dilation: 1,
            ..g
        };
        let conv = Conv2d::with_init(&mut self.registry, &first, reduce, false, Activation::Identity, init);
        self.push_layer(conv);
        let conv = Conv2d::with_init(&mut self.registry, &second, pointwise, bias, act, init);
        self.push_layer(conv);
    }
}

fn param_names(layer: &str) -> [String; 2] {
    ["weight", "bias"].map(|part| format!("{layer}.{part}"))
}
