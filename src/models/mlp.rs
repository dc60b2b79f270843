//! `kind = "mlp"`: the sample flattened, dense layers, one score a class. Parameters are named by their place in
//! a list: `layers.0.weight`, `layers.0.bias`, `layers.1.weight`, ...

use super::{Builder, ModelError};
use crate::features::Input;
use crate::job::Mlp;

pub(super) fn build(mlp: &Mlp, b: &mut Builder) -> Result<(), ModelError> {
    if let Input::Tokens { .. } = b.features.input {
        return Err(ModelError::Data { kind: "mlp", needs: "numbers or pictures", got: "tokens".into() });
    }
    b.block("input");
    b.flatten("flatten");
    let next = b.dense("layers", 0, &mlp.hidden, mlp.activation.into(), mlp.dropout);
    b.classify(&format!("layers.{next}"), "mlp")
}
