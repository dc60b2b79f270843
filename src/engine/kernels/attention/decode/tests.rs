//! The decode kernel against its reference, and both against the attention that models are trained with.

use candle_core::{DType, Tensor};
use proptest::prelude::*;

use super::*;
use crate::kernels::attention::AttentionKernel;
use crate::kernels::reference::ReferenceScope;
use crate::layers::gradcheck::{is_reference_under_test, random_tensor, relative_error, to_f64_vec};

#[derive(Debug)]
struct DecodeCase {
    dims: AttentionDims,
    rotary: bool,
    /// Positions of each sequence.
    lengths: Vec<usize>,
    /// New positions per pass.
    chunk: usize,
    slots: Vec<usize>,
}

impl DecodeCase {
    fn rotary(&self) -> Option<Rotary> {
        self.rotary.then(|| Rotary::new(self.longest(), self.dims.head_dim, 100.0))
    }

    fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap()
    }

    fn input(&self) -> Tensor {
        random_tensor(&[self.lengths.len(), self.longest(), self.dims.qkv_width()], 1)
    }

    /// All positions at once, as in training, (sequences, positions, width).
    fn whole(&self, qkv: &Tensor) -> Tensor {
        let rotary = self.rotary();
        let kernel = AttentionKernel {
            dims: AttentionDims { length: self.longest(), ..self.dims },
            causal: true,
            rotary: rotary.as_ref(),
            lengths: None,
            sample_info: None,
            dropout: None,
        };
        kernel.forward(qkv).unwrap().0
    }

    /// The same, `chunk` positions at a time, through a cache that holds garbage.
    fn decoded(&self, qkv: &Tensor, capacity: usize) -> Tensor {
        let AttentionDims { kv_heads, head_dim, .. } = self.dims;
        let slots = self.slots.iter().max().unwrap() + 1;
        let cache = || {
            let garbage = Tensor::full(f32::NAN, (slots, kv_heads, capacity, head_dim), qkv.device());
            garbage.unwrap().to_dtype(qkv.dtype()).unwrap()
        };
        let (keys, values, rotary) = (cache(), cache(), self.rotary());
        let padded = qkv.pad_with_zeros(1, 0, self.chunk).unwrap();
        let mut outputs = Vec::new();
        for first in (0..self.longest()).step_by(self.chunk) {
            let starts: Vec<usize> = self.lengths.iter().map(|length| first.min(*length)).collect();
            let counts: Vec<usize> =
                self.lengths.iter().map(|length| length.saturating_sub(first).min(self.chunk)).collect();
            let kernel = DecodeKernel {
                dims: AttentionDims { length: self.chunk, ..self.dims },
                rotary: rotary.as_ref(),
                rows: CacheRows { slots: &self.slots, starts: &starts, counts: &counts },
            };
            let x = padded.narrow(1, first, self.chunk).unwrap().contiguous().unwrap();
            outputs.push(kernel.forward(&x, &keys, &values).unwrap());
        }
        Tensor::cat(&outputs, 1).unwrap()
    }

    /// The outputs of the positions that exist.
    fn existing(&self, y: &Tensor) -> Vec<f64> {
        let row = |(i, length): (usize, &usize)| {
            to_f64_vec(&y.narrow(0, i, 1).unwrap().narrow(1, 0, *length).unwrap().contiguous().unwrap())
        };
        self.lengths.iter().enumerate().flat_map(row).collect()
    }

    fn check(&self, dtype: DType, tolerance: f64) {
        let qkv = self.input().to_dtype(dtype).unwrap();
        // Rounded inputs, computed in f64.
        let exact = self.existing(&self.whole(&qkv.to_dtype(DType::F64).unwrap()));
        let decoded = self.existing(&self.decoded(&qkv, self.longest() + 3));
        let error = relative_error(&decoded, &exact);
        assert!(error < tolerance, "{dtype:?}, {:?}, chunk {}: {error}", self.dims, self.chunk);
    }
}

fn cases() -> impl Strategy<Value = DecodeCase> {
    let shape = (1usize..4, 1usize..4, 1usize..10, any::<bool>());
    let sequences = (proptest::collection::vec(1usize..40, 1..5), 1usize..45);
    (shape, sequences).prop_map(|((kv_heads, group, half, rotary), (lengths, chunk))| {
        let dims = AttentionDims { length: chunk, heads: kv_heads * group, kv_heads, head_dim: 2 * half };
        // Slots in another order than the rows, with one that no row has.
        let slots = (0..lengths.len()).map(|i| lengths.len() - i).collect();
        DecodeCase { dims, rotary, lengths, chunk, slots }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn decoding_in_any_chunks_equals_attention_over_the_whole(case in cases()) {
        let _scope = ReferenceScope::enter(is_reference_under_test());
        case.check(DType::F64, 1e-12);
        case.check(DType::F32, 1e-5);
        case.check(DType::BF16, 2e-2);
        case.check(DType::F16, 3e-3);
    }

    #[test]
    fn the_kernel_computes_what_the_reference_does(case in cases()) {
        let qkv = case.input();
        let kernel = case.decoded(&qkv, case.longest());
        let _scope = ReferenceScope::enter(true);
        case.check(DType::BF16, 2e-2);
        let reference = case.decoded(&qkv, case.longest());
        prop_assert!(relative_error(&case.existing(&kernel), &case.existing(&reference)) < 1e-12);
    }
}

/// Longer than a tile of keys, with more queries than a tile of them, and one by one.
#[test]
fn tiles_are_joined_where_they_meet() {
    for (lengths, chunk) in [(vec![600, 257], 200), (vec![300], 1), (vec![520, 300], 512), (vec![256], 255)] {
        let dims = AttentionDims { length: chunk, heads: 4, kv_heads: 2, head_dim: 6 };
        let slots = (0..lengths.len()).collect();
        DecodeCase { dims, rotary: true, lengths, chunk, slots }.check(DType::F64, 1e-12);
    }
}

#[test]
fn rows_outside_of_the_cache_are_refused() {
    let dims = AttentionDims { length: 2, heads: 1, kv_heads: 1, head_dim: 2 };
    let qkv = random_tensor(&[2, 2, dims.qkv_width()], 1);
    let cache = random_tensor(&[2, 1, 4, 2], 2);
    let error = |slots: [usize; 2], starts: [usize; 2], counts: [usize; 2]| {
        let rows = CacheRows { slots: &slots, starts: &starts, counts: &counts };
        let result = DecodeKernel { dims, rotary: None, rows }.forward(&qkv, &cache, &cache.copy().unwrap());
        result.err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert_eq!(error([0, 1], [0, 2], [2, 2]), "");
    assert!(error([1, 1], [0, 0], [1, 1]).contains("slot 1 of 2 does not exist or occurs twice"));
    assert!(error([0, 2], [0, 0], [1, 1]).contains("slot 2 of 2"));
    assert!(error([0, 1], [0, 3], [1, 2]).contains("2 of 2 new positions after 3, in a cache of 4"));
    assert!(error([0, 1], [0, 0], [1, 3]).contains("3 of 2 new positions"));
}
