// `y = act(a + b)`, elementwise. `y` may alias `a`.
#include "cuda/activation.cuh"

namespace {

template <int A, class T, int N>
__global__ void __launch_bounds__(256) sum(const T *a, const T *b, T *y, int64_t packs) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    auto left = Pack<T, N>::load(a + i * N), right = Pack<T, N>::load(b + i * N);
#pragma unroll
    for (int k = 0; k < N; k++) left.v[k] = from_acc<T>(value_of<A>(to_acc(left.v[k]) + to_acc(right.v[k])));
    left.store(y + i * N);
}

} // namespace

extern "C" int add_forward(int type, int act, const void *a, const void *b, void *y, int64_t len,
                           cudaStream_t stream) {
    if (len == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        bool wide = aligned(len * sizeof(T), {a, b, y});
        int64_t packs = wide ? len / N : len;
        WITH_ACT(act, {
            if (wide) sum<A, T, N><<<blocks(packs, 256), 256, 0, stream>>>((const T *)a, (const T *)b, (T *)y, packs);
            else sum<A, T, 1><<<blocks(packs, 256), 256, 0, stream>>>((const T *)a, (const T *)b, (T *)y, packs);
        })
    })
    return cudaGetLastError();
}
