//! `kind = "vit"`: a vision transformer, its parameters named and begun as torchvision's `VisionTransformer` has
//! them.

use super::transformer::{classes, residual, sizes};
use super::{Builder, ModelError};
use crate::job::Vit;
use crate::kernels::Activation;
use crate::kernels::linear::Lies;
use crate::kernels::windows::Geometry;
use crate::layers::attention::Attention;
use crate::layers::class_token::ClassToken;
use crate::layers::conv::Conv;
use crate::layers::first::First;
use crate::layers::linear::{Linear, Options};
use crate::layers::norm::Norm;
use crate::params::Init;

const EPS: f64 = 1e-6;

pub(super) fn build(vit: &Vit, b: &mut Builder) -> Result<(), ModelError> {
    let geometry = patches(b, vit)?;
    b.block("conv_proj");
    let conv = Conv::new(&mut b.declared, "conv_proj", geometry, true, Activation::Identity);
    b.layer(conv);
    let token =
        ClassToken::new(&mut b.declared, "class_token", ("class_token", "encoder.pos_embedding"), &b.shape);
    b.layer(token);
    b.dropout("encoder.dropout", vit.dropout);

    let (length, width) = (b.shape[0], vit.width);
    let heads =
        sizes("encoder.layers.encoder_layer_0.self_attention", length, width, (vit.heads, vit.heads))?;
    for n in 0..vit.layers {
        let name = format!("encoder.layers.encoder_layer_{n}");
        b.block(&name);
        let attention = format!("{name}.self_attention");
        residual(b, &attention, |b| {
            norm(b, &format!("{name}.ln_1"));
            let names = [format!("{attention}.in_proj_weight"), format!("{attention}.in_proj_bias")];
            let name = format!("{attention}.in_proj");
            let options = Options { bias_init: Init::Constant(0.0), ..xavier(width, 3 * width) };
            let packed = Linear::named(&mut b.declared, &name, names, &b.shape, 3 * width, options);
            b.layer(packed);
            b.layer(Attention {
                name: attention.clone(),
                sizes: heads,
                causal: false,
                rotary: None,
                dropout: vit.dropout,
                padded: false,
            });
            let options =
                Options { bias_init: Init::Constant(0.0), ..Options::torch(width, Activation::Identity) };
            let name = format!("{attention}.out_proj");
            let out = Linear::new(&mut b.declared, &name, &b.shape, width, options);
            b.layer(out);
            b.dropout(&format!("{attention}.dropout"), vit.dropout);
            Ok(())
        })?;
        residual(b, &format!("{name}.mlp"), |b| {
            norm(b, &format!("{name}.ln_2"));
            let hidden = vit.ratio * width;
            for (i, from, to, act) in
                [(0, width, hidden, Activation::Gelu), (3, hidden, width, Activation::Identity)]
            {
                let (name, options) = (format!("{name}.mlp.{i}"), Options { act, ..xavier(from, to) });
                let layer = Linear::new(&mut b.declared, &name, &b.shape, to, options);
                b.layer(layer);
                b.dropout(&format!("{name}.dropout"), vit.dropout);
            }
            Ok(())
        })?;
    }
    b.block("encoder.ln");
    norm(b, "encoder.ln");
    b.layer(First { name: "class".into(), length, width });
    classes(b, "heads.head", "vit", Init::Constant(0.0))
}

/// The convolution that makes a vector of each patch.
fn patches(b: &Builder, vit: &Vit) -> Result<Geometry, ModelError> {
    let [height, width, inputs] = match <[usize; 3]>::try_from(b.shape.as_slice()) {
        Ok(shape) if shape[0] % vit.patch == 0 && shape[1] % vit.patch == 0 && shape[0] * shape[1] > 0 => {
            shape
        }
        _ => {
            return Err(ModelError::Shape {
                layer: "conv_proj".into(),
                got: b.shape.clone(),
                needs: format!("pictures whose height and width are multiples of the patch, {}", vit.patch),
            });
        }
    };
    Ok(Geometry {
        height,
        width,
        inputs,
        outputs: vit.width,
        kernel: vit.patch,
        stride: vit.patch,
        padding: 0,
        dilation: 1,
        groups: 1,
    })
}

fn xavier(inputs: usize, outputs: usize) -> Options {
    let init = Init::Uniform((6.0 / (inputs + outputs) as f64).sqrt());
    Options { bias: true, act: Activation::Identity, lies: Lies::OutIn, init, bias_init: Init::Normal(1e-6) }
}

fn norm(b: &mut Builder, name: &str) {
    let layer = Norm::layer(&mut b.declared, name, &b.shape, EPS);
    b.layer(layer);
}
