//! The decoding pass: rewrites a network for generation, in which positions attend to a key-value cache.
//!
//! It runs before the fusion pass. The parameters stay those of the network, so weights trained with one run in the
//! other. Layers other than attention and position embeddings treat every position alike and stay as they are.

use std::any::Any;
use std::sync::Arc;

use super::network::{Network, Node};
use crate::kernels::rotary::Rotary;
use crate::layers::Layer;
use crate::layers::attention::Attention;
use crate::layers::cached_attention::CachedAttention;
use crate::layers::kv_cache::CacheDims;

/// Why a network cannot generate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodingError {
    #[error("layer `{0}` attends to later positions")]
    NotCausal(String),
    #[error("no layer attends to earlier positions")]
    NoAttention,
    #[error("layers `{first}` and `{other}` differ in their key heads, and share a cache")]
    Unequal { first: String, other: String },
}

/// A network that decodes, and what it needs besides its parameters.
pub struct DecodingNetwork {
    pub network: Network,
    pub cache: CacheDims,
    /// Rotary tables, built at first use.
    pub tables: Option<Arc<Rotary>>,
}

impl Network {
    /// The same network over a cache of `slots` sequences of up to `capacity` positions. Reuses `tables` if they fit.
    pub fn for_decoding(
        mut self,
        slots: usize,
        capacity: usize,
        tables: Option<&Arc<Rotary>>,
    ) -> Result<DecodingNetwork, DecodingError> {
        let mut pass = DecodingPass { capacity, slots, tables: tables.cloned(), cache: None };
        for block in &mut self.blocks {
            block.nodes = pass.rewrite_nodes(std::mem::take(&mut block.nodes))?;
        }
        let Some((_, cache)) = pass.cache else { return Err(DecodingError::NoAttention) };
        Ok(DecodingNetwork { network: self, cache, tables: pass.tables })
    }
}

impl DecodingNetwork {
    /// Bytes of its rotary tables.
    pub fn table_bytes(&self) -> u64 {
        self.tables.as_ref().map_or(0, |tables| tables.table_bytes())
    }
}

struct DecodingPass {
    slots: usize,
    capacity: usize,
    /// Rotary tables of every position of the cache.
    tables: Option<Arc<Rotary>>,
    /// The cache so far, and the first layer in it.
    cache: Option<(String, CacheDims)>,
}

impl DecodingPass {
    fn rewrite_nodes(&mut self, nodes: Vec<Node>) -> Result<Vec<Node>, DecodingError> {
        nodes.into_iter().map(|node| self.rewrite(node)).collect()
    }

    fn rewrite(&mut self, node: Node) -> Result<Node, DecodingError> {
        Ok(match node {
            Node::Layer(layer) => Node::Layer(self.rewrite_layer(layer)?),
            Node::Residual(mut residual) => {
                residual.branch = self.rewrite_nodes(residual.branch)?;
                residual.shortcut = self.rewrite_nodes(residual.shortcut)?;
                Node::Residual(residual)
            }
            Node::Fused(fused) => unreachable!("{}: the fusion pass ran first", fused.describe()),
        })
    }

    fn rewrite_layer(&mut self, layer: Box<dyn Layer>) -> Result<Box<dyn Layer>, DecodingError> {
        let any: &dyn Any = layer.as_ref();
        let Some(attention) = any.downcast_ref::<Attention>() else { return Ok(layer) };
        let (name, sizes) = (&attention.name, attention.sizes);
        if !attention.causal {
            return Err(DecodingError::NotCausal(name.clone()));
        }
        let rotary = attention.rotary.as_ref().map(|rotary| self.rotary_tables(rotary));
        let own = CacheDims {
            layers: 0,
            kv_heads: sizes.kv_heads,
            head_dim: sizes.head_dim,
            slots: self.slots,
            capacity: self.capacity,
        };
        let (first, cache) = self.cache.get_or_insert_with(|| (name.clone(), own));
        if *cache != (CacheDims { layers: cache.layers, ..own }) {
            return Err(DecodingError::Unequal { first: first.clone(), other: name.clone() });
        }
        let cache_layer = cache.layers;
        cache.layers += 1;
        let capacity = self.capacity;
        Ok(Box::new(CachedAttention { name: name.clone(), sizes, rotary, cache_layer, capacity }))
    }

    /// Tables for every position of the cache, shared by layers with the same rotary settings.
    fn rotary_tables(&mut self, rotary: &Rotary) -> Arc<Rotary> {
        match &self.tables {
            Some(tables) if tables.is_extension_of(rotary, self.capacity) => tables.clone(),
            _ => {
                let tables = Arc::new(rotary.with_length(self.capacity));
                self.tables = Some(tables.clone());
                tables
            }
        }
    }
}
