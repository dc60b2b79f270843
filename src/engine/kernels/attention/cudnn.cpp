// cuDNN's fused attention over packed projections, forward and backward, deterministic. A graph is built once per shape
// and cached. The log-sum-exp of each row is stored in f32, as our own kernels store it.
#include "cuda/with_cudnn.h"

#ifdef TRAINER_CUDNN
#include <map>
#include <tuple>

namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;
using Key = std::tuple<int, int, int, int, int, int, int, int>;

enum Name : int64_t { Q = 1, K, V, Y, LOGSUMEXP, DY, DQ, DK, DV };

struct BuiltGraph {
    std::shared_ptr<fe::graph::Graph> graph;
    int64_t workspace;
};

struct AttentionDims {
    int type, batch, length, heads, kv_heads, head_dim, causal;
    float scale;

    int64_t qkv_width() const { return int64_t(heads + 2 * kv_heads) * head_dim; }
};

// A (batch, heads, length, head_dim) view into rows of `width` values.
Tensor qkv_view(fe::graph::Graph &graph, const AttentionDims &s, Name name, int heads, int64_t width) {
    return graph.tensor(fe::graph::Tensor_attributes()
                            .set_uid(name)
                            .set_dim({s.batch, heads, s.length, s.head_dim})
                            .set_stride({s.length * width, s.head_dim, width, 1}));
}

void set_output_view(const Tensor &t, const AttentionDims &s, Name name, int heads, int64_t width) {
    t->set_output(true).set_uid(name).set_dim({s.batch, heads, s.length, s.head_dim}).set_stride(
        {s.length * width, s.head_dim, width, 1});
}

int build(const AttentionDims &s, bool backward, cudnnHandle_t handle, BuiltGraph &built) {
    auto graph = std::make_shared<fe::graph::Graph>();
    graph->set_io_data_type(cudnn::cudnn_dtype(s.type))
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    int64_t qkv_width = s.qkv_width(), width = int64_t(s.heads) * s.head_dim;
    auto q = qkv_view(*graph, s, Q, s.heads, qkv_width), k = qkv_view(*graph, s, K, s.kv_heads, qkv_width);
    auto v = qkv_view(*graph, s, V, s.kv_heads, qkv_width);
    std::vector<int64_t> rows{s.batch, s.heads, s.length, 1}, steps{int64_t(s.heads) * s.length, s.length, 1, 1};
    if (backward) {
        auto y = qkv_view(*graph, s, Y, s.heads, width), dy = qkv_view(*graph, s, DY, s.heads, width);
        auto logsumexp = graph->tensor(fe::graph::Tensor_attributes().set_uid(LOGSUMEXP).set_dim(rows).set_stride(steps).set_data_type(
            fe::DataType_t::FLOAT));
        auto options = fe::graph::SDPA_backward_attributes().set_attn_scale(s.scale).set_causal_mask(s.causal);
        options.set_deterministic_algorithm(true);
        auto [dq, dk, dv] = graph->sdpa_backward(q, k, v, y, dy, logsumexp, options);
        set_output_view(dq, s, DQ, s.heads, qkv_width);
        set_output_view(dk, s, DK, s.kv_heads, qkv_width);
        set_output_view(dv, s, DV, s.kv_heads, qkv_width);
    } else {
        auto options = fe::graph::SDPA_attributes().set_attn_scale(s.scale).set_causal_mask(s.causal).set_generate_stats(true);
        auto [y, logsumexp] = graph->sdpa(q, k, v, options);
        set_output_view(y, s, Y, s.heads, width);
        logsumexp->set_output(true).set_uid(LOGSUMEXP).set_dim(rows).set_stride(steps).set_data_type(fe::DataType_t::FLOAT);
    }
    TRY_CUDNN(graph->build(handle, {fe::HeurMode_t::A}));
    built = {graph, 0};
    TRY_CUDNN(graph->get_workspace_size(built.workspace));
    return 0;
}

