//! What a walk over the network held, moment by moment, read from the log of a planning ledger.
//!
//! Takes the log and the blocks that names belong to; gives the highest moment of each phase, and what was
//! live in it. Where saved activations wait in host memory, a block is near the device while it or the one
//! after it computes (it is on its way out, or back), and away otherwise.

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

/// The highest moments of a phase, in bytes; each is a moment of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct High {
    pub all: u64,
    /// Of what is near the device.
    pub near: u64,
    /// Of what is away.
    pub away: u64,
}

impl High {
    pub fn of(self, whose: Whose) -> u64 {
        match whose {
            Whose::All => self.all,
            Whose::Near => self.near,
            Whose::Away => self.away,
        }
    }

    fn raise(&mut self, now: High) {
        self.all = self.all.max(now.all);
        self.near = self.near.max(now.near);
        self.away = self.away.max(now.away);
    }
}

/// Which bytes are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    All,
    Near,
    Away,
}

/// What is live at a moment.
struct Live<'a> {
    blocks: &'a Blocks,
    by_block: Vec<u64>,
    all: u64,
    saved: u64,
    current: usize,
}

impl<'a> Live<'a> {
    fn new(blocks: &'a Blocks) -> Self {
        Self { blocks, by_block: vec![0; blocks.count], all: 0, saved: 0, current: 0 }
    }

    /// The block whose activations an entry is of.
    fn block(&self, entry: &Entry) -> Option<usize> {
        (entry.role == Role::Activations).then(|| self.blocks.of.get(&*entry.name).copied())?
    }

    fn take(&mut self, entry: &Entry) -> High {
        self.all = self.all.wrapping_add_signed(entry.change);
        if let Some(block) = self.block(entry) {
            self.saved = self.saved.wrapping_add_signed(entry.change);
            self.by_block[block] = self.by_block[block].wrapping_add_signed(entry.change);
            // What is given back says nothing of who computes: the last holder may be another's.
            if entry.change > 0 {
                self.current = block;
            }
        }
        let close = self.by_block[..=self.current].iter().rev().take(2).sum::<u64>();
        let away = self.saved - close.min(self.saved);
        High { all: self.all, near: self.all - away, away }
    }

    fn is_near(&self, block: Option<usize>) -> bool {
        block.is_none_or(|block| block == self.current || block + 1 == self.current)
    }
}

/// The highest moment of every phase, in order.
pub fn highs(log: &[Entry], blocks: &Blocks) -> Vec<(&'static str, High)> {
    let mut live = Live::new(blocks);
    let mut highs: Vec<(&'static str, High)> = Vec::new();
    for entry in log {
        let now = live.take(entry);
        match highs.iter_mut().find(|(phase, _)| *phase == entry.phase) {
            Some((_, high)) => high.raise(now),
            None => highs.push((entry.phase, now)),
        }
    }
    highs
}

/// What is live at the highest moment of `phase`, by role and name.
pub fn moment(log: &[Entry], blocks: &Blocks, phase: &str, whose: Whose) -> BTreeMap<(Role, Arc<str>), u64> {
    let (mut live, mut highest, mut end) = (Live::new(blocks), 0, 0);
    for (i, entry) in log.iter().enumerate() {
        let now = live.take(entry).of(whose);
        if entry.phase == phase && now > highest {
            (highest, end) = (now, i + 1);
        }
    }
    let mut live = Live::new(blocks);
    let mut held: BTreeMap<(Role, Arc<str>), u64> = BTreeMap::new();
    for entry in &log[..end] {
        live.take(entry);
        let bytes = held.entry((entry.role, entry.name.clone())).or_default();
        *bytes = bytes.wrapping_add_signed(entry.change);
    }
    held.retain(|(role, name), bytes| {
        let block = (*role == Role::Activations).then(|| blocks.of.get(&**name).copied()).flatten();
        *bytes > 0
            && match whose {
                Whose::All => true,
                Whose::Near => live.is_near(block),
                Whose::Away => !live.is_near(block),
            }
    });
    held
}

/// Bytes each block holds when the forward pass is over.
pub fn kept(log: &[Entry], blocks: &Blocks) -> Vec<u64> {
    let mut live = Live::new(blocks);
    for entry in log.iter().take_while(|entry| entry.phase == "forward") {
        live.take(entry);
    }
    live.by_block.truncate(blocks.count - 1);
    live.by_block
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
        let highs = highs(&there_and_back(), &blocks());
        assert_eq!(highs[0], ("forward", High { all: 65, near: 55, away: 10 }));
        // At the loss, the third block is near and the first two are away.
        assert_eq!(highs[1], ("backward", High { all: 91, near: 80, away: 30 }));
    }

    #[test]
    fn a_moment_names_what_is_live_and_where() {
        let held = |whose| {
            let held = moment(&there_and_back(), &blocks(), "forward", whose);
            held.into_iter().map(|((_, name), bytes)| format!("{name} {bytes}")).collect::<Vec<_>>()
        };
        assert_eq!(held(Whose::All), ["a 10", "b 20", "c 30", "work 5"]);
        assert_eq!(held(Whose::Near), ["b 20", "c 30", "work 5"]);
        assert_eq!(held(Whose::Away), ["a 10"]);
        assert_eq!(kept(&there_and_back(), &blocks()), [10, 20, 30]);
    }
}
