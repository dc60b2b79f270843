//! Memory, before and during: what is there, what a step needs, what is chosen, what is held.

pub mod plan;
pub mod probe;

pub use plan::Plan;
