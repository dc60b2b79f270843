//! `kind = "vit"`: a vision transformer, with the parameter names and initialization of torchvision's
//! `VisionTransformer`.

use super::transformer::{add_residual, attention_sizes, classification_head, kept_heads};
use super::{ModelError, NetworkBuilder};
use crate::job::VitConfig;
use crate::kernels::Activation;
use crate::kernels::im2col::ConvGeometry;
use crate::kernels::linear::WeightLayout;
use crate::layers::attention::Attention;
use crate::layers::class_token::ClassToken;
use crate::layers::first_token::FirstToken;
use crate::layers::linear::LinearOptions;
use crate::layers::norm::NormLayer;
use crate::params::ParamInit;

const EPS: f64 = 1e-6;

pub(super) fn build(vit: &VitConfig, b: &mut NetworkBuilder) -> Result<(), ModelError> {
    let geometry = patch_conv(b, vit)?;
    b.begin_block("conv_proj");
    b.conv_layer("conv_proj", geometry, true, Activation::Identity, None);
    let token =
        ClassToken::new(&mut b.registry, "class_token", ("class_token", "encoder.pos_embedding"), &b.shape);
    b.push_layer(token);
    b.dropout("encoder.dropout", vit.dropout);

    let (length, width) = (b.shape[0], vit.width);
    let heads = attention_sizes(
        "encoder.layers.encoder_layer_0.self_attention",
        length,
        width,
        (vit.heads, vit.heads),
    )?;
    for n in 0..vit.layers {
        let name = format!("encoder.layers.encoder_layer_{n}");
        b.begin_block(&name);
        let attention = format!("{name}.self_attention");
        let heads = kept_heads(b, &attention, heads)?;
        let hidden = b.kept_units(&format!("{name}.mlp.0"), vit.ratio * width)?;
        add_residual(b, &attention, |b| {
            add_norm(b, &format!("{name}.ln_1"));
            let names = [format!("{attention}.in_proj_weight"), format!("{attention}.in_proj_bias")];
            let name = format!("{attention}.in_proj");
            let options = LinearOptions {
                bias_init: ParamInit::Constant(0.0),
                ..xavier_options(width, heads.qkv_width())
            };
            b.linear_with_param_names(&name, names, heads.qkv_width(), options);
            b.push_layer(Attention {
                name: attention.clone(),
                sizes: heads,
                causal: false,
                rotary: None,
                dropout: vit.dropout,
                padded: false,
            });
            let options = LinearOptions {
                bias_init: ParamInit::Constant(0.0),
                ..LinearOptions::torch_default(heads.width(), Activation::Identity)
            };
            let name = format!("{attention}.out_proj");
            b.linear(&name, width, options);
            b.dropout(&format!("{attention}.dropout"), vit.dropout);
            Ok(())
        })?;
        add_residual(b, &format!("{name}.mlp"), |b| {
            add_norm(b, &format!("{name}.ln_2"));
            for (i, from, to, act) in
                [(0, width, hidden, Activation::Gelu), (3, hidden, width, Activation::Identity)]
            {
                let (name, options) =
                    (format!("{name}.mlp.{i}"), LinearOptions { act, ..xavier_options(from, to) });
                b.linear(&name, to, options);
                b.dropout(&format!("{name}.dropout"), vit.dropout);
            }
            Ok(())
        })?;
    }
    b.begin_block("encoder.ln");
    add_norm(b, "encoder.ln");
    b.push_layer(FirstToken { name: "class".into(), length, width });
    classification_head(b, "heads.head", "vit", ParamInit::Constant(0.0))
}

/// The convolution that embeds each patch.
fn patch_conv(b: &NetworkBuilder, vit: &VitConfig) -> Result<ConvGeometry, ModelError> {
    let [height, width, inputs] = match <[usize; 3]>::try_from(b.shape.as_slice()) {
        Ok(shape) if shape[0] % vit.patch == 0 && shape[1] % vit.patch == 0 && shape[0] * shape[1] > 0 => {
            shape
        }
        _ => {
            return Err(ModelError::Shape {
                layer: "conv_proj".into(),
                got: b.shape.clone(),
                needs: format!("images whose height and width are multiples of `patch`, {}", vit.patch),
            });
        }
    };
    Ok(ConvGeometry {
        height,
        width,
        in_channels: inputs,
        out_channels: vit.width,
        kernel: vit.patch,
        stride: vit.patch,
        padding: 0,
        dilation: 1,
        groups: 1,
    })
}

fn xavier_options(inputs: usize, outputs: usize) -> LinearOptions {
    let init = ParamInit::Uniform((6.0 / (inputs + outputs) as f64).sqrt());
    LinearOptions {
        bias: true,
        act: Activation::Identity,
        weight_layout: WeightLayout::OutIn,
        init,
        bias_init: ParamInit::Normal(1e-6),
    }
}

fn add_norm(b: &mut NetworkBuilder, name: &str) {
    let layer = NormLayer::layer_norm(&mut b.registry, name, &b.shape, EPS);
    b.push_layer(layer);
}
