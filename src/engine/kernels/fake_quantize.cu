// Fake quantization to 8-bit integers, its straight-through gradient, and the ranges of activations. All results are those
// of the CPU kernels, bit for bit.
#include "cuda/device.cuh"

#include <cfloat>

namespace {

constexpr int THREADS = 256, BLOCKS_PER_SM = 16;

__device__ __forceinline__ float to_integer(float x) { return rintf(x); }
__device__ __forceinline__ double to_integer(double x) { return rint(x); }
__device__ __forceinline__ bool is_normal(float x) { return x >= FLT_MIN && x <= FLT_MAX; }

// The multiples of a step between two bounds, which are in steps.
template <class R> struct Grid {
    R step, first, last;
    __device__ __forceinline__ bool contains(R x) const {
        R steps = x / step;
        return steps >= first && steps <= last;
    }
    // Comparisons with NaN are false, so NaN propagates.
    __device__ __forceinline__ R rounded(R x) const {
        R steps = x / step;
        return to_integer(steps < first ? first : steps > last ? last : steps) * step;
    }
};

// The grid of the range of an activation; false if values are not rounded yet.
template <class R> __device__ __forceinline__ bool grid_of_range(const float *range, Grid<R> &grid) {
    float low = fminf(range[0], 0.0f), high = fmaxf(range[1], 0.0f), step = (high - low) / 255.0f;
    float zero = fminf(fmaxf(rintf(-128.0f - low / step), -128.0f), 127.0f);
    grid = {R(step), R(-128.0f - zero), R(127.0f - zero)};
    return is_normal(step);
}

// The step of a weight of this largest magnitude, of 16 significant bits by Veltkamp's splitting. A fused multiply-add
// would undo that.
__device__ __forceinline__ float symmetric_step(float largest) {
    float scale = largest / 127.0f, spread = __fmul_rn(scale, 257.0f);
    float step = __fsub_rn(spread, __fsub_rn(spread, scale));
    return is_normal(step) ? step : 1.0f;
}

template <class T, int N, bool observe>
__global__ void __launch_bounds__(THREADS) round_values(const T *x, T *y, float *range, int64_t packs) {
    using R = Acc<T>;
    Grid<R> grid;
    bool rounds = grid_of_range(range, grid);
    R low = 0, high = 0;
    int64_t stride = int64_t(gridDim.x) * THREADS;
    for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < packs; i += stride) {
        auto pack = Pack<T, N>::load(x + i * N);
#pragma unroll
        for (int k = 0; k < N; k++) {
            R value = to_acc(pack.v[k]);
            low = value < low ? value : low;
            high = value > high ? value : high;
            if (rounds) pack.v[k] = from_acc<T>(grid.rounded(value));
        }
        pack.store(y + i * N);
    }
    if constexpr (observe) {
        float least = float(-block_max(-low)), most = float(block_max(high));
        if (threadIdx.x > 0) return;
        // The bits of floats of one sign are ordered as their magnitudes, and 0 is below all negative ones.
        if (least < 0.0f) atomicMax((unsigned *)&range[2], __float_as_uint(least));
        if (most > 0.0f) atomicMax((unsigned *)&range[3], __float_as_uint(most));
    }
}

template <class T, int N>
__global__ void __launch_bounds__(THREADS) pass_gradient(const T *x, const T *dy, T *dx, const float *range, int64_t packs) {
    Grid<Acc<T>> grid;
    bool rounds = grid_of_range(range, grid);
    int64_t stride = int64_t(gridDim.x) * THREADS;
    for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < packs; i += stride) {
        auto value = Pack<T, N>::load(x + i * N), d = Pack<T, N>::load(dy + i * N);
#pragma unroll
        for (int k = 0; k < N; k++)
            if (rounds && !grid.contains(to_acc(value.v[k]))) d.v[k] = from_acc<T>(0);
        d.store(dx + i * N);
    }
}

