//! The program's only random number generator: counter-based, each number a function of where it is used.
//!
//! A draw is a hash of (seed, stream, coordinates..., counter), so a mask or an augmentation is the same on any thread,
//! in any order and after any retry. The key is 128 bits: `a` offsets a Weyl sequence over the counter, and `b` enters
//! between the two rounds of mixing, so that keys whose `a` lie on one sequence still give unrelated numbers. A draw
//! costs four multiplications and no memory. Not for cryptography.
//!
//! ```
//! use trainer_config::base::random::{RngKey, stream_id};
//! const DROPOUT: u64 = stream_id("dropout");
//! let (seed, epoch, sample, layer) = (42, 3, 117, 2);
//! let mask = RngKey::new(seed, DROPOUT).fold_in(epoch).fold_in(sample).fold_in(layer);
//! let keep = mask.f32(0) < 0.9;
//! # let _ = keep;
//! ```

/// 2^64 over the golden ratio: successive multiples spread evenly over the 64-bit circle.
const WEYL: u64 = 0x9e37_79b9_7f4a_7c15;

/// A bijection of 64 bits in which every input bit flips about half of the output bits.
#[inline]
pub const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

/// The id of a named stream, so that different uses of one seed never share draws. Meant for constants.
pub const fn stream_id(name: &str) -> u64 {
    let bytes = name.as_bytes();
    let (mut state, mut i) = (bytes.len() as u64, 0);
    while i < bytes.len() {
        state = mix(state.wrapping_add(WEYL) ^ bytes[i] as u64);
        i += 1;
    }
    state
}

/// A key for any number of draws, each identified by its counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)] // kernels read keys by this layout
pub struct RngKey {
    a: u64,
    b: u64,
}

impl RngKey {
    /// The key of one use of the job's seed; `stream` comes from [`stream_id`].
    #[inline]
    pub const fn new(seed: u64, stream: u64) -> Self {
        RngKey { a: seed, b: WEYL }.fold_in(stream)
    }

    /// Derives the key of a coordinate: an epoch, a sample, a layer. Order matters: `fold_in(1).fold_in(2)` is not
    /// `fold_in(2).fold_in(1)`.
    #[inline]
    pub const fn fold_in(self, coordinate: u64) -> Self {
        // Adds an odd multiple of `coordinate` to each half, then crosses the halves.
        let a = mix(self.a.wrapping_add(coordinate.wrapping_mul(WEYL)) ^ self.b.rotate_left(32));
        let b = mix(self.b.wrapping_add(coordinate) ^ a);
        RngKey { a, b }
    }

    /// 64 random bits.
    #[inline]
    pub const fn bits(self, counter: u64) -> u64 {
        mix(mix(self.a.wrapping_add(counter.wrapping_mul(WEYL))).wrapping_add(self.b))
    }

    /// Uniform in [0, 1), a multiple of 2^-24.
    #[inline]
    pub const fn f32(self, counter: u64) -> f32 {
        (self.bits(counter) >> 40) as f32 * (1.0 / (1u64 << 24) as f32)
    }

