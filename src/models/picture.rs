//! What models of pictures are put together with: convolutions, their normalisation and pooling, refused
//! by name where the picture is too small or the channels do not divide.

use super::{Builder, ModelError};
use crate::kernels::pool::Window;
use crate::kernels::windows::Geometry;
use crate::kernels::{Activation, Clip};
use crate::layers::avg_pool::AvgPool;
use crate::layers::batch_norm::BatchNorm;
use crate::layers::conv::Conv;
use crate::layers::global_pool::GlobalPool;
use crate::layers::group_norm::GroupNorm;
use crate::layers::network::{Node, Residual};
use crate::layers::pool::MaxPool;
use crate::params::Init;

/// A convolution but for the picture it is given.
#[derive(Clone, Copy)]
pub(super) struct Filter {
    pub outputs: usize,
    pub kernel: usize,
    pub stride: usize,
    pub padding: usize,
    pub dilation: usize,
    pub groups: usize,
}

impl Filter {
    /// Moves by `stride` and keeps the picture's size but for that, where the kernel is odd.
    pub fn same(outputs: usize, kernel: usize, stride: usize) -> Self {
        Self { outputs, kernel, stride, padding: kernel / 2, dilation: 1, groups: 1 }
    }

    /// Normal, so that gradients keep their size on the way back through a ReLU (He et al., 2015).
    pub fn kaiming(&self) -> Init {
        Init::Normal((2.0 / (self.outputs * self.kernel * self.kernel) as f64).sqrt())
    }
}

impl Builder {
    /// (height, width, channels) of the samples at this point, which must be pictures.
    pub(super) fn picture(&self, layer: &str) -> Result<[usize; 3], ModelError> {
        <[usize; 3]>::try_from(self.shape.as_slice())
            .map_err(|_| self.refuse(layer, "pictures, (height, width, channels)"))
    }

    pub(super) fn refuse(&self, layer: &str, needs: impl Into<String>) -> ModelError {
        ModelError::Shape { layer: layer.into(), got: self.shape.clone(), needs: needs.into() }
    }

    /// A convolution without bias, as stands before a normalisation.
    pub(super) fn filter(&mut self, name: &str, filter: Filter) -> Result<(), ModelError> {
        self.conv(name, filter, false, Activation::Identity, Some(filter.kaiming()))
    }

    /// `init` is PyTorch's default where there is none.
    pub(super) fn conv(
        &mut self,
        name: &str,
        filter: Filter,
        bias: bool,
        act: Activation,
        init: Option<Init>,
    ) -> Result<(), ModelError> {
        let [height, width, inputs] = self.picture(name)?;
        let Filter { outputs, kernel, stride, padding, dilation, groups } = filter;
        if inputs % groups != 0 || outputs % groups != 0 {
            return Err(
                self.refuse(name, format!("input and output channels divisible into {groups} groups"))
            );
        }
        let g = Geometry { height, width, inputs, outputs, kernel, stride, padding, dilation, groups };
        if g.output().0 == 0 || g.output().1 == 0 {
            let least = (dilation * (kernel - 1) + 1).saturating_sub(2 * padding);
            return Err(self.refuse(name, format!("pictures of at least {least} x {least}")));
        }
        let conv = match init {
            Some(init) => Conv::with_init(&mut self.declared, name, g, bias, act, init),
            None => Conv::new(&mut self.declared, name, g, bias, act),
        };
        self.layer(conv);
        Ok(())
    }

    /// Batch norm over groups of `group` samples.
    pub(super) fn batch_norm(&mut self, name: &str, group: usize, act: Clip) {
        let shape = self.shape.clone();
        let norm = BatchNorm::new(&mut self.declared, name, &shape, group, act);
        self.layer(norm);
    }

    /// Group norm over `groups` groups of channels.
    pub(super) fn group_norm(&mut self, name: &str, groups: usize, act: Clip) -> Result<(), ModelError> {
        let shape = self.shape.clone();
        if shape.last().is_none_or(|channels| channels % groups != 0) {
            return Err(self.refuse(name, format!("channels divisible into {groups} groups")));
        }
        let norm = GroupNorm::new(&mut self.declared, name, &shape, groups, act);
        self.layer(norm);
        Ok(())
    }

    pub(super) fn max_pool(
        &mut self,
        name: &str,
        size: usize,
        stride: usize,
        padding: usize,
    ) -> Result<(), ModelError> {
        let window = self.window(name, size, stride, padding)?;
        self.layer(MaxPool { name: name.into(), window });
        Ok(())
    }

    pub(super) fn avg_pool(
        &mut self,
        name: &str,
        size: usize,
        stride: usize,
        padding: usize,
    ) -> Result<(), ModelError> {
        let window = self.window(name, size, stride, padding)?;
        self.layer(AvgPool { name: name.into(), window });
        Ok(())
    }

    fn window(&self, name: &str, size: usize, stride: usize, padding: usize) -> Result<Window, ModelError> {
        let [height, width, channels] = self.picture(name)?;
        let window = Window { height, width, channels, size, stride, padding };
        if padding > size / 2 {
            return Err(self.refuse(name, format!("a padding of at most {}, half its size", size / 2)));
        }
        if window.output().0 == 0 || window.output().1 == 0 {
            let least = size - 2 * padding;
            return Err(
                self.refuse(name, format!("pictures of at least {least} x {least} to pool by {size}"))
            );
        }
        Ok(window)
    }

    /// The picture's mean a channel.
    pub(super) fn global_pool(&mut self, name: &str) -> Result<(), ModelError> {
        let shape = self.picture(name)?;
        self.layer(GlobalPool { name: name.into(), shape });
        Ok(())
    }

    /// `act(branch(x) + shortcut(x))`; no shortcut layers mean `x` itself.
    pub(super) fn residual(
        &mut self,
        name: &str,
        branch: impl FnOnce(&mut Self) -> Result<(), ModelError>,
        shortcut: impl FnOnce(&mut Self) -> Result<(), ModelError>,
        act: Activation,
    ) -> Result<(), ModelError> {
        let before = self.shape.clone();
        let branch = self.branch(branch)?;
        if branch.is_empty() {
            return Err(self.refuse(name, "a layer in its branch"));
        }
        let output = std::mem::replace(&mut self.shape, before);
        let shortcut = self.branch(shortcut)?;
        if self.shape != output {
            let needs = format!("a branch and a shortcut of one shape, and its branch gives {output:?}");
            return Err(self.refuse(name, needs));
        }
        self.node(Node::Residual(Residual { name: name.into(), branch, shortcut, act, output }));
        Ok(())
    }
}
