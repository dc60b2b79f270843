// GEMM through cuBLASLt: row-major matrices, with fused accumulation and epilogues.
//
// cuBLASLt is column-major, so `D = A B` becomes `D' = B' A'`. The algorithm for each shape is chosen once and cached:
// the heuristic proposes candidates, and of those whose results have the bits of the baseline's, on the operands of several
// calls, the fastest wins. Timing thus affects speed and never the result. The caller owns the workspace.
#include <cublasLt.h>
#include <mutex>
#include <map>
#include <tuple>

#include "device.cuh"

namespace {

struct GemmOperand {
    const void *data;
    int64_t stride; // values between rows
    int transposed;     // whether the operand is the transpose of the stored matrix
};

// `Epilogue` in cublaslt.rs.
enum Epilogue : int { PLAIN = 0, BIAS = 1, GELU_BIAS = 2, RELU_BIAS = 3 };

struct GemmArgs {
    int type, out_type, m, n, k, epilogue;
    GemmOperand a, b;
    const void *c; // null, or the matrix to add: may be `d`
    void *d;
    int64_t d_stride;
    const void *bias; // (n)
    void *aux;        // (m, n): receives the pre-activation of GELU
    int64_t aux_stride;
};

// What a candidate computed: a checksum over every bit of a matrix that does not depend on the order of the reads, and
// how many values are not zero.
struct Digest {
    unsigned long long sum, nonzero;
};

using Key = std::tuple<int, int, int, int, int, int, int64_t, int, int64_t, int, int, int64_t, int64_t, int>;

// The algorithm of a shape: the baseline until tuning is done.
struct CachedAlgo {
    cublasLtMatmulAlgo_t algo;
    int calls;         // further calls that may be used for tuning; 0 if it is done
    int probes;        // results that were compared so far
    uint32_t agreeing; // candidates that had the bits of the baseline in all of them, as a bit mask
};

struct GemmContext {
    cublasLtHandle_t handle;
    void *workspace;
    size_t bytes;
    bool tf32;
    std::mutex lock;
    std::map<Key, CachedAlgo> algo_cache;
    cudaEvent_t start_event, stop_event;
    Digest *digest; // on the device, behind the workspace
    void *bias;            // BIAS_BYTES bytes behind the digest
};

// Tail of the workspace in bytes: the digest, and an aligned copy of a bias.
constexpr size_t DIGEST_BYTES = 256, BIAS_BYTES = 256 << 10;

// Candidates requested from the heuristic, and timed runs of each.
constexpr int MAX_CANDIDATES = 8, TIMED_RUNS = 3;
// Results that a candidate must agree on, and calls after which the baseline is kept if there were fewer. Algorithms that
// differ may agree by chance on one result, most easily a small one in half precision. A choice by chance depends on
// which data came first, and a resumed run would not have the bits of one that was never interrupted.
constexpr int MIN_PROBES = 4, MAX_CALLS = 16;
// A result counts only if at least one in this many values is not zero: the gradients below a zero-initialized head are
// zero in the first update, and most of those of a head that reads one position of each sequence.
constexpr uint64_t MIN_NONZERO_PART = 4;
// FLOPs below which a GEMM is too short to be worth tuning.
constexpr double MIN_TUNED_FLOPS = 1e9;

cudaDataType_t cuda_dtype(int type) {
    switch (type) {
    case F64: return CUDA_R_64F;
    case BF16: return CUDA_R_16BF;
    case F16: return CUDA_R_16F;
    default: return CUDA_R_32F;
    }
}

cublasLtEpilogue_t cublas_epilogue(int epilogue, bool has_aux) {
    switch (epilogue) {
    case BIAS: return CUBLASLT_EPILOGUE_BIAS;
    case GELU_BIAS: return has_aux ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_BIAS;
    case RELU_BIAS: return CUBLASLT_EPILOGUE_RELU_BIAS;
    default: return CUBLASLT_EPILOGUE_DEFAULT;
    }
}

// The largest power of two, at most 256, that divides an address.
uint32_t alignment(const void *p) {
    uint32_t bytes = 256;
    while (uintptr_t(p) % bytes) bytes /= 2;
    return bytes;
}

// Owns a cuBLASLt descriptor.
template <class H, cublasStatus_t (*destroy)(H)> struct OwnedDescriptor {
    H h = nullptr;
    ~OwnedDescriptor() {
        if (h) destroy(h);
    }
};
using Operation = OwnedDescriptor<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = OwnedDescriptor<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = OwnedDescriptor<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

#define TRY(call)                                                                                             \
    if (cublasStatus_t tried = (call); tried != CUBLAS_STATUS_SUCCESS) return CUBLAS_ERRORS + tried

// Error codes from here on are cuBLAS status codes.
constexpr int CUBLAS_ERRORS = 10000;

template <class V> cublasStatus_t set(Operation &op, cublasLtMatmulDescAttributes_t find_candidates, const V &value) {
    return cublasLtMatmulDescSetAttribute(op.h, find_candidates, &value, sizeof(V));
}
template <class V> cublasStatus_t set(Preference &p, cublasLtMatmulPreferenceAttributes_t find_candidates, const V &value) {
    return cublasLtMatmulPreferenceSetAttribute(p.h, find_candidates, &value, sizeof(V));
}

template <class V> __global__ void digest(const V *d, int64_t rows, int64_t columns, int64_t stride, Digest *out) {
    unsigned long long sum = 0, nonzero = 0;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * columns; i += int64_t(gridDim.x) * blockDim.x) {
        V v = d[i / columns * stride + i % columns];
        sum += (unsigned long long)v * (2 * i + 1);
        nonzero += v != 0;
    }
    atomicAdd(&out->sum, sum);
    atomicAdd(&out->nonzero, nonzero);
}

