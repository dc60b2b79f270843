//! Uses of a trained model: evaluation, prediction, generation and export, without the training data.
//!
//! Takes a run, a checkpoint or an exported folder ([`trained_model`]), loads its weights within a memory budget
//! ([`session`]) and computes. Shares the network, the walk and the ledger with training.

mod bad_records;
pub mod calibration;
pub mod compress;
pub mod evaluate;
pub mod export;
mod exported_model;
pub mod generate;
pub mod predict;
pub mod session;
pub mod trained_model;
mod view_mean;
