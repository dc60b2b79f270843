//! Records a reference run in files, and compares another run with it update by update.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::Tensor;

use super::{MaxDifference, RunVariant, Tolerance, VariantKind, VariantResult};
use crate::base::random::RngKey;
use crate::base::regular_file;
use crate::data::digest::Digest;
use crate::kernels::host;
use crate::param_store::ParamStore;
use crate::params::TensorSpec;
use crate::train::Failure;
use crate::train::run::Observer;

/// Values compared at a time.
const CHUNK: usize = 16 * 1024;

/// Floor of a parameter's scale, as a fraction of the RMS over all parameters. Where the true gradient is zero, as
/// for the bias of an attention key, only rounding is left to compare with.
const RMS_FLOOR: f64 = 0.01;

/// Factor on differences in a weight that only rounding has moved. Where the true gradient is zero, as for a bias
/// before batch norm, an optimizer that divides by the gradient's magnitude turns rounding into full steps.
const ROUNDING_WEIGHT: f64 = 1e-3;

/// The fraction by which a perturbed run changes every weight, up or down.
pub const WEIGHT_CHANGE: f32 = 1e-6;

/// Records the reference run.
pub struct ReferenceRecorder {
    folder: PathBuf,
    log: Mutex<ReferenceLog>,
}

#[derive(Default)]
struct ReferenceLog {
    losses: Vec<f64>,
    factors: Vec<f64>,
    requests: Vec<u64>,
    digest: String,
}

/// What the caller needs of the reference run.
pub struct ReferenceSummary {
    pub losses: Vec<f64>,
    pub digest: String,
    /// Index of a reservation in the middle of the second update.
    pub request_in_second_update: u64,
}

impl ReferenceRecorder {
    pub fn new(folder: PathBuf) -> Result<Self, Failure> {
        fs::create_dir_all(&folder).map_err(Failure::io("create the folder", &folder))?;
        Ok(Self { folder, log: Mutex::default() })
    }

    pub fn summary(&self) -> ReferenceSummary {
        let log = lock(&self.log);
        let requests_at = |update: usize| log.requests.get(update).copied().unwrap_or(1);
        ReferenceSummary {
            losses: log.losses.clone(),
            digest: log.digest.clone(),
            request_in_second_update: (requests_at(0) + requests_at(1)).div_ceil(2),
        }
    }

    fn file(&self, what: &str, step: u64) -> PathBuf {
        self.folder.join(format!("{what}-{step}"))
    }

    fn write(&self, what: &str, step: u64, values: &Tensor) -> Result<(), Failure> {
        let (path, values) = (self.file(what, step), host::read::<f32>(values)?);
        fs::write(&path, bytemuck::cast_slice::<f32, u8>(&values)).map_err(Failure::io("write", path))
    }
}

impl Observer for ReferenceRecorder {
    fn on_gradients(
        &self,
        step: u64,
        loss: f64,
        store: &ParamStore,
        factor: f64,
        requests: u64,
    ) -> Result<(), Failure> {
        let mut log = lock(&self.log);
        // An update retried after an OOM is reported twice.
        let n = step as usize - 1;
        log.losses.truncate(n);
        log.factors.truncate(n);
        log.requests.truncate(n);
        log.losses.push(loss);
        log.factors.push(factor);
        log.requests.push(requests);
        self.write("gradients", step, &store.grads)
    }

    fn on_update(&self, step: u64, store: &ParamStore, digest: Digest) -> Result<(), Failure> {
        lock(&self.log).digest = digest.to_string();
        self.write("weights", step, &store.master_weights)?;
        self.write("statistics", step, &store.stats)
    }
}

/// Compares a run with the reference.
pub struct ComparisonObserver {
    reference: Arc<ReferenceRecorder>,
    /// A gradient below this fraction of the overall RMS counts as rounding error.
    noise: f64,
    /// How the run differs from the reference. If it drifts away with every update, values are compared at the first
    /// only, and gradients that are rounding error get a small weight.
    kind: VariantKind,
    differences: Mutex<RunDifferences>,
}

#[derive(Default)]
struct RunDifferences {
    losses: MaxDifference,
    gradients: MaxDifference,
    weights: MaxDifference,
    digest: String,
    /// Parameters with a gradient above rounding so far.
    with_gradient: BTreeSet<String>,
}

impl ComparisonObserver {
    /// `tolerance` is that for another summation order, even if this variant must be exact.
    pub fn new(reference: Arc<ReferenceRecorder>, tolerance: Tolerance, kind: VariantKind) -> Self {
        Self { reference, noise: 10.0 * tolerance.losses, kind, differences: Mutex::default() }
    }

