//! Reads how much memory the host has, and under which limits this process runs.
//!
//! Takes nothing, gives a [`HostInfo`]. A limit that cannot be read counts as absent. Pure functions parse the texts of
//! the kernel's files, so that tests can cover any machine on any other.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

use serde::Serialize;
use sysinfo::{MemoryRefreshKind, RefreshKind, System};

use crate::base::proc_status::proc_status;

const MIB: u64 = 1 << 20;

/// The host's current memory, and the limits of this process. All in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostInfo {
    pub total: u64,
    /// Available without swapping.
    pub available: u64,
    pub swap_total: u64,
    pub swap_free: u64,
    /// The tightest memory cgroup among this process's own and its ancestors.
    pub cgroup: Option<Cgroup>,
    /// `RLIMIT_AS`, which limits address space rather than memory.
    pub address_space: Option<AddressSpace>,
    /// Threads that can run in parallel.
    pub cores: usize,
    /// Resident memory of this process, if known.
    pub resident: Option<u64>,
    /// Name of the processor; empty if the system does not report it.
    pub processor: String,
}

/// A memory cgroup with a limit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cgroup {
    pub path: PathBuf,
    pub limit: u64,
    /// Usage minus the file cache that the kernel would reclaim first.
    pub used: u64,
}

/// The limit on the address space of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct AddressSpace {
    pub limit: u64,
    pub used: u64,
}

/// Which limit binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryLimit {
    Available,
    Cgroup,
    AddressSpace,
}

impl std::fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self {
            MemoryLimit::Available => "available memory",
            MemoryLimit::Cgroup => "the cgroup limit",
            MemoryLimit::AddressSpace => "RLIMIT_AS",
        })
    }
}

