// Convolution through cuDNN: forward, and the gradients of input and weight, in NHWC.
//
// The engine for each shape is chosen once and cached, and so is the absence of one. Only deterministic engines are
// considered that fit the caller's workspace. The result has the dtype of the operands, the weight gradient included:
// engines accumulate in f32 and round once, as in PyTorch. For an f32 result from 16-bit operands cuDNN has a single
// engine, which takes ten times as long and half a second per shape to compile.
#include "cuda/with_cudnn.h"

#include <array>
#include <map>
#include <memory>

namespace {

// `ConvPass` in conv/gpu.rs.
enum ConvPass : int { OUTPUT = 0, INPUT_GRADIENT = 1, WEIGHT_GRADIENT = 2 };

struct CudnnConvArgs {
    int type, pass, tf32;
    int batch, height, width, inputs, out_height, out_width, outputs, kernel, stride, padding, dilation, groups;
    const void *a, *b; // x and weight; dy and weight; dy and x
    void *out;         // y; dx; dw
    void *workspace;
    int64_t workspace_bytes;
};

// No engine supports the call: the caller must use our own kernel.
constexpr int NO_ENGINE = -1;

} // namespace

#ifdef TRAINER_CUDNN
namespace {

namespace fe = cudnn_frontend;
using Numbers = std::vector<int64_t>;

// The largest power of two, at most 16, that divides an address.
int alignment(const void *p) {
    int bytes = 16;
    while (uintptr_t(p) % bytes) bytes /= 2;
    return bytes;
}

// An NHWC tensor, in cuDNN's NCHW order of dimensions.
std::shared_ptr<fe::graph::Tensor_attributes> &set_nhwc(std::shared_ptr<fe::graph::Tensor_attributes> &t, int64_t n,
                                                      int64_t h, int64_t w, int64_t c) {
    t->set_dim({n, c, h, w}).set_stride({h * w * c, 1, w * c, c});
    return t;
}

template <class Attributes> Attributes window_attributes(const CudnnConvArgs &q) {
    int64_t p = q.padding, s = q.stride, d = q.dilation;
    return Attributes().set_padding({p, p}).set_stride({s, s}).set_dilation({d, d});
}

int build(fe::graph::Graph &graph, const CudnnConvArgs &q, bool tensor_cores, cudnnHandle_t handle) {
    graph.set_io_data_type(cudnn::cudnn_dtype(q.type))
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    auto tensor = [&](int64_t uid, const void *at, int64_t n, int64_t h, int64_t w, int64_t c) {
        auto t = graph.tensor(fe::graph::Tensor_attributes());
        t->set_uid(uid).set_alignment(alignment(at)).set_data_type(cudnn::cudnn_dtype(q.type));
        return set_nhwc(t, n, h, w, c);
    };
    int64_t depth = q.inputs / q.groups;
    auto x = [&](int64_t uid, const void *at) { return tensor(uid, at, q.batch, q.height, q.width, q.inputs); };
    auto y = [&](int64_t uid, const void *at) {
        return tensor(uid, at, q.batch, q.out_height, q.out_width, q.outputs);
    };
    auto w = [&](int64_t uid, const void *at) { return tensor(uid, at, q.outputs, q.kernel, q.kernel, depth); };
    std::shared_ptr<fe::graph::Tensor_attributes> out;
    switch (q.pass) {
    case OUTPUT:
        out = graph.conv_fprop(x(1, q.a), w(2, q.b), window_attributes<fe::graph::Conv_fprop_attributes>(q));
        set_nhwc(out, q.batch, q.out_height, q.out_width, q.outputs);
        break;
    case INPUT_GRADIENT:
        out = graph.conv_dgrad(y(1, q.a), w(2, q.b), window_attributes<fe::graph::Conv_dgrad_attributes>(q));
        set_nhwc(out, q.batch, q.height, q.width, q.inputs);
        break;
    default:
        out = graph.conv_wgrad(y(1, q.a), x(2, q.b), window_attributes<fe::graph::Conv_wgrad_attributes>(q));
        set_nhwc(out, q.outputs, q.kernel, q.kernel, depth);
    }
    out->set_output(true).set_uid(3).set_alignment(alignment(q.out)).set_data_type(cudnn::cudnn_dtype(q.type));

    TRY_CUDNN(graph.validate());
    TRY_CUDNN(graph.build_operation_graph(handle));
    std::vector<fe::HeurMode_t> modes{fe::HeurMode_t::A};
    if (!tensor_cores) modes.push_back(fe::HeurMode_t::FALLBACK);
    TRY_CUDNN(graph.create_execution_plans(modes));
    graph.deselect_numeric_notes({fe::NumericalNote_t::NONDETERMINISTIC});
    if (tensor_cores) graph.select_numeric_notes({fe::NumericalNote_t::TENSOR_CORE});
    // The weight gradient is a long sum: reduced-precision accumulation would lose too much.
    if (q.pass == WEIGHT_GRADIENT) graph.deselect_numeric_notes({fe::NumericalNote_t::REDUCED_PRECISION_REDUCTION});
    if (q.type == F32) {
        graph.deselect_numeric_notes({fe::NumericalNote_t::FFT, fe::NumericalNote_t::WINOGRAD,
                                      fe::NumericalNote_t::WINOGRAD_TILE_4x4, fe::NumericalNote_t::WINOGRAD_TILE_6x6,
                                      fe::NumericalNote_t::WINOGRAD_TILE_13x13});
        // Tensor cores round f32 operands to TF32.
        if (!q.tf32)
            graph.deselect_numeric_notes({fe::NumericalNote_t::TENSOR_CORE, fe::NumericalNote_t::DOWN_CONVERT_INPUTS});
    }
    graph.deselect_workspace_greater_than(q.workspace_bytes);
    TRY_CUDNN(graph.check_support());
    TRY_CUDNN(graph.build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE));
    int64_t bytes = 0;
    TRY_CUDNN(graph.get_workspace_size(bytes));
    return bytes <= q.workspace_bytes ? 0 : NO_ENGINE;
}

