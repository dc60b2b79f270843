// Dropout with the draws of dropout.rs: one draw serves four values.
#include "cuda/device.cuh"
#include "cuda/random.cuh"

namespace {

// `N` is 4, or 1 if the values cannot be moved in packs of four.
template <class T, int N>
__global__ void __launch_bounds__(256)
    apply(const T *x, T *y, int64_t width, uint32_t threshold, Acc<T> scale, const RngKey *keys, int samples) {
    int64_t group = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, first = group * 4;
    if (first >= width) return;
    // gridDim.y is limited to 65,535.
    for (int sample = blockIdx.y; sample < samples; sample += gridDim.y) {
    uint64_t bits = keys[sample].bits(group);
    int64_t at = sample * width + first;
    auto value = [&](T v, int lane) {
        bool kept = ((bits >> (16 * lane)) & 0xffff) >= threshold;
        return from_acc<T>(kept ? to_acc(v) * scale : Acc<T>(0));
    };
    if constexpr (N == 4) {
        auto v = Pack<T, 4>::load(x + at);
#pragma unroll
        for (int lane = 0; lane < 4; lane++) v.v[lane] = value(v.v[lane], lane);
        v.store(y + at);
    } else {
        for (int lane = 0; lane < 4 && first + lane < width; lane++) y[at + lane] = value(x[at + lane], lane);
    }
    }
}

} // namespace

// `samples` rows of `width` values, and a key per row. `y` may alias `x`.
extern "C" int dropout_apply(int type, const void *x, void *y, const void *keys, int samples, int64_t width,
                             uint32_t threshold, double scale, cudaStream_t stream) {
    if (samples == 0 || width == 0) return 0;
    auto *all = (const RngKey *)keys;
    dim3 grid(blocks((width + 3) / 4, 256), samples < 65535 ? samples : 65535);
    WITH_TYPE(type, {
        uintptr_t bits = uintptr_t(x) | uintptr_t(y) | uintptr_t(width * sizeof(T));
        if (bits % (4 * sizeof(T)) == 0)
            apply<T, 4><<<grid, 256, 0, stream>>>((const T *)x, (T *)y, width, threshold, Acc<T>(scale), all, samples);
        else apply<T, 1><<<grid, 256, 0, stream>>>((const T *)x, (T *)y, width, threshold, Acc<T>(scale), all, samples);
    })
    return cudaGetLastError();
}
