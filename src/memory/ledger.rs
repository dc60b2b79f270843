//! The ledger: nothing large is allocated that was not asked for here first.
//!
//! An ask that fails changes nothing and says who asked, for how much, what is left and who holds the
//! most. A reservation is given back when it is dropped. On the CPU a failed allocation cannot be
//! caught, so this is where running out of memory becomes a value instead of a death.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::plan::Role;
use crate::units::Bytes;

/// Accounts for one kind of memory, host or device. Clones share the account.
#[derive(Clone, Debug)]
pub struct Ledger {
    account: Arc<Mutex<Account>>,
}

#[derive(Debug)]
struct Account {
    budget: u64,
    held: BTreeMap<Role, u64>,
    total: u64,
    peak: u64,
    asks: u64,
    phase: &'static str,
    /// The ask that is refused whatever is left, for tests of recovery.
    fault: Option<u64>,
    /// Every change in order, where the account is kept for planning.
    log: Option<Vec<Entry>>,
}

/// One change of a planning ledger: bytes taken (or given back) by `name`.
#[derive(Clone, Debug)]
pub struct Entry {
    pub role: Role,
    pub name: Arc<str>,
    pub change: i64,
    /// What was going on, see [`Ledger::phase`].
    pub phase: &'static str,
}

/// An ask that did not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("out of memory: {asker} asked for {} for {role} and {} of {} are left; the largest holders are {}", Bytes(*bytes), Bytes(*left), Bytes(*budget), holders(largest))]
pub struct Oom {
    pub asker: String,
    pub role: Role,
    pub bytes: u64,
    pub left: u64,
    pub budget: u64,
    /// The three largest holders.
    pub largest: Vec<(Role, u64)>,
}

fn holders(largest: &[(Role, u64)]) -> String {
    let each: Vec<String> =
        largest.iter().map(|(role, bytes)| format!("{role} ({})", Bytes(*bytes))).collect();
    if each.is_empty() { "none".into() } else { each.join(", ") }
}

/// Bytes held until this is dropped.
#[derive(Debug)]
pub struct Reservation {
    account: Arc<Mutex<Account>>,
    role: Role,
    /// Known where the account keeps a log.
    name: Option<Arc<str>>,
    bytes: u64,
}

impl Ledger {
    /// `fault`: the number of the ask that fails, counted from 1, for tests.
    pub fn new(budget: u64, fault: Option<u64>) -> Self {
        let account = Account {
            budget,
            held: BTreeMap::new(),
            total: 0,
            peak: 0,
            asks: 0,
            fault,
            log: None,
            phase: "start",
        };
        Self { account: Arc::new(Mutex::new(account)) }
    }

    /// A ledger without limit that remembers every change: asking what a step would hold is planning it.
    pub fn planning() -> Self {
        let ledger = Self::new(u64::MAX, None);
        lock(&ledger.account).log = Some(Vec::new());
        ledger
    }

    /// Names what is going on from here on: `forward`, `backward`, ...
    pub fn phase(&self, phase: &'static str) {
        lock(&self.account).phase = phase;
    }

    /// The phase now named.
    pub fn current_phase(&self) -> &'static str {
        lock(&self.account).phase
    }

    /// Every change so far; empty unless made by [`Ledger::planning`].
    pub fn log(&self) -> Vec<Entry> {
        lock(&self.account).log.clone().unwrap_or_default()
    }

    /// Holds `bytes` for `role`, or changes nothing and says why not. `asker` names who wants them.
    pub fn reserve(&self, role: Role, asker: &str, bytes: u64) -> Result<Reservation, Oom> {
        let mut account = lock(&self.account);
        account.asks += 1;
        let left = account.budget.saturating_sub(account.total);
        if bytes > left || account.fault == Some(account.asks) {
            let held = account.held.iter().filter(|(_, bytes)| **bytes > 0);
            let mut largest: Vec<_> = held.map(|(role, bytes)| (*role, *bytes)).collect();
            largest.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
            largest.truncate(3);
            return Err(Oom { asker: asker.to_owned(), role, bytes, left, budget: account.budget, largest });
        }
        *account.held.entry(role).or_default() += bytes;
        account.total += bytes;
        account.peak = account.peak.max(account.total);
        let name = account.note(role, asker, bytes as i64);
        Ok(Reservation { account: self.account.clone(), role, name, bytes })
    }

    pub fn held(&self) -> u64 {
        lock(&self.account).total
    }

    /// The most ever held at once.
    pub fn peak(&self) -> u64 {
        lock(&self.account).peak
    }

    /// Asks made so far.
    pub fn asks(&self) -> u64 {
        lock(&self.account).asks
    }
}

impl Account {
    fn note(&mut self, role: Role, name: &str, change: i64) -> Option<Arc<str>> {
        let (log, phase) = (self.log.as_mut()?, self.phase);
        let name: Arc<str> = name.into();
        log.push(Entry { role, name: name.clone(), change, phase });
        Some(name)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut account = lock(&self.account);
        account.total -= self.bytes;
        if let Some(held) = account.held.get_mut(&self.role) {
            *held -= self.bytes;
        }
        if let Some(name) = &self.name {
            account.note(self.role, name, -(self.bytes as i64));
        }
    }
}

/// The account is numbers only, whole after every statement: a panic elsewhere cannot spoil it.
fn lock(account: &Mutex<Account>) -> MutexGuard<'_, Account> {
    account.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_ask_changes_nothing_and_names_the_holders() {
        let ledger = Ledger::new(100, None);
        let weights = ledger.reserve(Role::Weights, "weights", 60).unwrap();
        let _saved = ledger.reserve(Role::Activations, "conv1", 30).unwrap();
        let oom = ledger.reserve(Role::Workspace, "conv2", 11).unwrap_err();
        assert_eq!((oom.bytes, oom.left, oom.budget), (11, 10, 100));
        assert_eq!(oom.largest, [(Role::Weights, 60), (Role::Activations, 30)]);
        assert_eq!(ledger.held(), 90);
        drop(weights);
        assert_eq!(ledger.held(), 30);
        assert!(ledger.reserve(Role::Workspace, "conv2", 70).is_ok());
        assert_eq!(ledger.peak(), 100);
    }

    #[test]
    fn the_fault_fails_one_ask_and_no_other() {
        let ledger = Ledger::new(100, Some(2));
        let ask = || ledger.reserve(Role::Batch, "batch", 1).is_ok();
        assert_eq!([ask(), ask(), ask()], [true, false, true]);
    }
}
