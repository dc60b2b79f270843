//! The memory ledger: every large allocation must be reserved here first.
//!
//! A reservation that fails changes nothing, and the error names the requester, the bytes, what is left and the largest
//! holders. A reservation is released on drop. The CPU allocator's failure cannot be caught, so this is where running
//! out of memory becomes an error instead of a crash.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;

use super::recorder::{LedgerSnapshot, LedgerState, Recorder};
use super::resident_limit;
use crate::base::units::Bytes;
use crate::base::{MemorySpace, Phase, Role};

/// Accounts for one memory space, host or device. Clones share the account.
#[derive(Clone, Debug)]
pub struct Ledger {
    account: Arc<Mutex<Account>>,
}

#[derive(Debug)]
struct Account {
    space: MemorySpace,
    budget: u64,
    total: u64,
    peak: u64,
    /// Peak since [`Ledger::take_recent_peak`].
    recent_peak: u64,
    requests: u64,
    phase: Phase,
    /// Every requester so far, and its index in the list.
    holders: Vec<Holder>,
    index: BTreeMap<Role, BTreeMap<Arc<str>, usize>>,
    injected_oom: Option<InjectedOom>,
    /// Every change in order, for a planning ledger only.
    log: Option<Vec<LedgerEntry>>,
    /// The last changes, see [`Ledger::record`].
    recorder: Option<Recorder>,
}

/// Who holds how many bytes, and for what role.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Holder {
    pub role: Role,
    #[serde(serialize_with = "as_text")]
    pub name: Arc<str>,
    pub bytes: u64,
}

fn as_text<S: serde::Serializer>(name: &Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(name)
}

/// One change in a planning ledger: bytes reserved, or released if negative, by `name`.
#[derive(Clone, Debug)]
pub struct LedgerEntry {
    pub role: Role,
    pub name: Arc<str>,
    pub change: i64,
    /// The phase at that time, see [`Ledger::set_phase`].
    pub phase: Phase,
}

/// Bytes held, see [`Ledger::take_recent_peak`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecentPeak {
    pub now: u64,
    pub peak: u64,
}

/// A reservation that did not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "out of memory: {requester} requested {} for {role} and {} of {} are left; the largest holders are {}",
    Bytes(*bytes),
    Bytes(*available),
    Bytes(*budget),
    holders(&self.largest())
)]
pub struct Oom {
    pub space: MemorySpace,
    /// The phase at that time, see [`Ledger::set_phase`].
    pub phase: Phase,
    pub requester: String,
    pub role: Role,
    pub bytes: u64,
    pub available: u64,
    pub budget: u64,
    /// Everything held, largest first.
    pub live: Vec<Holder>,
    pub refused_by: RefusedBy,
}

/// Who refused the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusedBy {
    Ledger,
    /// The ledger granted the reservation, so the plan has capacity for it; the heap of the GPU had no room.
    DeviceHeap,
    /// The driver had no device memory for itself, to load a kernel, for example.
    Driver,
}

impl Oom {
    /// The three roles that held the most, with their bytes.
    pub fn largest(&self) -> Vec<(Role, u64)> {
        let mut roles: BTreeMap<Role, u64> = BTreeMap::new();
        self.live.iter().for_each(|holder| *roles.entry(holder.role).or_default() += holder.bytes);
        let mut largest: Vec<_> = roles.into_iter().collect();
        largest.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        largest.truncate(3);
        largest
    }

    /// Missing bytes; 0 if the failure was injected.
    pub fn shortfall(&self) -> u64 {
        self.bytes.saturating_sub(self.available)
    }
}

fn holders(largest: &[(Role, u64)]) -> String {
    let each: Vec<String> =
        largest.iter().map(|(role, bytes)| format!("{role} ({})", Bytes(*bytes))).collect();
    if each.is_empty() { "none".into() } else { each.join(", ") }
}

/// Reservations that fail regardless of what is left, to test recovery: the numbers `3,9`, counted from 1, or
/// `every:50`, each fiftieth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InjectedOom {
    At(Vec<u64>),
    Every(u64),
}

