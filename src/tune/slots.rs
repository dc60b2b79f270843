//! How many trials run side by side, and which starts next, within memory and cores.

use serde::{Deserialize, Serialize};

/// Bytes that a trial may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryNeed {
    pub ram: u64,
    pub vram: u64,
}

/// What the trials share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    pub ram: u64,
    pub vram: u64,
    /// Trials at the same time.
    pub slots: usize,
}

impl MemoryNeed {
    /// The budget of a trial whose plan has this peak: its process, or what the driver takes, may be a little larger
    /// than planned.
    pub fn of_peak(peak: Self) -> Self {
        const PROCESS_VARIATION: u64 = 8 << 20;
        const DRIVER_VARIATION: u64 = 64 << 20;
        let vram = if peak.vram > 0 { peak.vram + peak.vram / 16 + DRIVER_VARIATION } else { 0 };
        Self { ram: peak.ram + peak.ram / 16 + PROCESS_VARIATION, vram }
    }
}

impl Capacity {
    fn left(self, running: &[MemoryNeed]) -> Option<MemoryNeed> {
        let free_slot = running.len() < self.slots;
        let ram = self.ram.checked_sub(running.iter().map(|need| need.ram).sum())?;
        let vram = self.vram.checked_sub(running.iter().map(|need| need.vram).sum())?;
        free_slot.then_some(MemoryNeed { ram, vram })
    }

    /// Whether this trial could start with nothing else running.
    pub fn holds(self, need: MemoryNeed) -> bool {
        need.ram <= self.ram && need.vram <= self.vram
    }

    /// The position in `waiting` of the trial to start next: the first that fits beside those that run.
    pub fn next(self, waiting: &[MemoryNeed], running: &[MemoryNeed]) -> Option<usize> {
        let left = self.left(running)?;
        waiting.iter().position(|need| need.ram <= left.ram && need.vram <= left.vram)
    }
}

/// Trials at the same time: as many of the smallest as memory holds, one per core at most.
pub fn side_by_side(needs: &[MemoryNeed], memory: MemoryNeed, cores: usize) -> usize {
    let mut smallest = needs.to_vec();
    smallest.sort_by_key(|need| (need.vram, need.ram));
    let capacity = Capacity { ram: memory.ram, vram: memory.vram, slots: usize::MAX };
    let count = (1..=smallest.len()).take_while(|n| capacity.left(&smallest[..*n]).is_some()).count();
    count.min(cores).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ram(bytes: u64) -> MemoryNeed {
        MemoryNeed { ram: bytes, vram: 0 }
    }

    #[test]
    fn as_many_run_as_memory_and_cores_hold() {
        let needs = [ram(50), ram(20), ram(30), ram(90)];
        assert_eq!(side_by_side(&needs, ram(100), 8), 3);
        assert_eq!(side_by_side(&needs, ram(100), 2), 2);
        assert_eq!(side_by_side(&needs, ram(10), 8), 1);
        let gpu = [MemoryNeed { ram: 1, vram: 60 }, MemoryNeed { ram: 1, vram: 50 }];
        assert_eq!(side_by_side(&gpu, MemoryNeed { ram: 100, vram: 100 }, 8), 1);
    }

    #[test]
    fn the_first_that_fits_starts_next() {
        let capacity = Capacity { ram: 100, vram: 0, slots: 2 };
        assert_eq!(capacity.next(&[ram(90), ram(40)], &[]), Some(0));
        assert_eq!(capacity.next(&[ram(90), ram(40)], &[ram(50)]), Some(1));
        assert_eq!(capacity.next(&[ram(1)], &[ram(1), ram(1)]), None, "no slot");
        assert_eq!(capacity.next(&[ram(60)], &[ram(50)]), None);
        assert!(capacity.holds(ram(100)) && !capacity.holds(ram(101)));
    }

    proptest! {
        /// Started one after another, the trials never exceed memory and slots, and each gets its turn.
        #[test]
        fn a_schedule_keeps_its_limits(needs in prop::collection::vec(1u64..100, 1..30), slots in 1usize..5) {
            let capacity = Capacity { ram: 100, vram: 0, slots };
            let mut waiting: Vec<MemoryNeed> = needs.into_iter().map(ram).collect();
            let mut running: Vec<MemoryNeed> = Vec::new();
            while !waiting.is_empty() || !running.is_empty() {
                match capacity.next(&waiting, &running) {
                    Some(at) => running.push(waiting.remove(at)),
                    None => {
                        prop_assert!(!running.is_empty(), "nothing runs and nothing starts");
                        running.remove(0);
                    }
                }
                prop_assert!(running.len() <= slots && running.iter().map(|need| need.ram).sum::<u64>() <= 100);
            }
        }
    }
}
