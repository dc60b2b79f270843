//! The ranks of a job's `[lowrank]`, before its model is built: from the model alone, or from the singular values
//! of the weights that `train.init` names. They become part of the job, so that a run needs those weights only to
//! start.

use std::collections::BTreeSet;
use std::path::Path;

use super::Failure;
use super::initial_weights::{InitError, WeightFiles};
use crate::base::features::Features;
use crate::base::units::{Bytes, counted};
use crate::job::{
    InitHead, Job, LowRankConfig, ModelConfig, PruneStructure, Ranks, Reductions, SizeRatio, UnitCounts,
};
use crate::kernels::host;
use crate::kernels::low_rank::{self, Matrix, rank_of_energy, singular_values};
use crate::models::{ModelError, build_reduced, unit_groups};
use crate::params::{MatrixLayer, ParamLayout, UnitGroup, matching_layers};

/// Halvings of the interval in which the energy of a size target is searched: beyond the resolution of f64.
const BISECTIONS: usize = 60;

/// Why no ranks were found.
#[derive(Debug, thiserror::Error)]
pub enum LowRankError {
    #[error(
        "`[lowrank]` factorizes nothing: of {} that may be, none becomes smaller at {asked}",
        counted(*layers as u64, "layer")
    )]
    Nothing { layers: usize, asked: String },
    #[error(
        "`lowrank.target` is \"{target}\", and with rank 1 in every layer that may be factorized the model is \
         {smallest:.2} times smaller"
    )]
    Target { target: SizeRatio, smallest: f64 },
    #[error("the singular values of `{layer}` take {}, and the budget is {}", Bytes(*needed), Bytes(*max_bytes))]
    Memory { layer: String, needed: u64, max_bytes: u64 },
}

/// Finds the ranks of `job`, for samples of these features, within `ram` bytes. Does nothing if the job has no
/// `[lowrank]`, or has its ranks.
pub fn resolve(job: &mut Job, features: &Features, ram: u64) -> Result<(), Failure> {
    let Some(config) = job.lowrank.as_ref().filter(|config| config.ranks.is_empty()) else { return Ok(()) };
    let reductions = Reductions::of_job(job);
    let layout = build_reduced(&job.model, features, &reductions)?.layout;
    let named = matching_layers(&config.layers, &layout.matrices).map_err(ModelError::from)?;
    let named: BTreeSet<&str> = named.into_iter().map(|layer| layer.name.as_str()).collect();
    let mut layers = factorizable(&job.model, &layout, &reductions.kept);
    layers.retain(|layer| named.contains(layer.name.as_str()));
    let count = layers.len();
    let (ranks, asked) = match (config, &job.train.init) {
        (LowRankConfig { rank: Some(rank), .. }, _) => {
            (fitting(&layers, |_| *rank), format!("a rank of {rank}"))
        }
        (config, Some(init)) => {
            let spectra = Spectra::read(init, layers, layout.params.len, ram)?;
            match (config.energy, config.target) {
                (_, Some(target)) => (spectra.of_size(target)?, format!("\"{target}\"")),
                (energy, None) => {
                    let energy = energy.unwrap_or(1.0);
                    (spectra.at(energy), format!("{energy} of its energy"))
                }
            }
        }
        // Refused when the job was loaded.
        (_, None) => return Ok(()),
    };
    if ranks.is_empty() {
        return Err(Failure::LowRank(LowRankError::Nothing { layers: count, asked }));
    }
    job.lowrank.iter_mut().for_each(|config| config.ranks.clone_from(&ranks));
    Ok(())
}

/// Takes the ranks of the job of a checkpoint, as JSON, if `job` has none.
pub fn keep_ranks(job: &mut Job, before: &serde_json::Value) {
    let kept = serde_json::from_value::<Ranks>(before["lowrank"]["ranks"].clone());
    if let (Some(config), Ok(kept)) = (&mut job.lowrank, kept)
        && config.ranks.is_empty()
    {
        config.ranks = kept;
    }
}

