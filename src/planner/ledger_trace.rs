//! Reads from the log of a planning ledger what a dry run held over time.
//!
//! Takes the log and the mapping of names to blocks; gives the peak of each phase, what was live at it, and what every
//! block saves.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::base::{Phase, Role};
use crate::graph::network::{Network, Node};
use crate::memory::ledger::LedgerEntry;

/// Maps each layer's name to its block; the loss counts as a block of its own, the last.
pub struct BlockIndex {
    by_layer: BTreeMap<String, usize>,
    count: usize,
}

impl BlockIndex {
    pub fn new(network: &Network) -> Self {
        fn names(nodes: &[Node], block: usize, by_layer: &mut BTreeMap<String, usize>) {
            for node in nodes {
                match node {
                    Node::Layer(layer) => drop(by_layer.insert(layer.name().to_owned(), block)),
                    Node::Fused(fused) => {
                        by_layer.extend(fused.layers.iter().map(|layer| (layer.name().to_owned(), block)));
                    }
                    Node::Residual(residual) => {
                        by_layer.insert(residual.name.clone(), block);
                        names(&residual.branch, block, by_layer);
                        names(&residual.shortcut, block, by_layer);
                    }
                }
            }
        }
        let (mut by_layer, count) = (BTreeMap::new(), network.blocks.len() + 1);
        network.blocks.iter().enumerate().for_each(|(i, block)| names(&block.nodes, i, &mut by_layer));
        by_layer.insert(network.loss.name().to_owned(), count - 1);
        Self { by_layer, count }
    }

    /// Whether a layer has this name.
    pub fn contains(&self, name: &str) -> bool {
        self.by_layer.contains_key(name)
    }
}

/// Peak bytes per phase, in order.
pub fn phase_peaks(log: &[LedgerEntry]) -> Vec<(Phase, u64)> {
    let (mut live, mut peaks) = (0u64, Vec::<(Phase, u64)>::new());
    for entry in log {
        live = live.wrapping_add_signed(entry.change);
        match peaks.iter_mut().find(|(phase, _)| *phase == entry.phase) {
            Some((_, high)) => *high = live.max(*high),
            None => peaks.push((entry.phase, live)),
        }
    }
    peaks
}

/// What is live at the peak of `phase`, by role and name.
pub fn live_at_peak(log: &[LedgerEntry], phase: Phase) -> BTreeMap<(Role, Arc<str>), u64> {
    let (mut live, mut highest, mut end) = (0u64, 0, 0);
    for (i, entry) in log.iter().enumerate() {
        live = live.wrapping_add_signed(entry.change);
        if entry.phase == phase && live > highest {
            (highest, end) = (live, i + 1);
        }
    }
    let mut held: BTreeMap<(Role, Arc<str>), u64> = BTreeMap::new();
    for entry in &log[..end] {
        let bytes = held.entry((entry.role, entry.name.clone())).or_default();
        *bytes = bytes.wrapping_add_signed(entry.change);
    }
    held.retain(|_, bytes| *bytes > 0);
    held
}

/// Bytes each block still holds at the end of the forward pass.
pub fn saved_bytes_per_block(log: &[LedgerEntry], index: &BlockIndex) -> Vec<u64> {
    let mut saved = vec![0u64; index.count];
    for entry in log.iter().take_while(|entry| entry.phase == Phase::Forward) {
        if let (Role::Activations, Some(block)) = (entry.role, index.by_layer.get(&*entry.name)) {
            saved[*block] = saved[*block].wrapping_add_signed(entry.change);
        }
    }
    saved.truncate(index.count - 1);
    saved
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks() -> BlockIndex {
        let by_layer = ["a", "b", "c", "loss"].into_iter().map(str::to_owned).zip(0..).collect();
        BlockIndex { by_layer, count: 4 }
    }

    fn log(changes: &[(&str, i64, Phase)]) -> Vec<LedgerEntry> {
        let entry = |(name, change, phase): &(&str, i64, Phase)| {
            let role = if name.starts_with("work") { Role::Workspace } else { Role::Activations };
            LedgerEntry { role, name: (*name).into(), change: *change, phase: *phase }
        };
        changes.iter().map(entry).collect()
    }

    /// Three blocks of 10, 20 and 30 bytes, with a workspace of 5 in the last, then backward.
    fn forward_backward_log() -> Vec<LedgerEntry> {
        log(&[
            ("a", 10, Phase::Forward),
            ("b", 20, Phase::Forward),
            ("c", 30, Phase::Forward),
            ("work", 5, Phase::Forward),
            ("work", -5, Phase::Forward),
            ("loss", 1, Phase::Backward),
            ("c", 30, Phase::Backward),
            ("c", -60, Phase::Backward),
            ("b", 20, Phase::Backward),
            ("b", -40, Phase::Backward),
        ])
    }

    #[test]
    fn a_phase_is_as_high_as_its_highest_moment() {
        assert_eq!(phase_peaks(&forward_backward_log()), [(Phase::Forward, 65), (Phase::Backward, 91)]);
    }

    #[test]
    fn the_peak_names_what_is_live() {
        let held = live_at_peak(&forward_backward_log(), Phase::Forward);
        let held: Vec<String> =
            held.into_iter().map(|((_, name), bytes)| format!("{name} {bytes}")).collect();
        assert_eq!(held, ["a 10", "b 20", "c 30", "work 5"]);
        assert_eq!(saved_bytes_per_block(&forward_backward_log(), &blocks()), [10, 20, 30]);
    }
}
