//! Any text as a job, its last line as a `--set`: loads or is refused, never panics; what loads can be
//! written out and read again. Run with `cargo +nightly fuzz run job`, seeded from `configs/`.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use trainer::job::Job;

fuzz_target!(|text: &str| {
    let (job, set) = text.rsplit_once('\n').unwrap_or((text, ""));
    let path = Path::new("job.toml");
    for sets in [vec![], vec![set.to_owned()]] {
        match Job::parse(job, path, &sets) {
            Ok(job) => assert_eq!(Job::parse(&job.to_toml(), path, &[]).as_ref(), Ok(&job)),
            Err(errors) => assert!(errors.to_string().starts_with("error: ")),
        }
    }
});
