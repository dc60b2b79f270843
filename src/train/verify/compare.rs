//! What a run computed, kept in files, and another run held against it as it goes.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::Tensor;

use super::{Apart, Checked, Tolerance, Way};
use crate::data::digest::Digest;
use crate::kernels::host;
use crate::params::{Flat, Store};
use crate::regular;
use crate::train::Failure;
use crate::train::run::Observer;

/// Values compared at a time.
const CHUNK: usize = 16 * 1024;

/// A parameter whose values are smaller than this share of what all have on average is held against that share:
/// where the true gradient is zero, as that of a key's bias, there is nothing but rounding to compare with.
const FLOOR: f64 = 0.01;

/// How much less a difference counts in a weight that rounding alone has moved. Where a true gradient is zero, as
/// that of a bias before batch norm, a rule that divides by the gradient's size makes whole steps of what is left.
const ASTRAY: f64 = 1e-3;

/// The run that others are held against.
pub struct Kept {
    folder: PathBuf,
    notes: Mutex<Notes>,
}

#[derive(Default)]
struct Notes {
    losses: Vec<f64>,
    factors: Vec<f64>,
    asks: Vec<u64>,
    digest: String,
}

/// What a caller needs of the first run.
pub struct Done {
    pub losses: Vec<f64>,
    pub digest: String,
    /// An ask in the middle of the second update.
    pub middle_of_second: u64,
}

impl Kept {
    pub fn new(folder: PathBuf) -> Result<Self, Failure> {
        fs::create_dir_all(&folder).map_err(Failure::io("create the folder", &folder))?;
        Ok(Self { folder, notes: Mutex::default() })
    }

