//! The run: steps, the loop, checkpoints, and the events it tells.

pub mod event;
