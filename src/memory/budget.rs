//! How much memory a run may use.

use super::probe::Host;
use crate::job::Memory;
use crate::units::{Bytes, Size};

/// Host bytes a job may use on this machine now. `auto` is what is available less the headroom; a size or
/// a share is taken as stated, but never more than what is available.
pub fn host(memory: &Memory, host: &Host) -> u64 {
    let there = Bytes(host.usable());
    let stated = match memory.ram {
        Size::Auto => memory.usable(there),
        Size::Bytes(bytes) => bytes,
        share => share.of(Bytes(host.most())),
    };
    stated.min(there).0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_never_more_than_there_is() {
        let there = Host {
            total: 1000,
            available: 800,
            swap_total: 0,
            swap_free: 0,
            cgroup: None,
            address_space: None,
            cores: 1,
        };
        let with = |ram: &str| host(&Memory { ram: ram.parse().unwrap(), ..Memory::default() }, &there);
        assert_eq!(with("auto"), 760);
        assert_eq!(with("500B"), 500);
        assert_eq!(with("50%"), 500);
        assert_eq!(with("100%"), 800);
        assert_eq!(with("8GiB"), 800);
    }
}