// A block per row. `from` and `into` may be the same.
template <class S, class T> __global__ void round_rows(const S *from, T *into, int64_t width) {
    using R = Acc<S>;
    from += blockIdx.x * width;
    into += blockIdx.x * width;
    R largest = 0;
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
        R value = to_acc(from[i]), size = value < R(0) ? -value : value;
        largest = size > largest ? size : largest;
    }
    Grid<R> grid{R(symmetric_step(float(block_max(largest)))), R(-127), R(127)};
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) into[i] = from_acc<T>(Acc<T>(grid.rounded(to_acc(from[i]))));
}

__global__ void move(float *range, double fraction) {
    int end = threadIdx.x;
    bool moves = isfinite(range[2]) && isfinite(range[3]);
    __syncwarp();
    double at = range[end], seen = range[2 + end];
    if (moves) range[end] = float(__dadd_rn(at, __dmul_rn(fraction, seen - at)));
    range[2 + end] = 0.0f;
}

unsigned grid_size(int64_t packs) {
    int64_t most = int64_t(GRID_SMS) * BLOCKS_PER_SM, needed = (packs + THREADS - 1) / THREADS;
    return unsigned(needed < most ? needed : most);
}

} // namespace

extern "C" int fake_quantize_forward(int type, const void *x, void *y, float *range, int64_t len, int observe,
                                     cudaStream_t stream) {
    if (len == 0) return 0;
    WITH_TYPE(type, {
        constexpr int WIDE = Pack<T>::size;
        bool wide = aligned(len * sizeof(T), {x, y});
        int64_t packs = wide ? len / WIDE : len;
        unsigned grid = grid_size(packs);
        auto *from = (const T *)x;
        auto *to = (T *)y;
        if (wide && observe) round_values<T, WIDE, true><<<grid, THREADS, 0, stream>>>(from, to, range, packs);
        else if (wide) round_values<T, WIDE, false><<<grid, THREADS, 0, stream>>>(from, to, range, packs);
        else if (observe) round_values<T, 1, true><<<grid, THREADS, 0, stream>>>(from, to, range, packs);
        else round_values<T, 1, false><<<grid, THREADS, 0, stream>>>(from, to, range, packs);
    })
    return cudaGetLastError();
}

extern "C" int fake_quantize_backward(int type, const void *x, const void *dy, void *dx, const float *range, int64_t len,
                                      cudaStream_t stream) {
    if (len == 0) return 0;
    WITH_TYPE(type, {
        constexpr int WIDE = Pack<T>::size;
        bool wide = aligned(len * sizeof(T), {x, dy, dx});
        int64_t packs = wide ? len / WIDE : len;
        auto *value = (const T *)x, *d = (const T *)dy;
        if (wide) pass_gradient<T, WIDE><<<grid_size(packs), THREADS, 0, stream>>>(value, d, (T *)dx, range, packs);
        else pass_gradient<T, 1><<<grid_size(packs), THREADS, 0, stream>>>(value, d, (T *)dx, range, packs);
    })
    return cudaGetLastError();
}

// `from` is in f32, or null: then `into` is rounded in place.
extern "C" int fake_quantize_rows(int type, const float *from, void *into, int64_t rows, int64_t width,
                                  cudaStream_t stream) {
    if (rows == 0 || width == 0) return 0;
    int threads = width < THREADS ? int(width + WARP - 1) / WARP * WARP : THREADS;
    WITH_TYPE(type, {
        if (from) round_rows<float, T><<<unsigned(rows), threads, 0, stream>>>(from, (T *)into, width);
        else round_rows<T, T><<<unsigned(rows), threads, 0, stream>>>((const T *)into, (T *)into, width);
    })
    return cudaGetLastError();
}

// A fraction of 0 leaves the range as it is, and forgets what was seen.
extern "C" int fake_quantize_move_range(float *range, double fraction, cudaStream_t stream) {
    move<<<1, 2, 0, stream>>>(range, fraction);
    return cudaGetLastError();
}
