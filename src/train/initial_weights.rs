//! The weights that a run starts from (`train.init`): those of another run, of a checkpoint, or of another tool.
//!
//! Tensors are matched by name; the factors of a layer of `[lowrank]` come from its whole weight, if that is there.
//! Which tensors matched, are new or were left over is known from the headers of the files, before anything is
//! allocated, and is reported: no mismatch is silent.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use serde::Serialize;

use super::Failure;
use super::checkpoint::{AVERAGE, Checkpoints, MODEL, is_checkpoint, verify_files};
use super::run_dir::RunDir;
use super::tensor_reader::{TensorReader, is_float, write_f32};
use crate::base::regular_file;
use crate::base::units::counted;
use crate::job::InitHead;
use crate::kernels::host;
use crate::kernels::low_rank::{self, Factors, Matrix};
use crate::models::FEATURE_MAPS;
use crate::param_store::ParamStore;
use crate::params::{MatrixLayer, ParamLayout, TensorSpec};

/// Lists the files of the shards of a model, as transformers writes it.
const SHARD_INDEX: &str = "model.safetensors.index.json";
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// Why a run cannot start from these weights.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    #[error("`train.init` is `{}`, which {problem}", path.display())]
    Unreadable { path: PathBuf, problem: String },
    #[error("`train.init`: {}", problems.join("; "))]
    Mismatch { problems: Vec<String>, policy: InitHead },
}

/// What happens to each parameter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct InitReport {
    /// Tensors taken as they are.
    pub matched: usize,
    /// Parameters that the files lack or have in another shape: they start at random.
    pub new: Vec<String>,
    /// Parameters of which the common rows are taken: a vocabulary or a context of another size.
    pub resized: Vec<String>,
    /// Tensors of the files that the model does not have.
    pub left_over: Vec<String>,
    /// Layers whose two factors are computed from the whole weight.
    pub factorized: Vec<String>,
}

/// The weights that a run starts from.
pub struct InitialWeights {
    files: WeightFiles,
    pub report: InitReport,
    /// Names of the parameters to load, and of the tensors they are loaded from.
    taken: BTreeMap<String, String>,
}

/// The files of weights, by tensor.
pub(super) struct WeightFiles {
    files: Vec<TensorReader>,
    /// File of each tensor: the last one that has it.
    places: BTreeMap<String, usize>,
}

impl WeightFiles {
    pub fn open(path: &Path) -> Result<Self, InitError> {
        let (mut files, mut places) = (Vec::new(), BTreeMap::new());
        for path in weight_files(path)? {
            let reader = TensorReader::open(&path).map_err(|error| {
                let problem = match error.kind() {
                    io::ErrorKind::InvalidData => error.to_string(),
                    _ => format!("cannot be read: {error}"),
                };
                InitError::Unreadable { path, problem }
            })?;
            places.extend(reader.names().into_iter().map(|name| (name, files.len())));
            files.push(reader);
        }
        Ok(Self { files, places })
    }

    /// The whole weight of a layer, as it is stored; `None` if there is none of its shape.
    pub fn matrix(&self, layer: &MatrixLayer) -> Result<Option<Tensor>, Failure> {
        let spec = &layer.weight;
        if self.shape_of(&spec.name)?.as_ref() != Some(&spec.shape) {
            return Ok(None);
        }
        let values = Tensor::zeros(spec.len(), DType::F32, &Device::Cpu)?;
        self.read(&spec.name, spec, &values)?;
        Ok(Some(values))
    }

    /// Reads the tensor `name` as this parameter.
    fn read(&self, name: &str, spec: &TensorSpec, to: &Tensor) -> Result<(), Failure> {
        let reader = &self.files[self.places[name]];
        reader.info(name).map_or(Ok(()), |info| reader.read_param(info, spec, to))
    }

    /// The shape of a tensor, whose type must be a float; `None` if there is no such tensor.
    fn shape_of(&self, name: &str) -> Result<Option<Vec<usize>>, InitError> {
        let Some(&file) = self.places.get(name) else { return Ok(None) };
        let reader = &self.files[file];
        match reader.info(name) {
            Some(info) if !is_float(info.dtype) => Err(InitError::Unreadable {
                path: reader.path().to_owned(),
                problem: format!("has `{name}` as {}, and floats are wanted", info.dtype),
            }),
            info => Ok(info.map(|info| info.shape.clone())),
        }
    }
}

impl InitialWeights {
    /// Opens the weights at `path` for a model with this layout, whose last linear layer is called `head`.
    pub fn open(path: &Path, layout: &ParamLayout, head: &str, policy: InitHead) -> Result<Self, InitError> {
        let (files, report) = (WeightFiles::open(path)?, InitReport::default());
        let mut weights = Self { files, report, taken: BTreeMap::new() };
        weights.match_names(layout, head, policy)?;
        Ok(weights)
    }

