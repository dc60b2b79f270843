//! Which parameters are trained, which group they belong to and which may be pruned: the patterns of `train.freeze`,
//! `[[train.groups]]` and `prune.skip`; what makes layers smaller, ranks and units that are kept; and whether values
//! are rounded.
//!
//! A pattern matches a parameter's name, or that of a module it is in: the name up to one of its dots. `*` matches any
//! characters, dots too. Of several that match, the last decides.

use glob::Pattern;

use super::{MatrixLayer, ParamGroup, Placement, TensorSpec, UnitGroup};
use crate::job::{Job, PruneStructure, Reductions, TrainConfig};

/// Patterns on names, compiled.
#[derive(Clone, Debug, Default)]
pub struct ParamRules {
    freeze: Vec<FreezeRule>,
    groups: Vec<GroupRule>,
    /// `None` without `[prune]`.
    prune: Option<PruneRule>,
    reductions: Reductions,
    /// Values are rounded to 8-bit integers.
    quantize: bool,
}

/// Why the rules of a job do not apply to its model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RulesError {
    #[error("`{key}` has `{pattern}`, which matches no parameter; {near}")]
    NoMatch { key: &'static str, pattern: String, near: String },
    #[error("`train.freeze` leaves no parameter to train")]
    AllFrozen,
    #[error(
        "`[prune]` finds nothing to prune: no weight of a linear layer or convolution is trained, not in `prune.skip` and \
         of the structure, which for \"2:4\" needs a multiple of four inputs; shorten `prune.skip` or `train.freeze`"
    )]
    NothingPruned,
    #[error(
        "`[prune]` finds no {noun} to prune: {noun} with a frozen parameter or one in `prune.skip` stay, and the last of \
         a layer does"
    )]
    NoUnits { noun: &'static str },
    #[error("`prune.kept` has `{layer}`, which is no layer with channels or heads to prune; {near}")]
    NoUnitLayer { layer: String, near: String },
    #[error("`prune.kept` has {kept} for `{layer}`, which has {units}")]
    TooManyKept { layer: String, kept: usize, units: usize },
    #[error("`lowrank.ranks` has `{layer}`, which is no layer that can be factorized; {near}")]
    NoLayer { layer: String, near: String },
    #[error(
        "`lowrank.ranks` has {rank} for `{layer}`, whose weight of shape {shape:?} becomes smaller up to a rank of \
         {most}"
    )]
    RankTooLarge { layer: String, rank: usize, shape: Vec<usize>, most: usize },
}

#[derive(Clone, Debug)]
struct FreezeRule {
    pattern: NamePattern,
    /// False for an exception, which is written `!pattern`.
    freezes: bool,
}

#[derive(Clone, Debug)]
struct PruneRule {
    structure: PruneStructure,
    skip: Vec<NamePattern>,
}

impl PruneRule {
    /// Whether this tensor of a layer has weights of this structure: no bias, norm or embedding.
    fn suits(&self, spec: &TensorSpec) -> bool {
        spec.is_matrix()
            && !self.structure.has_units()
            && (self.structure != PruneStructure::TwoOfFour || spec.inputs().is_multiple_of(4))
    }
}

#[derive(Clone, Debug)]
struct GroupRule {
    patterns: Vec<NamePattern>,
    lr_scale: f64,
    weight_decay: Option<f64>,
}

#[derive(Clone, Debug)]
struct NamePattern {
    text: String,
    /// `None` if it is no pattern: it matches nothing. Loading a job refuses those.
    glob: Option<Pattern>,
}

impl NamePattern {
    fn new(text: &str) -> Self {
        Self { text: text.to_owned(), glob: Pattern::new(text).ok() }
    }

    fn matches(&self, name: &str) -> bool {
        let modules = name.match_indices('.').map(|(dot, _)| &name[..dot]);
        self.glob.as_ref().is_some_and(|glob| modules.chain([name]).any(|name| glob.matches(name)))
    }

    /// An error unless it matches one of `names`.
    fn check(&self, key: &'static str, names: &[&str]) -> Result<(), RulesError> {
        match names.iter().any(|name| self.matches(name)) {
            true => Ok(()),
            false => Err(RulesError::NoMatch {
                key,
                pattern: self.text.clone(),
                near: near_names("parameters", &self.text, names),
            }),
        }
    }
}

