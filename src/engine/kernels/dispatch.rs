//! The instruction sets of the CPU kernels: the best that the processor has, detected once, or the one that
//! `TRAINER_CPU_DISPATCH` names.
//!
//! The process makes one choice, the same in debug and release builds. Workspace sizes, packing and result bits depend
//! on it, so it cannot change during a run. Dispatches group sums differently, so GEMM results differ in the last
//! digits between them; within one dispatch no result depends on thread timing.

use std::sync::OnceLock;

/// Environment variable that overrides the detected dispatch.
pub const ENV_VAR: &str = "TRAINER_CPU_DISPATCH";

/// Instruction sets, each including those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dispatch {
    /// The baseline of the architecture.
    Portable,
    /// 32-byte vectors: AVX2, FMA, BMI2 and F16C.
    Avx2,
    /// 64-byte vectors: AVX-512 F, BW, DQ and VL.
    Avx512,
    /// bf16 tiles: AMX, where the operating system grants it to the process.
    Amx,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum DispatchError {
    #[error(
        "`{ENV_VAR}={0}` names no dispatch; allowed: {names}",
        names = Dispatch::ALL.map(Dispatch::name).join(", ")
    )]
    Unknown(String),
    #[error("`{ENV_VAR}={name}` asks for instructions that this processor or system does not have", name = .0.name())]
    Unavailable(Dispatch),
}

impl Dispatch {
    pub const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Amx];

    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        }
    }

    /// The best dispatch this process can use.
    pub fn best() -> Self {
        static BEST: OnceLock<Dispatch> = OnceLock::new();
        *BEST.get_or_init(detect)
    }

    pub fn is_available(self) -> bool {
        self <= Self::best()
    }

    /// Parses a value of [`ENV_VAR`]; the best dispatch if it is absent or empty.
    fn from_env_value(value: Option<&str>) -> Result<Self, DispatchError> {
        let Some(name) = value.filter(|name| !name.is_empty()) else { return Ok(Self::best()) };
        let known = Self::ALL.into_iter().find(|dispatch| dispatch.name() == name);
        match known.ok_or_else(|| DispatchError::Unknown(name.to_owned()))? {
            dispatch if dispatch.is_available() => Ok(dispatch),
            dispatch => Err(DispatchError::Unavailable(dispatch)),
        }
    }
}

/// The dispatch that the environment requests. Commands call this first and exit with its error; after that
/// [`dispatch`] cannot fail.
pub fn requested() -> Result<Dispatch, DispatchError> {
    Dispatch::from_env_value(
        std::env::var_os(ENV_VAR).as_ref().map(|value| value.to_string_lossy()).as_deref(),
    )
}

/// The dispatch this process uses.
#[inline]
pub fn dispatch() -> Dispatch {
    static CHOSEN: OnceLock<Dispatch> = OnceLock::new();
    *CHOSEN.get_or_init(|| requested().unwrap_or_else(|_| Dispatch::best()))
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Dispatch {
    Dispatch::Portable
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Dispatch {
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("f16c");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (false, _) => Dispatch::Portable,
        (true, false) => Dispatch::Avx2,
        (true, true) if has_amx() && amx_is_permitted() => Dispatch::Amx,
        (true, true) => Dispatch::Avx512,
    }
}

/// CPUID bits for AMX tiles and AMX-BF16.
#[cfg(target_arch = "x86_64")]
fn has_amx() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE
}

/// Linux saves tile state only for processes that request it with `arch_prctl`; kernels older than AMX refuse.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn amx_is_permitted() -> bool {
    const SYS_ARCH_PRCTL: isize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;
    let status: isize;
    // SAFETY: the system call reads its two integer arguments and no memory; the kernel overwrites rcx and r11.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") SYS_ARCH_PRCTL => status,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack)
        )
    };
    status == 0
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn amx_is_permitted() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_and_refused() {
        assert_eq!(Dispatch::from_env_value(None), Ok(Dispatch::best()));
        assert_eq!(Dispatch::from_env_value(Some("")), Ok(Dispatch::best()));
        assert_eq!(Dispatch::from_env_value(Some("portable")), Ok(Dispatch::Portable));
        assert_eq!(Dispatch::from_env_value(Some("AVX2")), Err(DispatchError::Unknown("AVX2".into())));
        for dispatch in Dispatch::ALL {
            let parsed = Dispatch::from_env_value(Some(dispatch.name()));
            assert_eq!(parsed.is_ok(), dispatch.is_available(), "{dispatch:?}");
        }
    }

    /// Runs the tests of kernels, layers and optimizers in child processes, one per other available dispatch.
    #[test]
    fn every_dispatch_passes_the_tests_of_kernels() {
        if std::env::var_os(ENV_VAR).is_some() {
            return println!("skipped: {ENV_VAR} chose {:?} for this process", dispatch());
        }
        for other in Dispatch::ALL.into_iter().filter(|other| *other != dispatch()) {
            if !other.is_available() {
                println!("skipped: this machine has no {}", other.name());
                continue;
            }
            let tests = std::env::current_exe().unwrap();
            let run = std::process::Command::new(tests)
                .args(["kernels::", "layers::", "optim::"])
                .env(ENV_VAR, other.name())
                .env_remove("TRAINER_TEST_DEVICE")
                .output()
                .unwrap();
            let stdout = String::from_utf8_lossy(&run.stdout);
            assert!(run.status.success(), "{}:\n{stdout}", other.name());
            println!("{}: {}", other.name(), stdout.lines().rfind(|l| !l.is_empty()).unwrap_or_default());
        }
    }
}
