//! The process part of a plan: resident memory outside the counted heap.
//!
//! Code, thread stacks, allocator overhead and library caches are resident too, and the OOM killer counts the sum. They
//! are measured when the plan is made, after freed memory was returned to the system, and what comes later is added:
//! training has not touched its stacks yet. Which code is resident depends on what ran, on how the kernel reads ahead
//! and on how the executable lies in the page cache, so the plan counts all of it, and training maps all of it.

use super::{measure, pressure, probe};

/// Read-only mappings of other files up to this size are counted as code too: the small libraries of the system. A large
/// one, such as those of a GPU, is never needed whole.
const SMALL_LIBRARY_BYTES: usize = 4 << 20;

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

/// A page of the kernel, or a part of one.
const PAGE_BYTES: usize = 4096;

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

impl ProcessMemory {
    /// Returns freed memory to the system and measures this process, which will touch these stacks. `leftover_heap`:
    /// live heap that no reservation covers. All zero if the system does not report its memory.
    pub fn measure(stacks: ThreadStacks, leftover_heap: u64) -> Self {
        if let Some(fixed) = std::env::var(FIXED_BYTES_VAR).ok().and_then(|text| text.parse().ok()) {
            return Self { non_heap: fixed, ..Self::default() };
        }
        pressure::release_to_os();
        let preparation_peak = (measure::resident_peak() + RSS_COUNTER_LAG).next_multiple_of(GRANULARITY);
        let Some(resident) = probe::proc_status("VmRSS:") else { return Self::default() };
        let unmapped_code: u64 = code_mappings().iter().map(CodeMapping::unmapped_bytes).sum();
        let later = unmapped_code + FRAGMENTATION_BYTES + stacks.bytes();
        let non_heap = (resident.saturating_sub(measure::live_bytes()) + later).next_multiple_of(GRANULARITY);
        Self { non_heap, preparation_peak, leftover_heap }
    }

    /// Trims fragments of freed memory if resident memory comes close to `planned` bytes. Costs some microseconds if
    /// there is nothing to do.
    pub fn enforce_limit(&self, planned: u64) {
        // /proc/self/statm: field 1 is resident pages.
        let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
        let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
        let margin = (planned / TRIM_MARGIN_FRACTION).clamp(TRIM_MARGIN_BYTES.0, TRIM_MARGIN_BYTES.1);
        if pages.unwrap_or(0) * PAGE_BYTES as u64 + margin > planned {
            pressure::trim_malloc();
        }
    }
}

/// Maps all code that the plan counts, so that it is resident from the first step on as planned, and no step waits for
/// it.
pub fn map_code() {
    for mapping in code_mappings() {
        for page in (mapping.start..mapping.end).step_by(PAGE_BYTES) {
            // SAFETY: the page belongs to a readable mapping of the program or a library, which are never unmapped.
            unsafe { std::ptr::read_volatile(page as *const u8) };
        }
    }
}

/// A read-only mapping of the executable or a small library.
#[derive(Debug, PartialEq, Eq)]
struct CodeMapping {
    start: usize,
    end: usize,
    resident_bytes: u64,
}

impl CodeMapping {
    fn unmapped_bytes(&self) -> u64 {
        ((self.end - self.start) as u64).saturating_sub(self.resident_bytes)
    }
}

/// The code of this process; empty if the system does not report it.
fn code_mappings() -> Vec<CodeMapping> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let executable = std::fs::read_link("/proc/self/exe").unwrap_or_default();
    parse_code_mappings(&smaps, &executable.to_string_lossy())
}

/// The code mappings in the text of `/proc/self/smaps`: a line for each mapping, followed by lines of its counters.
fn parse_code_mappings(smaps: &str, executable: &str) -> Vec<CodeMapping> {
    let mut mappings: Vec<CodeMapping> = Vec::new();
    let mut is_code = false;
    for line in smaps.lines() {
        if let Some(kilobytes) = line.strip_prefix("Rss:").and_then(|rest| rest.strip_suffix("kB")) {
            if let (true, Some(last)) = (is_code, mappings.last_mut()) {
                last.resident_bytes = kilobytes.trim().parse::<u64>().unwrap_or(0) * 1024;
            }
        } else if let Some((start, end, file)) = parse_read_only_mapping(line) {
            is_code = file == executable || end - start <= SMALL_LIBRARY_BYTES;
            if is_code {
                mappings.push(CodeMapping { start, end, resident_bytes: 0 });
            }
        } else if !line.split(' ').next().unwrap_or("").ends_with(':') {
            is_code = false;
        }
    }
    mappings
}

/// Start, end and file of a mapping that is readable and not writable, from its first line in `/proc/self/smaps`.
fn parse_read_only_mapping(line: &str) -> Option<(usize, usize, &str)> {
    let mut fields = line.splitn(6, ' ');
    let (range, rights) = (fields.next()?, fields.next()?);
    let file = fields.nth(3)?.trim_start();
    let (start, end) = range.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    let wanted = file.starts_with('/') && matches!(rights, "r--p" | "r-xp");
    wanted.then_some((address(start)?, address(end)?, file))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_program_and_small_libraries_are_code() {
        let smaps = "\
1000-3000 r--p 00000000 08:01 1234                       /bin/x y\nSize: 8 kB\nRss:                4 kB\n\
3000-5000 rw-p 00002000 08:01 1234                       /bin/x y\nRss:                8 kB\n\
5000-6000 rw-p 00000000 00:00 0 \nRss:                8 kB\n\
10000000-20000000 r-xp 00000000 08:01 99                 /lib/large.so\nRss:                64 kB\n\
20000000-20001000 r-xp 00000000 08:01 98                 /lib/small.so\nRss:                0 kB\n\
30000000-30001000 r-xp 00000000 00:00 0                  [vdso]\nRss:                4 kB\n";
        let code = parse_code_mappings(smaps, "/bin/x y");
        let mapping = |start, end, resident_bytes| CodeMapping { start, end, resident_bytes };
        assert_eq!(code, [mapping(0x1000, 0x3000, 4096), mapping(0x2000_0000, 0x2000_1000, 0)]);
        assert_eq!(code.iter().map(CodeMapping::unmapped_bytes).collect::<Vec<_>>(), [4096, 4096]);
    }

    #[test]
    fn mapped_code_is_resident() {
        map_code();
        let code = code_mappings();
        let total: usize = code.iter().map(|mapping| mapping.end - mapping.start).sum();
        let unmapped: u64 = code.iter().map(CodeMapping::unmapped_bytes).sum();
        assert!(total > 8 << 20, "the code of this test is larger than {total} bytes");
        assert!(unmapped < total as u64 / 8, "{unmapped} of {total} bytes are not resident");
    }
}
