//! How much of this program's code and constants is resident.
//!
//! A page fault also maps the pages around the one that was touched: 64 KiB, or 2 MiB where the page cache holds huge
//! pages. Resident memory would then depend on the order of faults and on what else the machine runs. A fault never
//! maps beyond its mapping, so the program is divided into small mappings: little more than the code that runs is
//! resident. Pages can be dropped at any time; touching them again maps them from the page cache.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Bytes of one mapping, a power of two. With 4 KiB, the kernel's records of mappings would take as much as is saved.
const MAPPING_BYTES: usize = 16 << 10;

/// Bytes that are dropped at once.
const CHUNK_BYTES: usize = 1 << 20;

/// The addresses of this program's code and constants.
fn ranges() -> &'static [Range<usize>] {
    static RANGES: OnceLock<Vec<Range<usize>>> = OnceLock::new();
    RANGES.get_or_init(|| {
        let program = std::fs::read_link("/proc/self/exe").unwrap_or_default();
        read_only_mappings(&program.to_string_lossy())
    })
}

/// The read-only mappings of files whose path ends with `path`.
fn read_only_mappings(path: &str) -> Vec<Range<usize>> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().filter(|line| line.ends_with(path)).filter_map(parse_read_only_mapping).collect()
}

/// Bytes of this program's code and constants, resident or not; 0 if the system does not say.
pub fn total_bytes() -> u64 {
    ranges().iter().map(|range| range.len() as u64).sum()
}

/// Divides the mappings of the program. Libraries, of which little is resident, are mapped in small pages.
pub fn divide() {
    read_only_mappings("").into_iter().for_each(|range| advise(range, Advice::SmallPages));
    for range in ranges() {
        // Neighbours are merged unless their flags differ.
        let second = (range.start.next_multiple_of(MAPPING_BYTES)..range.end).step_by(2 * MAPPING_BYTES);
        second.for_each(|start| {
            advise(start..range.end.min(start + MAPPING_BYTES), Advice::LeaveOutOfCoreDumps)
        });
        advise(range.clone(), Advice::Drop);
    }
}

/// Drops everything that is resident.
pub fn drop_all() {
    drop_until(|| false);
}

/// Drops chunk by chunk until `is_enough`, starting after the chunk dropped last.
pub fn drop_until(is_enough: impl Fn() -> bool) {
    static NEXT_CHUNK: AtomicUsize = AtomicUsize::new(0);
    let chunk_of = |range: &Range<usize>, start| start..range.end.min(start + CHUNK_BYTES);
    let chunks = || {
        ranges()
            .iter()
            .flat_map(|range| range.clone().step_by(CHUNK_BYTES).map(|start| chunk_of(range, start)))
    };
    let count = chunks().count();
    for _ in 0..count {
        chunks()
            .nth(NEXT_CHUNK.fetch_add(1, Relaxed) % count)
            .into_iter()
            .for_each(|chunk| advise(chunk, Advice::Drop));
        if is_enough() {
            break;
        }
    }
}

/// Advice to the kernel about pages.
#[derive(Clone, Copy)]
enum Advice {
    SmallPages,
    /// Debuggers read code from the program's file.
    LeaveOutOfCoreDumps,
    Drop,
}

fn advise(range: Range<usize>, advice: Advice) {
    #[cfg(target_os = "linux")]
    {
        use rustix::mm::{Advice as Linux, madvise};
        let advice = match advice {
            Advice::SmallPages => Linux::LinuxNoHugepage,
            Advice::LeaveOutOfCoreDumps => Linux::LinuxDontDump,
            Advice::Drop => Linux::LinuxDontNeed,
        };
        // SAFETY: no advice changes content. The pages are those of files, never written to, and are mapped again when
        // they are touched. A kernel that refuses an advice maps more than is needed.
        let _ = unsafe { madvise(range.start as *mut _, range.len(), advice) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (range, advice);
}

/// The addresses of a file mapping that is never written to, from a line of `/proc/self/maps`: code, or the constants
/// at the start of the file. Behind the code are tables that were written to before they became read-only.
fn parse_read_only_mapping(line: &str) -> Option<Range<usize>> {
    let mut fields = line.split_whitespace();
    let (range, rights, offset) = (fields.next()?, fields.next()?, fields.next()?);
    let file = fields.nth(2)?;
    let (start, end) = range.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    let never_written = rights == "r-xp" || (rights == "r--p" && address(offset)? == 0);
    (file.starts_with('/') && never_written).then_some(address(start)?..address(end)?)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_code_and_constants_are_distinguished_from_others() {
        let line = |rights: &str, offset: &str, file: &str| {
            parse_read_only_mapping(&format!("55d0-55e0 {rights} {offset} 08:01 1234   {file}"))
        };
        assert_eq!(line("r-xp", "00010000", "/bin/x"), Some(0x55d0..0x55e0));
        assert_eq!(line("r--p", "00000000", "/bin/x"), Some(0x55d0..0x55e0));
        assert_eq!(line("r--p", "00010000", "/bin/x"), None);
        assert_eq!(line("rw-p", "00000000", "/bin/x"), None);
        assert_eq!(line("r-xp", "00000000", "[vdso]"), None);
        assert_eq!(parse_read_only_mapping("7f00-7f01 r-xp 0000 00:00 0"), None);
    }

    /// What is dropped comes back with the code that runs, in small steps.
    #[test]
    fn a_divided_program_runs_on_and_maps_less() {
        let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count() as u64;
        let before = mappings();
        divide();
        let expected = total_bytes() / MAPPING_BYTES as u64;
        assert!(mappings() - before >= expected * 9 / 10, "{} of {expected}", mappings() - before);
        drop_all();
        let resident = crate::base::proc_status::proc_status("RssFile:").unwrap();
        assert!(resident < total_bytes() / 2, "{resident} of {}", total_bytes());
    }
}
