//! What Linux reports about this process.

use std::fs::read_to_string;

/// An entry of this process's `/proc/self/status` in bytes, if the file exists.
pub fn proc_status(key: &str) -> Option<u64> {
    parse_status(&read_to_string("/proc/self/status").ok()?, key)
}

/// Resident bytes of this process, if the system reports them: counted page by page, where that is to be had. `VmRSS` lags
/// behind by up to a batch of pages per CPU, of files and of the heap each.
pub fn exact_resident() -> Option<u64> {
    let counted = read_to_string("/proc/self/smaps_rollup").ok().and_then(|text| parse_status(&text, "Rss:"));
    counted.or_else(|| proc_status("VmRSS:"))
}

/// An entry of `/proc/self/status` in bytes: `VmSize:` is the address space in use, `VmRSS:` the resident memory and
/// `VmHWM:` its peak.
fn parse_status(status: &str, key: &str) -> Option<u64> {
    let kilobytes = status.lines().find_map(|line| line.strip_prefix(key)?.strip_suffix("kB"));
    Some(kilobytes?.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_memory_in_use_are_read() {
        let status = "Name:\tx\nVmPeak:\t 9 kB\nVmSize:\t    1234 kB\nVmRSS:\t 8 kB\n";
        assert_eq!(parse_status(status, "VmSize:"), Some(1234 * 1024));
        assert_eq!(parse_status(status, "VmRSS:"), Some(8192));
        assert_eq!(parse_status("", "VmSize:"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn resident_memory_is_counted() {
        let held = std::hint::black_box(vec![1u8; 32 << 20]);
        assert!(exact_resident().unwrap() > held.len() as u64);
    }
}
