//! The network of layers and how it runs: one walk drives planning and training, with recomputation and offload.

pub mod decoding;
pub mod fusion;
pub mod network;
pub mod node_timer;
pub mod offload;
pub mod quantization;
pub mod reference;
