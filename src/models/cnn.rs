//! `kind = "cnn"`: convolutions, each with its activation and pooling, then dense layers.

use super::{Builder, ModelError};
use crate::job::Cnn;
use crate::kernels::conv::Geometry;
use crate::kernels::pool::Window;
use crate::layers::conv::Conv;
use crate::layers::pool::MaxPool;

pub(super) fn build(cnn: &Cnn, b: &mut Builder) -> Result<(), ModelError> {
    for (i, stage) in cnn.stages.iter().enumerate() {
        let name = format!("stages.{i}");
        b.block(&name);
        let [height, width, inputs] = picture(b, &name)?;
        let geometry = Geometry {
            height,
            width,
            inputs,
            outputs: stage.channels,
            kernel: stage.kernel,
            stride: stage.stride,
            padding: stage.kernel / 2,
            dilation: 1,
            groups: 1,
        };
        let conv = Conv::new(&mut b.declared, &name, geometry, true, cnn.activation.into());
        b.layer(conv);
        if stage.pool > 1 {
            let [height, width, channels] = picture(b, &name)?;
            if height < stage.pool || width < stage.pool {
                return Err(ModelError::Shape {
                    layer: format!("{name}.pool"),
                    got: b.shape.clone(),
                    needs: format!("pictures of at least {0} x {0} to pool by {0}", stage.pool),
                });
            }
            let window = Window { height, width, channels, size: stage.pool, stride: stage.pool, padding: 0 };
            b.layer(MaxPool { name: format!("{name}.pool"), window });
        }
    }
    let next = b.dense("layers", 0, &cnn.hidden, cnn.activation.into(), cnn.dropout);
    b.block("flatten");
    b.flatten("flatten");
    b.classify(&format!("layers.{next}"), "cnn")
}

/// (height, width, channels) of the samples at this point, which must be pictures.
fn picture(b: &Builder, layer: &str) -> Result<[usize; 3], ModelError> {
    <[usize; 3]>::try_from(b.shape.as_slice()).map_err(|_| ModelError::Shape {
        layer: layer.into(),
        got: b.shape.clone(),
        needs: "pictures, (height, width, channels)".into(),
    })
}
