//! What a job declares, and the types that everything above it shares. Nothing here computes in a loop over samples,
//! so it is built for a short build rather than for speed.

pub mod base;
pub mod job;
