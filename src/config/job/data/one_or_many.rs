//! A key that takes one value or a list of them.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

/// One value for all, or a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T: Clone> OneOrMany<T> {
    /// The values as they are written.
    pub fn to_vec(&self) -> Vec<T> {
        match self {
            Self::One(value) => vec![value.clone()],
            Self::Many(values) => values.clone(),
        }
    }
}

/// `type` lists both types; `items` has the constraints of a value.
impl<T: JsonSchema> JsonSchema for OneOrMany<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("OneOr{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let items = generator.subschema_for::<T>();
        let kind = items.get("type").cloned().unwrap_or_default();
        json_schema!({ "type": [kind, "array"], "items": items, "minItems": 1, "maxItems": 4 })
    }
}

/// Deserializes a list from a list or from one value.
pub(in crate::job) fn list_of_one_or_many<'de, T, D>(from: D) -> Result<Vec<T>, D::Error>
where
    T: Clone + Deserialize<'de>,
    D: Deserializer<'de>,
{
    OneOrMany::deserialize(from).map(|values| values.to_vec())
}

/// The schema of such a list.
pub(in crate::job) fn one_or_list(schema: &mut Schema) {
    let kind = schema.get("items").and_then(|items| items.get("type")).cloned().unwrap_or_default();
    schema.insert("type".into(), json!([kind, "array"]));
}

/// Any number of distinct values.
pub(super) fn any_number(schema: &mut Schema) {
    schema.remove("maxItems");
    schema.insert("uniqueItems".into(), true.into());
}

pub(super) fn above_zero(schema: &mut Schema) {
    set_bound(schema, "exclusiveMinimum", 0.0.into());
}

/// Sides in pixels: one, or height and width.
pub(super) fn at_least_one(schema: &mut Schema) {
    set_bound(schema, "minimum", 1.into());
    set_bound(schema, "maximum", 16_384.into());
    schema.insert("minItems".into(), 2.into());
    schema.insert("maxItems".into(), 2.into());
}

fn set_bound(schema: &mut Schema, key: &str, value: Value) {
    if let Some(items) = schema.get_mut("items").and_then(Value::as_object_mut) {
        items.insert(key.into(), value.clone());
    }
    schema.insert(key.into(), value);
}