// Finds or builds the graph for these dimensions; returns an error code if cuDNN does not support them. The caller
// holds the lock.
int find_graph(const AttentionDims &s, bool backward, cudnnHandle_t handle, BuiltGraph *&found) {
    static std::map<Key, BuiltGraph> graphs;
    Key key{s.type, s.batch, s.length, s.heads, s.kv_heads, s.head_dim, s.causal, backward};
    auto known = graphs.find(key);
    if (known == graphs.end()) {
        BuiltGraph built;
        if (int error = build(s, backward, handle, built)) return error;
        known = graphs.emplace(key, built).first;
    }
    found = &known->second;
    return 0;
}

} // namespace

// Workspace in bytes for these dimensions; returns an error code if cuDNN does not support them.
extern "C" int attention_cudnn_workspace(int type, int batch, int length, int heads, int kv_heads, int head_dim, int causal,
                                         float scale, int backward, cudaStream_t stream, int64_t *bytes) {
    std::lock_guard<std::mutex> guard(cudnn::lock());
    cudnnHandle_t handle = cudnn::handle(stream);
    if (!handle) return cudnn::ERRORS;
    BuiltGraph *built;
    if (int error = find_graph({type, batch, length, heads, kv_heads, head_dim, causal, scale}, backward, handle, built)) return error;
    *bytes = built->workspace;
    return 0;
}

extern "C" int attention_cudnn_forward(int type, int batch, int length, int heads, int kv_heads, int head_dim, int causal,
                                       float scale, char *qkv, void *y, void *logsumexp, void *workspace, cudaStream_t stream) {
    std::lock_guard<std::mutex> guard(cudnn::lock());
    cudnnHandle_t handle = cudnn::handle(stream);
    if (!handle) return cudnn::ERRORS;
    BuiltGraph *built;
    if (int error = find_graph({type, batch, length, heads, kv_heads, head_dim, causal, scale}, false, handle, built)) return error;
    int64_t query = int64_t(heads) * head_dim * 2, key = int64_t(kv_heads) * head_dim * 2; // bytes of a 16-bit type
    std::unordered_map<int64_t, void *> tensors{
        {Q, qkv}, {K, qkv + query}, {V, qkv + query + key}, {Y, y}, {LOGSUMEXP, logsumexp}};
    TRY_CUDNN(built->graph->execute(handle, tensors, workspace));
    return 0;
}

extern "C" int attention_cudnn_backward(int type, int batch, int length, int heads, int kv_heads, int head_dim, int causal,
                                        float scale, char *qkv, void *y, void *logsumexp, void *dy, char *dx, void *workspace,
                                        cudaStream_t stream) {
    std::lock_guard<std::mutex> guard(cudnn::lock());
    cudnnHandle_t handle = cudnn::handle(stream);
    if (!handle) return cudnn::ERRORS;
    BuiltGraph *built;
    if (int error = find_graph({type, batch, length, heads, kv_heads, head_dim, causal, scale}, true, handle, built)) return error;
    int64_t query = int64_t(heads) * head_dim * 2, key = int64_t(kv_heads) * head_dim * 2;
    std::unordered_map<int64_t, void *> tensors{{Q, qkv}, {K, qkv + query}, {V, qkv + query + key}, {Y, y}, {LOGSUMEXP, logsumexp},
                                                {DY, dy}, {DQ, dx},         {DK, dx + query},       {DV, dx + query + key}};
    TRY_CUDNN(built->graph->execute(handle, tensors, workspace));
    return 0;
}
#else
// Built without cuDNN's headers: our own kernels handle every call.
extern "C" int attention_cudnn_workspace(int, int, int, int, int, int, int, float, int, cudaStream_t, int64_t *) { return 1; }
extern "C" int attention_cudnn_forward(int, int, int, int, int, int, int, float, char *, void *, void *, void *, cudaStream_t) {
    return 1;
}
extern "C" int attention_cudnn_backward(int, int, int, int, int, int, int, float, char *, void *, void *, void *, char *, void *,
                                        cudaStream_t) {
    return 1;
}
#endif