int compute_digest(GemmContext &context, const GemmArgs &q, Digest *out, cudaStream_t stream) {
    cudaMemsetAsync(context.digest, 0, sizeof *out, stream);
    if (q.out_type == F32) digest<<<1024, 256, 0, stream>>>((const uint32_t *)q.d, q.m, q.n, q.d_stride, context.digest);
    else digest<<<1024, 256, 0, stream>>>((const uint16_t *)q.d, q.m, q.n, q.d_stride, context.digest);
    cudaMemcpyAsync(out, context.digest, sizeof *out, cudaMemcpyDeviceToHost, stream);
    return cudaStreamSynchronize(stream);
}

// The candidate whose result is the reference: the first, unless it is split-K, which adds a reduction kernel, and one
// of the next two is not.
int baseline_of(const cublasLtMatmulHeuristicResult_t *candidates, int count) {
    for (int i = 0; i < count && i < 3; i++) {
        int parts = 1;
        cublasLtMatmulAlgoConfigGetAttribute(&candidates[i].algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof parts, nullptr);
        if (parts <= 1) return i;
    }
    return 0;
}

// The part of the candidates in `agreeing` whose result has the bits of `candidates[base]`. `run(algo)` must be
// repeatable. `counts` is false if so much of the result is zero that the comparison proves nothing.
template <class F>
uint32_t compare(GemmContext &context, const GemmArgs &q, const cublasLtMatmulHeuristicResult_t *candidates, int count, int base,
                 uint32_t agreeing, cudaStream_t stream, F run, bool &counts) {
    auto result = [&](int i, Digest &digest) {
        if (run(&candidates[i].algo) == CUBLAS_STATUS_SUCCESS && !compute_digest(context, q, &digest, stream)) return true;
        cudaGetLastError(); // clears the error of a candidate that failed to load: it is skipped
        return false;
    };
    Digest wanted = {}, found = {};
    counts = result(base, wanted) && wanted.nonzero >= uint64_t(q.m) * q.n / MIN_NONZERO_PART;
    for (int i = 0; counts && i < count; i++)
        if (i != base && (agreeing >> i & 1) && !(result(i, found) && found.sum == wanted.sum)) agreeing &= ~(1u << i);
    return agreeing;
}

