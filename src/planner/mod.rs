//! The memory plan: what a step takes, which execution plan is the fastest that fits, and which change would make one
//! fit.

pub mod advice;
pub mod budget;
pub mod correction;
pub mod cost_model;
pub mod estimate;
pub mod execution_plan;
pub mod generation;
pub mod ladder;
pub mod ledger_trace;
pub mod plan;
pub mod plan_lock;
pub mod prediction;
pub mod search;

pub use execution_plan::ExecutionPlan;
pub use plan::MemoryPlan;