// 16-bit operands should use tensor cores, which the heuristic's first choice does not always do. Falls back to any
// engine if none with tensor cores is found.
std::unique_ptr<fe::graph::Graph> plan_for(const CudnnConvArgs &q, cudnnHandle_t handle) {
    for (bool tensor_cores : {true, false}) {
        if (tensor_cores && q.type == F32) continue;
        auto graph = std::make_unique<fe::graph::Graph>();
        // The front end throws if a symbol is missing.
        try {
            if (build(*graph, q, tensor_cores, handle) == 0) return graph;
        } catch (...) {
        }
    }
    return nullptr;
}

using Key = std::array<int64_t, 19>;

// Never destroyed: at process exit the library may be unloaded first.
std::map<Key, std::unique_ptr<fe::graph::Graph>> &plans() {
    static auto *plans = new std::map<Key, std::unique_ptr<fe::graph::Graph>>;
    return *plans;
}

int run(const CudnnConvArgs &q, cudaStream_t stream) {
    std::lock_guard<std::mutex> guard(cudnn::lock());
    cudnnHandle_t handle = cudnn::handle(stream);
    if (!handle) return NO_ENGINE;
    Key key{q.type,       q.pass,      q.tf32,   q.batch,     q.height,  q.width,    q.inputs,
            q.out_height, q.out_width, q.outputs, q.kernel,    q.stride,  q.padding,  q.dilation,
            q.groups,     q.workspace_bytes,      alignment(q.a), alignment(q.b), alignment(q.out)};
    auto cached = plans().find(key);
    if (cached == plans().end()) cached = plans().emplace(key, plan_for(q, handle)).first;
    if (!cached->second) return NO_ENGINE;
    std::unordered_map<int64_t, void *> tensors{
        {1, const_cast<void *>(q.a)}, {2, const_cast<void *>(q.b)}, {3, q.out}};
    TRY_CUDNN(cached->second->execute(handle, tensors, q.workspace));
    return 0;
}

} // namespace

extern "C" int conv_cudnn(const CudnnConvArgs *args, cudaStream_t stream) {
    try {
        return run(*args, stream);
    } catch (...) {
        return NO_ENGINE;
    }
}
#else
extern "C" int conv_cudnn(const CudnnConvArgs *, cudaStream_t) { return NO_ENGINE; }
#endif
