//! Arguments in, exit code out.

fn main() -> std::process::ExitCode {
    trainer::cli::run(std::env::args_os()).into()
}
