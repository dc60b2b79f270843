//! The teacher of a run that distills (`distill.teacher`): a trained model on disk, and whether it suits the data.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device};

use super::Failure;
use super::checkpoint::{self, Checkpoints};
use super::datasets::images;
use super::datasets::tables::TableSource;
use super::described_job::{DESCRIPTION, described_job};
use super::run_dir::RunDir;
use super::setup::{activation_dtype, fused_network};
use super::tensor_files::{load_views, load_weights};
use super::tensor_reader::TensorReader;
use crate::base::Backend;
use crate::base::features::{Features, InputSpec};
use crate::base::regular_file;
use crate::data::Dataset;
use crate::data::preprocessing::Preprocessing;
use crate::graph::network::TeacherNetwork;
use crate::job::{
    DistillConfig, FeatureConfig, Job, LogitSource, ModelConfig, Precision, Reductions, TeacherPrecision,
};
use crate::models::{BuiltModel, FeatureOptions, LossOptions, ModelError, block_named};
use crate::param_store::ParamStore;
use crate::params::{Int8Layout, ParamLayout, ParamRules};

/// Upper bound on the size of each JSON file.
const MAX_JSON_BYTES: u64 = 1 << 30;

/// Why a model cannot be the teacher.
#[derive(Debug, thiserror::Error)]
#[error("`distill.teacher` is `{}`, which {problem}", path.display())]
pub struct TeacherError {
    path: PathBuf,
    problem: String,
}

/// A model that suits the data of the job.
pub struct Teacher {
    model: ModelConfig,
    reductions: Reductions,
    precision: Precision,
    /// Its weights are held as 8-bit integers.
    is_int8: bool,
    /// When it computes.
    pub logits: LogitSource,
    pub layout: ParamLayout,
    /// The file with the EMA of the weights, if the run kept one.
    pub weights: PathBuf,
    /// Has the running statistics.
    statistics: PathBuf,
}

impl Teacher {
    /// Opens the teacher of a job that trains on this dataset; `None` if the job has none. Reads no weights.
    pub fn of(job: &Job, dataset: &dyn Dataset) -> Result<Option<Self>, Failure> {
        let Some(distill) = &job.distill else { return Ok(None) };
        let path = &distill.teacher;
        let refuse = |problem| TeacherError { path: path.clone(), problem };
        let teacher =
            Self::open(distill, job, dataset).map_err(|problem| Failure::Teacher(refuse(problem)))?;
        Ok(Some(teacher))
    }

    fn open(distill: &DistillConfig, job: &Job, dataset: &dyn Dataset) -> Result<Self, String> {
        let folder = folder(&distill.teacher)?;
        let read = |name: &str| {
            regular_file::read(&folder.join(name), MAX_JSON_BYTES)
                .map_err(|error| format!("cannot be used: `{name}`: {error}"))
        };
        let its_job: Job = match checkpoint::is_checkpoint(&folder) {
            true => {
                let state = checkpoint::verify_files(&folder).map_err(|why| format!("is damaged: {why}"))?;
                serde_json::from_value(state.job)
                    .map_err(|error| format!("has a job that cannot be read: {error}"))?
            }
            false => {
                let description: serde_json::Value = serde_json::from_slice(&read(DESCRIPTION)?)
                    .map_err(|error| format!("cannot be used: `{DESCRIPTION}` is not JSON: {error}"))?;
                described_job(&description, &folder).map_err(|why| format!("cannot be used: {why}"))?
            }
        };
        let preprocessing = Preprocessing::from_json(&read(checkpoint::PREPROCESSING)?)
            .map_err(|why| format!("cannot be used: `{}`: {why}", checkpoint::PREPROCESSING))?;
        check_data(&preprocessing, dataset)?;
        check_table(&preprocessing, &its_job, dataset, job)?;
        check_normalization(&its_job, job)?;
        check_tokenizer(&folder, dataset)?;
        let statistics = folder.join(checkpoint::MODEL);
        let average = folder.join(checkpoint::AVERAGE);
        let weights = if average.exists() { average } else { statistics.clone() };
        if !weights.exists() {
            return Err(format!("has no `{}`", checkpoint::MODEL));
        }
        let features = teacher_features(dataset.features());
        let reductions = Reductions::of_job(&its_job);
        let built = crate::models::build_reduced(&its_job.model, &features, &reductions)
            .map_err(|why| format!("does not fit: {why}"))?;
        let precision = match distill.teacher_precision {
            TeacherPrecision::Same | TeacherPrecision::Int8 => job.train.precision,
            TeacherPrecision::F32 => Precision::F32,
            TeacherPrecision::Bf16 => Precision::Bf16,
        };
        let is_int8 = distill.teacher_precision == TeacherPrecision::Int8;
        let (model, logits, layout) = (its_job.model, distill.logits, built.layout);
        let teacher = Self { model, reductions, precision, is_int8, logits, layout, weights, statistics };
        teacher.check_names()?;
        Ok(teacher)
    }