    pub fn done(&self) -> Done {
        let notes = lock(&self.notes);
        let ask = |update: usize| notes.asks.get(update).copied().unwrap_or(1);
        Done {
            losses: notes.losses.clone(),
            digest: notes.digest.clone(),
            middle_of_second: (ask(0) + ask(1)).div_ceil(2),
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

impl Observer for Kept {
    fn gradients(&self, step: u64, loss: f64, store: &Store, factor: f64, asks: u64) -> Result<(), Failure> {
        let mut notes = lock(&self.notes);
        // An update that is made again after a refused ask is told again.
        let n = step as usize - 1;
        notes.losses.truncate(n);
        notes.factors.truncate(n);
        notes.asks.truncate(n);
        notes.losses.push(loss);
        notes.factors.push(factor);
        notes.asks.push(asks);
        self.write("gradients", step, &store.grads)
    }

    fn updated(&self, step: u64, store: &Store, digest: Digest) -> Result<(), Failure> {
        lock(&self.notes).digest = digest.to_string();
        self.write("weights", step, &store.master)?;
        self.write("statistics", step, &store.stats)
    }
}

/// A run held against the kept one.
pub struct Against {
    kept: Arc<Kept>,
    /// A gradient below this share of the average is rounding.
    noise: f64,
    found: Mutex<Found>,
}

#[derive(Default)]
struct Found {
    losses: Apart,
    gradients: Apart,
    weights: Apart,
    digest: String,
    /// Parameters that have had a gradient.
    moved: BTreeSet<String>,
}

impl Against {
    /// `tolerance` is that of ways with another order of additions, whatever this one is.
    pub fn new(kept: Arc<Kept>, tolerance: Tolerance) -> Self {
        Self { kept, noise: 10.0 * tolerance.losses, found: Mutex::default() }
    }

    /// The verdict on the way that was run.
    pub fn judge(&self, way: &Way, tolerance: Tolerance, digest: &str) -> Checked {
        let found = lock(&self.found);
        let within = [
            (&found.losses, tolerance.losses),
            (&found.gradients, tolerance.gradients),
            (&found.weights, tolerance.weights),
        ];
        Checked {
            name: way.name.clone(),
            micro_batch: way.split.micro_batch,
            accumulation_steps: way.split.accumulation_steps,
            recompute: way.recompute,
            exact: way.exact,
            losses: found.losses.clone(),
            gradients: found.gradients.clone(),
            weights: found.weights.clone(),
            samples_digest: found.digest.clone(),
            passed: found.digest == digest && within.iter().all(|(apart, most)| apart.difference <= *most),
        }
    }
}

impl Observer for Against {
    fn gradients(&self, step: u64, loss: f64, store: &Store, factor: f64, _: u64) -> Result<(), Failure> {
        let (wanted, wanted_factor) = {
            let notes = lock(&self.kept.notes);
            let at = |of: &[f64]| of.get(step as usize - 1).copied().unwrap_or(f64::NAN);
            (at(&notes.losses), at(&notes.factors))
        };
        let path = self.kept.file("gradients", step);
        let each = sums(&store.layout.params, &store.grads, &path, factor, wanted_factor)?;
        let gradients = largest(&each, |_| 1.0).at(step);
        let difference = apart(wanted, loss) / wanted.abs().max(f64::MIN_POSITIVE);
        let mut found = lock(&self.found);
        found.losses.widen(Apart { difference: worst(difference), update: step, parameter: None });
        found.gradients.widen(gradients);
        let least = self.noise * size_of_all(&each);
        let moved = each.iter().filter(|(_, sums)| sums.size() > least);
        found.moved.extend(moved.map(|(name, _)| (*name).to_owned()));
        Ok(())
    }

    fn updated(&self, step: u64, store: &Store, digest: Digest) -> Result<(), Failure> {
        let of = |flat, values, what| sums(flat, values, &self.kept.file(what, step), 1.0, 1.0);
        let weights = of(&store.layout.params, &store.master, "weights")?;
        let statistics = of(&store.layout.stats, &store.stats, "statistics")?;
        let mut found = lock(&self.found);
        let weights = largest(&weights, |name| if found.moved.contains(name) { 1.0 } else { ASTRAY });
        found.weights.widen(weights.at(step));
        found.weights.widen(largest(&statistics, |_| 1.0).at(step));
        found.digest = digest.to_string();
        Ok(())
    }
}

impl Apart {
    fn widen(&mut self, other: Apart) {
        if other.difference > self.difference {
            *self = other;
        }
    }

    fn at(self, update: u64) -> Self {
        Self { update, ..self }
    }
}

/// 0 for the same bits, whatever they mean.
fn apart(a: f64, b: f64) -> f64 {
    if a.to_bits() == b.to_bits() { 0.0 } else { (a - b).abs() }
}

/// What is not a number is as far away as can be.
fn worst(difference: f64) -> f64 {
    if difference.is_nan() { f64::INFINITY } else { difference }
}

/// Sums over the values of a parameter.
#[derive(Clone, Copy, Default)]
struct Sums {
    count: f64,
    wanted: f64,
    apart: f64,
}

impl Sums {
    fn add(&mut self, wanted: f64, got: f64) {
        self.count += 1.0;
        self.wanted += wanted * wanted;
        self.apart += apart(wanted, got).powi(2);
    }

    /// Root of the mean square.
    fn size(&self) -> f64 {
        (self.wanted / self.count.max(1.0)).sqrt()
    }
}

/// A flat buffer against the one in the file at `path`, parameter by parameter. Both are multiplied with their
/// factor first.
fn sums<'a>(
    flat: &'a Flat,
    values: &Tensor,
    path: &Path,
    factor: f64,
    kept_factor: f64,
) -> Result<Vec<(&'a str, Sums)>, Failure> {
    let values = host::read::<f32>(values)?;
    let mut file = BufReader::new(regular::open(path).map_err(Failure::io("read", path))?);
    let mut kept = vec![0f32; CHUNK.min(values.len())];
    let mut each = Vec::new();
    for (spec, range) in flat.iter() {
        let mut sums = Sums::default();
        for values in values[range].chunks(CHUNK) {
            let kept = &mut kept[..values.len()];
            file.read_exact(bytemuck::cast_slice_mut::<f32, u8>(kept)).map_err(Failure::io("read", path))?;
            for (kept, value) in kept.iter().zip(values) {
                sums.add(*kept as f64 * kept_factor, *value as f64 * factor);
            }
        }
        each.push((spec.name.as_str(), sums));
    }
    Ok(each)
}

/// Root of the mean square of all values.
fn size_of_all(each: &[(&str, Sums)]) -> f64 {
    let add = |all: Sums, (_, one): &(&str, Sums)| Sums {
        count: all.count + one.count,
        wanted: all.wanted + one.wanted,
        apart: 0.0,
    };
    each.iter().fold(Sums::default(), add).size()
}

/// The parameter whose values are furthest away, by the root of its mean square difference over that of the values
/// themselves, times what a difference counts in it.
fn largest(each: &[(&str, Sums)], counts: impl Fn(&str) -> f64) -> Apart {
    let floor = FLOOR * size_of_all(each);
    let mut found = Apart::default();
    for (name, s) in each.iter().filter(|(_, s)| s.apart != 0.0) {
        // A sum that is not a number makes no floor and no scale.
        let scale = s.size().max(floor).max(f64::MIN_POSITIVE);
        let difference = worst((s.apart / s.count).sqrt() / scale) * counts(name);
        found.widen(Apart { difference, update: 0, parameter: Some((*name).to_owned()) });
    }
    found
}

/// Plain values, whole after every statement.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(values: &[(f64, f64)]) -> Sums {
        let mut sums = Sums::default();
        values.iter().for_each(|(wanted, got)| sums.add(*wanted, *got));
        sums
    }