impl Cgroup {
    pub fn remaining(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

impl AddressSpace {
    pub fn remaining(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

impl HostInfo {
    /// The binding limit, and the bytes it leaves.
    fn binding_limit(&self) -> (u64, MemoryLimit) {
        let cgroup = self.cgroup.as_ref().map(|c| (c.remaining(), MemoryLimit::Cgroup));
        let space = self.address_space.map(|a| (a.remaining(), MemoryLimit::AddressSpace));
        let available = (self.available, MemoryLimit::Available);
        [cgroup, space].into_iter().flatten().fold(available, |a, b| if b.0 < a.0 { b } else { a })
    }

    /// Bytes a run can use now.
    pub fn usable(&self) -> u64 {
        self.binding_limit().0
    }

    /// Bytes this process can use in total: what is left plus what it already holds, since a plan counts the whole
    /// process, minus what the limit counts and a plan does not. A cgroup counts page tables, a five-hundredth of the
    /// memory they map, and the kernel memory of each thread and mapping; `RLIMIT_AS` counts whole stacks of 2 MiB each.
    pub fn process_budget(&self) -> u64 {
        let (left, limit) = self.binding_limit();
        let uncounted = match limit {
            MemoryLimit::Available => 0,
            MemoryLimit::Cgroup => 2 * MIB + self.process_limit() / 256,
            MemoryLimit::AddressSpace => 8 * MIB + 4 * MIB * self.cores as u64,
        };
        left.saturating_add(self.resident.unwrap_or(0)).saturating_sub(uncounted).min(self.process_limit())
    }

    /// The limit behind [`Self::usable`].
    pub fn limited_by(&self) -> MemoryLimit {
        self.binding_limit().1
    }

    /// Maximum bytes of a process on this host: a percentage in `memory.ram` is of this.
    pub fn process_limit(&self) -> u64 {
        let limits = [self.cgroup.as_ref().map(|c| c.limit), self.address_space.map(|a| a.limit)];
        limits.into_iter().flatten().fold(self.total, u64::min)
    }
}

/// The system does not report how much memory it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot read how much memory this machine has")]
pub struct ProbeError;

/// Probes the host.
pub fn host() -> Result<HostInfo, ProbeError> {
    let kind = RefreshKind::nothing().with_memory(MemoryRefreshKind::everything());
    let system = System::new_with_specifics(kind).map_err(|_| ProbeError)?;
    if system.total_memory() == 0 {
        return Err(ProbeError);
    }
    Ok(HostInfo {
        total: system.total_memory(),
        available: system.available_memory(),
        swap_total: system.total_swap(),
        swap_free: system.free_swap(),
        cgroup: cgroup(),
        address_space: address_space(),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        resident: proc_status("VmRSS:"),
        processor: processor(),
    })
}

/// Name of the processor, from the kernel's own file: querying every core would take longer than everything else.
fn processor() -> String {
    let name = |text: String| {
        let line = text.lines().find_map(|line| line.strip_prefix("model name"))?;
        Some(line.trim_start_matches([' ', '\t', ':']).to_owned())
    };
    read_to_string("/proc/cpuinfo").ok().and_then(name).unwrap_or_default()
}

fn cgroup() -> Option<Cgroup> {
    let groups = read_to_string("/proc/self/cgroup").ok()?;
    let mounts = read_to_string("/proc/self/mountinfo").ok()?;
    let chains = memory_groups(&groups, &mounts);
    chains
        .iter()
        .flat_map(|(version, group, mount)| cgroup_limits(*version, group, mount))
        .min_by_key(Cgroup::remaining)
}

/// OOM kills so far: in the memory cgroup of this process or, if it is in none or the cgroup does not report them, on
/// the whole machine.
pub fn oom_kills() -> Option<u64> {
    let groups = read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mounts = read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let of_group = |(version, group, mount): &(CgroupVersion, PathBuf, PathBuf)| {
        let name = match version {
            CgroupVersion::V1 => "memory.oom_control",
            CgroupVersion::V2 => "memory.events",
        };
        // A v2 cgroup includes the events of its descendants; a cgroup without the memory controller has no such file.
        let mut folders = group.ancestors().take_while(|folder| folder.starts_with(mount) && folder != mount);
        folders.find_map(|folder| parse_counter(&read_to_string(folder.join(name)).ok()?, "oom_kill"))
    };
    let machine = || parse_counter(&read_to_string("/proc/vmstat").ok()?, "oom_kill");
    memory_groups(&groups, &mounts).iter().find_map(of_group).or_else(machine)
}

/// The value of a `name value` line.
fn parse_counter(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Every cgroup with a limit from `group` up to the mount: whichever leaves the least binds.
fn cgroup_limits(version: CgroupVersion, group: &Path, mount: &Path) -> Vec<Cgroup> {
    let up_to_mount = group.ancestors().take_while(|folder| folder.starts_with(mount));
    up_to_mount.filter_map(|folder| read_group(version, folder)).collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CgroupVersion {
    V1,
    V2,
}

/// The directories of this process's memory cgroups, each with its mount point, from the texts of `/proc/self/cgroup`
/// and `/proc/self/mountinfo`.
fn memory_groups(groups: &str, mounts: &str) -> Vec<(CgroupVersion, PathBuf, PathBuf)> {
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(group)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let version = match controllers {
            "" => CgroupVersion::V2,
            list if list.split(',').any(|c| c == "memory") => CgroupVersion::V1,
            _ => continue,
        };
        if let Some((root, mount)) = mounts.lines().find_map(|line| memory_mount(version, line)) {
            // A container sees its own cgroup as the mount's root, or a path outside the mount: in both cases the mount
            // itself is the cgroup.
            let inside = Path::new(group).strip_prefix(root).unwrap_or(Path::new(""));
            found.push((version, mount.join(inside), mount));
        }
    }
    found
}

/// Root and mount point from a `mountinfo` line that mounts the memory controller.
fn memory_mount(version: CgroupVersion, line: &str) -> Option<(&str, PathBuf)> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(3);
    let (root, mount) = (left.next()?, left.next()?);
    let mut right = right.split(' ');
    let (fs_type, options) = (right.next()?, right.nth(1).unwrap_or_default());
    let ours = match version {
        CgroupVersion::V1 => fs_type == "cgroup" && options.split(',').any(|option| option == "memory"),
        CgroupVersion::V2 => fs_type == "cgroup2",
    };
    ours.then(|| (root, PathBuf::from(mount)))
}

/// Limit and usage of the cgroup at `folder`; `None` without a limit.
fn read_group(version: CgroupVersion, folder: &Path) -> Option<Cgroup> {
    let read = |name: &str| read_to_string(folder.join(name)).ok();
    let (limit, usage, cache) = match version {
        CgroupVersion::V1 => ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        CgroupVersion::V2 => ("memory.max", "memory.current", "inactive_file"),
    };
    let limit = parse_limit(&read(limit)?)?;
    let usage = read(usage)?.trim().parse::<u64>().ok()?;
    let cache = read("memory.stat").and_then(|stat| parse_stat(&stat, cache)).unwrap_or(0);
    Some(Cgroup { path: folder.to_owned(), limit, used: usage.saturating_sub(cache) })
}

/// A cgroup limit: for none, v2 says `max` and v1 a number near 2^63.
fn parse_limit(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|limit| *limit < 1 << 60)
}

fn parse_stat(stat: &str, key: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(unix)]
fn address_space() -> Option<AddressSpace> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::As).current?;
    Some(AddressSpace { limit, used: proc_status("VmSize:").unwrap_or(0) })
}

#[cfg(not(unix))]
fn address_space() -> Option<AddressSpace> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn sample_host() -> HostInfo {
        HostInfo {
            total: 16 * GIB,
            available: 10 * GIB,
            swap_total: 0,
            swap_free: 0,
            cgroup: None,
            address_space: None,
            cores: 2,
            resident: None,
            processor: String::new(),
        }
    }

