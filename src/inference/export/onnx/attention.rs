//! Attention and what belongs to it: rotary embeddings and masks.

use super::graph::OnnxGraphBuilder;
use super::proto::AttributeProto;
use crate::kernels::attention::AttentionDims;

/// The masked score: finite, so that a row without any visible key gives no NaN.
const MASKED: f32 = -1e30;

/// Values that all attentions of a graph share.
#[derive(Default)]
pub(super) struct AttentionInputs {
    /// Whether a key is padding, (batch, 1, 1, length).
    padding: Option<String>,
    /// Whether a key comes after the query, (length, length).
    future: Option<String>,
    /// Cosines and sines, (length, head / 2).
    rotary: Option<(String, String)>,
}

impl AttentionInputs {
    /// Derives the padding from a mask of (batch, length) that is 0 there.
    pub(super) fn set_padding(&mut self, graph: &mut OnnxGraphBuilder, mask: &str) {
        let zero = graph.int(0);
        let padding = graph.node("Equal", &[mask, &zero]);
        let axes = graph.ints(&[1, 2]);
        self.padding = Some(graph.node("Unsqueeze", &[&padding, &axes]));
    }

    /// `tokens` is (batch, length).
    fn future(&mut self, graph: &mut OnnxGraphBuilder, tokens: &str) -> String {
        if let Some(future) = &self.future {
            return future.clone();
        }
        let length = graph.dim(tokens, 1);
        let (zero, one, first, second) = (graph.int(0), graph.int(1), graph.ints(&[0]), graph.ints(&[1]));
        let length = graph.node("Squeeze", &[&length, &first]);
        let positions = graph.node("Range", &[&zero, &length, &one]);
        let (keys, queries) =
            (graph.node("Unsqueeze", &[&positions, &first]), graph.node("Unsqueeze", &[&positions, &second]));
        let future = graph.node("Less", &[&queries, &keys]);
        self.future = Some(future.clone());
        future
    }

    /// The tables of `context` positions, cut to the length of the tokens.
    fn rotary(
        &mut self,
        graph: &mut OnnxGraphBuilder,
        tokens: &str,
        context: usize,
        rope: Rope,
    ) -> (String, String) {
        if let Some(tables) = &self.rotary {
            return tables.clone();
        }
        let half = rope.head_dim / 2;
        let angle = |at: usize| {
            let (position, pair) = (at / half, at % half);
            position as f64 * rope.theta.powf(-2.0 * pair as f64 / rope.head_dim as f64)
        };
        let length = graph.dim(tokens, 1);
        let mut table = |f: fn(f64) -> f64| {
            let values: Vec<f32> = (0..context * half).map(|at| f(angle(at)) as f32).collect();
            let table = graph.floats(&[context, half], &values);
            graph.first_rows(&table, &length)
        };
        let tables = (table(f64::cos), table(f64::sin));
        self.rotary = Some(tables.clone());
        tables
    }
}

/// Rotary embeddings: the head dimension and the base of the wavelengths.
#[derive(Clone, Copy)]
pub(super) struct Rope {
    pub head_dim: usize,
    pub theta: f64,
}

/// An attention without its projections.
pub(super) struct AttentionNode<'a> {
    pub dims: AttentionDims,
    pub causal: bool,
    pub rope: Option<Rope>,
    /// The graph's input, (batch, length), if samples are tokens.
    pub tokens: &'a str,
    /// Positions that the model was made for.
    pub context: usize,
}

impl AttentionNode<'_> {
    /// Takes queries, keys and values, each (batch, length, its heads * head_dim), and gives the outputs of the heads.
    pub(super) fn add(
        &self,
        graph: &mut OnnxGraphBuilder,
        shared: &mut AttentionInputs,
        [q, k, v]: [&str; 3],
    ) -> String {
        let AttentionDims { heads, kv_heads, head_dim, .. } = self.dims;
        let (head, kv, group) = (head_dim as i64, kv_heads as i64, (heads / kv_heads) as i64);
        // (batch, kv_heads, group, length, head_dim): the queries of a group share its keys by broadcasting.
        let split = |graph: &mut OnnxGraphBuilder, x: &str, group: i64| {
            let x = graph.reshape(x, &[0, 0, kv, group, head]);
            graph.transpose(&x, &[0, 2, 3, 1, 4])
        };
        let (mut q, mut k, v) = (split(graph, q, group), split(graph, k, 1), split(graph, v, 1));
        if let Some(rope) = self.rope {
            let (cos, sin) = shared.rotary(graph, self.tokens, self.context, rope);
            q = rotate(graph, &q, head_dim / 2, &cos, &sin);
            k = rotate(graph, &k, head_dim / 2, &cos, &sin);
        }
        let k = graph.transpose(&k, &[0, 1, 2, 4, 3]);
        let scale = graph.float((head_dim as f64).powf(-0.5) as f32);
        let q = graph.node("Mul", &[&q, &scale]);
        let mut scores = graph.node("MatMul", &[&q, &k]);
        if self.causal {
            let (future, masked) = (shared.future(graph, self.tokens), graph.float(MASKED));
            scores = graph.node("Where", &[&future, &masked, &scores]);
        }
        if let Some(padding) = &shared.padding {
            let (axis, masked) = (graph.ints(&[1]), graph.float(MASKED));
            let padding = graph.node("Unsqueeze", &[padding, &axis]);
            scores = graph.node("Where", &[&padding, &masked, &scores]);
        }
        let weights = graph.node_with("Softmax", &[&scores], vec![AttributeProto::int("axis", -1)]);
        let y = graph.node("MatMul", &[&weights, &v]);
        let y = graph.transpose(&y, &[0, 3, 1, 2, 4]);
        graph.reshape(&y, &[0, 0, kv * group * head])
    }
}

/// Rotates value `i` of each head with value `i + half`.
fn rotate(graph: &mut OnnxGraphBuilder, x: &str, half: usize, cos: &str, sin: &str) -> String {
    let parts = graph.split_last(x, &[half, half]);
    let [a, b] = [&parts[0], &parts[1]];
    let (ac, bs) = (graph.node("Mul", &[a, cos]), graph.node("Mul", &[b, sin]));
    let (bc, r#as) = (graph.node("Mul", &[b, cos]), graph.node("Mul", &[a, sin]));
    let first = graph.node("Sub", &[&ac, &bs]);
    let second = graph.node("Add", &[&bc, &r#as]);
    graph.concat(&[&first, &second], -1)
}
