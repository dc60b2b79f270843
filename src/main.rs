//! Arguments in, exit code out.

/// Counts what is really used, to be held against what was planned.
#[global_allocator]
static ALLOCATOR: trainer::memory::measure::CountingAllocator = trainer::memory::measure::CountingAllocator;

fn main() -> std::process::ExitCode {
    trainer::memory::measure::tune_malloc();
    trainer::train::signals::ignore_sigxfsz();
    trainer::memory::process::disable_huge_code_pages();
    trainer::cli::run(std::env::args_os()).into()
}
