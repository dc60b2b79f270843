//! The run: steps, the loop, checkpoints, and the events it tells.

pub mod checkpoint;
pub mod engine;
pub mod event;
mod failure;
pub mod folder;
pub mod hooks;
pub mod owner;
#[cfg(feature = "cuda")]
mod passes;
mod planning;
pub mod postmortem;
pub mod retry;
pub mod run;
pub mod sets;
pub mod setup;
pub mod signals;
mod staging;
pub mod supervisor;
mod tensors;
pub mod trial;
pub mod verify;
pub mod waiting;

pub use failure::Failure;
