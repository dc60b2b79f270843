//! Offline placement: assigns each tensor of a traced pass an offset in one arena, so that running the pass needs no
//! search.
//!
//! A pass allocates and frees the same sizes in the same order every time, so its trace shows which tensors are live
//! together, and only those must not overlap. Finding the smallest arena is NP-hard (dynamic storage allocation); the
//! two greedy orders tried here end within a few per cent of the lower bound, the peak of live bytes.

/// The allocations of a pass, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocTrace {
    pub tensors: Vec<TensorLifetime>,
    /// Allocations and frees so far: the clock of the lifetimes.
    clock: u64,
}

/// A tensor's size and lifetime within the pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorLifetime {
    pub bytes: u64,
    begin: u64,
    /// `None` while it is alive; a tensor that outlives the pass gets no offset in the arena.
    end: Option<u64>,
}

impl AllocTrace {
    /// Records an allocation and returns the index that [`free`](Self::free) takes.
    pub fn allocate(&mut self, bytes: u64) -> usize {
        self.clock += 1;
        self.tensors.push(TensorLifetime { bytes, begin: self.clock, end: None });
        self.tensors.len() - 1
    }

    pub fn free(&mut self, tensor: usize) {
        self.clock += 1;
        self.tensors[tensor].end = Some(self.clock);
    }
}

/// A trace with an offset for every tensor that does not outlive its pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaPlacement {
    /// (bytes, offset) of each allocation, in trace order.
    pub tensors: Vec<(u64, Option<u64>)>,
    /// Bytes of the arena.
    pub arena_bytes: u64,
    /// Peak bytes of placed tensors alive at once: no arena can be smaller.
    pub lower_bound: u64,
}

impl ArenaPlacement {
    pub fn new(trace: &AllocTrace) -> Self {
        let ranges: Vec<(usize, LiveRange)> =
            trace.tensors.iter().enumerate().filter_map(LiveRange::from_lifetime).collect();
        let by_size = |(at, life): &(usize, LiveRange)| (std::cmp::Reverse(life.bytes), *at);
        let by_span = |(at, life): &(usize, LiveRange)| (std::cmp::Reverse(life.end - life.begin), *at);
        let placed = [place_first_fit(&ranges, by_size), place_first_fit(&ranges, by_span)];
        let (arena_bytes, offsets) = placed.into_iter().min_by_key(|(arena, _)| *arena).unwrap_or_default();
        let mut tensors: Vec<_> = trace.tensors.iter().map(|tensor| (tensor.bytes, None)).collect();
        offsets.into_iter().for_each(|(at, offset)| tensors[at].1 = Some(offset));
        Self { tensors, arena_bytes, lower_bound: peak_live_bytes(&ranges) }
    }
}

impl ArenaPlacement {
    /// Number of tensors that outlive the pass.
    pub fn outliving_count(&self) -> usize {
        self.tensors.iter().filter(|(_, offset)| offset.is_none()).count()
    }
}

#[derive(Clone, Copy)]
struct LiveRange {
    bytes: u64,
    begin: u64,
    end: u64,
}

impl LiveRange {
    fn from_lifetime((at, tensor): (usize, &TensorLifetime)) -> Option<(usize, Self)> {
        let TensorLifetime { bytes, begin, end } = *tensor;
        Some((at, Self { bytes, begin, end: end? }))
    }

    fn overlaps(&self, other: &LiveRange) -> bool {
        self.begin < other.end && other.begin < self.end
    }
}

/// Places tensors one by one, in this order, at the lowest offset that is free for their whole lifetime.
fn place_first_fit<K: Ord>(
    ranges: &[(usize, LiveRange)],
    order: impl Fn(&(usize, LiveRange)) -> K,
) -> (u64, Vec<(usize, u64)>) {
    let mut ordered: Vec<&(usize, LiveRange)> = ranges.iter().collect();
    ordered.sort_by_key(|life| order(life));
    // Sorted by offset, so that gaps are scanned from the bottom.
    let mut placed: Vec<(u64, LiveRange, usize)> = Vec::with_capacity(ordered.len());
    let mut arena = 0;
    for (at, life) in ordered {
        let mut offset = 0;
        for (other, placed, _) in &placed {
            if placed.overlaps(life) {
                if *other >= offset + life.bytes {
                    break;
                }
                offset = offset.max(other + placed.bytes);
            }
        }
        let index = placed.partition_point(|(other, ..)| *other <= offset);
        placed.insert(index, (offset, *life, *at));
        arena = arena.max(offset + life.bytes);
    }
    (arena, placed.into_iter().map(|(offset, _, at)| (at, offset)).collect())
}

