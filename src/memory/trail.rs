//! What a walk over the network held, moment by moment, read from the log of a planning ledger.
//!
//! Takes the log and the blocks that names belong to; gives the highest moment of each phase, what was live in
//! it, and what every block keeps.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::ledger::Entry;
use super::plan::Role;
use crate::layers::network::{Network, Node};

/// The block that every layer's name belongs to; the loss is one of its own, the last.
pub struct Blocks {
    of: BTreeMap<String, usize>,
    count: usize,
}

impl Blocks {
    pub fn new(network: &Network) -> Self {
        fn names(nodes: &[Node], block: usize, of: &mut BTreeMap<String, usize>) {
            for node in nodes {
                match node {
                    Node::Layer(layer) => drop(of.insert(layer.name().to_owned(), block)),
                    Node::Residual(residual) => {
                        of.insert(residual.name.clone(), block);
                        names(&residual.branch, block, of);
                        names(&residual.shortcut, block, of);
                    }
                }
            }
        }
        let (mut of, count) = (BTreeMap::new(), network.blocks.len() + 1);
        network.blocks.iter().enumerate().for_each(|(i, block)| names(&block.nodes, i, &mut of));
        of.insert(network.loss.name().to_owned(), count - 1);
        Self { of, count }
    }

    /// Whether there is a layer of this name.
    pub fn has(&self, name: &str) -> bool {
        self.of.contains_key(name)
    }
}

/// The highest moment of every phase, in order, in bytes.
pub fn highs(log: &[Entry]) -> Vec<(&'static str, u64)> {
    let (mut live, mut highs) = (0u64, Vec::<(&'static str, u64)>::new());
    for entry in log {
        live = live.wrapping_add_signed(entry.change);
        match highs.iter_mut().find(|(phase, _)| *phase == entry.phase) {
            Some((_, high)) => *high = live.max(*high),
            None => highs.push((entry.phase, live)),
        }
    }
    highs
}

/// What is live at the highest moment of `phase`, by role and name.
pub fn moment(log: &[Entry], phase: &str) -> BTreeMap<(Role, Arc<str>), u64> {
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

/// Bytes each block holds when the forward pass is over.
pub fn kept(log: &[Entry], blocks: &Blocks) -> Vec<u64> {
    let mut kept = vec![0u64; blocks.count];
    for entry in log.iter().take_while(|entry| entry.phase == "forward") {
        if let (Role::Activations, Some(block)) = (entry.role, blocks.of.get(&*entry.name)) {
            kept[*block] = kept[*block].wrapping_add_signed(entry.change);
        }
    }
    kept.truncate(blocks.count - 1);
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks() -> Blocks {
        let of = ["a", "b", "c", "loss"].into_iter().map(str::to_owned).zip(0..).collect();
        Blocks { of, count: 4 }
    }

    fn log(changes: &[(&str, i64, &'static str)]) -> Vec<Entry> {
        let entry = |(name, change, phase): &(&str, i64, &'static str)| {
            let role = if name.starts_with("work") { Role::Workspace } else { Role::Activations };
            Entry { role, name: (*name).into(), change: *change, phase }
        };
        changes.iter().map(entry).collect()
    }

    /// Three blocks of 10, 20 and 30 bytes with a workspace of 5 in the last, then back.
    fn there_and_back() -> Vec<Entry> {
        log(&[
            ("a", 10, "forward"),
            ("b", 20, "forward"),
            ("c", 30, "forward"),
            ("work", 5, "forward"),
            ("work", -5, "forward"),
            ("loss", 1, "backward"),
            ("c", 30, "backward"),
            ("c", -60, "backward"),
            ("b", 20, "backward"),
            ("b", -40, "backward"),
        ])
    }

    #[test]
    fn a_phase_is_as_high_as_its_highest_moment() {
        assert_eq!(highs(&there_and_back()), [("forward", 65), ("backward", 91)]);
    }

    #[test]
    fn a_moment_names_what_is_live() {
        let held = moment(&there_and_back(), "forward");
        let held: Vec<String> =
            held.into_iter().map(|((_, name), bytes)| format!("{name} {bytes}")).collect();
        assert_eq!(held, ["a 10", "b 20", "c 30", "work 5"]);
        assert_eq!(kept(&there_and_back(), &blocks()), [10, 20, 30]);
    }
}
