// Rewrites a captured graph so that it consists of kernel nodes only: memset and memcpy nodes start later than kernels
// do.
#include <algorithm>
#include <vector>

#include "device.cuh"

namespace {

constexpr int THREADS = 256;

// The callers use 16-byte values whenever addresses and sizes allow it.
template <class V> __global__ void fill(V *to, V value, size_t count) {
    for (size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x; i < count; i += size_t(gridDim.x) * THREADS) to[i] = value;
}
// Copies rows of `width` values; the pitches are in values.
template <class V> __global__ void copy(V *to, const V *from, size_t count, size_t width, size_t to_pitch, size_t from_pitch) {
    for (size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x; i < count; i += size_t(gridDim.x) * THREADS) {
        size_t row = i / width, column = i - row * width;
        to[row * to_pitch + column] = from[row * from_pitch + column];
    }
}

#if CUDART_VERSION >= 13000
#define EDGES nullptr,
#else
#define EDGES
#endif

#define TRY(call)                                                                                             \
    if (cudaError_t error = (call)) return error

// Replaces a node by a kernel node with the same dependencies.
cudaError_t replace(cudaGraph_t graph, cudaGraphNode_t node, void *kernel, size_t count, void **arguments) {
    size_t before = 0, after = 0;
    TRY(cudaGraphNodeGetDependencies(node, nullptr, EDGES & before));
    TRY(cudaGraphNodeGetDependentNodes(node, nullptr, EDGES & after));
    std::vector<cudaGraphNode_t> earlier(before), later(after);
    TRY(cudaGraphNodeGetDependencies(node, earlier.data(), EDGES & before));
    TRY(cudaGraphNodeGetDependentNodes(node, later.data(), EDGES & after));
    cudaKernelNodeParams params{};
    params.func = kernel;
    params.gridDim = dim3(unsigned(std::min<size_t>((count + THREADS - 1) / THREADS, 1024)));
    params.blockDim = dim3(THREADS);
    params.kernelParams = arguments;
    cudaGraphNode_t kernel_node;
    TRY(cudaGraphAddKernelNode(&kernel_node, graph, earlier.data(), before, &params));
    std::vector<cudaGraphNode_t> from(after, kernel_node);
    if (after) TRY(cudaGraphAddDependencies(graph, from.data(), later.data(), EDGES after));
    return cudaGraphDestroyNode(node);
}

cudaError_t replace_memset(cudaGraph_t graph, cudaGraphNode_t node, bool &replaceable) {
    cudaMemsetParams p;
    TRY(cudaGraphMemsetNodeGetParams(node, &p));
    replaceable = p.height == 1;
    if (!replaceable) return cudaSuccess;
    uint32_t word = p.elementSize == 1 ? p.value * 0x01010101u : p.elementSize == 2 ? p.value * 0x00010001u : p.value;
    size_t bytes = p.width * p.elementSize;
    if ((uintptr_t(p.dst) | bytes) % 16 == 0) {
        uint4 value{word, word, word, word};
        size_t count = bytes / 16;
        void *arguments[]{&p.dst, &value, &count};
        return replace(graph, node, (void *)fill<uint4>, count, arguments);
    }
    // The destination of a memset is aligned to its element size.
    size_t count = p.width;
    void *arguments[]{&p.dst, &word, &count};
    return replace(graph, node, p.elementSize == 1 ? (void *)fill<uint8_t> : p.elementSize == 2 ? (void *)fill<uint16_t> : (void *)fill<uint32_t>,
                   count, arguments);
}

cudaError_t replace_memcpy(cudaGraph_t graph, cudaGraphNode_t node, bool &replaceable) {
    cudaMemcpy3DParms p{};
    TRY(cudaGraphMemcpyNodeGetParams(node, &p));
    bool plain = !p.srcArray && !p.dstArray && p.extent.depth == 1;
    plain &= p.dstPos.y == 0 && p.srcPos.y == 0 && p.dstPos.z == 0 && p.srcPos.z == 0;
    replaceable = p.kind == cudaMemcpyDeviceToDevice && plain;
    if (!replaceable) return cudaSuccess;
    void *to = (char *)p.dstPtr.ptr + p.dstPos.x, *from = (char *)p.srcPtr.ptr + p.srcPos.x;
    size_t bytes = p.extent.width, rows = p.extent.height;
    size_t to_pitch = rows > 1 ? p.dstPtr.pitch : bytes, from_pitch = rows > 1 ? p.srcPtr.pitch : bytes;
    bool wide = (uintptr_t(to) | uintptr_t(from) | bytes | to_pitch | from_pitch) % 16 == 0;
    size_t unit = wide ? 16 : 1, width = bytes / unit, count = width * rows;
    to_pitch /= unit, from_pitch /= unit;
    void *arguments[]{&to, &from, &count, &width, &to_pitch, &from_pitch};
    return replace(graph, node, wide ? (void *)copy<uint4> : (void *)copy<uint8_t>, count, arguments);
}

cudaError_t replace_nodes(cudaGraph_t graph, size_t &kernels) {
    size_t count = 0;
    TRY(cudaGraphGetNodes(graph, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    TRY(cudaGraphGetNodes(graph, nodes.data(), &count));
    for (cudaGraphNode_t node : nodes) {
        cudaGraphNodeType type;
        TRY(cudaGraphNodeGetType(node, &type));
        bool replaceable = type == cudaGraphNodeTypeKernel || type == cudaGraphNodeTypeEmpty;
        if (type == cudaGraphNodeTypeMemset) TRY(replace_memset(graph, node, replaceable));
        if (type == cudaGraphNodeTypeMemcpy) TRY(replace_memcpy(graph, node, replaceable));
        if (!replaceable) return cudaErrorNotSupported;
    }
    kernels = count;
    return cudaSuccess;
}

} // namespace

// Turns all nodes into kernel nodes and returns their number; 0 if a node cannot be replaced, such as a copy from host
// memory.
extern "C" size_t graph_to_kernels_only(cudaGraph_t graph) {
    size_t kernels = 0;
    if (replace_nodes(graph, kernels)) cudaGetLastError(); // clears the error
    return kernels;
}