    /// The result of the variant.
    pub fn result(&self, variant: &RunVariant, tolerance: Tolerance, digest: &str) -> VariantResult {
        let differences = lock(&self.differences);
        let within = [
            (&differences.losses, tolerance.losses),
            (&differences.gradients, tolerance.gradients),
            (&differences.weights, tolerance.weights),
        ];
        VariantResult {
            name: variant.name.clone(),
            micro_batch: variant.plan.micro_batch,
            accumulation_steps: variant.plan.accumulation_steps,
            recompute: variant.plan.recompute,
            exact: variant.exact,
            losses: differences.losses.clone(),
            gradients: differences.gradients.clone(),
            weights: differences.weights.clone(),
            tolerance,
            samples_digest: differences.digest.clone(),
            passed: differences.digest == digest
                && within.iter().all(|(apart, most)| apart.difference <= *most),
        }
    }
}

impl Observer for ComparisonObserver {
    fn on_start(&self, store: &ParamStore) -> Result<(), Failure> {
        if self.kind == VariantKind::Perturbed {
            let signs = RngKey::new(0, 0);
            host::write::<f32, _>(&store.master_weights, |weights| {
                for (weight, i) in weights.iter_mut().zip(0..) {
                    *weight *= 1.0 + if signs.f64(i) < 0.5 { WEIGHT_CHANGE } else { -WEIGHT_CHANGE };
                }
            })?;
            store.sync_compute_weights()?;
        }
        Ok(())
    }

    fn on_gradients(
        &self,
        step: u64,
        loss: f64,
        store: &ParamStore,
        factor: f64,
        _: u64,
    ) -> Result<(), Failure> {
        if self.kind.diverges() && step > 1 {
            return Ok(());
        }
        let (reference_loss, reference_factor) = {
            let log = lock(&self.reference.log);
            let at = |of: &[f64]| of.get(step as usize - 1).copied().unwrap_or(f64::NAN);
            (at(&log.losses), at(&log.factors))
        };
        let path = self.reference.file("gradients", step);
        let trained = store.layout.params.trained();
        let sums = sums_by_param(trained, &store.grads, &path, factor, reference_factor)?;
        let noise_floor = self.noise * overall_rms(&sums);
        let has_gradient = |name: &str| sums.iter().any(|(n, sums)| *n == name && sums.rms() > noise_floor);
        let counts = |name: &str| !self.kind.diverges() || has_gradient(name);
        let gradients = largest_difference(&sums, |name| if counts(name) { 1.0 } else { ROUNDING_WEIGHT })
            .at_update(step);
        let difference = abs_difference(reference_loss, loss) / reference_loss.abs().max(f64::MIN_POSITIVE);
        let mut differences = lock(&self.differences);
        differences.losses.keep_larger(MaxDifference {
            difference: nan_to_infinity(difference),
            update: step,
            parameter: None,
        });
        differences.gradients.keep_larger(gradients);
        let with_gradient = sums.iter().filter(|(_, sums)| sums.rms() > noise_floor);
        differences.with_gradient.extend(with_gradient.map(|(name, _)| (*name).to_owned()));
        Ok(())
    }

    fn on_update(&self, step: u64, store: &ParamStore, digest: Digest) -> Result<(), Failure> {
        if self.kind.diverges() && step > 1 {
            lock(&self.differences).digest = digest.to_string();
            return Ok(());
        }
        let file = |what| self.reference.file(what, step);
        let trained = store.layout.params.trained();
        let weights = sums_by_param(trained, &store.master_weights, &file("weights"), 1.0, 1.0)?;
        let statistics = store.layout.stats.iter();
        let statistics = sums_by_param(statistics, &store.stats, &file("statistics"), 1.0, 1.0)?;
        let mut differences = lock(&self.differences);
        let weights = largest_difference(&weights, |name| {
            if differences.with_gradient.contains(name) { 1.0 } else { ROUNDING_WEIGHT }
        });
        differences.weights.keep_larger(weights.at_update(step));
        differences.weights.keep_larger(largest_difference(&statistics, |_| 1.0).at_update(step));
        differences.digest = digest.to_string();
        Ok(())
    }
}

impl MaxDifference {
    fn keep_larger(&mut self, other: MaxDifference) {
        if other.difference > self.difference {
            *self = other;
        }
    }

    fn at_update(self, update: u64) -> Self {
        Self { update, ..self }
    }
}

/// 0 for equal bits, `NaN` included.
fn abs_difference(a: f64, b: f64) -> f64 {
    if a.to_bits() == b.to_bits() { 0.0 } else { (a - b).abs() }
}

/// Treats `NaN` as an infinite difference.
fn nan_to_infinity(difference: f64) -> f64 {
    if difference.is_nan() { f64::INFINITY } else { difference }
}

/// Sums of squares over a parameter.
#[derive(Clone, Copy, Default)]
struct SquareSums {
    count: f64,
    reference: f64,
    difference: f64,
}

impl SquareSums {
    fn add(&mut self, reference: f64, actual: f64) {
        self.count += 1.0;
        self.reference += reference * reference;
        self.difference += abs_difference(reference, actual).powi(2);
    }

    /// Root mean square of the reference.
    fn rms(&self) -> f64 {
        (self.reference / self.count.max(1.0)).sqrt()
    }
}

