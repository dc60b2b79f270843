//! How much memory a run may use, from the job's `[memory]` and what the machine has.

use crate::base::features::Features;
use crate::base::units::{Bytes, MemorySize};
use crate::base::{ComputeCapability, HOPPER};
use crate::job::{Job, MemoryConfig};
use crate::memory::gpu::{self, GpuInfo};
use crate::memory::probe::HostInfo;

/// The machine that a plan is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetMachine {
    /// `cpu`, or `cuda` for a GPU that need not be present.
    pub device: String,
    /// Host bytes the run may use.
    pub ram: u64,
    /// Device bytes the run may use; 0 on the CPU.
    pub vram: u64,
    /// Physical host bytes: no budget can exceed them.
    pub max_ram: u64,
    /// Device bytes that the CUDA context takes besides the budget, if known.
    pub context_bytes: u64,
    /// Compute capability of the device.
    pub capability: ComputeCapability,
}

impl TargetMachine {
    /// A CPU-only machine with these host bytes; it may be this one or a hypothetical one.
    pub fn cpu(ram: u64, max_ram: u64) -> Self {
        Self { device: "cpu".into(), ram, vram: 0, max_ram, context_bytes: 0, capability: HOPPER }
    }

    pub fn on_device(&self) -> bool {
        self.vram > 0
    }
}

/// Host bytes a job may use on this machine now, this process included. `auto` is the available memory minus the
/// headroom; a size or a percentage is taken as stated, capped at the available memory.
pub fn host(memory: &MemoryConfig, host: &HostInfo) -> u64 {
    let available = Bytes(host.process_budget());
    let stated = match memory.ram {
        MemorySize::Auto => memory.usable(available),
        MemorySize::Bytes(bytes) => bytes,
        percent => percent.resolve(Bytes(host.process_limit())),
    };
    stated.min(available).0
}

/// Device bytes that a job's tensors may use. `auto` is the free memory minus the headroom, which is never less than
/// what the heap and the driver need beside tensors; a size is taken as stated; a percentage is of the total memory.
pub fn gpu(memory: &MemoryConfig, info: &GpuInfo) -> u64 {
    match memory.vram {
        MemorySize::Auto => memory.usable(Bytes(info.free)).0.min(gpu::max_tensor_bytes(info.free)),
        MemorySize::Bytes(bytes) => bytes.0,
        percent => percent.resolve(Bytes(info.total)).0,
    }
}

/// Micro-batches the loader may hold regardless of their size. With fewer, workers wait for each other.
const MIN_PREFETCH_BATCHES: u64 = 4;

/// Limit of the loader's buffers in bytes, given the host memory budget.
pub fn prefetch(job: &Job, features: &Features, ram: u64) -> u64 {
    match job.data.loader.prefetch {
        // A tenth of the budget is ample for every dataset with small samples.
        MemorySize::Auto => {
            let minimum =
                features.sample_bytes().saturating_mul(MIN_PREFETCH_BATCHES * job.train.batch_size as u64);
            (ram / 10).min(minimum.max(256 << 20))
        }
        size => size.resolve(Bytes(ram)).0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_never_more_than_there_is() {
        let there = HostInfo {
            total: 1000,
            available: 800,
            swap_total: 0,
            swap_free: 0,
            cgroup: None,
            address_space: None,
            cores: 1,
            resident: None,
            processor: String::new(),
        };
        let with =
            |ram: &str| host(&MemoryConfig { ram: ram.parse().unwrap(), ..MemoryConfig::default() }, &there);
        assert_eq!(with("auto"), 760);
        assert_eq!(with("500B"), 500);
        assert_eq!(with("50%"), 500);
        assert_eq!(with("100%"), 800);
        assert_eq!(with("8GiB"), 800);
    }

    /// On a GPU with much free memory the headroom decides, with little the reserve for the driver.
    #[test]
    fn an_automatic_budget_leaves_the_driver_its_reserve() {
        const MIB: u64 = 1 << 20;
        let with = |vram: &str, free: u64| {
            let memory = MemoryConfig { vram: vram.parse().unwrap(), ..MemoryConfig::default() };
            let (total, capability) = (140 << 30, HOPPER);
            gpu(
                &memory,
                &GpuInfo { ordinal: 0, model: String::new(), total, free, capability, context_bytes: 0 },
            )
        };
        assert_eq!(with("auto", 100 << 30), (100 << 30) / 100 * 95);
        assert_eq!(with("auto", 2048 * MIB), (2048 - 64 - 96) * MIB);
        assert_eq!(
            with("auto", (64 + 180) * MIB),
            160 * MIB,
            "an eighth for chunks that tensors fill partially"
        );
        assert_eq!(with("auto", 50 * MIB), 0);
        assert_eq!(with("200MiB", 50 * MIB), 200 * MIB, "as stated");
    }
}