    #[test]
    fn counters_are_read_by_their_whole_name() {
        let v1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n";
        let v2 = "low 0\nmax 7\noom 2\noom_kill 2\noom_group_kill 1\n";
        assert_eq!((parse_counter(v1, "oom_kill"), parse_counter(v2, "oom_kill")), (Some(3), Some(2)));
        assert_eq!(parse_counter("oom_kill_disable 0\n", "oom_kill"), None);
        assert!(!cfg!(target_os = "linux") || oom_kills().is_some());
    }

    #[test]
    fn the_smallest_of_three_binds() {
        let mut host = sample_host();
        assert_eq!(
            (host.usable(), host.limited_by(), host.process_limit()),
            (10 * GIB, MemoryLimit::Available, 16 * GIB)
        );
        host.cgroup = Some(Cgroup { path: "/g".into(), limit: 8 * GIB, used: GIB });
        assert_eq!(
            (host.usable(), host.limited_by(), host.process_limit()),
            (7 * GIB, MemoryLimit::Cgroup, 8 * GIB)
        );
        host.address_space = Some(AddressSpace { limit: 4 * GIB, used: 5 * GIB });
        assert_eq!(
            (host.usable(), host.limited_by(), host.process_limit()),
            (0, MemoryLimit::AddressSpace, 4 * GIB)
        );
    }

    #[test]
    fn version_2_group_is_found_under_its_mount() {
        let mounts = "24 30 0:22 / /proc rw - proc proc rw\n\
                      29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        let found = memory_groups("0::/user.slice/app.service\n", mounts);
        let mount = PathBuf::from("/sys/fs/cgroup");
        assert_eq!(found, [(CgroupVersion::V2, mount.join("user.slice/app.service"), mount)]);
    }

    #[test]
    fn version_1_group_is_found_by_its_controller() {
        let groups = "5:devices:/x\n4:memory:/box/run\n0::/\n";
        let mounts = "31 25 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                      32 25 0:28 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n";
        let mount = PathBuf::from("/sys/fs/cgroup/memory");
        assert_eq!(memory_groups(groups, mounts), [(CgroupVersion::V1, mount.join("box/run"), mount)]);
    }

    #[test]
    fn a_container_that_sees_only_its_own_group_uses_the_mount() {
        let mounts = "32 25 0:28 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let mount = PathBuf::from("/sys/fs/cgroup/memory");
        let found = memory_groups("4:memory:/docker/abc\n", mounts);
        assert_eq!(found, [(CgroupVersion::V1, mount.join(""), mount.clone())]);
        let found = memory_groups("4:memory:/elsewhere\n", mounts);
        assert_eq!(found, [(CgroupVersion::V1, mount.join(""), mount)]);
    }

    #[test]
    fn no_limit_is_none_in_both_versions() {
        assert_eq!(parse_limit("max\n"), None);
        assert_eq!(parse_limit("9223372036854771712\n"), None);
        assert_eq!(parse_limit("1073741824\n"), Some(GIB));
        assert_eq!(parse_limit(""), None);
    }

    #[test]
    fn a_group_is_read_from_its_folder_less_its_file_cache() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("memory.max", "1000\n");
        write("memory.current", "700\n");
        write("memory.stat", "anon 400\ninactive_file_x 9\ninactive_file 300\n");
        let group = read_group(CgroupVersion::V2, folder.path()).unwrap();
        assert_eq!((group.limit, group.used, group.remaining()), (1000, 400, 600));
        write("memory.max", "max\n");
        assert_eq!(read_group(CgroupVersion::V2, folder.path()), None);
    }

    #[test]
    fn a_limit_above_binds_the_group_below() {
        let mount = tempfile::tempdir().unwrap();
        let inner = mount.path().join("outer/inner");
        std::fs::create_dir_all(&inner).unwrap();
        let write = |folder: &Path, name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
        for (folder, limit, usage) in
            [(inner.as_path(), "900\n", "100\n"), (inner.parent().unwrap(), "500\n", "450\n")]
        {
            write(folder, "memory.limit_in_bytes", limit);
            write(folder, "memory.usage_in_bytes", usage);
        }
        let found = cgroup_limits(CgroupVersion::V1, &inner, mount.path());
        assert_eq!(found.iter().map(Cgroup::remaining).collect::<Vec<_>>(), [800, 50]);
    }

    #[test]
    fn this_machine_has_memory() {
        let host = host().unwrap();
        assert!(host.total > 0 && host.process_limit() > 0 && host.cores > 0, "{host:?}");
        assert!(host.usable() <= host.available, "{host:?}");
    }
}
