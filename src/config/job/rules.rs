//! Rules across keys: values that are valid individually and wrong together.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::check::SpannedError;
use super::error::{ErrorCode, JobError};
use super::source_map::WHOLE_FILE;
use super::{
    AugmentConfig, BestMetric, CategoryEncoding, ClassWeightsConfig, INT8_KINDS, IdxConfig, Job, JsonlConfig,
    LogitSource, OptimizerConfig, Precision, PruneConfig, PruneSchedule, PruneScope, PruneStructure,
    RunLength, SourceConfig, SplitKind, Task, TextConfig, TokensConfig, WindowMode,
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
    if let Some(uri) = &job.log.mlflow {
        let host = uri.strip_prefix("http://").or_else(|| uri.strip_prefix("https://"));
        let is_server = host.is_some_and(|host| {
            !host.is_empty() && !host.starts_with('/') && !host.contains(char::is_whitespace)
        });
        let file = uri.strip_prefix("sqlite:///");
        if !is_server
            && !file.is_some_and(|path| !path.is_empty() && !path.ends_with('/') && !path.contains('?'))
        {
            report(
                "log.mlflow",
                format!(
                    "`log.mlflow` must be the address of an MLflow server or a SQLite file, not \"{uri}\""
                ),
                "write \"http://localhost:5000\" (`mlflow server` starts one), or \"sqlite:///mlflow.db\""
                    .into(),
            );
        } else if uri.starts_with("https://") && !cfg!(feature = "https") {
            report(
                "log.mlflow",
                "`log.mlflow` has https, which this build does not support".into(),
                "build with `--features https`, or use http".into(),
            );
        }
    }
    if job.log.histograms && !job.log.tensorboard {
        report(
            "log.histograms",
            "`log.histograms` needs `log.tensorboard`, which shows them".into(),
            "remove it, or `tensorboard = false`".into(),
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
    let skip = job.prune.iter().flat_map(|prune| &prune.skip).map(|text| ("prune.skip", text.as_str()));
    let layers = job.lowrank.iter().flat_map(|lowrank| &lowrank.layers);
    let layers = layers.map(|text| ("lowrank.layers", text.as_str()));
    let groups = groups.map(|text| ("train.groups", text.as_str()));
    for (key, text) in freeze.chain(groups).chain(skip).chain(layers) {
        if let Err(error) = glob::Pattern::new(text) {
            report(
                key,
                format!("`{text}` is no pattern: {}, at character {}", error.msg, error.pos + 1),
                "`*` stands for any characters, `?` for one, `[ab]` for one of these".into(),
            );
        }
    }
    if let Some(columns) = job.data.source.columns()
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
    if !job.eval.prompts.is_empty() {
        let (kind, source) = (job.model.kind(), &job.data.source);
        let has_text = match source {
            SourceConfig::Text(_) | SourceConfig::Jsonl(JsonlConfig { label: None, .. }) => true,
            SourceConfig::Tokens(tokens) => tokens.tokenizer.is_some(),
            _ => false,
        };
        if !job.model.generates_text() {
            report(
                "eval.prompts",
                format!(
                    "`eval.prompts` needs a language model, and models of kind `{kind}` generate no text"
                ),
                "remove it, or use a model of kind `gpt` or `llama`".into(),
            );
        } else if !has_text {
            report(
                "eval.prompts",
                format!(
                    "`eval.prompts` needs text, and data of kind `{}` has no tokenizer here",
                    source.kind()
                ),
                "use data of kind `text` or `jsonl` without `label`, or name the `tokenizer` of `tokens`"
                    .into(),
            );
        }
    }
    split_contradictions(job, tree, &mut report);
    prune_contradictions(job, &mut report);
    lowrank_contradictions(job, &mut report);
    quantize_contradictions(job, &mut report);
    distill_contradictions(job, tree, &mut report);
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
    if let Some(columns) = job.data.source.columns()
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

/// Keys of the split that contradict each other.
fn split_contradictions(job: &Job, tree: &DeTable, report: &mut impl FnMut(&str, String, String)) {
    let (split, group) = job.data.source.split();
    if let SourceConfig::Idx(IdxConfig { test_images, test_labels, .. }) = &job.data.source
        && test_images.is_some() != test_labels.is_some()
    {
        let (has, lacks) = match test_images.is_some() {
            true => ("data.test_images", "test_labels"),
            false => ("data.test_labels", "test_images"),
        };
        report(has, format!("`{has}` needs `data.{lacks}`"), format!("add `{lacks}`"));
    }
    let Some(files) = job.data.source.files() else { return };
    if let (false, Some(_)) = (files.test.is_empty(), files.test_fraction) {
        let hint = "remove one of them: a test set is either files or a fraction of `train`";
        let message = "`data.test` and `data.test_fraction` exclude each other";
        report("data.test_fraction", message.into(), hint.into());
    }
    if files.fold.is_some() {
        let others = [
            ("data.valid", !files.valid.is_empty()),
            ("data.valid_fraction", files.valid_fraction.is_some()),
        ];
        for (key, _) in others.into_iter().filter(|(_, is_given)| *is_given) {
            let hint = "remove one of them: a fold of `train` is the validation set";
            report("data.fold", format!("`data.fold` and `{key}` exclude each other"), hint.into());
        }
    } else if let (true, Some(test)) = (files.valid.is_empty(), files.test_fraction)
        && test + files.valid_fraction() >= 1.0
    {
        let sum = test + files.valid_fraction();
        report(
            "data.test_fraction",
            format!(
                "`data.test_fraction` and `data.valid_fraction` add up to {sum}, which leaves no training samples"
            ),
            "their sum must be below 1; `valid_fraction` is 0.1 if absent".into(),
        );
    }
    let is_split = files.fold.is_some() || files.valid.is_empty() || files.test_fraction.is_some();
    let keys = [
        ("data.group", group.is_some()),
        ("data.split", !split.is_random() && stated(tree, "data", "split")),
    ];
    for (key, _) in keys.into_iter().filter(|(_, is_given)| *is_given && !is_split) {
        let hint = "remove it, or replace `valid` by `valid_fraction` or `fold`";
        report(key, format!("`{key}` has no effect: all sets have files of their own"), hint.into());
    }
    if let (false, Some(group)) = (split.is_random(), group) {
        let hint = format!("remove one of them: groups of `{group}` are assigned as a whole, at random");
        report("data.group", "`data.group` and `data.split` exclude each other".into(), hint);
    }
    match &job.data.source {
        SourceConfig::Jsonl(JsonlConfig { pack: true, .. }) => {
            let hint =
                "packed records are one stream of tokens, split by position: remove it, or remove `pack`";
            for (key, _) in [("data.group", group.is_some()), ("data.split", split == SplitKind::Stratified)]
                .iter()
                .filter(|k| k.1)
            {
                report(key, format!("`{key}` and `data.pack` exclude each other"), hint.into());
            }
        }
        SourceConfig::Jsonl(JsonlConfig { label: None, .. }) if split == SplitKind::Stratified => {
            let message = "`data.split` is \"stratified\", but the records have no classes";
            report("data.split", message.into(), "name the field with the class as `label`".into());
        }
        _ => {}
    }
    if let Some(columns) = job.data.source.columns()
        && let Some(group) = group.filter(|group| columns.target.to_vec().iter().any(|t| t == group))
    {
        let hint = "no class would be in two sets: name another column, or use `split = \"stratified\"`";
        report("data.group", format!("`data.group` is the target, `{group}`"), hint.into());
    }
}

/// Keys of `[prune]` that contradict each other or the length of the run.
fn prune_contradictions(job: &Job, report: &mut impl FnMut(&str, String, String)) {
    let Some(prune) = &job.prune else { return };
    let (begin, last, sparsity) = (prune.begin_step, prune.last_step(), prune.target());
    if let Some((layer, _)) = prune.kept.iter().find(|(_, kept)| **kept == 0) {
        let hint = "a layer keeps at least one; without an entry it stays whole";
        report("prune.kept", format!("`prune.kept` has 0 for `{layer}`"), hint.into());
    }
    if !prune.is_active() {
        if prune.kept.is_empty() || prune.initial.is_some() || prune.end_step.is_some() {
            report(
                "prune",
                "`prune.final` is missing: the sparsity that pruning ends with".into(),
                format!("add `final = 0.8` for four fifths of the {}", prune.structure.noun()),
            );
        }
        return;
    }
    unit_contradictions(job, prune, report);
    if (prune.structure, prune.final_sparsity.is_some()) == (PruneStructure::TwoOfFour, true) {
        report(
            "prune.final",
            "`prune.final` has no effect with `structure = \"2:4\"`".into(),
            "remove it: half of the weights are zero".into(),
        );
    }
    if (prune.structure, prune.schedule) == (PruneStructure::TwoOfFour, PruneSchedule::Polynomial) {
        return report(
            "prune.structure",
            "`prune.structure = \"2:4\"` needs `prune.schedule = \"constant\"`".into(),
            "two of each four weights are pruned at once, at `begin_step`".into(),
        );
    }
    match (prune.schedule, prune.end_step) {
        (PruneSchedule::Polynomial, None) => report(
            "prune",
            "`prune.end_step` is missing: a polynomial schedule ends somewhere".into(),
            "add it, or prune all at once with `schedule = \"constant\"`".into(),
        ),
        (PruneSchedule::Polynomial, Some(end)) if end < begin => report(
            "prune.end_step",
            format!("`prune.end_step` must be at least `prune.begin_step`, {begin}, not {end}"),
            "a schedule ends after it begins".into(),
        ),
        (PruneSchedule::Constant, Some(_)) => report(
            "prune.end_step",
            "`prune.end_step` has no effect with `schedule = \"constant\"`".into(),
            "remove it, or the schedule, which is polynomial by default".into(),
        ),
        _ => {}
    }
    match (prune.schedule, prune.initial) {
        (PruneSchedule::Polynomial, Some(initial)) if initial > sparsity => report(
            "prune.initial",
            format!("`prune.initial` must be at most `prune.final`, {sparsity}, not {initial}"),
            "pruned weights stay zero: sparsity only grows".into(),
        ),
        (PruneSchedule::Constant, Some(_)) => report(
            "prune.initial",
            "`prune.initial` has no effect with `schedule = \"constant\"`".into(),
            "remove it: all weights are pruned at `begin_step`".into(),
        ),
        _ => {}
    }
    if let RunLength::Steps(steps) = job.train.length()
        && last > steps
    {
        let key = if prune.end_step.is_some() { "prune.end_step" } else { "prune.begin_step" };
        let message = format!("`{key}` must be at most `train.steps`, {steps}, not {last}");
        report(key, message, "pruning must end within the run".into());
    }
}

/// What `prune.structure` does not go together with.
fn unit_contradictions(job: &Job, prune: &PruneConfig, report: &mut impl FnMut(&str, String, String)) {
    let (structure, noun, kind) = (prune.structure, prune.structure.noun(), job.model.kind());
    if let Some(kinds) = structure.kinds().filter(|kinds| !kinds.contains(&kind)) {
        report(
            "prune.structure",
            format!("`prune.structure = \"{noun}\"` has no form for a model of kind `{kind}`"),
            format!("models with {noun} to prune are {}", kinds.join(", ")),
        );
    }
    if structure == PruneStructure::Heads && prune.scope == PruneScope::Global {
        report(
            "prune.scope",
            "`prune.scope = \"global\"` has no form for heads".into(),
            "every layer keeps as many heads: remove it".into(),
        );
    }
    if structure.has_units() && job.lowrank.is_some() {
        report(
            "prune.structure",
            format!("`prune.structure = \"{noun}\"` and `[lowrank]` exclude each other"),
            format!("factorize the export of the run that prunes {noun}, or prune `\"weights\"`"),
        );
    }
}

/// Keys of `[lowrank]` that contradict each other or need weights.
fn lowrank_contradictions(job: &Job, report: &mut impl FnMut(&str, String, String)) {
    let Some(lowrank) = &job.lowrank else { return };
    let by_weights = [("energy", lowrank.energy.is_some()), ("target", lowrank.target.is_some())];
    let by_weights = by_weights.iter().find(|(_, is_given)| *is_given).map(|(key, _)| *key);
    if lowrank.rank.is_none() && by_weights.is_none() && lowrank.ranks.is_empty() {
        report(
            "lowrank",
            "`[lowrank]` states no rank: one of `rank`, `energy`, `target` and `ranks` is missing".into(),
            "add `target = \"2x\"` for half of the parameters".into(),
        );
    }
    if let (Some(key), true, None) = (by_weights, lowrank.ranks.is_empty(), &job.train.init) {
        report(
            &format!("lowrank.{key}"),
            format!("`lowrank.{key}` needs `train.init`, whose weights decide the ranks"),
            "name the run to factorize as `init` in [train], or state a `rank`".into(),
        );
    }
    if let Some((layer, _)) = lowrank.ranks.iter().find(|(_, rank)| **rank == 0) {
        let hint = "a rank is at least 1; without an entry the layer stays whole";
        report("lowrank.ranks", format!("the rank of `{layer}` cannot be 0"), hint.into());
    }
}

/// Keys of `[quantize]` that contradict each other, the model or the length of the run.
fn quantize_contradictions(job: &Job, report: &mut impl FnMut(&str, String, String)) {
    let Some(quantize) = &job.quantize else { return };
    let kind = job.model.kind();
    if quantize.training && !INT8_KINDS.contains(&kind) {
        let [others @ .., last] = INT8_KINDS;
        report(
            "quantize.training",
            format!("`quantize.training` has no form for models of kind `{kind}`"),
            format!(
                "those of kind `{}` and `{last}` have one; `trainer export --quantize` quantizes after training",
                others.join("`, `")
            ),
        );
    }
    match (quantize.begin_step, job.train.length()) {
        (Some(_), _) if !quantize.training => report(
            "quantize.begin_step",
            "`quantize.begin_step` has no effect without `quantize.training`".into(),
            "add `training = true`, or remove it".into(),
        ),
        (Some(begin), RunLength::Steps(steps)) if begin > steps => report(
            "quantize.begin_step",
            format!("`quantize.begin_step` must be at most `train.steps`, {steps}, not {begin}"),
            "rounding must begin within the run".into(),
        ),
        _ => {}
    }
}

/// Keys of `[distill]` that contradict each other or the data.
fn distill_contradictions(job: &Job, tree: &DeTable, report: &mut impl FnMut(&str, String, String)) {
    let Some(distill) = &job.distill else { return };
    if distill.logits == LogitSource::EveryStep {
        if stated(tree, "distill", "top_k") {
            report(
                "distill.top_k",
                "`distill.top_k` has no effect: the teacher computes all logits in every step".into(),
                "remove it, or add `logits = \"stored\"`".into(),
            );
        }
        return;
    }
    if !distill.features.is_empty() {
        report(
            "distill.features",
            "`distill.features` needs the teacher in every step, and `distill.logits` is \"stored\"".into(),
            "remove one of them".into(),
        );
    }
    let changing = match &job.data.source {
        source if source.augment().is_some_and(|augment| !augment.is_off()) => {
            Some(("augmentation", "remove `[data.augment]`"))
        }
        SourceConfig::Text(TextConfig { windows: WindowMode::Random, .. })
        | SourceConfig::Tokens(TokensConfig { windows: WindowMode::Random, .. }) => {
            Some(("random windows", "add `windows = \"fixed\"` to [data]"))
        }
        _ => None,
    };
    if let Some((what, change)) = changing {
        report(
            "distill.logits",
            format!(
                "`distill.logits` is \"stored\", but with {what} a sample has other inputs in every epoch"
            ),
            format!("{change}, or let the teacher compute in every step: `logits = \"every_step\"`"),
        );
    }
}

/// Whether the job states this key of a table.
fn stated(tree: &DeTable, table: &str, key: &str) -> bool {
    let table = tree.get(table).map(Spanned::get_ref);
    matches!(table, Some(DeValue::Table(table)) if table.contains_key(key))
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