    /// Checks that the file has every parameter, in its shape.
    fn check_names(&self) -> Result<(), String> {
        let file = TensorReader::open(&self.weights).map_err(|error| format!("cannot be read: {error}"))?;
        for (spec, _) in self.layout.params.iter() {
            match file.info(&spec.name) {
                Some(info) if info.shape == spec.shape => {}
                Some(info) => {
                    let (name, there, here) = (&spec.name, &info.shape, &spec.shape);
                    return Err(format!("has `{name}` of shape {there:?}, and its model needs {here:?}"));
                }
                None => return Err(format!("has no `{}`: export it as safetensors", spec.name)),
            }
        }
        Ok(())
    }

    /// The type of its activations on this backend, and of its weights unless those are 8-bit integers.
    pub fn dtype(&self, backend: Backend) -> DType {
        activation_dtype(self.precision, backend)
    }

    /// What its logits depend on besides the values of its weights: the types that they are held in and that it
    /// computes in.
    pub fn weight_format(&self, backend: Backend) -> String {
        format!("{}{:?}", if self.is_int8 { "int8 " } else { "" }, self.dtype(backend))
    }

    /// The layout of its weights if they are 8-bit integers.
    fn int8(&self) -> Option<Int8Layout> {
        self.is_int8.then(|| Int8Layout::new(&self.layout.params))
    }

    /// Its network for samples of these features, fused for this backend.
    pub fn network(&self, features: &Features, backend: Backend) -> Result<TeacherNetwork, ModelError> {
        let (loss, dtype) = (LossOptions::default(), self.dtype(backend));
        let rules = ParamRules::of_reductions(&self.reductions);
        let features = teacher_features(features);
        let BuiltModel { network, .. } =
            fused_network(&self.model, &loss, &rules, &features, dtype, backend)?;
        let float_inputs = match &features.input {
            InputSpec::Floats { shape } => shape.iter().product(),
            InputSpec::Tabular { .. } | InputSpec::Tokens { .. } => 0,
        };
        let every_step = self.logits == LogitSource::EveryStep;
        Ok(TeacherNetwork { network, dtype, int8: self.int8(), float_inputs, every_step })
    }

    /// The features that a job names, with the blocks that they are of.
    pub fn features(
        &self,
        named: &[FeatureConfig],
        features: &Features,
    ) -> Result<Vec<FeatureOptions>, ModelError> {
        if named.is_empty() {
            return Ok(Vec::new());
        }
        let network = self.network(features, Backend::Cpu { threads: 1 })?.network;
        let resolve = |feature: &FeatureConfig| {
            let teacher = block_named("teacher", &feature.teacher, &network.blocks)?;
            let width = network.blocks[teacher].output_shape().last().copied().unwrap_or(1);
            let (student, weight) = (feature.student.clone(), feature.weight);
            Ok(FeatureOptions { student, teacher, width, weight })
        };
        named.iter().map(resolve).collect()
    }

    /// Bytes of its weights on this backend, and of its running statistics.
    pub fn bytes(&self, backend: Backend) -> u64 {
        let float = self.dtype(backend).size_in_bytes();
        let weights = self.int8().map_or(self.layout.params.len * float, |int8| int8.bytes(float));
        (weights + self.layout.stats.len * size_of::<f32>()) as u64
    }

    /// Allocates its weights, all zero.
    pub fn store(&self, backend: Backend, device: &Device) -> candle_core::Result<ParamStore> {
        let (layout, dtype) = (self.layout.clone(), self.dtype(backend));
        match self.is_int8 {
            true => ParamStore::for_int8_inference(layout, dtype, device),
            false => ParamStore::for_inference(layout, dtype, device),
        }
    }

    /// Loads the weights into its [`store`](Self::store).
    pub fn load(&self, store: &ParamStore) -> Result<(), Failure> {
        load_weights(&self.weights, store)?;
        load_views(&self.statistics, &store.layout.stats, store.stat_views())
    }
}

/// The teacher's features. With mixup the student's target is a blend of two classes; the teacher's is one class.
fn teacher_features(features: &Features) -> Features {
    use crate::base::features::TargetSpec::{Class, MixedClass};
    let target = match &features.target {
        MixedClass { names } => Class { names: names.clone() },
        target => target.clone(),
    };
    Features { target, ..features.clone() }
}

/// The folder of the checkpoint or export that a path names: of a run, its best checkpoint.
fn folder(path: &Path) -> Result<PathBuf, String> {
    if checkpoint::is_checkpoint(path) || path.join(DESCRIPTION).exists() {
        return Ok(path.to_owned());
    }
    let checkpoints = Checkpoints::new(RunDir::new(path).checkpoints());
    let best =
        checkpoints.newest_state().and_then(|state| state.best).map(|(_, step)| checkpoints.path(step));
    let found = best.filter(|folder| folder.exists()).or_else(|| Some(checkpoints.newest().found?.1));
    found.ok_or_else(|| match path.exists() {
        true => "is neither a run with a checkpoint nor a checkpoint or an export".into(),
        false => "does not exist".into(),
    })
}