    fn match_names(&mut self, layout: &ParamLayout, head: &str, policy: InitHead) -> Result<(), InitError> {
        let (mut report, mut taken, mut problems) = (InitReport::default(), BTreeMap::new(), Vec::new());
        let mut factors = BTreeSet::new();
        let mut used: BTreeSet<&str> = BTreeSet::new();
        for layer in layout.matrices.iter().filter(|layer| layer.rank.is_some()) {
            let has_factors = layer.factor_weights().iter().any(|name| self.files.places.contains_key(name));
            if has_factors || self.files.shape_of(&layer.weight.name)?.as_ref() != Some(&layer.weight.shape) {
                continue;
            }
            report.factorized.push(layer.name.clone());
            factors.extend(layer.factor_weights());
            used.insert(&layer.weight.name);
            if let Some((name, whole)) = layer.factor_bias()
                && self.files.places.contains_key(whole)
            {
                used.insert(whole);
                taken.insert(name, whole.to_owned());
            }
        }
        let of_head = |name: &str| name.strip_prefix(head).is_some_and(|rest| rest.starts_with('.'));
        let auto = policy == InitHead::Auto;
        for (spec, _) in layout.params.iter() {
            let name = &spec.name;
            if factors.contains(name) {
                continue;
            }
            let source = taken.get(name).unwrap_or(name).clone();
            match self.files.shape_of(&source)? {
                Some(shape) if shape == spec.shape => {
                    report.matched += 1;
                    taken.insert(name.clone(), source);
                }
                Some(shape) if auto && is_resizable(name) && has_rows_of(&shape, &spec.shape) => {
                    report.resized.push(format!(
                        "{name}: {} of {}",
                        counted(shape[0].min(spec.shape[0]) as u64, "row"),
                        spec.shape[0]
                    ));
                    taken.insert(name.clone(), source);
                }
                Some(_) | None if auto && of_head(name) => report.new.push(name.clone()),
                // The linear maps to a teacher's features are no part of the model.
                Some(_) | None if name.starts_with(FEATURE_MAPS) => report.new.push(name.clone()),
                Some(shape) => {
                    problems.push(format!(
                        "`{name}` has shape {shape:?} in the file, and {:?} in the model",
                        spec.shape
                    ));
                }
                None => problems.push(format!("the file lacks the tensor `{name}`")),
            }
        }
        // Running statistics must be complete or absent. The ranges of activations are not loaded: training finds them
        // again.
        let stats = layout.stats.iter().map(|(spec, _)| spec).filter(|spec| !spec.is_activation_range());
        let stats: Vec<&TensorSpec> = stats.collect();
        if stats.iter().any(|spec| self.files.places.contains_key(&spec.name)) {
            for spec in stats {
                match self.files.shape_of(&spec.name)? {
                    Some(shape) if shape == spec.shape => {
                        drop(taken.insert(spec.name.clone(), spec.name.clone()))
                    }
                    Some(shape) => problems.push(format!(
                        "`{}` has shape {shape:?} in the file, and {:?} in the model",
                        spec.name, spec.shape
                    )),
                    None => problems.push(format!("the file lacks the tensor `{}`", spec.name)),
                }
            }
        }
        if !problems.is_empty() {
            const MAX_SHOWN: usize = 4;
            let more = problems.len().saturating_sub(MAX_SHOWN);
            problems.truncate(MAX_SHOWN);
            if more > 0 {
                problems.push(format!("and {more} more"));
            }
            return Err(InitError::Mismatch { problems, policy });
        }
        used.extend(taken.values().map(String::as_str));
        let left_over = self.files.places.keys().filter(|name| !used.contains(name.as_str()));
        report.left_over = left_over.cloned().collect();
        (self.report, self.taken) = (report, taken);
        Ok(())
    }

    /// Host bytes at most while [`load`](Self::load) factorizes layers.
    pub fn factorization_bytes(&self, layout: &ParamLayout) -> u64 {
        if self.report.factorized.is_empty() { 0 } else { low_rank::factorization_bytes(layout) }
    }

    /// Loads the weights, one tensor at a time.
    pub fn load(&self, store: &ParamStore) -> Result<(), Failure> {
        self.load_factors(store)?;
        self.load_ranges(store.layout.params.trained(), &store.master_weights)?;
        self.load_ranges(store.layout.params.frozen(), &store.frozen_weights()?)?;
        self.load_ranges(store.layout.stats.iter(), &store.stats)?;
        Ok(store.sync_compute_weights()?)
    }

    fn load_ranges<'a>(
        &self,
        params: impl Iterator<Item = (&'a TensorSpec, std::ops::Range<usize>)>,
        buffer: &Tensor,
    ) -> Result<(), Failure> {
        for (spec, range) in params {
            if let Some(source) = self.taken.get(&spec.name) {
                self.files.read(source, spec, &buffer.narrow(0, range.start, range.len())?)?;
            }
        }
        Ok(())
    }