/// The layers that may be factorized. Factorized layers are not factorized again. Layers whose units are in `kept` stay
/// whole, since a factorized layer has no units to count, and so do layers that share a unit tensor with them: the
/// units of several convolutions of a block are selected together.
pub fn factorizable(model: &ModelConfig, layout: &ParamLayout, kept: &UnitCounts) -> Vec<MatrixLayer> {
    let structures = [PruneStructure::Channels, PruneStructure::Heads];
    let groups: Vec<UnitGroup> =
        structures.into_iter().flat_map(|structure| unit_groups(model, structure, layout)).collect();
    let in_kept = groups.iter().filter(|group| kept.contains_key(&group.name));
    let in_kept: BTreeSet<&str> = in_kept.flat_map(tensors).collect();
    let stay = groups.iter().filter(|group| tensors(group).any(|tensor| in_kept.contains(tensor)));
    let stay: BTreeSet<&str> = stay.flat_map(tensors).collect();
    let may = |layer: &&MatrixLayer| {
        layer.rank.is_none() && layer.max_rank() > 0 && !stay.contains(layer.weight.name.as_str())
    };
    layout.matrices.iter().filter(may).cloned().collect()
}

/// The tensors with values of these units.
fn tensors(group: &UnitGroup) -> impl Iterator<Item = &str> {
    group.slices.iter().map(|slice| slice.tensor.as_str())
}

/// The ranks, given by the index of a layer, of the layers that become smaller.
fn fitting(layers: &[MatrixLayer], rank: impl Fn(usize) -> usize) -> Ranks {
    let ranks = layers.iter().enumerate().map(|(index, layer)| (layer, rank(index)));
    let smaller = ranks.filter(|(layer, rank)| *rank <= layer.max_rank());
    smaller.map(|(layer, rank)| (layer.name.clone(), rank)).collect()
}

/// The singular values of layers.
pub struct Spectra {
    layers: Vec<MatrixLayer>,
    values: Vec<Vec<f64>>,
    /// Number of parameters of the whole model.
    parameters: usize,
}

impl Spectra {
    /// Reads the whole weights of `layers`, one at a time, from a run, a checkpoint or a file.
    pub fn read(path: &Path, layers: Vec<MatrixLayer>, parameters: usize, ram: u64) -> Result<Self, Failure> {
        let files = WeightFiles::open(path)?;
        let spectrum = |layer: &MatrixLayer| {
            let needed = low_rank::layer_bytes(layer, Some(0));
            if needed > ram {
                let (layer, max_bytes) = (layer.name.clone(), ram);
                return Err(Failure::LowRank(LowRankError::Memory { layer, needed, max_bytes }));
            }
            let Some(values) = files.matrix(layer)? else {
                let (name, shape) = (&layer.weight.name, &layer.weight.shape);
                let problems = vec![format!("the file lacks the tensor `{name}` of shape {shape:?}")];
                return Err(Failure::Init(InitError::Mismatch { problems, policy: InitHead::Strict }));
            };
            let (rows, columns) = layer.dims();
            Ok(singular_values(Matrix { values: &host::read(&values)?, rows, columns }))
        };
        let values = layers.iter().map(spectrum).collect::<Result<_, _>>()?;
        Ok(Self { layers, values, parameters })
    }

    /// The ranks that keep this fraction of the energy.
    pub fn at(&self, energy: f64) -> Ranks {
        fitting(&self.layers, |index| rank_of_energy(&self.values[index], energy))
    }

    /// The ranks at the largest energy with which the model is small enough.
    pub fn of_size(&self, target: SizeRatio) -> Result<Ranks, Failure> {
        let smallest = self.ratio(&self.at(0.0));
        if smallest < target.value() {
            return Err(Failure::LowRank(LowRankError::Target { target, smallest }));
        }
        let (mut enough, mut too_much) = (0.0, 1.0);
        for _ in 0..BISECTIONS {
            let middle = (enough + too_much) / 2.0;
            match self.ratio(&self.at(middle)) >= target.value() {
                true => enough = middle,
                false => too_much = middle,
            }
        }
        Ok(self.at(enough))
    }

