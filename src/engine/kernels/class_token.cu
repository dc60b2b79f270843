// Prepends a class token to each sequence and adds position embeddings; backward sums their gradients.
#include "cuda/device.cuh"

namespace {

template <class T, int N>
__global__ void __launch_bounds__(256)
    forward(const T *x, const T *cls, const T *positions, T *y, int64_t packs_all, int packs, int length) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs_all) return;
    int64_t row = i / packs, sample = row / length;
    int p = int(i - row * packs) * N, t = int(row - sample * length), n = packs * N;
    // Each sample of `y` has one row more than in `x`, so `x` lags by the number of samples up to this one.
    auto v = Pack<T, N>::load(t == 0 ? cls + p : x + (row - sample - 1) * n + p);
    auto position = Pack<T, N>::load(positions + int64_t(t) * n + p);
#pragma unroll
    for (int k = 0; k < N; k++) v.v[k] = from_acc<T>(to_acc(v.v[k]) + to_acc(position.v[k]));
    v.store(y + i * N);
}

// Accumulates the sums over samples into the gradients and, if needed, writes the input gradient: dy without the class
// token.
template <class T, int N>
__global__ void __launch_bounds__(256)
    backward(const T *dy, Acc<T> *cls, Acc<T> *positions, T *dx, int64_t packs_all, int packs, int samples) {
    using R = Acc<T>;
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs_all) return;
    R sum[N] = {};
#pragma unroll 4
    for (int sample = 0; sample < samples; sample++) {
        auto d = Pack<T, N>::load(dy + (sample * packs_all + i) * N);
#pragma unroll
        for (int k = 0; k < N; k++) sum[k] += to_acc(d.v[k]);
        if (dx && i >= packs) d.store(dx + (sample * (packs_all - packs) + i - packs) * N);
    }
#pragma unroll
    for (int k = 0; k < N; k++) {
        if (positions) positions[i * N + k] += sum[k];
        if (cls && i < packs) cls[i * N + k] += sum[k];
    }
}

} // namespace

// `y` is (samples, length, n); `x` is one position shorter.
extern "C" int class_token_forward(int type, const void *x, const void *cls, const void *positions, void *y,
                                   int samples, int length, int n, cudaStream_t stream) {
    if (samples == 0 || length == 0 || n == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        bool wide = aligned(int64_t(n) * sizeof(T), {x, cls, positions, y});
        int packs = wide ? n / N : n;
        int64_t all = int64_t(samples) * length * packs;
        auto *from = (const T *)x, *c = (const T *)cls, *p = (const T *)positions;
        if (wide) forward<T, N><<<blocks(all, 256), 256, 0, stream>>>(from, c, p, (T *)y, all, packs, length);
        else forward<T, 1><<<blocks(all, 256), 256, 0, stream>>>(from, c, p, (T *)y, all, packs, length);
    })
    return cudaGetLastError();
}

// `dx` and the gradients of frozen parameters may be null.
extern "C" int class_token_backward(int type, const void *dy, void *cls, void *positions, void *dx, int samples,
                                    int length, int n, cudaStream_t stream) {
    if (samples == 0 || length == 0 || n == 0) return 0;
    WITH_TYPE(type, {
        using R = Acc<T>;
        constexpr int N = Pack<T>::size;
        bool wide = aligned(int64_t(n) * sizeof(T), {dy, dx});
        int packs = wide ? n / N : n;
        int64_t all = int64_t(length) * packs;
        auto *d = (const T *)dy;
        if (wide) backward<T, N><<<blocks(all, 256), 256, 0, stream>>>(d, (R *)cls, (R *)positions, (T *)dx, all, packs, samples);
        else backward<T, 1><<<blocks(all, 256), 256, 0, stream>>>(d, (R *)cls, (R *)positions, (T *)dx, all, packs, samples);
    })
    return cudaGetLastError();
}
