//! Arguments in, exit code out.

/// Counts what is really used, to be held against what was planned.
#[global_allocator]
static ALLOCATOR: trainer::memory::measure::Counting = trainer::memory::measure::Counting;

fn main() -> std::process::ExitCode {
    trainer::memory::measure::steady_heap();
    trainer::train::signals::survive_file_limits();
    trainer::memory::process::small_code_pages();
    trainer::cli::run(std::env::args_os()).into()
}