/// Compares a flat buffer with the file at `path`, parameter by parameter. Multiplies each by its factor first.
fn sums_by_param<'a>(
    params: impl Iterator<Item = (&'a TensorSpec, Range<usize>)>,
    values: &Tensor,
    path: &Path,
    factor: f64,
    reference_factor: f64,
) -> Result<Vec<(&'a str, SquareSums)>, Failure> {
    let values = host::read::<f32>(values)?;
    let mut file = BufReader::new(regular_file::open(path).map_err(Failure::io("read", path))?);
    let mut reference = vec![0f32; CHUNK.min(values.len())];
    let mut each = Vec::new();
    for (spec, range) in params {
        let mut sums = SquareSums::default();
        for values in values[range].chunks(CHUNK) {
            let reference = &mut reference[..values.len()];
            file.read_exact(bytemuck::cast_slice_mut::<f32, u8>(reference))
                .map_err(Failure::io("read", path))?;
            for (reference, value) in reference.iter().zip(values) {
                sums.add(*reference as f64 * reference_factor, *value as f64 * factor);
            }
        }
        each.push((spec.name.as_str(), sums));
    }
    Ok(each)
}

/// Root mean square over all parameters.
fn overall_rms(each: &[(&str, SquareSums)]) -> f64 {
    let add = |all: SquareSums, (_, one): &(&str, SquareSums)| SquareSums {
        count: all.count + one.count,
        reference: all.reference + one.reference,
        difference: 0.0,
    };
    each.iter().fold(SquareSums::default(), add).rms()
}

/// The parameter with the largest difference: RMS of the difference over RMS of the reference, times `weight`.
fn largest_difference(each: &[(&str, SquareSums)], weight: impl Fn(&str) -> f64) -> MaxDifference {
    let floor = RMS_FLOOR * overall_rms(each);
    let mut max = MaxDifference::default();
    for (name, s) in each.iter().filter(|(_, s)| s.difference != 0.0) {
        // `f64::max` ignores `NaN`, so a `NaN` sum sets neither floor nor scale.
        let scale = s.rms().max(floor).max(f64::MIN_POSITIVE);
        let difference = nan_to_infinity((s.difference / s.count).sqrt() / scale) * weight(name);
        max.keep_larger(MaxDifference { difference, update: 0, parameter: Some((*name).to_owned()) });
    }
    max
}

/// Ignores poisoning: the guarded values are consistent after every statement.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(values: &[(f64, f64)]) -> SquareSums {
        let mut sums = SquareSums::default();
        values.iter().for_each(|(wanted, got)| sums.add(*wanted, *got));
        sums
    }

    #[test]
    fn the_parameter_that_differs_most_is_named() {
        let same = pairs(&[(1.0, 1.0), (f64::NAN, f64::NAN)]);
        let little = pairs(&[(1.0, 1.0 + 1e-6), (-2.0, -2.0)]);
        let much = pairs(&[(0.5, 0.5), (0.5, 0.51)]);
        let found = largest_difference(&[("same", same), ("little", little), ("much", much)], |_| 1.0);
        assert_eq!(found.parameter.as_deref(), Some("much"));
        let found = largest_difference(&[("little", little), ("much", much)], |_| 1.0);
        assert!((found.difference - 0.01 / 2f64.sqrt() / 0.5).abs() < 1e-9, "{found:?}");
        assert_eq!(largest_difference(&[("same", same)], |_| 1.0), MaxDifference::default());
    }

    #[test]
    fn what_is_not_a_number_on_one_side_alone_is_as_far_as_can_be() {
        let found =
            largest_difference(&[("a", pairs(&[(1.0, f64::NAN)])), ("b", pairs(&[(1.0, 2.0)]))], |_| 1.0);
        assert_eq!((found.difference, found.parameter.as_deref()), (f64::INFINITY, Some("a")));
    }

    #[test]
    fn rounding_around_a_gradient_of_zero_is_held_against_the_others() {
        let noise = pairs(&[(1e-9, -1e-9); 10]);
        let found = largest_difference(&[("noise", noise), ("true", pairs(&[(1.0, 1.0); 10]))], |_| 1.0);
        assert!(found.difference < 1e-6, "{found:?}");
        assert!(largest_difference(&[("noise", noise)], |_| 1.0).difference > 1.0);
    }

    #[test]
    fn a_weight_that_rounding_moved_counts_less_and_is_still_not_equal() {
        let astray = [("astray", pairs(&[(1.0, 1.01); 4])), ("sound", pairs(&[(1.0, 1.0001); 4]))];
        let found = largest_difference(&astray, |name| if name == "astray" { ROUNDING_WEIGHT } else { 1.0 });
        assert_eq!(found.parameter.as_deref(), Some("sound"));
        assert!(largest_difference(&astray[..1], |_| ROUNDING_WEIGHT).difference > 0.0);
    }
}
