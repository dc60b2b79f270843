// `y = act(x)` and `dx = dy act'(v)`, elementwise. `dx` may alias `dy`.
#include "cuda/activation.cuh"

namespace {

template <int A, class T, int N> __global__ void forward(const T *x, T *y, int64_t packs) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    auto values = Pack<T, N>::load(x + i * N);
#pragma unroll
    for (int k = 0; k < N; k++) values.v[k] = from_acc<T>(value_of<A, is_low_precision<T>>(to_acc(values.v[k])));
    values.store(y + i * N);
}

template <int A, class T, int N> __global__ void backward(const T *v, const T *dy, T *dx, int64_t packs) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    auto at = Pack<T, N>::load(v + i * N), d = Pack<T, N>::load(dy + i * N);
#pragma unroll
    for (int k = 0; k < N; k++) d.v[k] = from_acc<T>(to_acc(d.v[k]) * slope_of<A, is_low_precision<T>>(to_acc(at.v[k])));
    d.store(dx + i * N);
}

} // namespace

extern "C" int activation_forward(int type, int act, const void *x, void *y, int64_t len, cudaStream_t stream) {
    if (len == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        bool wide = aligned(len * sizeof(T), {x, y});
        int64_t packs = wide ? len / N : len;
        WITH_ACT(act, {
            if (wide) forward<A, T, N><<<blocks(packs, 256), 256, 0, stream>>>((const T *)x, (T *)y, packs);
            else forward<A, T, 1><<<blocks(packs, 256), 256, 0, stream>>>((const T *)x, (T *)y, packs);
        })
    })
    return cudaGetLastError();
}

extern "C" int activation_backward(int type, int act, const void *v, const void *dy, void *dx, int64_t len,
                                   cudaStream_t stream) {
    if (len == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        bool wide = aligned(len * sizeof(T), {v, dy, dx});
        int64_t packs = wide ? len / N : len;
        WITH_ACT(act, {
            if (wide)
                backward<A, T, N><<<blocks(packs, 256), 256, 0, stream>>>((const T *)v, (const T *)dy, (T *)dx, packs);
            else
                backward<A, T, 1><<<blocks(packs, 256), 256, 0, stream>>>((const T *)v, (const T *)dy, (T *)dx, packs);
        })
    })
    return cudaGetLastError();
}