    /// Uniform in [0, 1), a multiple of 2^-53.
    #[inline]
    pub const fn f64(self, counter: u64) -> f64 {
        (self.bits(counter) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Uniform in 0..n for n > 0, and 0 for n = 0; the bias is below n / 2^64.
    #[inline]
    pub const fn below(self, counter: u64, n: u64) -> u64 {
        ((self.bits(counter) as u128 * n as u128) >> 64) as u64
    }

    /// Normal with mean 0 and variance 1, within 6.8 standard deviations.
    #[inline]
    pub fn normal(self, counter: u64) -> f64 {
        let bits = self.bits(counter);
        let unit = 1.0 / (1u64 << 32) as f64;
        // Half a unit away from 0 keeps the logarithm finite.
        let radius = (-2.0 * (((bits >> 32) as f64 + 0.5) * unit).ln()).sqrt();
        radius * (std::f64::consts::TAU * (bits as u32) as f64 * unit).cos()
    }

    /// The draws in sequence, for code that draws many different values.
    #[inline]
    pub const fn rng(self) -> CounterRng {
        CounterRng { key: self, counter: 0 }
    }
}

/// An [`RngKey`] and the counter of its next draw.
#[derive(Clone, Debug)]
pub struct CounterRng {
    key: RngKey,
    counter: u64,
}

impl CounterRng {
    #[inline]
    fn next_counter(&mut self) -> u64 {
        self.counter += 1;
        self.counter - 1
    }

    #[inline]
    pub fn bits(&mut self) -> u64 {
        let counter = self.next_counter();
        self.key.bits(counter)
    }

    /// Uniform in [low, high).
    #[inline]
    pub fn uniform(&mut self, low: f32, high: f32) -> f32 {
        let counter = self.next_counter();
        low + (high - low) * self.key.f32(counter)
    }

    /// Uniform in 0..n.
    #[inline]
    pub fn below(&mut self, n: u64) -> u64 {
        let counter = self.next_counter();
        self.key.below(counter, n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: RngKey = RngKey::new(1, stream_id("test"));
    const N: u64 = 200_000;

    /// Pearson's chi-square statistic of counts that should be equal.
    fn chi_square(counts: &[u64]) -> f64 {
        let mean = counts.iter().sum::<u64>() as f64 / counts.len() as f64;
        counts.iter().map(|&c| (c as f64 - mean).powi(2) / mean).sum()
    }

    /// For fair draws over `bins` counts the statistic has mean `bins - 1` and variance twice that.
    fn assert_uniform(counts: &[u64], what: &str) {
        let dof = counts.len() as f64 - 1.0;
        let x = (chi_square(counts) - dof) / (2.0 * dof).sqrt();
        assert!(x.abs() < 4.0, "{what}: {x} standard deviations off");
    }

    type NamedDraw = (&'static str, fn(u64) -> u64);

    /// The access patterns of a program: by counter, and by each coordinate of the key.
    fn draw_functions() -> [NamedDraw; 5] {
        [
            ("counter", |i| KEY.bits(i)),
            ("last coordinate", |i| KEY.fold_in(i).bits(0)),
            ("first coordinate", |i| KEY.fold_in(i).fold_in(0).bits(0)),
            ("seed", |i| RngKey::new(i, 0).bits(0)),
            ("stream", |i| RngKey::new(0, i).bits(0)),
        ]
    }

    #[test]
    fn every_byte_of_every_draw_is_uniform() {
        for (name, draw) in draw_functions() {
            for shift in [0, 8, 24, 40, 56] {
                let mut counts = [0; 256];
                (0..N).for_each(|i| counts[(draw(i) >> shift) as usize & 255] += 1);
                assert_uniform(&counts, &format!("{name}, byte at bit {shift}"));
            }
        }
    }

    #[test]
    fn neighbours_are_independent() {
        for (name, draw) in draw_functions() {
            let mut counts = [0; 256];
            (0..N).for_each(|i| counts[((draw(i) >> 60) << 4 | draw(i + 1) >> 60) as usize] += 1);
            assert_uniform(&counts, name);
        }
    }

    #[test]
    fn each_input_bit_flips_half_of_the_output() {
        type Hash = fn([u64; 5]) -> u64;
        let hash: Hash = |[seed, stream, epoch, sample, n]| {
            RngKey::new(seed, stream).fold_in(epoch).fold_in(sample).bits(n)
        };
        for field in 0..5 {
            for bit in 0..64 {
                let mut flips = [0u32; 64];
                for i in 0..256u64 {
                    let mut input = [i, i * 3, i * 5, i * 7, i];
                    let before = hash(input);
                    input[field] ^= 1 << bit;
                    let changed = before ^ hash(input);
                    (0..64).for_each(|b| flips[b] += (changed >> b & 1) as u32);
                }
                // 256 coin flips: mean 128, standard deviation 8; 20,480 such counts in all.
                assert!(flips.iter().all(|&f| (80..=176).contains(&f)), "field {field} bit {bit}: {flips:?}");
            }
        }
    }

    #[test]
    fn moments_are_those_of_the_distributions() {
        let moments = |draw: &dyn Fn(u64) -> f64| {
            let mean = (0..N).map(draw).sum::<f64>() / N as f64;
            let central = |p| (0..N).map(|i| (draw(i) - mean).powi(p)).sum::<f64>() / N as f64;
            (mean, central(2), central(4))
        };
        for (mean, variance, fourth) in
            [moments(&|i| KEY.f64(i)), moments(&|i| KEY.f32(i) as f64), moments(&|i| KEY.draws_f32(i))]
        {
            assert!((mean - 0.5).abs() < 0.003 && (variance - 1.0 / 12.0).abs() < 0.001, "{mean} {variance}");
            assert!((fourth - 1.0 / 80.0).abs() < 0.0005, "{fourth}");
        }
        let (mean, variance, fourth) = moments(&|i| KEY.normal(i));
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.015 && (fourth - 3.0).abs() < 0.1);
        assert!((0..N).all(|i| KEY.normal(i).abs() < 6.8));
    }

    impl RngKey {
        fn draws_f32(self, i: u64) -> f64 {
            let mut draws = self.fold_in(i).rng();
            draws.uniform(-1.0, 1.0);
            (draws.uniform(-1.0, 1.0) as f64 + 1.0) / 2.0
        }
    }

    #[test]
    fn below_is_uniform_and_in_range() {
        let mut counts = [0; 10];
        (0..N).for_each(|i| counts[KEY.below(i, 10) as usize] += 1);
        assert_uniform(&counts, "below 10");
        assert_eq!((KEY.below(3, 1), KEY.below(3, 0)), (0, 0));
    }

    #[test]
    fn the_numbers_never_change() {
        // Changing these values changes every run: old checkpoints would no longer resume exactly.
        assert_eq!([KEY.bits(0), KEY.fold_in(1).bits(2)], [2301246976881751613, 9837983499698444775]);
    }

    #[test]
    fn order_of_coordinates_matters() {
        assert_ne!(KEY.fold_in(1).fold_in(2), KEY.fold_in(2).fold_in(1));
        assert_ne!(KEY.fold_in(0), KEY);
        assert_ne!(stream_id("ab"), stream_id("ba"));
    }
}
