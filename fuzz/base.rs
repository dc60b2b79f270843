//! What the readers use of the crate's floor.

#[path = "../src/base/features.rs"]
pub mod features;
#[path = "../src/base/file_format.rs"]
pub mod file_format;
#[path = "../src/base/panics.rs"]
pub mod panics;
#[path = "../src/base/random.rs"]
pub mod random;
#[path = "../src/base/regular_file.rs"]
pub mod regular_file;
#[path = "../src/base/units.rs"]
pub mod units;