    /// Computes the factors of layers whose whole weights the files have, one layer at a time.
    fn load_factors(&self, store: &ParamStore) -> Result<(), Failure> {
        let (params, frozen) = (&store.layout.params, store.frozen_weights()?);
        let buffers = params.trained().map(|param| (param, &store.master_weights));
        let buffers = buffers.chain(params.frozen().map(|param| (param, &frozen)));
        let views: BTreeMap<&str, (std::ops::Range<usize>, &Tensor)> =
            buffers.map(|((spec, range), buffer)| (spec.name.as_str(), (range, buffer))).collect();
        for layer in &store.layout.matrices {
            let Some(rank) = layer.rank.filter(|_| self.report.factorized.contains(&layer.name)) else {
                continue;
            };
            let Some(values) = self.files.matrix(layer)? else { continue };
            let (rows, columns) = layer.dims();
            let Factors { left, right } =
                low_rank::factorize(Matrix { values: &host::read(&values)?, rows, columns }, rank);
            for (name, factor) in layer.factor_weights().iter().zip([left, right]) {
                if let Some((range, buffer)) = views.get(name.as_str()) {
                    write_f32(&buffer.narrow(0, range.start, range.len())?, &factor)?;
                }
            }
        }
        Ok(())
    }
}

/// Whether a shape has rows, and they are as wide as those of the other.
fn has_rows_of(shape: &[usize], other: &[usize]) -> bool {
    match (shape, other) {
        ([rows, width @ ..], [_, other_width @ ..]) => *rows > 0 && width == other_width,
        _ => false,
    }
}

/// Whether the rows of a parameter are tokens or positions, so that some of them mean the same in another model.
fn is_resizable(name: &str) -> bool {
    const TABLES: [&str; 6] = [
        "wte.weight",
        "wpe.weight",
        "embed_tokens.weight",
        "lm_head.weight",
        "word_embeddings.weight",
        "position_embeddings.weight",
    ];
    TABLES.iter().any(|table| name.ends_with(table))
}

