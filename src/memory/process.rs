//! The process part of a plan: resident memory outside the counted heap.
//!
//! Code, thread stacks, allocator overhead and library caches are resident too, and the OOM killer counts the sum. They
//! are measured when the plan is made, after freed memory was returned to the system, and what is known to come later
//! is added: training has not touched its stacks yet. Code pages are dropped before measuring, since how many are
//! mapped depends on what ran before and on how the executable lies in the page cache.

use std::sync::{Mutex, PoisonError};

#[cfg(target_os = "linux")]
use rustix::mm::{Advice, madvise};

use super::{measure, pressure, probe};

/// Fraction of the program's code, in 64ths, that may be resident: what training, evaluation and checkpoints run. Code
/// beyond it is dropped, see [`ProcessMemory::enforce_limit`]. Code of the dev profile is less dense: it is optimized
/// less, and not across units.
const RESIDENT_CODE_64THS: u64 = if cfg!(debug_assertions) { 29 } else { 24 };

/// Before a phase of work whose code is not mapped yet, code is dropped if less than this much of its allowance is left,
/// in 64ths of all code: the phase may touch as much before the next check.
const CODE_HEADROOM_64THS: u64 = if cfg!(debug_assertions) { 13 } else { 10 };

/// Stack and thread-local memory that a thread touches: one that computes, besides the buffers of kernels, and one that
/// loads data, which decodes images.
const COMPUTE_STACK_BYTES: u64 = 64 << 10;
const LOADER_STACK_BYTES: u64 = 96 << 10;

/// Fragmentation: freed small blocks that the C library keeps between live ones and at the top of its heap, and the
/// unused ends of the pages of large buffers. Beyond this it is trimmed, see [`ProcessMemory::enforce_limit`].
const FRAGMENTATION_BYTES: u64 = 4 << 19;

/// Fragments are trimmed when less than this part of the plan is left, but not less than the first and not more than the
/// second number of bytes: a larger job leaves larger fragments between two checks.
const TRIM_MARGIN_FRACTION: u64 = 64;
const TRIM_MARGIN_BYTES: (u64, u64) = (1 << 20, 4 << 20);

/// The process part is rounded up to this, so that `trainer plan` and the run, which measures again, mostly agree.
const GRANULARITY: u64 = 1 << 19;

/// How far the kernel's RSS counters may lag: it folds in the per-thread page counts only now and then.
const RSS_COUNTER_LAG: u64 = 1 << 18;

/// Fixes the process part, for tests that compare plans byte by byte.
const FIXED_BYTES_VAR: &str = "TRAINER_PROCESS_BYTES";

/// Memory of a process outside its counted heap, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Resident during training and not on the heap.
    pub non_heap: u64,
    /// Peak of resident memory until the data was ready.
    pub preparation_peak: u64,
    /// Heap that data preparation left behind, in caches of libraries and threads.
    pub leftover_heap: u64,
    /// Maximum file-backed resident memory; 0 if it was not measured.
    max_file_rss: u64,
    /// The part of it that is kept free, when the phase of work changes, for code that has not run yet.
    code_headroom: u64,
}

/// The threads of a run, whose stacks the plan counts.
#[derive(Clone, Copy, Debug)]
pub struct ThreadStacks {
    pub compute_threads: usize,
    /// Buffers of kernels on the stack of each thread that computes.
    pub kernel_bytes: u64,
    pub loader_threads: usize,
}

impl ThreadStacks {
    fn bytes(self) -> u64 {
        (COMPUTE_STACK_BYTES + self.kernel_bytes) * self.compute_threads as u64
            + LOADER_STACK_BYTES * self.loader_threads as u64
    }
}

/// The kind of work between two checks; each runs its own code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkPhase {
    Training,
    Update,
    Evaluation,
    Checkpoint,
    Reporting,
}