fn check_data(its: &Preprocessing, dataset: &dyn Dataset) -> Result<(), String> {
    let (there, here) = (&its.features, dataset.features());
    let suits = match (&there.input, &here.input) {
        // Its context may be longer or shorter: building it checks that.
        (InputSpec::Tokens { vocab: there, .. }, InputSpec::Tokens { vocab: here, .. }) => there == here,
        (there, here) => there == here,
    };
    if !suits {
        let (there, here) = (describe_input(&there.input), describe_input(&here.input));
        return Err(format!("takes {there}, and the data has {here}"));
    }
    let (there, here) = (teacher_features(there).target, teacher_features(here).target);
    if there != here {
        let describe = |target: &crate::base::features::TargetSpec| match target.names() {
            [] => crate::models::describe_target(target),
            names => format!("{}: {}", crate::models::describe_target(target), shown(names)),
        };
        return Err(format!("has {}, and the data has {}", describe(&there), describe(&here)));
    }
    Ok(())
}

/// Checks that the teacher's job and this one turn a row into the same sample.
fn check_table(its: &Preprocessing, its_job: &Job, dataset: &dyn Dataset, job: &Job) -> Result<(), String> {
    let (there, here) = (its.table.as_ref(), dataset.table_schema());
    let is_same = match (there, here, TableSource::of(its_job), TableSource::of(job)) {
        (None, None, ..) => true,
        (Some(there), Some(here), Some(its_source), Some(source)) => {
            there.reads_like(&its_source.settings, here, &source.settings)
        }
        _ => false,
    };
    match is_same {
        true => Ok(()),
        false => {
            Err("reads the columns of the table in another way: other columns, means or categories".into())
        }
    }
}

/// The first names of a list.
fn shown(names: &[String]) -> String {
    const SHOWN: usize = 5;
    let first = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN { format!("{first}, ...") } else { first }
}

fn describe_input(input: &InputSpec) -> String {
    match input {
        InputSpec::Floats { shape } => format!("samples of shape {shape:?}"),
        InputSpec::Tabular { num_numeric, cardinalities } => {
            format!("rows of {num_numeric} numbers and {} categories", cardinalities.len())
        }
        InputSpec::Tokens { vocab, .. } => format!("a vocabulary of {vocab} tokens"),
    }
}

fn check_normalization(its: &Job, job: &Job) -> Result<(), String> {
    let ((mean, std), (own_mean, own_std)) = (normalization(its), normalization(job));
    match mean == own_mean && std == own_std {
        true => Ok(()),
        false => Err(format!(
            "was trained with the mean {mean:?} and the standard deviation {std:?} of images, and this job has \
             {own_mean:?} and {own_std:?}"
        )),
    }
}

/// The mean and the standard deviation that values of 0 to 1 are normalized with: one number if it is that of every
/// channel.
fn normalization(job: &Job) -> (Vec<f32>, Vec<f32>) {
    let found = images::normalization(&job.data.source).unwrap_or_default();
    let shortest = |mut values: Vec<f32>| {
        if values.windows(2).all(|pair| pair[0] == pair[1]) {
            values.truncate(1);
        }
        values
    };
    (shortest(found.mean), shortest(found.std))
}

fn check_tokenizer(folder: &Path, dataset: &dyn Dataset) -> Result<(), String> {
    let Some(here) = dataset.tokenizer_json() else { return Ok(()) };
    // An export has it indented.
    let is_same = |there: &[u8]| {
        let json = |text: &[u8]| serde_json::from_slice::<serde_json::Value>(text).ok();
        there == here || json(there).is_some_and(|there| Some(there) == json(&here))
    };
    match regular_file::read(&folder.join(checkpoint::TOKENIZER), MAX_JSON_BYTES) {
        Ok(there) if is_same(&there) => Ok(()),
        Ok(_) => Err("has another tokenizer than the data".into()),
        Err(error) => Err(format!("has no tokenizer that can be read: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A preset equals its numbers, and one number stands for all channels.
    #[test]
    fn another_normalization_is_refused() {
        let job = |keys: &str| {
            let text = format!(
                "[model]\nkind = 'mlp'\n[data]\nkind = 'images'\ntrain = 'd'\nimage_size = 8\n{keys}\n[train]\nsteps = 1\n"
            );
            Job::parse(&text, Path::new("job.toml"), &[]).unwrap()
        };
        for (there, here, suits) in [
            ("", "normalise = 'imagenet'", true),
            ("", "mean = [0.485, 0.456, 0.406]", true),
            ("normalise = 'half'", "mean = 0.5\nstd = [0.5, 0.5, 0.5]", true),
            ("", "normalise = 'half'", false),
            ("", "normalise = 'none'", false),
            ("normalise = 'half'", "normalise = 'half'\nstd = 1.0", false),
        ] {
            let found = check_normalization(&job(there), &job(here));
            assert_eq!(found.is_ok(), suits, "{there} {here}: {found:?}");
        }
    }
}