fn peak_live_bytes(ranges: &[(usize, LiveRange)]) -> u64 {
    let moments = ranges
        .iter()
        .flat_map(|(_, life)| [(life.begin, life.bytes as i64), (life.end, -(life.bytes as i64))]);
    let mut moments: Vec<(u64, i64)> = moments.collect();
    moments.sort();
    let (mut alive, mut most) = (0, 0);
    for (_, change) in moments {
        alive += change;
        most = most.max(alive);
    }
    most as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Trace of a pass: forward saves some tensors, backward frees them in reverse.
    fn pass(sizes: &[(u64, u64)]) -> AllocTrace {
        let mut trace = AllocTrace::default();
        let mut kept = Vec::new();
        for (saved, workspace) in sizes {
            let saved = trace.allocate(*saved);
            let workspace = trace.allocate(*workspace);
            trace.free(workspace);
            kept.push(saved);
        }
        let mut gradient = trace.allocate(512);
        for (saved, (_, workspace)) in kept.into_iter().zip(sizes).rev() {
            let next = trace.allocate(trace.tensors[saved].bytes);
            let workspace = trace.allocate(*workspace);
            for tensor in [workspace, gradient, saved] {
                trace.free(tensor);
            }
            gradient = next;
        }
        trace.free(gradient);
        trace
    }

    fn overlap(placement: &ArenaPlacement, trace: &AllocTrace) -> bool {
        let each: Vec<_> = placement.tensors.iter().zip(&trace.tensors).collect();
        each.iter().enumerate().any(|(i, ((a, at), x))| {
            each[i + 1..].iter().any(|((b, bt), y)| match (at, bt, x.end, y.end) {
                (Some(at), Some(bt), Some(_), Some(_)) => {
                    let alive = x.begin < y.end.unwrap() && y.begin < x.end.unwrap();
                    alive && *at < bt + b && *bt < at + a
                }
                _ => false,
            })
        })
    }

    proptest! {
        #[test]
        fn tensors_that_live_together_do_not_overlap(
            sizes in prop::collection::vec((1u64..5000, 1u64..9000), 1..40),
            more in prop::collection::vec((1u64..5000, any::<bool>()), 0..40),
        ) {
            let mut trace = pass(&sizes);
            let extra: Vec<_> = more.iter().map(|(bytes, freed)| (trace.allocate(*bytes), *freed)).collect();
            extra.into_iter().filter(|(_, freed)| *freed).for_each(|(tensor, _)| trace.free(tensor));
            let placement = ArenaPlacement::new(&trace);
            prop_assert!(!overlap(&placement, &trace));
            prop_assert!(placement.lower_bound <= placement.arena_bytes);
            prop_assert_eq!(placement.tensors.len(), trace.tensors.len());
            for ((_, offset), tensor) in placement.tensors.iter().zip(&trace.tensors) {
                prop_assert_eq!(offset.is_some(), tensor.end.is_some(), "what outlives the pass has no place");
            }
        }

        /// With sizes as in real networks, where a few dominate, the arena is close to the lower bound.
        #[test]
        fn little_is_wasted(blocks in 1usize..30, width in 1u64..40, wide in 1u64..200) {
            let sizes: Vec<_> = (0..blocks * 4)
                .map(|i| (width * [512, 2048, 512, 1536][i % 4], if i % 4 == 2 { wide * 4096 } else { 512 }))
                .collect();
            let placement = ArenaPlacement::new(&pass(&sizes));
            prop_assert!(
                placement.arena_bytes <= placement.lower_bound + placement.lower_bound / 8,
                "{} for {}",
                placement.arena_bytes,
                placement.lower_bound
            );
        }
    }

    #[test]
    fn nothing_takes_nothing() {
        let placement = ArenaPlacement::new(&AllocTrace::default());
        assert_eq!((placement.arena_bytes, placement.lower_bound), (0, 0));
    }
}