    /// How many times fewer parameters a model with these ranks has.
    fn ratio(&self, ranks: &Ranks) -> f64 {
        let saved = self.layers.iter().filter_map(|layer| {
            let rank = ranks.get(&layer.name)?;
            Some(layer.weight.len() - layer.factors_len(*rank))
        });
        self.parameters as f64 / (self.parameters - saved.sum::<usize>()) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::features::{InputSpec, TargetSpec};
    use crate::params::{ParamRegistry, TensorUse};

    fn layers(shapes: &[[usize; 2]]) -> Vec<MatrixLayer> {
        let mut registry = ParamRegistry::default();
        for (i, shape) in shapes.iter().enumerate() {
            let names = ["weight", "bias"].map(|part| format!("{i}.{part}"));
            registry.matrix_layer(&i.to_string(), names, shape.to_vec(), TensorUse::Weight, false);
        }
        registry.into_layout().unwrap().matrices
    }

    /// The largest energy that is small enough.
    #[test]
    fn a_size_target_is_met_and_not_exceeded_by_much() {
        let layers = layers(&[[64, 64], [64, 32], [4, 4]]);
        let values = [64, 32, 4].map(|n| (0..n).map(|i| 0.9f64.powi(i)).collect()).to_vec();
        let spectra = Spectra { layers, values, parameters: 64 * 64 + 64 * 32 + 16 + 100 };
        for (text, most) in [("1.5x", 1.7), ("2x", 2.3), ("4x", 5.0)] {
            let target: SizeRatio = text.parse().unwrap();
            let ranks = spectra.of_size(target).unwrap();
            let ratio = spectra.ratio(&ranks);
            assert!(ratio >= target.value() && ratio < most, "{text}: {ratio} with {ranks:?}");
        }
        let error = spectra.of_size("99x".parse().unwrap()).unwrap_err().to_string();
        assert!(error.contains("`lowrank.target` is \"99x\"") && error.contains("times smaller"), "{error}");
    }

    /// With every other layer factorized, a model still has the units that `kept` counts.
    #[test]
    fn layers_with_counted_units_stay_whole() {
        let names = (0..10).map(|class| class.to_string()).collect();
        let images = Features::new(InputSpec::Floats { shape: vec![16, 16, 3] }, TargetSpec::Class { names });
        let tokens = Features::new(InputSpec::Tokens { length: 16, vocab: 61 }, TargetSpec::Tokens);
        let gpt = "kind = 'gpt'\nlayers = 2\nheads = 4\nwidth = 16\ncontext = 16";
        let resnet = "kind = 'resnet'\ndepth = 50\nstem = 'small'";
        let block = "transformer.h.0";
        let cases = [
            (
                gpt,
                &tokens,
                format!("{block}.attn"),
                format!("{block}.attn.c_proj"),
                format!("{block}.mlp.c_fc"),
            ),
            (
                gpt,
                &tokens,
                format!("{block}.mlp.c_fc"),
                format!("{block}.mlp.c_proj"),
                format!("{block}.attn.c_proj"),
            ),
            (resnet, &images, "layer1.0.conv2".into(), "layer1.0.conv1".into(), "layer1.1.conv2".into()),
        ];
        for (model, features, counted, whole, other) in cases {
            let model: ModelConfig = toml::from_str(model).unwrap();
            let kept = UnitCounts::from([(counted.clone(), 2)]);
            let layout = |ranks: Ranks| {
                let reductions = Reductions { ranks, kept: kept.clone() };
                build_reduced(&model, features, &reductions).unwrap().layout
            };
            let layers = factorizable(&model, &layout(Ranks::new()), &kept);
            let has = |name: &str| layers.iter().any(|layer| layer.name == name);
            assert!(!has(&whole) && has(&other), "{counted}: {layers:?}");
            let ranks = layers.iter().map(|layer| (layer.name.clone(), 1)).collect();
            assert!(factorizable(&model, &layout(ranks), &kept).is_empty(), "{counted}");
        }
    }

    #[test]
    fn layers_that_would_not_become_smaller_stay_whole() {
        let all = layers(&[[64, 64], [64, 8]]);
        let ranks = fitting(&all, |_| 10);
        assert_eq!(ranks, Ranks::from([("0".to_owned(), 10)]));
    }
}
