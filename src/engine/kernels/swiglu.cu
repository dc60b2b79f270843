// `y = silu(gate) up` over rows of (gate, up), and its gradient.
#include "cuda/activation.cuh"

namespace {

template <class T, int N>
__global__ void __launch_bounds__(256) forward(const T *x, T *y, int64_t packs_all, int packs) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs_all) return;
    const T *gate = x + (i / packs * packs + i) * N, *up_at = gate + int64_t(packs) * N;
    auto g = Pack<T, N>::load(gate), u = Pack<T, N>::load(up_at);
#pragma unroll
    for (int k = 0; k < N; k++) g.v[k] = from_acc<T>(value_of<SILU>(to_acc(g.v[k])) * to_acc(u.v[k]));
    g.store(y + i * N);
}

template <class T, int N>
__global__ void __launch_bounds__(256) backward(const T *x, const T *dy, T *dx, int64_t packs_all, int packs) {
    using R = Acc<T>;
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs_all) return;
    int64_t at = (i / packs * packs + i) * N, other = at + int64_t(packs) * N;
    auto g = Pack<T, N>::load(x + at), u = Pack<T, N>::load(x + other), d = Pack<T, N>::load(dy + i * N);
#pragma unroll
    for (int k = 0; k < N; k++) {
        R gate = to_acc(g.v[k]), slope = to_acc(d.v[k]), s = sigmoid_of(gate);
        g.v[k] = from_acc<T>(slope * to_acc(u.v[k]) * s * (R(1) + gate * (R(1) - s)));
        u.v[k] = from_acc<T>(slope * gate * s);
    }
    g.store(dx + at);
    u.store(dx + other);
}

} // namespace

// `x` is (rows, 2 n), `y` (rows, n).
extern "C" int swiglu_forward(int type, const void *x, void *y, int64_t rows, int n, cudaStream_t stream) {
    if (rows == 0 || n == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        bool wide = aligned(int64_t(n) * sizeof(T), {x, y});
        int packs = wide ? n / N : n;
        int64_t all = rows * packs;
        if (wide) forward<T, N><<<blocks(all, 256), 256, 0, stream>>>((const T *)x, (T *)y, all, packs);
        else forward<T, 1><<<blocks(all, 256), 256, 0, stream>>>((const T *)x, (T *)y, all, packs);
    })
    return cudaGetLastError();
}

extern "C" int swiglu_backward(int type, const void *x, const void *dy, void *dx, int64_t rows, int n,
                               cudaStream_t stream) {
    if (rows == 0 || n == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        bool wide = aligned(int64_t(n) * sizeof(T), {x, dy, dx});
        int packs = wide ? n / N : n;
        int64_t all = rows * packs;
        if (wide) backward<T, N><<<blocks(all, 256), 256, 0, stream>>>((const T *)x, (const T *)dy, (T *)dx, all, packs);
        else backward<T, 1><<<blocks(all, 256), 256, 0, stream>>>((const T *)x, (const T *)dy, (T *)dx, all, packs);
    })
    return cudaGetLastError();
}