/// The phases of work that ran since all code was within its allowance: their code is mapped, and they need no headroom.
#[derive(Debug, Default, PartialEq, Eq)]
struct RecentWork(Vec<WorkPhase>);

impl RecentWork {
    const NONE: Self = Self(Vec::new());

    /// The most file-backed memory that may be resident before `work` runs.
    fn limit(&self, work: WorkPhase, max_file_rss: u64, code_headroom: u64) -> u64 {
        max_file_rss - if self.0.contains(&work) { 0 } else { code_headroom }
    }

    /// Notes that `work` runs now. Where code `exceeded` its allowance, any of it may have been dropped.
    fn note(&mut self, work: WorkPhase, exceeded: bool) {
        if exceeded {
            self.0.clear();
        }
        if !self.0.contains(&work) {
            self.0.push(work);
        }
    }
}

impl ProcessMemory {
    /// Returns freed memory to the system and measures this process, which will touch these stacks. `leftover_heap`:
    /// live heap that no reservation covers. All zero if the system does not report its memory.
    pub fn measure(stacks: ThreadStacks, leftover_heap: u64) -> Self {
        if let Some(fixed) = std::env::var(FIXED_BYTES_VAR).ok().and_then(|text| text.parse().ok()) {
            return Self { non_heap: fixed, ..Self::default() };
        }
        pressure::release_to_os();
        let preparation_peak = (measure::resident_peak() + RSS_COUNTER_LAG).next_multiple_of(GRANULARITY);
        let code = drop_code_pages(|| false);
        let Some(resident) = probe::proc_status("VmRSS:") else { return Self::default() };
        let later = code * RESIDENT_CODE_64THS / 64 + FRAGMENTATION_BYTES + stacks.bytes();
        let non_heap = (resident.saturating_sub(measure::live_bytes()) + later).next_multiple_of(GRANULARITY);
        let file = probe::proc_status("RssFile:").map_or(0, |file| file + code * RESIDENT_CODE_64THS / 64);
        Self {
            non_heap,
            preparation_peak,
            leftover_heap,
            max_file_rss: file,
            code_headroom: code * CODE_HEADROOM_64THS / 64,
        }
    }

    /// Keeps resident memory outside the heap within its part before more `work` runs. Trims fragments if the total
    /// comes close to `planned` bytes, and drops code pages; code that is still needed is mapped again from the page
    /// cache. Costs some microseconds if there is nothing to do.
    pub fn enforce_limit(&self, planned: u64, work: WorkPhase) {
        static RECENT_WORK: Mutex<RecentWork> = Mutex::new(RecentWork::NONE);
        if self.max_file_rss == 0 {
            return;
        }
        // /proc/self/statm: field 1 is total resident pages, field 2 file-backed ones.
        let pages = |field: usize| {
            let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
            let pages = text.split(' ').nth(field).and_then(|pages| pages.parse::<u64>().ok());
            pages.unwrap_or(0) * 4096
        };
        let margin = (planned / TRIM_MARGIN_FRACTION).clamp(TRIM_MARGIN_BYTES.0, TRIM_MARGIN_BYTES.1);
        if pages(1) + margin > planned {
            pressure::trim_malloc();
        }
        let mut recent = RECENT_WORK.lock().unwrap_or_else(PoisonError::into_inner);
        let file_rss = pages(2);
        if file_rss > recent.limit(work, self.max_file_rss, self.code_headroom) {
            drop_code_pages(|| pages(2) <= self.max_file_rss - self.code_headroom);
        }
        recent.note(work, file_rss > self.max_file_rss);
    }
}

