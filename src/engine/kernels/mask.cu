// Zeroes the values whose byte in the mask is 0.
#include "cuda/device.cuh"

namespace {

constexpr int THREADS = 256;

// A store only where a value changes: most masked values are zero already, save for what the last update added.
template <class T> __global__ void __launch_bounds__(THREADS) apply(T *values, const uint8_t *mask, int64_t len) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < len && mask[i] == 0) values[i] = from_acc<T>(0);
}

} // namespace

extern "C" int mask_apply(int type, void *values, const void *mask, int64_t len, cudaStream_t stream) {
    if (len == 0) return 0;
    WITH_TYPE(type, {
        apply<T><<<blocks(len, THREADS), THREADS, 0, stream>>>((T *)values, (const uint8_t *)mask, len);
    })
    return cudaGetLastError();
}
