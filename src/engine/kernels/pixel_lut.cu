// Maps image bytes to values through a lookup table per channel.
#include "cuda/device.cuh"

namespace {

constexpr int THREADS = 256, EACH = 16; // values per thread

// Value `i` belongs to channel `i % channels`. Each block caches the tables in shared memory.
template <class T>
__global__ void __launch_bounds__(THREADS)
    expand(const uint8_t *bytes, const float *tables, T *values, int64_t count, int channels) {
    extern __shared__ float table[];
    for (int i = threadIdx.x; i < channels * 256; i += THREADS) table[i] = tables[i];
    __syncthreads();
    int64_t first = int64_t(blockIdx.x) * THREADS * EACH;
    unsigned channel = unsigned(first % channels) + threadIdx.x;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        int64_t i = first + k * THREADS + threadIdx.x;
        if (i < count) values[i] = from_acc<T>(table[(channel + k * THREADS) % unsigned(channels) * 256 + bytes[i]]);
    }
}

} // namespace

// `bytes` and `values` are (count / channels, channels), `tables` (channels, 256).
extern "C" int pixel_lut_expand(int type, const void *bytes, const void *tables, void *values, int64_t count, int channels,
                              cudaStream_t stream) {
    if (count == 0) return 0;
    WITH_TYPE(type, {
        size_t shared = size_t(channels) * 256 * sizeof(float);
        expand<T><<<blocks(count, THREADS * EACH), THREADS, shared, stream>>>(
            (const uint8_t *)bytes, (const float *)tables, (T *)values, count, channels);
    })
    return cudaGetLastError();
}
