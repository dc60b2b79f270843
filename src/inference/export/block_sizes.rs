//! The sizes of a transformer's blocks, for formats that state them once for all layers.

use super::error::ExportError;
use super::{ExportFormat, ExportSource};
use crate::job::{ModelConfig, PruneStructure};
use crate::models::{BuiltModel, unit_groups};

/// Sizes that every block has; 0 for other models.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct BlockSizes {
    pub heads: usize,
    pub kv_heads: usize,
    /// Values per head.
    pub head_dim: usize,
    /// Width of the feed-forward layer.
    pub hidden: usize,
}

impl BlockSizes {
    /// Refuses a model that pruning left with sizes that `format` cannot state.
    pub(super) fn of(
        source: &ExportSource,
        built: &BuiltModel,
        format: ExportFormat,
    ) -> Result<Self, ExportError> {
        let (heads, kv_heads, width) = match source.model {
            ModelConfig::Gpt(gpt) => (gpt.heads, gpt.heads, gpt.width),
            ModelConfig::Llama(llama) => (llama.heads, llama.kv_heads, llama.width),
            ModelConfig::Bert(bert) => (bert.heads, bert.heads, bert.width),
            ModelConfig::Vit(vit) => (vit.heads, vit.heads, vit.width),
            _ => {
                return match source.reductions.kept.keys().next() {
                    Some(layer) => Err(ExportError::Shrunk { layer: layer.clone(), format }),
                    None => Ok(Self::default()),
                };
            }
        };
        let common = |structure| {
            let groups = unit_groups(source.model, structure, &built.layout);
            let Some((first, others)) = groups.split_first() else { return Ok(0) };
            match others.iter().find(|group| group.units != first.units) {
                None => Ok(first.units),
                Some(other) => {
                    let sizes = [(first.name.clone(), first.units), (other.name.clone(), other.units)];
                    Err(ExportError::Uneven { sizes, format })
                }
            }
        };
        let (hidden, left) = (common(PruneStructure::Channels)?, common(PruneStructure::Heads)?);
        // Others take the size of a head from the width and the number of heads.
        if left != kv_heads && !matches!(source.model, ModelConfig::Llama(_)) {
            let layer = source.reductions.kept.keys().next().cloned().unwrap_or_default();
            return Err(ExportError::Shrunk { layer, format });
        }
        let (head_dim, queries) = (width / heads, heads / kv_heads);
        Ok(Self { heads: queries * left, kv_heads: left, head_dim, hidden })
    }
}
