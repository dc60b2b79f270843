//! Fuzzes the reader of the file format that `TARGET` in the environment names. A panic, a timeout, an allocation beyond
//! the limit (`-malloc_limit_mb`) or a failed assertion is a defect. `just fuzz TARGET SECONDS` builds and runs it.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

#[path = "../tests/hostile_files.rs"]
mod hostile_files;

static TARGET: LazyLock<String> = LazyLock::new(|| std::env::var("TARGET").expect("TARGET names the reader"));

fuzz_target!(|data: &[u8]| hostile_files::read(&TARGET, data));
