// One factor per sample and channel (squeeze-and-excitation): `y = x s`, the gradient of the factors, and the input
// gradient, which includes that of the channel means.
#include "cuda/device.cuh"

namespace {

// `y = x s + m inv_pixels`; `m` may be null.
template <class T, int N>
__global__ void __launch_bounds__(256)
    apply(const T *x, const T *s, const T *m, T *y, int64_t packs_all, int64_t sample_packs, int packs, Acc<T> inv_pixels) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs_all) return;
    int64_t at = (i / sample_packs * packs + i % packs) * N;
    auto v = Pack<T, N>::load(x + i * N), factor = Pack<T, N>::load(s + at);
    if (m) {
        auto mean = Pack<T, N>::load(m + at);
#pragma unroll
        for (int k = 0; k < N; k++) v.v[k] = from_acc<T>(to_acc(v.v[k]) * to_acc(factor.v[k]) + to_acc(mean.v[k]) * inv_pixels);
    } else {
#pragma unroll
        for (int k = 0; k < N; k++) v.v[k] = from_acc<T>(to_acc(v.v[k]) * to_acc(factor.v[k]));
    }
    v.store(y + i * N);
}

constexpr int LINES = 8; // pixels that a block processes at a time

template <class T>
__global__ void __launch_bounds__(WARP *LINES) factor_gradient(const T *x, const T *dy, T *ds, int64_t pixels, int channels) {
    using R = Acc<T>;
    __shared__ R lines[LINES][WARP];
    int c = blockIdx.x * WARP + threadIdx.x;
    int64_t base = int64_t(blockIdx.y) * pixels * channels;
    R sum = 0;
    if (c < channels)
        for (int64_t p = threadIdx.y; p < pixels; p += LINES) {
            int64_t at = base + p * channels + c;
            sum += to_acc(x[at]) * to_acc(dy[at]);
        }
    lines[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= channels) return;
#pragma unroll
    for (int i = 1; i < LINES; i++) sum += lines[i][threadIdx.x];
    ds[int64_t(blockIdx.y) * channels + c] = from_acc<T>(sum);
}

} // namespace

// `x` and `y` are (samples, pixels, channels), `s` and `m` (samples, channels).
extern "C" int scale_apply(int type, const void *x, const void *s, const void *m, void *y, int64_t samples,
                           int64_t pixels, int channels, double inv_pixels, cudaStream_t stream) {
    if (samples == 0 || pixels == 0 || channels == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        bool wide = aligned(int64_t(channels) * sizeof(T), {x, s, m, y});
        int packs = wide ? channels / N : channels;
        int64_t sample = pixels * packs, all = samples * sample;
        auto *from = (const T *)x, *f = (const T *)s, *mean = (const T *)m;
        if (wide) apply<T, N><<<blocks(all, 256), 256, 0, stream>>>(from, f, mean, (T *)y, all, sample, packs, Acc<T>(inv_pixels));
        else apply<T, 1><<<blocks(all, 256), 256, 0, stream>>>(from, f, mean, (T *)y, all, sample, packs, Acc<T>(inv_pixels));
    })
    return cudaGetLastError();
}

extern "C" int scale_factor_gradient(int type, const void *x, const void *dy, void *ds, int64_t samples, int64_t pixels,
                             int channels, cudaStream_t stream) {
    if (samples == 0 || channels == 0) return 0;
    WITH_TYPE(type, {
        auto *from = (const T *)x, *d = (const T *)dy;
        // gridDim.y is limited to 65,535.
        for (int64_t first = 0; first < samples; first += 65535) {
            int64_t at = first * pixels * channels, n = samples - first < 65535 ? samples - first : 65535;
            factor_gradient<T><<<dim3(blocks(channels, WARP), unsigned(n)), dim3(WARP, LINES), 0, stream>>>(
                from + at, d + at, (T *)ds + first * channels, pixels, channels);
        }
    })
    return cudaGetLastError();
}
