//! Building blocks of the image models: convolutions, normalization and pooling. Refuses, by layer name, images that
//! are too small and channels that do not divide.

use super::{ModelError, NetworkBuilder};
use crate::graph::network::{Node, ResidualNode};
use crate::kernels::im2col::ConvGeometry;
use crate::kernels::pool::PoolGeometry;
use crate::kernels::{Activation, ClampActivation};
use crate::layers::avg_pool::AvgPool;
use crate::layers::batch_norm::BatchNorm;
use crate::layers::global_pool::GlobalAvgPool;
use crate::layers::group_norm::GroupNorm;
use crate::layers::max_pool::MaxPool;
use crate::params::ParamInit;

/// A convolution, independent of its input shape.
#[derive(Clone, Copy)]
pub(super) struct ConvSpec {
    pub outputs: usize,
    pub kernel: usize,
    pub stride: usize,
    pub padding: usize,
    pub dilation: usize,
    pub groups: usize,
}

impl ConvSpec {
    /// Padded so that, with an odd kernel, only `stride` changes the image size.
    pub fn same(outputs: usize, kernel: usize, stride: usize) -> Self {
        Self { outputs, kernel, stride, padding: kernel / 2, dilation: 1, groups: 1 }
    }

    /// Normal with the variance that preserves the size of gradients through a ReLU (He et al., 2015).
    pub fn kaiming_fan_out(&self) -> ParamInit {
        ParamInit::Normal((2.0 / (self.outputs * self.kernel * self.kernel) as f64).sqrt())
    }
}

impl NetworkBuilder {
    /// (height, width, channels) of the samples at this point; refuses anything but images.
    pub(super) fn image_shape(&self, layer: &str) -> Result<[usize; 3], ModelError> {
        <[usize; 3]>::try_from(self.shape.as_slice())
            .map_err(|_| self.shape_error(layer, "images (height, width, channels)"))
    }

    pub(super) fn shape_error(&self, layer: &str, needs: impl Into<String>) -> ModelError {
        ModelError::Shape { layer: layer.into(), got: self.shape.clone(), needs: needs.into() }
    }

    /// A convolution without bias, for use before a normalization.
    pub(super) fn conv_no_bias(&mut self, name: &str, spec: ConvSpec) -> Result<(), ModelError> {
        self.conv(name, spec, false, Activation::Identity, Some(spec.kaiming_fan_out()))
    }

    /// Without `init`, PyTorch's default.
    pub(super) fn conv(
        &mut self,
        name: &str,
        spec: ConvSpec,
        bias: bool,
        act: Activation,
        init: Option<ParamInit>,
    ) -> Result<(), ModelError> {
        let [height, width, inputs] = self.image_shape(name)?;
        let ConvSpec { outputs, kernel, stride, padding, dilation, groups } = spec;
        if inputs % groups != 0 || outputs % groups != 0 {
            return Err(
                self.shape_error(name, format!("input and output channels divisible into {groups} groups"))
            );
        }
        let g = ConvGeometry {
            height,
            width,
            in_channels: inputs,
            out_channels: outputs,
            kernel,
            stride,
            padding,
            dilation,
            groups,
        };
        if g.output().0 == 0 || g.output().1 == 0 {
            let min_size = (dilation * (kernel - 1) + 1).saturating_sub(2 * padding);
            return Err(self.shape_error(name, format!("images of at least {min_size} x {min_size}")));
        }
        self.conv_layer(name, g, bias, act, init);
        Ok(())
    }

    /// Batch norm over groups of `group_size` samples.
    pub(super) fn batch_norm(&mut self, name: &str, group_size: usize, act: ClampActivation) {
        let shape = self.shape.clone();
        let norm = BatchNorm::new(&mut self.registry, name, &shape, group_size, act);
        self.push_layer(norm);
    }

    /// Group norm over `groups` groups of channels.
    pub(super) fn group_norm(
        &mut self,
        name: &str,
        groups: usize,
        act: ClampActivation,
    ) -> Result<(), ModelError> {
        let shape = self.shape.clone();
        if shape.last().is_none_or(|channels| channels % groups != 0) {
            return Err(self.shape_error(name, format!("channels divisible into {groups} groups")));
        }
        let norm = GroupNorm::new(&mut self.registry, name, &shape, groups, act);
        self.push_layer(norm);
        Ok(())
    }

    pub(super) fn max_pool(
        &mut self,
        name: &str,
        size: usize,
        stride: usize,
        padding: usize,
    ) -> Result<(), ModelError> {
        let window = self.pool_window(name, size, stride, padding)?;
        self.push_layer(MaxPool { name: name.into(), window });
        Ok(())
    }

    pub(super) fn avg_pool(
        &mut self,
        name: &str,
        size: usize,
        stride: usize,
        padding: usize,
    ) -> Result<(), ModelError> {
        let window = self.pool_window(name, size, stride, padding)?;
        self.push_layer(AvgPool { name: name.into(), window });
        Ok(())
    }

    fn pool_window(
        &self,
        name: &str,
        size: usize,
        stride: usize,
        padding: usize,
    ) -> Result<PoolGeometry, ModelError> {
        let [height, width, channels] = self.image_shape(name)?;
        let window = PoolGeometry { height, width, channels, size, stride, padding };
        if padding > size / 2 {
            return Err(self.shape_error(name, format!("a padding of at most {}, half its size", size / 2)));
        }
        if window.output().0 == 0 || window.output().1 == 0 {
            let min_size = size - 2 * padding;
            return Err(self.shape_error(
                name,
                format!("images of at least {min_size} x {min_size} for a pooling window of {size}"),
            ));
        }
        Ok(window)
    }

    /// Global average pooling: the mean per channel.
    pub(super) fn global_pool(&mut self, name: &str) -> Result<(), ModelError> {
        let shape = self.image_shape(name)?;
        self.push_layer(GlobalAvgPool { name: name.into(), shape });
        Ok(())
    }

    /// `act(branch(x) + shortcut(x))`; without shortcut layers, the shortcut is the identity.
    pub(super) fn residual(
        &mut self,
        name: &str,
        branch: impl FnOnce(&mut Self) -> Result<(), ModelError>,
        shortcut: impl FnOnce(&mut Self) -> Result<(), ModelError>,
        act: Activation,
    ) -> Result<(), ModelError> {
        let input_shape = self.shape.clone();
        let branch = self.build_branch(branch)?;
        if branch.is_empty() {
            return Err(self.shape_error(name, "a layer in its branch"));
        }
        let output = std::mem::replace(&mut self.shape, input_shape.clone());
        let shortcut = self.build_branch(shortcut)?;
        if self.shape != output {
            let needs = format!(
                "a branch and a shortcut of the same output shape, not {output:?} and {:?}",
                self.shape
            );
            return Err(ModelError::Shape { layer: name.into(), got: input_shape, needs });
        }
        self.push_node(Node::Residual(ResidualNode {
            name: name.into(),
            branch,
            shortcut,
            act,
            output_shape: output,
        }));
        Ok(())
    }
}