impl InjectedOom {
    fn fails(&self, request: u64) -> bool {
        match self {
            InjectedOom::At(requests) => requests.contains(&request),
            InjectedOom::Every(n) => request.is_multiple_of(*n),
        }
    }
}

impl FromStr for InjectedOom {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| match text.trim().parse::<u64>() {
            Ok(n) if n > 0 => Ok(n),
            _ => Err(format!("`{text}` is no number from 1 on")),
        };
        match text.strip_prefix("every:") {
            Some(n) => number(n).map(InjectedOom::Every),
            None => text.split(',').map(number).collect::<Result<_, _>>().map(InjectedOom::At),
        }
    }
}

/// Bytes held until dropped.
#[derive(Debug)]
pub struct Reservation {
    account: Arc<Mutex<Account>>,
    holder: usize,
    bytes: u64,
}

impl Ledger {
    /// A ledger of host memory. `injected_oom`: reservations that fail, for tests.
    pub fn new(budget: u64, injected_oom: Option<InjectedOom>) -> Self {
        Self::of(MemorySpace::Ram, budget, injected_oom)
    }

    /// A ledger of this memory.
    pub fn of(space: MemorySpace, budget: u64, injected_oom: Option<InjectedOom>) -> Self {
        let account = Account {
            space,
            budget,
            total: 0,
            peak: 0,
            recent_peak: 0,
            requests: 0,
            phase: Phase::Start,
            holders: Vec::new(),
            index: BTreeMap::new(),
            injected_oom,
            log: None,
            recorder: None,
        };
        Self { account: Arc::new(Mutex::new(account)) }
    }

    /// A ledger without a limit that logs every change, for planning by dry runs.
    pub fn planning() -> Self {
        let ledger = Self::new(u64::MAX, None);
        lock(&ledger.account).log = Some(Vec::new());
        ledger
    }

    /// Records the changes of the last two updates from now on, in [`RECORDER_BYTES`](super::recorder::RECORDER_BYTES).
    pub fn record(&self) {
        lock(&self.account).recorder.get_or_insert_with(Recorder::new);
    }

    /// An update begins, for the recorder.
    pub fn begin_update(&self) {
        if let Some(recorder) = &mut lock(&self.account).recorder {
            recorder.begin_update();
        }
    }

    /// Who holds what now, and what was recorded up to now; for an `oom` of this ledger, as it was when the request was
    /// refused.
    pub fn snapshot(&self, oom: Option<&Oom>) -> LedgerSnapshot {
        let account = lock(&self.account);
        let oom = oom.filter(|oom| oom.space == account.space);
        let mut held: Vec<u64> = account.holders.iter().map(|holder| holder.bytes).collect();
        if let Some(oom) = oom {
            held.fill(0);
            for Holder { role, name, bytes } in &oom.live {
                held[account.index[role][name]] = *bytes;
            }
        }
        let state = LedgerState {
            space: account.space,
            budget_bytes: oom.map_or(account.budget, |oom| oom.budget),
            phase: oom.map_or(account.phase, |oom| oom.phase),
            is_refusal: oom.is_some(),
            held,
        };
        LedgerSnapshot::new(state, &account.holders, account.recorder.as_ref())
    }

    /// Sets the current phase.
    pub fn set_phase(&self, phase: Phase) {
        lock(&self.account).phase = phase;
        if matches!(phase, Phase::Eval | Phase::Checkpoint) {
            resident_limit::limit_code_now();
        }
    }

    /// Every change so far; empty unless created by [`Ledger::planning`].
    pub fn log(&self) -> Vec<LedgerEntry> {
        lock(&self.account).log.clone().unwrap_or_default()
    }