impl ParamRules {
    pub fn new(train: &TrainConfig) -> Self {
        let freeze = train.freeze.iter().map(|text| match text.strip_prefix('!') {
            Some(text) => FreezeRule { pattern: NamePattern::new(text), freezes: false },
            None => FreezeRule { pattern: NamePattern::new(text), freezes: true },
        });
        let groups = train.groups.iter().map(|group| GroupRule {
            patterns: group.params.iter().map(|text| NamePattern::new(text)).collect(),
            lr_scale: group.lr_scale,
            weight_decay: group.weight_decay,
        });
        Self { freeze: freeze.collect(), groups: groups.collect(), ..Self::default() }
    }

    /// Only what makes layers smaller, for a model that is not trained.
    pub fn of_reductions(reductions: &Reductions) -> Self {
        Self { reductions: reductions.clone(), ..Self::default() }
    }

    /// The same rules for a model whose values are rounded to 8-bit integers, or are not.
    pub fn quantized(self, quantize: bool) -> Self {
        Self { quantize, ..self }
    }

    pub(super) fn quantizes(&self) -> bool {
        self.quantize
    }

    /// The rules of all tables of a job.
    pub fn of_job(job: &Job) -> Self {
        let prune = job.pruning().map(|prune| PruneRule {
            structure: prune.structure,
            skip: prune.skip.iter().map(|text| NamePattern::new(text)).collect(),
        });
        let (reductions, quantize) = (Reductions::of_job(job), job.quantizes());
        Self { prune, reductions, quantize, ..Self::new(&job.train) }
    }

    /// The rank of the factors of this layer; `None` if it stays whole.
    pub(super) fn rank_of(&self, layer: &str) -> Option<usize> {
        self.reductions.ranks.get(layer).copied()
    }

    /// Checks that every rank is that of one of `layers`, and makes it smaller.
    pub(super) fn check_ranks(&self, layers: &[MatrixLayer]) -> Result<(), RulesError> {
        for (name, &rank) in &self.reductions.ranks {
            let Some(layer) = layers.iter().find(|layer| layer.name == *name) else {
                let names: Vec<&str> = layers.iter().map(|layer| layer.name.as_str()).collect();
                let near = near_names("those layers", name, &names);
                return Err(RulesError::NoLayer { layer: name.clone(), near });
            };
            if rank > layer.max_rank() {
                let (layer, shape, most) = (name.clone(), layer.weight.shape.clone(), layer.max_rank());
                return Err(RulesError::RankTooLarge { layer, rank, shape, most });
            }
        }
        Ok(())
    }

    /// Whether the job prunes weights one by one.
    pub(super) fn prunes_weights(&self) -> bool {
        self.prune.as_ref().is_some_and(|rule| !rule.structure.has_units())
    }

    /// The structure of units that the job prunes as a whole.
    pub fn unit_structure(&self) -> Option<PruneStructure> {
        self.prune.as_ref().map(|rule| rule.structure).filter(|structure| structure.has_units())
    }

    /// Whether `prune.skip` has this parameter.
    pub(super) fn skips(&self, name: &str) -> bool {
        self.prune.iter().flat_map(|rule| &rule.skip).any(|pattern| pattern.matches(name))
    }

    /// Checks that there are units to prune.
    pub(super) fn check_units(&self, groups: &[UnitGroup]) -> Result<(), RulesError> {
        match self.unit_structure().filter(|_| groups.is_empty()) {
            Some(structure) => Err(RulesError::NoUnits { noun: structure.noun() }),
            None => Ok(()),
        }
    }

    /// How many of the `units` of a layer are left.
    pub fn kept_of(&self, layer: &str, units: usize) -> Result<usize, RulesError> {
        match self.reductions.kept.get(layer) {
            None => Ok(units),
            Some(&kept) if (1..=units).contains(&kept) => Ok(kept),
            Some(&kept) => Err(RulesError::TooManyKept { layer: layer.to_owned(), kept, units }),
        }
    }

