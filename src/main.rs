//! Entry point: arguments in, exit code out.

/// Counts actual heap use, to compare it with the plan.
#[global_allocator]
static ALLOCATOR: trainer::memory::measure::CountingAllocator = trainer::memory::measure::CountingAllocator;

fn main() -> std::process::ExitCode {
    trainer::memory::measure::tune_malloc();
    trainer::train::signals::ignore_sigxfsz();
    trainer::memory::code_pages::divide();
    trainer::cli::run(std::env::args_os()).into()
}
