//! Keeps the resident memory of this process outside its heap within the plan.
//!
//! Code and freed small blocks are resident although nothing reserved them. Both can be given back at any time: code is
//! read again from the page cache when it runs, and the C library can trim its free blocks. Reservations in the ledger
//! trigger the checks, so that little code is mapped between two of them; they are frequent while code is being mapped,
//! and rare once steps repeat what ran before. A thread checks too, for work that reserves nothing.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{code_pages, measure, pressure};

/// Code is dropped when less than this is left of its limit: more than a step maps between two checks. Small plans use
/// the first number, since their steps are short and checks come late on a loaded machine; larger ones a 64th of the
/// plan minus half a MiB, at most the second number. The margin is memory that is planned and never used.
const CODE_MARGIN_BYTES: (u64, u64) = (3 << 20, 4 << 20);
const SMALL_PLAN_BYTES: u64 = 64 << 20;

/// Added to the margin before code that steps do not run, such as an evaluation or an event.
const OTHER_CODE_BYTES: u64 = 1 << 20;

/// Dropped beyond the margin, so that the next check has nothing to drop.
const DROPPED_BYTES: u64 = 1 << 19;

/// Freed blocks are trimmed when less than this fraction of the plan is left, within these bounds in bytes: a larger
/// job leaves larger fragments between two checks.
const TRIM_MARGIN_FRACTION: u64 = 64;
const TRIM_MARGIN_BYTES: (u64, u64) = (1 << 20, 4 << 20);

/// The shortest and the longest time between two checks.
const CHECK_INTERVALS: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(1));

/// The same for the thread that checks, and its stack.
const WATCH_INTERVALS: (Duration, Duration) = (Duration::from_micros(500), Duration::from_millis(4));
const WATCH_STACK_BYTES: usize = 64 << 10;

/// How much may be resident outside the heap.
#[derive(Clone, Copy, Debug)]
pub struct ResidentLimit {
    /// All of it; with the planned peak of the heap, the plan of the process.
    pub non_heap: u64,
    /// The file-backed part: code.
    pub max_file_rss: u64,
}

struct LimitState {
    limit: ResidentLimit,
    /// `/proc/self/statm`.
    statm: File,
    next_check: Instant,
    interval: Duration,
    last_file_rss: u64,
}

static IS_SET: AtomicBool = AtomicBool::new(false);
static STATE: Mutex<Option<LimitState>> = Mutex::new(None);

/// Enforces this limit from now on, where the system reports resident memory.
pub fn set(limit: ResidentLimit) {
    let Ok(statm) = File::open("/proc/self/statm") else { return };
    let interval = CHECK_INTERVALS.0;
    let state = LimitState { limit, statm, next_check: Instant::now(), interval, last_file_rss: 0 };
    *lock() = Some(state);
    if !IS_SET.swap(true, Relaxed) {
        // Without the thread, the checks at reservations remain.
        let _ = std::thread::Builder::new()
            .name("resident limit".into())
            .stack_size(WATCH_STACK_BYTES)
            .spawn(watch);
    }
}

/// Checks from time to time, as long as the process runs.
fn watch() {
    loop {
        let interval = lock().as_mut().map_or(WATCH_INTERVALS.1, |state| {
            state.limit_code(0);
            state.interval
        });
        std::thread::sleep(interval.clamp(WATCH_INTERVALS.0, WATCH_INTERVALS.1));
    }
}

/// Drops code beyond its limit, if it is time to check. Costs some nanoseconds if it is not, and microseconds if
/// nothing exceeds the limit. Waits for a check of another thread, even if that was preempted: code mapped meanwhile
/// would not be limited.
pub fn limit_code() {
    if IS_SET.load(Relaxed)
        && let Some(state) = lock().as_mut()
        && Instant::now() >= state.next_check
    {
        state.limit_code(0);
    }
}