/// Drops resident code pages of this program, chunk by chunk until `is_enough`, starting after the last chunk dropped.
/// Returns the total bytes of code, resident or not; 0 if the system does not report them.
fn drop_code_pages(is_enough: impl Fn() -> bool) -> u64 {
    #[cfg(target_os = "linux")]
    {
        use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
        static NEXT_CHUNK: AtomicUsize = AtomicUsize::new(0);
        const CHUNK_BYTES: usize = 1 << 20;
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let own = std::fs::read_link("/proc/self/exe").unwrap_or_default();
        let own = maps.lines().filter(|line| line.ends_with(&*own.to_string_lossy()));
        let mappings = own.filter_map(parse_code_mapping).filter(|(.., executable)| *executable);
        let chunks: Vec<(usize, usize)> = mappings
            .flat_map(|(start, end, _)| {
                (start..end).step_by(CHUNK_BYTES).map(move |at| (at, end.min(at + CHUNK_BYTES)))
            })
            .collect();
        for _ in 0..chunks.len() {
            let (start, end) = chunks[NEXT_CHUNK.fetch_add(1, Relaxed) % chunks.len()];
            // SAFETY: as in `disable_huge_code_pages`.
            let _ = unsafe { madvise(start as *mut _, end - start, Advice::LinuxDontNeed) };
            if is_enough() {
                break;
            }
        }
        chunks.iter().map(|(start, end)| (end - start) as u64).sum()
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = is_enough;
        0
    }
}

/// Makes the kernel map this program's code in small pages on demand. If the executable lies in huge pages of the page
/// cache, a first touch would otherwise map 2 MiB.
pub fn disable_huge_code_pages() {
    #[cfg(target_os = "linux")]
    for line in std::fs::read_to_string("/proc/self/maps").unwrap_or_default().lines() {
        let Some((start, end, executable)) = parse_code_mapping(line) else { continue };
        // SAFETY: the advice changes no content. Read-execute mappings are backed by the file and fault in again when
        // touched; pages that were written to, such as relocations, are in other mappings.
        unsafe {
            let _ = madvise(start as *mut _, end - start, Advice::LinuxNoHugepage);
            if executable {
                let _ = madvise(start as *mut _, end - start, Advice::LinuxDontNeed);
            }
        }
    }
}

/// Start, end and whether it is executable, of a file mapping that is not writable, from a line of `/proc/self/maps`.
#[cfg(target_os = "linux")]
fn parse_code_mapping(line: &str) -> Option<(usize, usize, bool)> {
    let mut fields = line.split_whitespace();
    let (range, rights) = (fields.next()?, fields.next()?);
    let file = fields.nth(3)?;
    let (start, end) = range.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    let wanted = file.starts_with('/') && matches!(rights, "r--p" | "r-xp");
    wanted.then_some((address(start)?, address(end)?, rights == "r-xp"))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn work_whose_code_is_not_mapped_has_headroom() {
        let mut recent = RecentWork::default();
        let limits = |recent: &RecentWork| {
            [WorkPhase::Training, WorkPhase::Update, WorkPhase::Evaluation]
                .map(|work| recent.limit(work, 100, 30))
        };
        assert_eq!(limits(&recent), [70, 70, 70]);
        recent.note(WorkPhase::Training, false);
        recent.note(WorkPhase::Update, false);
        assert_eq!(limits(&recent), [100, 100, 70]);
        recent.note(WorkPhase::Update, true);
        assert_eq!(limits(&recent), [70, 100, 70]);
    }

    #[test]
    fn code_mappings_are_distinguished_from_data_and_stack() {
        let line = |rights: &str, file: &str| format!("55d0-55e0 {rights} 0001000 08:01 1234   {file}");
        assert_eq!(parse_code_mapping(&line("r-xp", "/bin/x")), Some((0x55d0, 0x55e0, true)));
        assert_eq!(parse_code_mapping(&line("r--p", "/bin/x")), Some((0x55d0, 0x55e0, false)));
        assert_eq!(parse_code_mapping(&line("rw-p", "/bin/x")), None);
        assert_eq!(parse_code_mapping(&line("rw-p", "[heap]")), None);
        assert_eq!(parse_code_mapping("7f00-7f01 r-xp 0000 00:00 0"), None);
        disable_huge_code_pages();
    }
}
