//! Rules across keys: values that are valid individually and wrong together.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::check::SpannedError;
use super::error::{ErrorCode, JobError};
use super::source_map::WHOLE_FILE;
use super::{
    AugmentConfig, BestMetric, CategoryEncoding, ClassWeightsConfig, CsvConfig, Job, JsonConfig, JsonlConfig,
    OptimizerConfig, ParquetConfig, Precision, RunLength, SourceConfig, Task,
};

/// Every contradiction in `job`, reported where `tree` states it.
pub(super) fn contradictions(job: &Job, tree: &DeTable) -> Vec<SpannedError> {
    let mut found = Vec::new();
    let mut report = |key: &str, message: String, hint: String| {
        found.push((
            span(tree, key),
            JobError::new(ErrorCode::Contradiction, message).key(key).hint(hint).into(),
        ));
    };
    if let (RunLength::Steps(steps), warmup) = (job.train.length(), job.schedule.warmup_steps())
        && warmup > steps
    {
        report(
            "schedule.warmup_steps",
            format!("`schedule.warmup_steps` must be at most `train.steps`, {steps}, not {warmup}"),
            "the warm-up must end within the run".into(),
        );
    }
    if let OptimizerConfig::Sgd(sgd) = &job.optimizer
        && sgd.nesterov
        && sgd.momentum == 0.0
    {
        report(
            "optimizer.nesterov",
            "`optimizer.nesterov` needs `optimizer.momentum` above 0".into(),
            "add `momentum = 0.9`".into(),
        );
    }
    if job.train.tf32 && job.train.precision != Precision::F32 {
        report(
            "train.tf32",
            "`train.tf32` needs `train.precision = \"f32\"`".into(),
            "add `precision = \"f32\"` to [train], or remove `tf32`".into(),
        );
    }
    if let Some(ClassWeightsConfig::Table(weights)) = &job.train.class_weights
        && let Some((class, weight)) = weights.iter().find(|(_, weight)| **weight < 0.0)
    {
        report(
            "train.class_weights",
            format!("the weight of class `{class}` cannot be {weight}"),
            "weights are 0 or more; 0 leaves the class out of the loss".into(),
        );
    }
    let freeze = job.train.freeze.iter().map(|text| ("train.freeze", text.strip_prefix('!').unwrap_or(text)));
    let groups = job.train.groups.iter().flat_map(|group| &group.params);
    for (key, text) in freeze.chain(groups.map(|text| ("train.groups", text.as_str()))) {
        if let Err(error) = glob::Pattern::new(text) {
            report(
                key,
                format!("`{text}` is no pattern: {}, at character {}", error.msg, error.pos + 1),
                "`*` stands for any characters, `?` for one, `[ab]` for one of these".into(),
            );
        }
    }
    if let SourceConfig::Csv(CsvConfig { columns, .. })
    | SourceConfig::Json(JsonConfig { columns, .. })
    | SourceConfig::Parquet(ParquetConfig { columns, .. }) = &job.data.source
        && columns.label_separator.is_some()
        && matches!(columns.task, Task::Classes | Task::Values)
    {
        report(
            "data.task",
            "`data.task` contradicts `data.label_separator`, which is for several labels per row".into(),
            "write `task = \"labels\"`, or remove one of them".into(),
        );
    }
    if job.data.source.label_separator() == Some("") {
        report(
            "data.label_separator",
            "`data.label_separator` cannot be empty".into(),
            "write what stands between two labels, such as \"|\"".into(),
        );
    }
    for (key, best) in [("checkpoint.best", Some(job.checkpoint.best)), ("stop.metric", job.stop.metric)] {
        if let (Some(metric), Some(metrics)) = (best.and_then(BestMetric::metric), &job.eval.metrics)
            && !metrics.contains(&metric)
        {
            let name = metric.name();
            report(
                key,
                format!("`{key}` is \"valid.{name}\", which is not in `eval.metrics`"),
                format!("add \"{name}\" to `eval.metrics`"),
            );
        }
    }
    if let SourceConfig::Jsonl(JsonlConfig { label: Some(_), messages, chat, pack, .. }) = &job.data.source {
        if *pack {
            let hint = "with `label` each record is a sample: remove `pack`";
            report("data.pack", "`data.pack` and `data.label` exclude each other".into(), hint.into());
        }
        if chat.is_some() {
            let hint = "`label` classifies the text in `data.field`: remove `chat`";
            report("data.chat", "`data.chat` and `data.label` exclude each other".into(), hint.into());
        }
        if messages.is_some() {
            let hint = "`label` classifies the text in `data.field`: remove `messages`";
            report(
                "data.messages",
                "`data.messages` and `data.label` exclude each other".into(),
                hint.into(),
            );
        }
    }
    if let SourceConfig::Csv(CsvConfig { columns, .. })
    | SourceConfig::Json(JsonConfig { columns, .. })
    | SourceConfig::Parquet(ParquetConfig { columns, .. }) = &job.data.source
        && columns.encode == CategoryEncoding::Embed
        && !job.model.supports_embedding()
    {
        let kind = job.model.kind();
        report(
            "data.encode",
            format!("`data.encode` is \"embed\", but models of kind `{kind}` cannot embed categories"),
            "use a model of kind `mlp` or `layers`, or `encode = \"one_hot\"`".into(),
        );
    }
    for (key, [low, high]) in job.data.source.augment().into_iter().flat_map(AugmentConfig::ranges) {
        if low > high {
            let key = format!("data.augment.{key}");
            let message = format!("`{key}` must be [low, high], not [{low}, {high}]");
            report(&key, message, "write the lower bound first".into());
        }
    }
    if let Some(kernel) = job.data.source.augment().map(|a| a.blur_kernel).filter(|kernel| kernel % 2 == 0) {
        report(
            "data.augment.blur_kernel",
            format!("`data.augment.blur_kernel` must be odd, not {kernel}: a kernel has a center"),
            format!("use {} or {}", kernel - 1, kernel + 1),
        );
    }
    found
}

/// The bytes of the value at a dotted `key`, or of the nearest table above it.
fn span(tree: &DeTable, key: &str) -> Range<usize> {
    let mut span = WHOLE_FILE;
    let mut table = Some(tree);
    for part in key.split('.') {
        let Some(value) = table.and_then(|t| t.get(part)) else { break };
        span = Spanned::span(value);
        table = match value.get_ref() {
            DeValue::Table(table) => Some(table),
            _ => None,
        };
    }
    span
}