    /// Reserves `bytes` for `role`, or changes nothing and returns why. `requester` names the caller.
    pub fn reserve(&self, role: Role, requester: &str, bytes: u64) -> Result<Reservation, Oom> {
        resident_limit::limit_code();
        let mut account = lock(&self.account);
        account.requests += 1;
        let available = account.budget.saturating_sub(account.total);
        if bytes > available
            || account.injected_oom.as_ref().is_some_and(|fault| fault.fails(account.requests))
        {
            return Err(account.oom_error(role, requester, bytes));
        }
        let holder = account.holder_index(role, requester);
        account.total += bytes;
        account.peak = account.peak.max(account.total);
        account.recent_peak = account.recent_peak.max(account.total);
        account.holders[holder].bytes += bytes;
        account.log_change(holder, bytes as i64);
        Ok(Reservation { account: self.account.clone(), holder, bytes })
    }

    /// The error for an allocation that the system refused although it was reserved here.
    pub fn oom_error(&self, role: Role, requester: &str, bytes: u64) -> Oom {
        lock(&self.account).oom_error(role, requester, bytes)
    }

    /// The error for an allocation that was reserved here and that the device refused, with `available` bytes of its
    /// heap free.
    pub fn device_oom(&self, role: Role, bytes: u64, available: u64) -> Oom {
        let refused_by = RefusedBy::DeviceHeap;
        Oom { available, refused_by, ..self.oom_error(role, "the device heap", bytes) }
    }

    /// The error for an operation that failed because the driver, which should have `bytes`, had only `available` for
    /// its own use. It does not say how many it asked for.
    pub fn driver_oom(&self, bytes: u64, available: u64) -> Oom {
        let refused_by = RefusedBy::Driver;
        Oom { available, refused_by, ..self.oom_error(Role::Workspace, "the CUDA driver", bytes) }
    }

    pub fn space(&self) -> MemorySpace {
        lock(&self.account).space
    }

    /// Maximum bytes that may be held.
    pub fn budget(&self) -> u64 {
        lock(&self.account).budget
    }

    /// Changes the budget from now on; existing reservations stay.
    pub fn set_budget(&self, budget: u64) {
        lock(&self.account).budget = budget;
    }

    pub fn reserved(&self) -> u64 {
        lock(&self.account).total
    }

    /// Peak of all bytes held at once.
    pub fn peak(&self) -> u64 {
        lock(&self.account).peak
    }

    /// The bytes held now, and their peak since the last call.
    pub fn take_recent_peak(&self) -> RecentPeak {
        let mut account = lock(&self.account);
        let now = account.total;
        RecentPeak { now, peak: std::mem::replace(&mut account.recent_peak, now).max(now) }
    }

    /// Reservations requested so far.
    pub fn request_count(&self) -> u64 {
        lock(&self.account).requests
    }
}

impl Account {
    /// Index of this requester in the list. A run has at most layers times roles of them, so none is ever removed.
    fn holder_index(&mut self, role: Role, name: &str) -> usize {
        let names = self.index.entry(role).or_default();
        if let Some(at) = names.get(name) {
            return *at;
        }
        let (at, name): (usize, Arc<str>) = (self.holders.len(), name.into());
        names.insert(name.clone(), at);
        self.holders.push(Holder { role, name, bytes: 0 });
        at
    }

    fn oom_error(&mut self, role: Role, requester: &str, bytes: u64) -> Oom {
        if let Some(recorder) = &mut self.recorder {
            recorder.record_refusal();
        }
        let mut live: Vec<Holder> = self.holders.iter().filter(|holder| holder.bytes > 0).cloned().collect();
        live.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        let (phase, budget) = (self.phase, self.budget);
        let available = budget.saturating_sub(self.total);
        let (requester, refused_by) = (requester.to_owned(), RefusedBy::Ledger);
        Oom { space: self.space, phase, requester, role, bytes, available, budget, live, refused_by }
    }

    fn log_change(&mut self, holder: usize, change: i64) {
        if let Some(log) = &mut self.log {
            let Holder { role, name, .. } = &self.holders[holder];
            log.push(LedgerEntry { role: *role, name: name.clone(), change, phase: self.phase });
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.push(holder, change, self.phase);
        }
    }
}

