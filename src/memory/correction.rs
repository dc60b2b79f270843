//! What to do when more memory is measured than was asked for: a pure function.

/// Differences below this are not worth a word.
const GRANULARITY: u64 = 1 << 20;

/// The budget to enforce from here on, where it should be another than `current`: what was found above the asked
/// is taken off the `full`, in whole MiB, so that true use stays within it; but never so much that not even
/// the leanest plan, of `minimum` bytes, fits.
pub fn corrected_budget(full: u64, current: u64, reserved: u64, measured: u64, minimum: u64) -> Option<u64> {
    let unreserved = measured.saturating_sub(reserved).next_multiple_of(GRANULARITY);
    let budget = full.saturating_sub(unreserved).max(minimum.min(full));
    (budget < current).then_some(budget)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn unreserved_bytes_reduce_the_budget_once() {
        assert_eq!(corrected_budget(100 * MIB, 100 * MIB, 50 * MIB, 50 * MIB, MIB), None);
        assert_eq!(corrected_budget(100 * MIB, 100 * MIB, 50 * MIB, 40 * MIB, MIB), None);
        assert_eq!(corrected_budget(100 * MIB, 100 * MIB, 50 * MIB, 58 * MIB, MIB), Some(92 * MIB));
        assert_eq!(corrected_budget(100 * MIB, 92 * MIB, 50 * MIB, 58 * MIB, MIB), None);
        assert_eq!(corrected_budget(100 * MIB, 92 * MIB, 50 * MIB, 59 * MIB, 95 * MIB), None);
    }

    proptest! {
        #[test]
        fn the_budget_only_falls_and_leaves_room_for_the_leanest(whole in 1u64..1 << 34, fell in 0u64..1 << 30, asked in 0u64..1 << 34, measured in 0u64..1 << 34, least in 0u64..1 << 34) {
            let now = whole.saturating_sub(fell);
            if let Some(budget) = corrected_budget(whole, now, asked, measured, least) {
                prop_assert!(budget < now && budget >= least.min(whole));
                prop_assert!(measured > asked);
                prop_assert!(budget == least.min(whole) || measured - asked <= whole - budget);
            }
        }
    }
}
