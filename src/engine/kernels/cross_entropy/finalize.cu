// The steps of cross-entropy around the GEMMs, if the epilogue of the logits GEMM computes exponentials
// (linear/hopper.cu). Before that GEMM: the logits of the targets, which the exponentials are relative to. After it:
// the losses and the normalization factor of each row. The factor is applied to the other operand of the
// weight-gradient GEMM and to the result of the input-gradient GEMM, instead of to the exponentials.
#include "cuda/device.cuh"
#include "cuda/cross_entropy.cuh"

namespace {

constexpr int WARPS = 8, ROWS = WARP; // per block

// Scales a row; one warp per row.
__device__ __forceinline__ void scale_row(const bf16 *x, bf16 *y, float scale, int width) {
    for (int i = threadIdx.x % WARP * 8; i < width; i += WARP * 8) {
        auto v = Pack<bf16>::load(x + i);
#pragma unroll
        for (int k = 0; k < 8; k++) v.v[k] = from_acc<bf16>(to_acc(v.v[k]) * scale);
        v.store(y + i);
    }
}

__global__ void __launch_bounds__(WARP *WARPS) target_logits(const bf16 *x, const bf16 *w, const uint32_t *targets, float *base,
                                                          int rows, int width, int classes) {
    int row = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (row >= rows) return;
    uint32_t target = targets[row];
    float sum = 0;
    if (target < uint32_t(classes)) {
        for (int i = threadIdx.x % WARP * 8; i < width; i += WARP * 8) {
            auto a = Pack<bf16>::load(x + int64_t(row) * width + i), b = Pack<bf16>::load(w + int64_t(target) * width + i);
#pragma unroll
            for (int k = 0; k < 8; k++) sum = fmaf(to_acc(a.v[k]), to_acc(b.v[k]), sum);
        }
        sum = warp_sum(sum) * LOG2_E;
    } else sum = INFINITY; // makes every exponential zero
    if (threadIdx.x % WARP == 0) base[row] = sum;
}

// `CrossEntropyFinalizeArgs` in fused.rs.
struct CrossEntropyFinalizeArgs {
    const float *exp_sums; // (tiles, rows)
    bf16 *logits;      // (rows, stride)
    const uint32_t *targets;
    const bf16 *x; // (rows, width), like `scaled_x`
    bf16 *scaled_x;
    float *factors;        // (rows)
    double *loss, *weight; // (rows)
    uint32_t *hits;
    double scale;
    int rows, stride, classes, tiles, width;
};

__global__ void __launch_bounds__(WARP *WARPS) finalize(CrossEntropyFinalizeArgs q) {
    __shared__ float parts[WARPS][ROWS], factors[ROWS];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = blockIdx.x * ROWS + lane;
    float part = 0;
    if (row < q.rows)
        for (int tile = warp; tile < q.tiles; tile += WARPS) part += q.exp_sums[int64_t(tile) * q.rows + row];
    parts[warp][lane] = part;
    __syncthreads();
    if (warp == 0 && row < q.rows) {
        float total = 0;
        for (int i = 0; i < WARPS; i++) total += parts[i][lane];
        uint32_t target = q.targets[row];
        bool has_target = target < uint32_t(q.classes);
        // The target's own exponential is 1 in theory, but its logit was computed twice, with different summation
        // orders.
        if (total < 1) total = 1;
        float factor = has_target ? float(q.scale) / total : 0;
        if (has_target) q.logits[int64_t(row) * q.stride + target] = from_acc<bf16>(1 - total);
        factors[lane] = q.factors[row] = factor;
        q.loss[row] = has_target ? log(double(total)) : target == IGNORE_INDEX ? 0 : double(NAN);
        q.weight[row] = has_target;
        q.hits[row] = target == IGNORE_INDEX ? 0 : COUNTED;
    }
    __syncthreads();
    for (int i = warp; i < ROWS && blockIdx.x * ROWS + i < q.rows; i += WARPS) {
        int64_t at = int64_t(blockIdx.x * ROWS + i) * q.width;
        scale_row(q.x + at, q.scaled_x + at, factors[i], q.width);
    }
}

__global__ void __launch_bounds__(WARP *WARPS) scale_rows(bf16 *x, const float *factors, int rows, int width) {
    int row = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (row >= rows) return;
    bf16 *at = x + int64_t(row) * width;
    scale_row(at, at, factors[row], width);
}

} // namespace

// The logits of the targets in units of log2; infinity for rows without a target.
extern "C" int cross_entropy_target_logits(const void *x, const void *w, const uint32_t *targets, float *base, int rows, int width,
                                   int classes, cudaStream_t stream) {
    target_logits<<<blocks(rows, WARPS), WARP * WARPS, 0, stream>>>((const bf16 *)x, (const bf16 *)w, targets, base, rows, width,
                                                                 classes);
    return cudaGetLastError();
}

// From the exponentials and their sums, computes the losses; replaces the target's entry in `logits` by 1 minus the row
// sum; computes the factors by which the rows are still to be multiplied to become `scale` times the gradient; and
// multiplies `x` with them.
extern "C" int cross_entropy_finalize(const CrossEntropyFinalizeArgs *args, cudaStream_t stream) {
    finalize<<<blocks(args->rows, ROWS), WARP * WARPS, 0, stream>>>(*args);
    return cudaGetLastError();
}

extern "C" int cross_entropy_scale_rows(void *x, const float *factors, int rows, int width, cudaStream_t stream) {
    scale_rows<<<blocks(rows, WARPS), WARP * WARPS, 0, stream>>>((bf16 *)x, factors, rows, width);
    return cudaGetLastError();
}
