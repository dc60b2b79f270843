//! What to do when more memory is measured than was reserved: a pure function.

/// Budgets change in steps of this many bytes.
const GRANULARITY: u64 = 1 << 20;

/// The budget to enforce from now on, if it must be lower than `current`. Unreserved bytes are subtracted from `full`,
/// in whole MiB, so that actual use stays within `full`, but never below the `minimum` bytes that the leanest plan
/// needs.
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
        fn the_budget_only_falls_and_leaves_room_for_the_leanest(
            whole in 1u64..1 << 34,
            fell in 0u64..1 << 30,
            asked in 0u64..1 << 34,
            measured in 0u64..1 << 34,
            least in 0u64..1 << 34,
        ) {
            let now = whole.saturating_sub(fell);
            if let Some(budget) = corrected_budget(whole, now, asked, measured, least) {
                prop_assert!(budget < now && budget >= least.min(whole));
                prop_assert!(measured > asked);
                prop_assert!(budget == least.min(whole) || measured - asked <= whole - budget);
            }
        }
    }
}
