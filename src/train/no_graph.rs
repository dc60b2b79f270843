//! Why the passes of a GPU run are not captured as CUDA graphs.

/// A reason, for the event `cuda_graph_disabled`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoGraph {
    #[error("the run is observed")]
    Observed,
    #[error("the reference backend launches candle's own kernels")]
    Reference,
    #[error("memory.graphs is false")]
    TurnedOff,
    #[error("the teacher's probabilities are compared by candle's own kernels")]
    Distilled,
    #[error("offloaded memory is copied by streams of its own")]
    Offloaded,
    #[error("no micro-batch shape occurred {0} times, as a capture needs")]
    TooFewPasses(u32),
    #[error("its arena of {} does not fit into the heap beside what lives longer", crate::base::units::Bytes(*.0))]
    ArenaDoesNotFit(u64),
    #[error("its allocations differ from pass to pass")]
    AllocationsDiffer,
    #[error("{0} tensors outlive the pass, not only its metric sums")]
    TensorsOutlive(usize),
    #[error("the pass synchronizes with the host")]
    HostReads,
    #[error("it was released when memory ran out")]
    Released,
    /// The driver's reason, or that of the kernel that cannot be captured.
    #[error("{0}")]
    NotCapturable(String),
}