    /// Checks that every layer that keeps some of its units is one of `groups`.
    pub fn check_kept(&self, groups: &[UnitGroup]) -> Result<(), RulesError> {
        let names: Vec<&str> = groups.iter().map(|group| group.name.as_str()).collect();
        match self.reductions.kept.keys().find(|layer| !names.contains(&layer.as_str())) {
            None => Ok(()),
            Some(layer) => {
                let near = near_names("those layers", layer, &names);
                Err(RulesError::NoUnitLayer { layer: layer.clone(), near })
            }
        }
    }

    /// Whether layers have fewer units than `[model]` says.
    pub fn keeps_units(&self) -> bool {
        !self.reductions.kept.is_empty()
    }

    /// Where a parameter with these names belongs.
    pub(super) fn place(&self, names: &[&str], spec: &TensorSpec) -> Placement {
        let matches = |pattern: &NamePattern| names.iter().any(|name| pattern.matches(name));
        let frozen = self.freeze.iter().rfind(|rule| matches(&rule.pattern)).is_some_and(|rule| rule.freezes);
        let group = self.groups.iter().rposition(|group| group.patterns.iter().any(matches));
        let prunes = |rule: &PruneRule| rule.suits(spec) && !rule.skip.iter().any(matches);
        let pruned = !frozen && self.prune.as_ref().is_some_and(prunes);
        let quantized = self.quantize && spec.is_matrix();
        Placement { trained: !frozen, group: group.map_or(0, |index| index + 1), pruned, quantized }
    }

    /// The group of a placement, which starts at this offset and is still empty.
    pub(super) fn new_group(&self, number: usize, start: usize) -> ParamGroup {
        let rule = number.checked_sub(1).and_then(|index| self.groups.get(index));
        ParamGroup {
            range: start..start,
            decayed_len: 0,
            lr_scale: rule.map_or(1.0, |rule| rule.lr_scale),
            weight_decay: rule.and_then(|rule| rule.weight_decay),
        }
    }

    /// Checks that every pattern matches one of `names`.
    pub(super) fn check(&self, names: &[&str]) -> Result<(), RulesError> {
        self.freeze.iter().try_for_each(|rule| rule.pattern.check("train.freeze", names))?;
        let patterns = self.groups.iter().flat_map(|group| &group.patterns);
        patterns.into_iter().try_for_each(|pattern| pattern.check("train.groups", names))?;
        let skip = self.prune.iter().flat_map(|rule| &rule.skip);
        skip.into_iter().try_for_each(|pattern| pattern.check("prune.skip", names))
    }
}

/// The layers that one of `patterns`, those of `lowrank.layers`, matches by the name of the layer or of its weight;
/// all if there are none.
pub fn matching_layers<'a>(
    patterns: &[String],
    layers: &'a [MatrixLayer],
) -> Result<Vec<&'a MatrixLayer>, RulesError> {
    let patterns: Vec<NamePattern> = patterns.iter().map(|text| NamePattern::new(text)).collect();
    let names: Vec<&str> = layers.iter().flat_map(|layer| [&*layer.name, &*layer.weight.name]).collect();
    patterns.iter().try_for_each(|pattern| pattern.check("lowrank.layers", &names))?;
    let matches = |layer: &&MatrixLayer| {
        let of_layer =
            |pattern: &NamePattern| pattern.matches(&layer.name) || pattern.matches(&layer.weight.name);
        patterns.is_empty() || patterns.iter().any(of_layer)
    };
    Ok(layers.iter().filter(matches).collect())
}

/// The names most similar to a pattern, for a message.
pub fn near_names(what: &str, pattern: &str, names: &[&str]) -> String {
    const SHOWN: usize = 4;
    if names.is_empty() {
        return "there are none".into();
    }
    let mut names: Vec<(f64, &str)> =
        names.iter().map(|name| (strsim::jaro_winkler(pattern, name), *name)).collect();
    names.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    let shown: Vec<String> = names.iter().take(SHOWN).map(|(_, name)| format!("`{name}`")).collect();
    match names.len() > SHOWN {
        true => format!("{what} are {} and {} others", shown.join(", "), names.len() - SHOWN),
        false => format!("{what} are {}", shown.join(", ")),
    }
}
