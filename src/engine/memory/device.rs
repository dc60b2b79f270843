//! The devices a run could use, with their total memory and what other processes hold of it.
//!
//! The CPU is always available, and its memory is the host's. A build with a GPU backend adds its GPUs to [`all`];
//! nothing else in the program enumerates devices.

use serde::Serialize;

use super::gpu;
use super::probe::HostInfo;

/// A device and its current memory, in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceInfo {
    /// The value of `--device`: `cpu`, `cuda:0`, ...
    pub name: String,
    /// Name of the processor or the GPU.
    pub model: String,
    pub total_bytes: u64,
    /// Bytes that a run could use now.
    pub free_bytes: u64,
    /// Bytes held by other processes, if known.
    pub others_bytes: Option<u64>,
    /// Major and minor version; GPUs only.
    pub compute_capability: Option<(u32, u32)>,
}

/// Every device of this machine that this build supports, the CPU first.
pub fn all(host: &HostInfo) -> Vec<DeviceInfo> {
    std::iter::once(cpu(host)).chain(gpu::all().into_iter().map(cuda)).collect()
}

fn cuda(info: gpu::GpuInfo) -> DeviceInfo {
    DeviceInfo {
        name: format!("cuda:{}", info.ordinal),
        model: info.model,
        total_bytes: info.total,
        free_bytes: info.free,
        others_bytes: Some(info.total - info.free),
        compute_capability: Some(info.capability),
    }
}

fn cpu(host: &HostInfo) -> DeviceInfo {
    DeviceInfo {
        name: "cpu".into(),
        model: host.processor.clone(),
        total_bytes: host.total,
        free_bytes: host.usable(),
        others_bytes: host.resident.map(|own| host.total.saturating_sub(host.available + own)),
        compute_capability: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::probe;

    #[test]
    fn the_cpu_is_always_there_and_its_memory_is_the_hosts() {
        let host = probe::host().unwrap();
        let devices = all(&host);
        assert_eq!((devices[0].name.as_str(), devices[0].total_bytes), ("cpu", host.total));
        assert!(devices[0].free_bytes <= host.available);
        let others = devices[0].others_bytes;
        assert!(others.is_none_or(|others| others < host.total - host.available), "{devices:?}");
    }
}