impl Reservation {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Releases what is held beyond `bytes`.
    pub fn shrink_to(&mut self, bytes: u64) {
        let freed = self.bytes.saturating_sub(bytes);
        let mut account = lock(&self.account);
        account.total -= freed;
        account.holders[self.holder].bytes -= freed;
        account.log_change(self.holder, -(freed as i64));
        self.bytes -= freed;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut account = lock(&self.account);
        account.total -= self.bytes;
        account.holders[self.holder].bytes -= self.bytes;
        account.log_change(self.holder, -(self.bytes as i64));
    }
}

/// The account holds only numbers and is consistent after every statement, so a poisoned lock is safe to use.
fn lock(account: &Mutex<Account>) -> MutexGuard<'_, Account> {
    account.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_reservation_changes_nothing_and_names_the_holders() {
        let ledger = Ledger::new(100, None);
        let weights = ledger.reserve(Role::Weights, "weights", 60).unwrap();
        let _saved = ledger.reserve(Role::Activations, "conv1", 30).unwrap();
        let oom = ledger.reserve(Role::Workspace, "conv2", 11).unwrap_err();
        assert_eq!((oom.bytes, oom.available, oom.budget), (11, 10, 100));
        assert_eq!(oom.largest(), [(Role::Weights, 60), (Role::Activations, 30)]);
        assert_eq!(ledger.reserved(), 90);
        drop(weights);
        assert_eq!(ledger.reserved(), 30);
        assert!(ledger.reserve(Role::Workspace, "conv2", 70).is_ok());
        assert_eq!(ledger.peak(), 100);
    }

    #[test]
    fn what_is_live_is_known_by_role_and_by_name() {
        let ledger = Ledger::new(100, None);
        let _weights = ledger.reserve(Role::Weights, "weights", 10).unwrap();
        let _a = ledger.reserve(Role::Activations, "conv1", 20).unwrap();
        let b = ledger.reserve(Role::Activations, "conv1", 30).unwrap();
        drop(ledger.reserve(Role::Workspace, "conv1", 5).unwrap());
        ledger.set_phase(Phase::Forward);
        let live = |oom: Oom| -> Vec<(Role, String, u64)> {
            oom.live.into_iter().map(|h| (h.role, h.name.to_string(), h.bytes)).collect()
        };
        let oom = ledger.reserve(Role::Batch, "batch", 50).unwrap_err();
        assert_eq!((oom.phase, oom.shortfall()), (Phase::Forward, 10));
        assert_eq!(
            live(oom),
            [(Role::Activations, "conv1".into(), 50), (Role::Weights, "weights".into(), 10)]
        );
        drop(b);
        ledger.set_budget(30);
        let oom = ledger.reserve(Role::Batch, "batch", 1).unwrap_err();
        assert_eq!((oom.available, oom.budget), (0, 30), "a lowered budget binds the next reservation");
    }

    /// The shortfall makes the next plan smaller by what the driver lacks.
    #[test]
    fn a_driver_without_memory_reports_its_reserve_and_what_is_free() {
        let ledger = Ledger::new(100, None);
        let _weights = ledger.reserve(Role::Weights, "weights", 60).unwrap();
        let oom = ledger.driver_oom(64, 3);
        assert_eq!((oom.bytes, oom.available, oom.shortfall()), (64, 3, 61));
        assert_eq!((oom.refused_by, oom.requester.as_str()), (RefusedBy::Driver, "the CUDA driver"));
    }

    #[test]
    fn an_injected_oom_fails_only_the_requests_it_names() {
        let fails = |fault: &str| -> Vec<u64> {
            let ledger = Ledger::new(100, Some(fault.parse().unwrap()));
            (1..=9).filter(|_| ledger.reserve(Role::Batch, "batch", 1).is_err()).collect()
        };
        assert_eq!(fails("2"), [2]);
        assert_eq!(fails("3,4,8"), [3, 4, 8]);
        assert_eq!(fails("every:4"), [4, 8]);
        assert!(
            ["", "0", "x", "3,", "every:0", "every:"].iter().all(|text| text.parse::<InjectedOom>().is_err())
        );
    }
}