// The fastest of the candidates in `agreeing`.
template <class F>
int fastest(GemmContext &context, const cublasLtMatmulHeuristicResult_t *candidates, int count, int base, uint32_t agreeing,
            cudaStream_t stream, F run) {
    int best = base;
    float least = INFINITY;
    for (int i = 0; i < count; i++) {
        if (i != base && !(agreeing >> i & 1)) continue;
        cudaEventRecord(context.start_event, stream);
        for (int k = 0; k < TIMED_RUNS; k++) run(&candidates[i].algo);
        cudaEventRecord(context.stop_event, stream);
        float ms = 0;
        if (cudaEventSynchronize(context.stop_event) || cudaEventElapsedTime(&ms, context.start_event, context.stop_event)) continue;
        if (ms < least) best = i, least = ms;
    }
    return best;
}

int multiply(GemmContext &context, const GemmArgs &q, cudaStream_t stream) {
    bool wide = q.type == F64;
    auto compute = wide                                   ? CUBLAS_COMPUTE_64F
                   : q.type == F32 && context.tf32       ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                          : CUBLAS_COMPUTE_32F;
    Operation op;
    Layout a, b, c, d;
    TRY(cublasLtMatmulDescCreate(&op.h, compute, wide ? CUDA_R_64F : CUDA_R_32F));
    auto transposed = [](int t) { return t ? CUBLAS_OP_T : CUBLAS_OP_N; };
    TRY(set(op, CUBLASLT_MATMUL_DESC_TRANSA, transposed(q.b.transposed)));
    TRY(set(op, CUBLASLT_MATMUL_DESC_TRANSB, transposed(q.a.transposed)));
    TRY(set(op, CUBLASLT_MATMUL_DESC_EPILOGUE, cublas_epilogue(q.epilogue, q.aux != nullptr)));
    if (q.bias) {
        // cuBLASLt has no attribute for the alignment of a bias and proposes kernels that read it in vectors: copy an
        // unaligned bias.
        const void *bias = q.bias;
        size_t bytes = size_t(q.n) * (wide ? 8 : q.type == F32 ? 4 : 2);
        if (alignment(bias) < 16 && bytes <= BIAS_BYTES) {
            if (int error = cudaMemcpyAsync(context.bias, bias, bytes, cudaMemcpyDeviceToDevice, stream)) return error;
            bias = context.bias;
        }
        TRY(set(op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias));
        TRY(set(op, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t(cuda_dtype(q.type))));
    }
    if (q.aux) {
        TRY(set(op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, q.aux));
        TRY(set(op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, q.aux_stride));
        TRY(set(op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, int32_t(cuda_dtype(q.type))));
    }
    auto layout = [&](Layout &l, int type, int64_t rows, int64_t cols, int64_t stride, int t) {
        return cublasLtMatrixLayoutCreate(&l.h, cuda_dtype(type), t ? rows : cols, t ? cols : rows, stride);
    };
    TRY(layout(a, q.type, q.k, q.n, q.b.stride, q.b.transposed));
    TRY(layout(b, q.type, q.m, q.k, q.a.stride, q.a.transposed));
    TRY(layout(c, q.out_type, q.m, q.n, q.d_stride, 0));
    TRY(layout(d, q.out_type, q.m, q.n, q.d_stride, 0));

    uint32_t aligns[4] = {alignment(q.b.data), alignment(q.a.data), alignment(q.c ? q.c : q.d), alignment(q.d)};
    int alignment_key = 0;
    for (uint32_t align : aligns) alignment_key = alignment_key * 16 + __builtin_ctz(align);
    Key key{q.type, q.out_type, q.m, q.n, q.k, q.epilogue * 2 + (q.aux != nullptr), q.a.stride, q.a.transposed,
            q.b.stride, q.b.transposed, q.c ? (q.c == q.d ? 2 : 1) : 0, q.d_stride, q.aux_stride, alignment_key};
    float one = 1, beta = q.c ? 1 : 0;
    double one_wide = 1, beta_wide = beta;
    const void *alphas = wide ? (const void *)&one_wide : &one, *betas = wide ? (const void *)&beta_wide : &beta;
    auto run = [&](const cublasLtMatmulAlgo_t *algo) {
        return cublasLtMatmul(context.handle, op.h, alphas, q.b.data, a.h, q.a.data, b.h, betas, q.c ? q.c : q.d, c.h, q.d,
                              d.h, algo, context.workspace, context.bytes, stream);
    };
    cublasLtMatmulHeuristicResult_t candidates[MAX_CANDIDATES];
    int count = 0;
    // Asks the heuristic for algorithms whose operands are aligned to their actual alignment, at most `max_alignment`
    // bytes.
    auto find_candidates = [&](uint32_t max_alignment) -> int {
        Preference p;
        auto aligned = [&](int i) { return aligns[i] < max_alignment ? aligns[i] : max_alignment; };
        TRY(cublasLtMatmulPreferenceCreate(&p.h));
        TRY(set(p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, context.bytes));
        TRY(set(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, aligned(0)));
        TRY(set(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, aligned(1)));
        TRY(set(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, aligned(2)));
        TRY(set(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, aligned(3)));
        TRY(cublasLtMatmulAlgoGetHeuristic(context.handle, op.h, a.h, b.h, c.h, d.h, p.h, MAX_CANDIDATES, candidates, &count));
        return count == 0 ? CUBLAS_ERRORS + CUBLAS_STATUS_NOT_SUPPORTED : 0;
    };
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(stream, &capture);
    bool can_synchronize = capture == cudaStreamCaptureStatusNone; // a capture must not synchronize
    std::lock_guard<std::mutex> guard(context.lock);
    auto cached = context.algo_cache.find(key);
    if (cached == context.algo_cache.end() || (cached->second.calls > 0 && can_synchronize)) {
        if (int error = find_candidates(256)) return error;
        int base = baseline_of(candidates, count);
        if (cached == context.algo_cache.end()) {
            // A GEMM that accumulates into its own output cannot be repeated, so it is not tuned.
            bool tuned = q.c != q.d && !wide && 2.0 * q.m * q.n * q.k > MIN_TUNED_FLOPS;
            cached = context.algo_cache.insert({key, CachedAlgo{candidates[base].algo, tuned ? MAX_CALLS : 0, 0, ~0u}}).first;
        }
        CachedAlgo &tuning = cached->second;
        if (tuning.calls > 0 && can_synchronize) {
            bool counts = false;
            tuning.agreeing = compare(context, q, candidates, count, base, tuning.agreeing, stream, run, counts);
            tuning.calls--;
            tuning.probes += counts;
            if (tuning.probes == MIN_PROBES) {
                tuning.algo = candidates[fastest(context, candidates, count, base, tuning.agreeing, stream, run)].algo;
                tuning.calls = 0;
            }
        }
    }
    cublasStatus_t status = run(&cached->second.algo);
    // For odd sizes and an unaligned bias, cuBLASLt proposes kernels that it then refuses to launch: retry with others.
    for (uint32_t max_alignment : {256u, 16u, 2u}) {
        if (status == CUBLAS_STATUS_SUCCESS) return 0;
        if (!can_synchronize || find_candidates(max_alignment)) break;
        for (int i = 0; i < count && status != CUBLAS_STATUS_SUCCESS; i++) {
            cudaGetLastError(); // clears the error of the refused kernel
            status = run(&candidates[i].algo);
            if (status == CUBLAS_STATUS_SUCCESS) cached->second = CachedAlgo{candidates[i].algo, 0, 0, 0};
        }
    }
    return status == CUBLAS_STATUS_SUCCESS ? 0 : CUBLAS_ERRORS + status;
}

} // namespace

extern "C" int cublaslt_context_new(void *workspace, size_t bytes, int tf32, void **out) {
    size_t left = bytes - DIGEST_BYTES - BIAS_BYTES;
    char *tail = (char *)workspace + left;
    auto *context = new GemmContext{nullptr, workspace, left, tf32 != 0, {}, {}, nullptr, nullptr,
                                  (Digest *)tail, tail + DIGEST_BYTES};
    cublasStatus_t status = cublasLtCreate(&context->handle);
    int code = status == CUBLAS_STATUS_SUCCESS ? 0 : CUBLAS_ERRORS + status;
    if (!code) code = cudaEventCreate(&context->start_event);
    if (!code) code = cudaEventCreate(&context->stop_event);
    if (code) {
        delete context;
        return code;
    }
    *out = context;
    return 0;
}

extern "C" int cublaslt_matmul(void *context, const GemmArgs *args, cudaStream_t stream) {
    return multiply(*(GemmContext *)context, *args, stream);
}
