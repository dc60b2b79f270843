//! Mixup and CutMix: blends a sample with another sample of the same dataset; the target holds both classes.
//!
//! The sample key determines the partner like everything else, so a sample does not depend on the batch it is in. The
//! partner is any sample of a random-access dataset. A compressed archive is read sequentially: there it is one of the
//! same shuffle window, which is in memory and is determined by the order of the epoch. The cost is reading two samples
//! for each one.

use std::sync::Arc;

use super::{ScratchPool, bernoulli};
use crate::base::random::{CounterRng, RngKey, stream_id};
use crate::{
    BatchRow, DataError, Dataset, DatasetContext, Features, InputSpec, LengthStats, SampleKey, SliceMut,
    TargetSpec, order::Order, streaming::RecordBlock,
};

/// How samples are blended.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MixOptions {
    /// Both parameters of the beta distribution of the mixup coefficient; 0 disables mixup.
    pub mixup: f64,
    /// The same for CutMix. If both are enabled, each sample gets one of them with equal probability.
    pub cutmix: f64,
    /// Fraction of samples that are blended.
    pub probability: f64,
}

impl MixOptions {
    pub fn is_off(&self) -> bool {
        self.probability == 0.0 || (self.mixup == 0.0 && self.cutmix == 0.0)
    }
}

const MIX: u64 = stream_id("augment.mix");

/// A dataset with blended samples. Its targets are [`TargetSpec::MixedClass`].
pub struct MixedDataset {
    inner: Arc<dyn Dataset>,
    /// The order that `inner` is read in.
    order: Order,
    options: MixOptions,
    features: Features,
    /// (height, width, channels)
    shape: [usize; 3],
    pool: ScratchPool,
}

/// How a sample is blended.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Blend {
    /// Interpolate all values; the weight of the sample itself.
    Mixup(f32),
    /// Replace these rows and columns (start, end) by those of the partner.
    CutMix { rows: [usize; 2], columns: [usize; 2] },
}

impl MixedDataset {
    /// Wraps a dataset of images with one class each, read by `readers` threads in the order of `ctx`.
    pub fn new(
        inner: Arc<dyn Dataset>,
        options: MixOptions,
        readers: usize,
        ctx: &DatasetContext,
    ) -> Result<Self, DataError> {
        let (InputSpec::Floats { shape }, TargetSpec::Class { names }) =
            (&inner.features().input, &inner.features().target)
        else {
            return Err(unsupported_error());
        };
        let shape = <[usize; 3]>::try_from(&shape[..]).map_err(|_| unsupported_error())?;
        let target = TargetSpec::MixedClass { names: names.clone() };
        // Blended values no longer fit the byte lookup table.
        let features = Features { target, pixel_lut: None, ..inner.features().clone() };
        let pool = ScratchPool::new(readers, 4 * features.input_len() as u64);
        let order = Order::for_dataset(inner.as_ref(), 1, ctx.seed, ctx.shuffle, ctx.shuffle_buffer)?;
        Ok(Self { inner, order, options, features, shape, pool })
    }
}

fn unsupported_error() -> DataError {
    let (name, value) = ("augment.mixup", "used".into());
    DataError::InvalidSetting { name, value, expected: "it needs images with one class each" }
}

impl MixOptions {
    /// Draws the partner of sample `index` in `order`, and the blend for samples of (height, width) `size`.
    fn draw(&self, key: SampleKey, index: u64, order: &Order, size: [usize; 2]) -> Option<(u64, Blend)> {
        let mut draws = RngKey::new(key.seed, MIX).fold_in(key.epoch).fold_in(key.sample).rng();
        if !bernoulli(&mut draws, self.probability) {
            return None;
        }
        let other = order.draw_neighbor(key.epoch, index, &mut draws);
        let cut = self.mixup == 0.0 || (self.cutmix > 0.0 && bernoulli(&mut draws, 0.5));
        if !cut {
            return Some((other, Blend::Mixup(beta(&mut draws, self.mixup) as f32)));
        }
        let side = (1.0 - beta(&mut draws, self.cutmix)).sqrt();
        let mut range = |all: usize| {
            let (middle, half) = (draws.below(all as u64) as f64 + 0.5, side * all as f64 / 2.0);
            let end = |x: f64| x.round().clamp(0.0, all as f64) as usize;
            [end(middle - half), end(middle + half)]
        };
        Some((other, Blend::CutMix { rows: range(size[0]), columns: range(size[1]) }))
    }
}

