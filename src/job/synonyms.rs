//! Names that people bring from other tools, and the key that means the same here.

/// (name, key, note): the names of Keras, Lightning, Hugging Face, nanoGPT, axolotl and others.
const SYNONYMS: [(&str, &str, &str); 72] = [
    ("learning_rate", "optimizer.lr", ""),
    ("lr", "optimizer.lr", ""),
    ("base_lr", "optimizer.lr", ""),
    ("max_lr", "optimizer.lr", ""),
    ("weight_decay", "optimizer.weight_decay", ""),
    ("beta1", "optimizer.betas", "as `betas = [beta1, beta2]`"),
    ("beta2", "optimizer.betas", "as `betas = [beta1, beta2]`"),
    ("adam_beta1", "optimizer.betas", "as `betas = [beta1, beta2]`"),
    ("adam_beta2", "optimizer.betas", "as `betas = [beta1, beta2]`"),
    ("epsilon", "optimizer.eps", ""),
    ("optim", "optimizer.kind", ""),
    ("lr_scheduler", "schedule.kind", ""),
    ("lr_scheduler_type", "schedule.kind", ""),
    ("scheduler", "schedule.kind", ""),
    ("warmup", "schedule.warmup_steps", ""),
    ("warmup_iters", "schedule.warmup_steps", ""),
    ("warmup_ratio", "schedule.warmup_fraction", "for `kind = \"onecycle\"`; others take `warmup_steps`"),
    ("max_steps", "train.steps", ""),
    ("max_iters", "train.steps", ""),
    ("num_steps", "train.steps", ""),
    ("max_epochs", "train.epochs", ""),
    ("num_epochs", "train.epochs", ""),
    ("num_train_epochs", "train.epochs", ""),
    ("n_epochs", "train.epochs", ""),
    ("epochs", "train.epochs", ""),
    ("batch", "train.batch_size", ""),
    ("bs", "train.batch_size", ""),
    ("batch_size", "train.batch_size", ""),
    ("micro_batch_size", "train.batch_size", ""),
    ("per_device_train_batch_size", "train.batch_size", ""),
    ("gradient_accumulation_steps", "train.accumulation_steps", ""),
    ("accumulate_grad_batches", "train.accumulation_steps", ""),
    ("grad_accum", "train.accumulation_steps", ""),
    ("gradient_clip_val", "train.clip_norm", ""),
    ("max_grad_norm", "train.clip_norm", ""),
    ("grad_clip", "train.clip_norm", ""),
    ("freeze_layers", "train.freeze", ""),
    ("frozen", "train.freeze", ""),
    ("unfrozen_parameters", "train.freeze", "as `freeze = [\"*\", \"!pattern\"]`"),
    ("param_groups", "train.groups", ""),
    ("dtype", "train.precision", ""),
    ("mixed_precision", "train.precision", ""),
    ("fp16", "train.precision", "as `precision = \"f16\"`"),
    ("bf16", "train.precision", "as `precision = \"bf16\"`"),
    ("n_layer", "model.layers", ""),
    ("num_layers", "model.layers", ""),
    ("num_hidden_layers", "model.layers", ""),
    ("n_head", "model.heads", ""),
    ("num_heads", "model.heads", ""),
    ("num_attention_heads", "model.heads", ""),
    ("num_key_value_heads", "model.kv_heads", ""),
    ("n_embd", "model.width", ""),
    ("hidden_size", "model.width", "`model.hidden` of an mlp"),
    ("d_model", "model.width", ""),
    ("embed_dim", "model.width", ""),
    ("intermediate_size", "model.hidden", ""),
    ("ffn_dim", "model.hidden", ""),
    ("block_size", "model.context", ""),
    ("seq_len", "model.context", ""),
    ("sequence_len", "model.context", ""),
    ("max_length", "model.context", ""),
    ("max_seq_length", "model.context", ""),
    ("max_position_embeddings", "model.context", ""),
    ("tokenizer", "data.tokens", "the path of a `tokenizer.json`; `data.tokenizer` with `kind = \"tokens\"`"),
    ("valid_split", "data.valid_fraction", ""),
    ("validation_split", "data.valid_fraction", ""),
    ("test_split", "data.test_fraction", ""),
    ("test_size", "data.test_fraction", ""),
    ("stratify", "data.split", "as `split = \"stratified\"`"),
    ("groups", "data.group", ""),
    ("group_column", "data.group", ""),
    ("n_splits", "data.fold", "as `fold = \"1/5\"`"),
];

/// File formats and layouts that are not a `kind` of data by their own name, and the kind that reads them.
const KINDS: [(&str, &str); 8] = [
    ("feather", "parquet"),
    ("arrow", "parquet"),
    ("ipc", "parquet"),
    ("tsv", "csv"),
    ("image_folder", "images"),
    ("imagefolder", "images"),
    ("webdataset", "images"),
    ("mnist", "idx"),
];

/// Names of what a job does not state, and why.
const NOT_STATED: [(&str, &str); 6] = [
    ("num_classes", "the classes are found in the data"),
    ("n_classes", "the classes are found in the data"),
    ("num_labels", "the classes are found in the data"),
    ("vocab_size", "the vocabulary is that of the tokenizer; `data.vocab` with `kind = \"tokens\"`"),
    ("input_shape", "the shape of a sample is found in the data"),
    ("device", "`--device` on the command line chooses it"),
];

fn normalize(name: &str) -> String {
    name.to_lowercase().replace('-', "_")
}

/// The dotted key that means what other tools call `name`.
pub fn synonym_key(name: &str) -> Option<&'static str> {
    let name = normalize(name);
    SYNONYMS.iter().find(|(other, ..)| *other == name).map(|(_, key, _)| *key)
}

/// The kind of data that reads what is called `name`.
pub(super) fn synonym_kind(name: &str) -> Option<&'static str> {
    let name = normalize(name);
    KINDS.iter().find(|(other, _)| *other == name).map(|(_, kind)| *kind)
}

/// What to write instead of a name that is no key.
pub(super) fn synonym_hint(name: &str) -> Option<String> {
    let name = normalize(name);
    if let Some((_, why)) = NOT_STATED.iter().find(|(other, _)| *other == name) {
        return Some(format!("a job does not state it: {why}"));
    }
    let (_, key, note) = SYNONYMS.iter().find(|(other, ..)| *other == name)?;
    let note = if note.is_empty() { String::new() } else { format!(", {note}") };
    Some(format!("here it is called `{key}`{note}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every key that a hint names exists in the schema.
    #[test]
    fn synonyms_lead_to_keys() {
        let schema = crate::job::schema();
        for (name, key, _) in SYNONYMS {
            let (table, key) = key.split_once('.').unwrap();
            let table = &schema["properties"][table];
            let kinds = super::super::schema::kinds(table);
            assert!(kinds.iter().any(|kind| kind["properties"].get(key).is_some()), "{name}: {table} {key}");
        }
    }
}