/// Makes room for code that has not run for a while and is about to, and checks often from now on.
pub fn limit_code_now() {
    if IS_SET.load(Relaxed)
        && let Some(state) = lock().as_mut()
    {
        state.interval = CHECK_INTERVALS.0;
        state.limit_code(OTHER_CODE_BYTES);
    }
}

/// Trims freed memory if the plan is nearly exhausted.
pub fn trim() {
    if IS_SET.load(Relaxed)
        && let Some(state) = lock().as_ref()
    {
        state.trim(0);
    }
}

/// Trims freed memory if the plan has no room for `bytes` more. The allocator calls it, perhaps within another check:
/// it does not wait for that.
pub fn make_room(bytes: u64) {
    if IS_SET.load(Relaxed)
        && let Ok(state) = STATE.try_lock()
        && let Some(state) = state.as_ref()
    {
        state.trim(bytes);
    }
}

fn lock() -> MutexGuard<'static, Option<LimitState>> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LimitState {
    fn planned(&self) -> u64 {
        measure::planned_peak() + self.limit.non_heap
    }

    fn trim(&self, more: u64) {
        let planned = self.planned();
        let margin = (planned / TRIM_MARGIN_FRACTION).clamp(TRIM_MARGIN_BYTES.0, TRIM_MARGIN_BYTES.1);
        if read_statm(&self.statm).0 + more + margin > planned {
            pressure::trim_malloc();
        }
    }

    /// Leaves room for `other` bytes of code besides that of steps.
    fn limit_code(&mut self, other: u64) {
        let margin = code_margin(self.planned()) + other;
        let file_rss = || read_statm(&self.statm).1;
        let resident = file_rss();
        if resident + margin > self.limit.max_file_rss {
            code_pages::drop_until(|| file_rss() + margin + DROPPED_BYTES <= self.limit.max_file_rss);
        }
        self.interval = next_interval(self.interval, resident != self.last_file_rss);
        (self.last_file_rss, self.next_check) = (resident, Instant::now() + self.interval);
    }
}

/// The margin below the limit of code in a plan of this size.
fn code_margin(planned: u64) -> u64 {
    match planned {
        ..SMALL_PLAN_BYTES => CODE_MARGIN_BYTES.0,
        _ => (planned / 64 - (1 << 19)).min(CODE_MARGIN_BYTES.1),
    }
}

/// The time until the next check: short if more code `was_mapped` since the last one, longer each time if not.
fn next_interval(interval: Duration, was_mapped: bool) -> Duration {
    if was_mapped { CHECK_INTERVALS.0 } else { (interval * 2).min(CHECK_INTERVALS.1) }
}

/// Resident bytes, and the file-backed ones of them, from `/proc/self/statm`: the second and the third field, in pages.
fn read_statm(statm: &File) -> (u64, u64) {
    let mut text = [0; 128];
    #[cfg(unix)]
    let len = std::os::unix::fs::FileExt::read_at(statm, &mut text, 0).unwrap_or(0);
    #[cfg(not(unix))]
    let len = 0;
    parse_statm(str::from_utf8(&text[..len]).unwrap_or_default())
}

fn parse_statm(text: &str) -> (u64, u64) {
    let mut fields = text.split(' ').skip(1).map(|pages| pages.parse::<u64>().unwrap_or(0) * 4096);
    (fields.next().unwrap_or(0), fields.next().unwrap_or(0))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn checks_are_frequent_while_code_is_mapped() {
        let (shortest, longest) = CHECK_INTERVALS;
        assert_eq!(next_interval(longest, true), shortest);
        assert_eq!(next_interval(shortest, false), 2 * shortest);
        assert_eq!(next_interval(longest, false), longest);
    }

    #[test]
    fn statm_has_resident_and_file_backed_pages() {
        assert_eq!(parse_statm("100 7 3 1 0 50 0\n"), (7 * 4096, 3 * 4096));
        assert_eq!(parse_statm(""), (0, 0));
        let (resident, file_rss) = read_statm(&File::open("/proc/self/statm").unwrap());
        assert!(resident > file_rss && file_rss > 1 << 20, "{resident} {file_rss}");
    }
}