    #[test]
    fn the_parameter_that_differs_most_is_named() {
        let same = pairs(&[(1.0, 1.0), (f64::NAN, f64::NAN)]);
        let little = pairs(&[(1.0, 1.0 + 1e-6), (-2.0, -2.0)]);
        let much = pairs(&[(0.5, 0.5), (0.5, 0.51)]);
        let found = largest(&[("same", same), ("little", little), ("much", much)], |_| 1.0);
        assert_eq!(found.parameter.as_deref(), Some("much"));
        let found = largest(&[("little", little), ("much", much)], |_| 1.0);
        assert!((found.difference - 0.01 / 2f64.sqrt() / 0.5).abs() < 1e-9, "{found:?}");
        assert_eq!(largest(&[("same", same)], |_| 1.0), Apart::default());
    }

    #[test]
    fn what_is_not_a_number_on_one_side_alone_is_as_far_as_can_be() {
        let found = largest(&[("a", pairs(&[(1.0, f64::NAN)])), ("b", pairs(&[(1.0, 2.0)]))], |_| 1.0);
        assert_eq!((found.difference, found.parameter.as_deref()), (f64::INFINITY, Some("a")));
    }

    #[test]
    fn rounding_around_a_gradient_of_zero_is_held_against_the_others() {
        let noise = pairs(&[(1e-9, -1e-9); 10]);
        let found = largest(&[("noise", noise), ("true", pairs(&[(1.0, 1.0); 10]))], |_| 1.0);
        assert!(found.difference < 1e-6, "{found:?}");
        assert!(largest(&[("noise", noise)], |_| 1.0).difference > 1.0);
    }

    #[test]
    fn a_weight_that_rounding_moved_counts_less_and_is_still_not_equal() {
        let astray = [("astray", pairs(&[(1.0, 1.01); 4])), ("sound", pairs(&[(1.0, 1.0001); 4]))];
        let found = largest(&astray, |name| if name == "astray" { ASTRAY } else { 1.0 });
        assert_eq!(found.parameter.as_deref(), Some("sound"));
        assert!(largest(&astray[..1], |_| ASTRAY).difference > 0.0);
    }
}