/// The safetensors files at `path`: a file, an intact checkpoint, the best one of a run, or a folder with one file or
/// with shards. The EMA of a checkpoint comes last: it has neither frozen parameters nor running statistics.
fn weight_files(path: &Path) -> Result<Vec<PathBuf>, InitError> {
    let unreadable = |problem: &str| InitError::Unreadable { path: path.to_owned(), problem: problem.into() };
    if !path.is_dir() {
        return match path.exists() {
            true => Ok(vec![path.to_owned()]),
            false => Err(unreadable("does not exist")),
        };
    }
    let checkpoint = match is_checkpoint(path) {
        true => Some(path.to_owned()),
        false => Checkpoints::new(RunDir::new(path).checkpoints()).best_or_last(),
    };
    if let Some(folder) = checkpoint {
        verify_files(&folder).map_err(|why| unreadable(&format!("is damaged: {why}")))?;
        let files = [MODEL, AVERAGE].map(|name| folder.join(name));
        return Ok(files.into_iter().filter(|file| file.exists()).collect());
    }
    let index = path.join(SHARD_INDEX);
    if index.exists() {
        let text =
            regular_file::read(&index, MAX_INDEX_BYTES).map_err(|error| unreadable(&error.to_string()))?;
        let index: serde_json::Value = serde_json::from_slice(&text)
            .map_err(|error| unreadable(&format!("has a damaged index: {error}")))?;
        let map =
            index["weight_map"].as_object().ok_or_else(|| unreadable("has an index without `weight_map`"))?;
        let shards: BTreeSet<&str> = map.values().filter_map(|file| file.as_str()).collect();
        // A shard is a file of this folder.
        if shards.iter().any(|file| file.contains(['/', '\\']) || file.starts_with("..")) {
            return Err(unreadable("has an index that names files of other folders"));
        }
        return Ok(shards.into_iter().map(|file| path.join(file)).collect());
    }
    let one = path.join(MODEL);
    if one.exists() { Ok(vec![one]) } else { Err(unreadable("is a folder without model.safetensors")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::{ParamInit, ParamRegistry};
    use std::collections::HashMap;

    fn layout(vocab: usize, classes: usize) -> ParamLayout {
        let mut registry = ParamRegistry::default();
        registry.param("wte.weight", [vocab, 2], ParamInit::Constant(9.0));
        registry.param("body.weight", [2, 2], ParamInit::Constant(9.0));
        registry.param("head.weight", [classes, 2], ParamInit::Constant(9.0));
        registry.into_layout().unwrap()
    }

    fn save(folder: &Path, name: &str, tensors: &[(&str, (usize, usize), DType)]) -> PathBuf {
        let tensor = |shape: (usize, usize), dtype| {
            Tensor::arange(0f32, (shape.0 * shape.1) as f32, &Device::Cpu)
                .unwrap()
                .reshape(shape)
                .unwrap()
                .to_dtype(dtype)
                .unwrap()
        };
        let all: HashMap<String, Tensor> =
            tensors.iter().map(|(name, shape, dtype)| (name.to_string(), tensor(*shape, *dtype))).collect();
        let path = folder.join(name);
        candle_core::safetensors::save(&all, &path).unwrap();
        path
    }

    #[test]
    fn a_new_head_and_another_vocabulary_are_made_where_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let file = save(
            folder.path(),
            "a.safetensors",
            &[
                ("wte.weight", (3, 2), DType::F16),
                ("body.weight", (2, 2), DType::BF16),
                ("head.weight", (5, 2), DType::F64),
                ("extra", (1, 1), DType::F32),
            ],
        );
        let layout = layout(4, 2);
        let error = InitialWeights::open(&file, &layout, "head", InitHead::Strict).err().unwrap().to_string();
        assert!(
            error.contains("`head.weight` has shape [5, 2] in the file, and [2, 2] in the model"),
            "{error}"
        );
        let weights = InitialWeights::open(&file, &layout, "head", InitHead::Auto).unwrap();
        let report = InitReport {
            matched: 1,
            new: vec!["head.weight".into()],
            resized: vec!["wte.weight: 3 rows of 4".into()],
            left_over: vec!["extra".into(), "head.weight".into()],
            factorized: Vec::new(),
        };
        assert_eq!(weights.report, report);
        let store = ParamStore::new(layout, 1, DType::F32, &Device::Cpu).unwrap();
        weights.load(&store).unwrap();
        let values = |i: usize| store.weight_views()[i].flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(values(0), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 9.0, 9.0]);
        assert_eq!((values(1), values(2)), (vec![0.0, 1.0, 2.0, 3.0], vec![9.0; 4]));
    }

    /// A table of no dimension or without rows has nothing to take.
    #[test]
    fn a_table_without_rows_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let error = |shape: &[usize], layout: &ParamLayout| {
            let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
            let square = || zeros(&[2, 2]);
            let all = [("wte.weight", zeros(shape)), ("body.weight", square()), ("head.weight", square())];
            candle_core::safetensors::save(&HashMap::from(all), &path).unwrap();
            InitialWeights::open(&path, layout, "head", InitHead::Auto).err().map(|error| error.to_string())
        };
        let layout = layout(4, 2);
        for (shape, problem) in [
            (&[][..], "`wte.weight` has shape [] in the file, and [4, 2] in the model"),
            (&[2][..], "`wte.weight` has shape [2] in the file, and [4, 2] in the model"),
            (&[0, 2][..], "`wte.weight` has shape [0, 2] in the file, and [4, 2] in the model"),
        ] {
            let error = error(shape, &layout).unwrap();
            assert!(error.contains(problem), "{error}");
        }
        assert_eq!(error(&[3, 2], &layout), None);
    }

    #[test]
    fn shards_are_read_by_their_index_and_other_folders_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        save(at, "one.safetensors", &[("wte.weight", (4, 2), DType::F32)]);
        save(
            at,
            "two.safetensors",
            &[("body.weight", (2, 2), DType::F32), ("head.weight", (2, 2), DType::F32)],
        );
        let index = |files: [&str; 2]| {
            let text = format!(
                r#"{{"weight_map": {{"wte.weight": "{}", "body.weight": "{}"}}}}"#,
                files[0], files[1]
            );
            std::fs::write(at.join(SHARD_INDEX), text).unwrap();
            InitialWeights::open(at, &layout(4, 2), "head", InitHead::Strict)
        };
        assert_eq!(index(["one.safetensors", "two.safetensors"]).unwrap().report.matched, 3);
        assert!(
            index(["one.safetensors", "../two.safetensors"])
                .err()
                .unwrap()
                .to_string()
                .contains("other folders")
        );
        assert!(
            index(["one.safetensors", "gone.safetensors"])
                .err()
                .unwrap()
                .to_string()
                .contains("cannot be read")
        );
        let missing = InitialWeights::open(&at.join("nowhere"), &layout(4, 2), "head", InitHead::Auto);
        assert!(missing.err().unwrap().to_string().contains("does not exist"));
        let torch = at.join("model.pt");
        std::fs::write(&torch, b"PK\x03\x04 and what torch.save writes").unwrap();
        let error =
            InitialWeights::open(&torch, &layout(4, 2), "head", InitHead::Auto).err().unwrap().to_string();
        assert!(error.contains("it is a zip file") && error.contains("save_file(torch.load("), "{error}");
    }
}
