//! `kind = "mlp"`: flattens the sample, then dense layers and one logit per class. Parameters are named by index:
//! `layers.0.weight`, `layers.0.bias`, `layers.1.weight`, ...

use super::{ModelError, NetworkBuilder};
use crate::base::features::InputSpec;
use crate::job::MlpConfig;

pub(super) fn build(mlp: &MlpConfig, b: &mut NetworkBuilder) -> Result<(), ModelError> {
    if let InputSpec::Tokens { .. } = b.features.input {
        return Err(ModelError::Data { kind: "mlp", needs: "numbers or images", got: "tokens".into() });
    }
    b.begin_block("input");
    b.flatten("flatten");
    let next = b.dense_layers("layers", 0, &mlp.hidden, mlp.activation.into(), mlp.dropout)?;
    b.add_head(&format!("layers.{next}"), "mlp")
}
