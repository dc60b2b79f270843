// What cross-entropy is beside its products where the product of the scores makes exponentials at once (linear/hopper.cu):
// before it, the scores of the targets, from which these are taken; after it, losses and what rows are divided by, which meets
// the other operand of one product and the result of the other instead of the exponentials.
#include "cuda/device.cuh"
#include "cuda/scores.cuh"

namespace {

constexpr int WARPS = 8, ROWS = WARP; // of a block

// `x` scaled, a row by a warp.
__device__ __forceinline__ void scale_row(const bf16 *x, bf16 *y, float scale, int width) {
    for (int i = threadIdx.x % WARP * 8; i < width; i += WARP * 8) {
        auto v = Pack<bf16>::load(x + i);
#pragma unroll
        for (int k = 0; k < 8; k++) v.v[k] = down<bf16>(up(v.v[k]) * scale);
        v.store(y + i);
    }
}

__global__ void __launch_bounds__(WARP *WARPS) find_bases(const bf16 *x, const bf16 *w, const uint32_t *targets, float *base,
                                                          int rows, int width, int classes) {
    int row = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (row >= rows) return;
    uint32_t target = targets[row];
    float sum = 0;
    if (target < uint32_t(classes)) {
        for (int i = threadIdx.x % WARP * 8; i < width; i += WARP * 8) {
            auto a = Pack<bf16>::load(x + int64_t(row) * width + i), b = Pack<bf16>::load(w + int64_t(target) * width + i);
#pragma unroll
            for (int k = 0; k < 8; k++) sum = fmaf(up(a.v[k]), up(b.v[k]), sum);
        }
        sum = warp_sum(sum) * LOG2_E;
    } else sum = INFINITY; // every exponential is zero
    if (threadIdx.x % WARP == 0) base[row] = sum;
}

// `Settled` in fused.rs.
struct Settled {
    const float *sums; // (tiles, rows)
    bf16 *scores;      // (rows, stride)
    const uint32_t *targets;
    const bf16 *x; // (rows, width), as `scaled`
    bf16 *scaled;
    float *factors;        // (rows)
    double *loss, *weight; // (rows)
    uint32_t *hits;
    double scale;
    int rows, stride, classes, tiles, width;
};

__global__ void __launch_bounds__(WARP *WARPS) settle(Settled q) {
    __shared__ float parts[WARPS][ROWS], factors[ROWS];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = blockIdx.x * ROWS + lane;
    float part = 0;
    if (row < q.rows)
        for (int tile = warp; tile < q.tiles; tile += WARPS) part += q.sums[int64_t(tile) * q.rows + row];
    parts[warp][lane] = part;
    __syncthreads();
    if (warp == 0 && row < q.rows) {
        float total = 0;
        for (int i = 0; i < WARPS; i++) total += parts[i][lane];
        uint32_t target = q.targets[row];
        bool learnt = target < uint32_t(q.classes);
        // The target's own is 1, but its score was made twice, with the sums in another order.
        if (total < 1) total = 1;
        float factor = learnt ? float(q.scale) / total : 0;
        if (learnt) q.scores[int64_t(row) * q.stride + target] = down<bf16>(1 - total);
        factors[lane] = q.factors[row] = factor;
        q.loss[row] = learnt ? log(double(total)) : target == IGNORE ? 0 : double(NAN);
        q.weight[row] = learnt;
        q.hits[row] = target == IGNORE ? 0 : JUDGED;
    }
    __syncthreads();
    for (int i = warp; i < ROWS && blockIdx.x * ROWS + i < q.rows; i += WARPS) {
        int64_t at = int64_t(blockIdx.x * ROWS + i) * q.width;
        scale_row(q.x + at, q.scaled + at, factors[i], q.width);
    }
}

__global__ void __launch_bounds__(WARP *WARPS) scale_rows(bf16 *x, const float *factors, int rows, int width) {
    int row = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (row >= rows) return;
    bf16 *at = x + int64_t(row) * width;
    scale_row(at, at, factors[row], width);
}

} // namespace

// The scores of the targets in powers of two, and infinity where there is none.
extern "C" int cross_entropy_bases(const void *x, const void *w, const uint32_t *targets, float *base, int rows, int width,
                                   int classes, cudaStream_t stream) {
    find_bases<<<blocks(rows, WARPS), WARP * WARPS, 0, stream>>>((const bf16 *)x, (const bf16 *)w, targets, base, rows, width,
                                                                 classes);
    return cudaGetLastError();
}

// Of exponentials from the targets' on and their sums: losses, the target's place in `scores` less the sum of the row, and
// what rows of these are yet to be multiplied with to be `scale` times the gradient, with `x` multiplied with it.
extern "C" int cross_entropy_settle(const Settled *settled, cudaStream_t stream) {
    settle<<<blocks(settled->rows, ROWS), WARP * WARPS, 0, stream>>>(*settled);
    return cudaGetLastError();
}

extern "C" int cross_entropy_scale(void *x, const float *factors, int rows, int width, cudaStream_t stream) {
    scale_rows<<<blocks(rows, WARPS), WARP * WARPS, 0, stream>>>((bf16 *)x, factors, rows, width);
    return cudaGetLastError();
}