impl Blend {
    /// Blends `other` into `values`, both (height, width, channels); returns the fraction of the sample that remains.
    fn apply(self, [height, width, channels]: [usize; 3], values: &mut [f32], other: &[f32]) -> f32 {
        match self {
            Blend::Mixup(fraction) => {
                values.iter_mut().zip(other).for_each(|(v, o)| *v = fraction * *v + (1.0 - fraction) * o);
                fraction
            }
            Blend::CutMix { rows, columns } => {
                for row in rows[0]..rows[1] {
                    let at = (row * width + columns[0]) * channels..(row * width + columns[1]) * channels;
                    values[at.clone()].copy_from_slice(&other[at]);
                }
                let taken = (rows[1] - rows[0]) * (columns[1] - columns[0]);
                1.0 - taken as f32 / (height * width) as f32
            }
        }
    }
}

impl Dataset for MixedDataset {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn features(&self) -> &Features {
        &self.features
    }

    fn read(&self, index: u64, key: SampleKey, into: &mut BatchRow<'_>) -> Result<(), DataError> {
        let [height, width, _] = self.shape;
        let (values, target) = (into.input.as_f32_mut(), into.target.as_u32_mut());
        let read = |index, key, values: &mut [f32]| {
            let mut class = [0];
            let mut row =
                BatchRow { input: SliceMut::F32(values), target: SliceMut::U32(&mut class), length: 0 };
            self.inner.read(index, key, &mut row).map(|()| class[0])
        };
        let class = read(index, key, values)?;
        let unmixed = [class, class, 1f32.to_bits()];
        target.copy_from_slice(&unmixed);
        let Some((other, blend)) = self.options.draw(key, index, &self.order, [height, width]) else {
            return Ok(());
        };
        let mut scratch = self.pool.acquire();
        scratch.floats.resize(values.len(), 0.0);
        match read(other, SampleKey { sample: other, ..key }, &mut scratch.floats) {
            Ok(second) => {
                let fraction = blend.apply(self.shape, values, &scratch.floats);
                target.copy_from_slice(&[class, second, fraction.to_bits()]);
                Ok(())
            }
            // A bad partner is reported when it is read as a sample itself; this sample stays unblended.
            Err(error) if error.is_bad_record() => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn resident_bytes(&self) -> u64 {
        self.inner.resident_bytes() + self.pool.bytes() + self.order.resident_bytes()
    }

    fn blocks(&self) -> Option<Vec<RecordBlock>> {
        self.inner.blocks()
    }

    fn prefetch(&self, blocks: Vec<u32>) {
        self.inner.prefetch(blocks);
    }

    fn class_counts(&self) -> Option<Vec<u64>> {
        self.inner.class_counts()
    }

    fn length_stats(&self) -> Option<LengthStats> {
        self.inner.length_stats()
    }

    fn describe(&self) -> Vec<(String, String)> {
        self.inner.describe()
    }
}

/// Draws from Beta(a, a); `a` must be positive.
fn beta(draws: &mut CounterRng, a: f64) -> f64 {
    let (x, y) = (gamma(draws, a), gamma(draws, a));
    // For a tiny `a` both draws can underflow to 0: leave the sample unblended.
    if x + y > 0.0 { x / (x + y) } else { 1.0 }
}

/// Draws from Gamma(a, 1) by rejection from a transformed normal distribution.
fn gamma(draws: &mut CounterRng, a: f64) -> f64 {
    let uniform = |draws: &mut CounterRng| ((draws.bits() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    if a < 1.0 {
        return gamma(draws, a + 1.0) * uniform(draws).powf(1.0 / a);
    }
    let d = a - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let (u, w) = (uniform(draws), uniform(draws));
        let normal = (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * w).cos();
        let v = (1.0 + c * normal).powi(3);
        // At most one draw in twenty is rejected, so the loop terminates.
        if v > 0.0 && uniform(draws).ln() < 0.5 * normal * normal + d * (1.0 - v + v.ln()) {
            return d * v;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::shapes::ShapesDataset;
    use crate::split::DatasetSplit;

    fn mixed(mixing: MixOptions) -> MixedDataset {
        MixedDataset::new(
            Arc::new(ShapesDataset::new(16, 100, 5, DatasetSplit::Train).unwrap()),
            mixing,
            1,
            &DatasetContext::default(),
        )
        .unwrap()
    }

    fn read(set: &dyn Dataset, index: u64, epoch: u64) -> (Vec<f32>, Vec<u32>) {
        let mut values = vec![f32::NAN; set.features().input_len()];
        let mut target = vec![9; set.features().target_len()];
        let mut row =
            BatchRow { input: SliceMut::F32(&mut values), target: SliceMut::U32(&mut target), length: 0 };
        set.read(index, SampleKey { seed: 5, epoch, sample: index }, &mut row).unwrap();
        (values, target)
    }

    #[test]
    fn a_blend_is_of_two_samples_and_says_how_much_of_each() {
        let plain = mixed(MixOptions::default());
        let mixing = MixOptions { mixup: 0.4, cutmix: 1.0, probability: 0.8 };
        let set = mixed(mixing);
        assert_eq!(set.features().target_len(), 3);
        let (mut whole, mut cut, mut none) = (0, 0, 0);
        for index in 0..100 {
            let (values, target) = read(&set, index, 2);
            assert_eq!((values.clone(), target.clone()), read(&set, index, 2));
            let key = SampleKey { seed: 5, epoch: 2, sample: index };
            let (own, class) = read(&plain, index, 2);
            let fraction = f32::from_bits(target[2]);
            assert_eq!(target[0], class[0]);
            let Some((other, blend)) = mixing.draw(key, index, &set.order, [16, 16]) else {
                assert_eq!((values, target), (own, vec![class[0], class[0], 1f32.to_bits()]));
                none += 1;
                continue;
            };
            let (second, second_class) = read(&plain, other, 2);
            assert_eq!(target[1], second_class[0]);
            match blend {
                Blend::Mixup(s) => {
                    assert_eq!(s, fraction);
                    let formula = own.iter().zip(&second).map(|(a, b)| s * a + (1.0 - s) * b);
                    assert!(values.iter().zip(formula).all(|(v, f)| (v - f).abs() < 1e-6));
                    whole += 1;
                }
                Blend::CutMix { rows, columns } => {
                    let mut left = 0;
                    for (i, v) in values.iter().enumerate() {
                        let inside = (rows[0]..rows[1]).contains(&(i / 16))
                            && (columns[0]..columns[1]).contains(&(i % 16));
                        assert_eq!(*v, if inside { second[i] } else { own[i] });
                        left += !inside as usize;
                    }
                    assert!((fraction - left as f32 / 256.0).abs() < 1e-6);
                    cut += 1;
                }
            }
        }
        assert!(whole > 20 && cut > 20 && none > 5, "{whole} {cut} {none}");
        assert_ne!(read(&set, 0, 2), read(&set, 0, 3));
    }

    #[test]
    fn beta_draws_have_the_moments_of_the_distribution() {
        for a in [0.05, 0.2, 1.0, 4.0] {
            let n = 20_000;
            let samples: Vec<f64> = (0..n).map(|i| beta(&mut RngKey::new(i, 3).rng(), a)).collect();
            assert!(samples.iter().all(|s| (0.0..=1.0).contains(s)));
            let mean = samples.iter().sum::<f64>() / n as f64;
            let variance = samples.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / n as f64;
            let expected = 1.0 / (4.0 * (2.0 * a + 1.0));
            assert!(
                (mean - 0.5).abs() < 0.012 && (variance / expected - 1.0).abs() < 0.04,
                "{a}: {mean} {variance}"
            );
        }
    }

    proptest! {
        #[test]
        fn the_cut_box_lies_in_the_image(size in [1usize..40, 1usize..40], seed: u64, a in 0.01..3.0f64) {
            let mixing = MixOptions { mixup: 0.0, cutmix: a, probability: 1.0 };
            let order = Order::new(10, 1, seed, true).unwrap();
            let drawn = mixing.draw(SampleKey { seed, epoch: 0, sample: 1 }, 1, &order, size);
            let Some((other, Blend::CutMix { rows, columns })) = drawn else { panic!("{drawn:?}") };
            prop_assert!(other < 10 && rows[0] <= rows[1] && rows[1] <= size[0]);
            prop_assert!(columns[0] <= columns[1] && columns[1] <= size[1]);
        }
    }
}
