// Average pooling, over windows, where padding counts as zeros, and over whole images.
#include "cuda/channels.cuh"
#include "cuda/pooling.cuh"

namespace {

template <class T, int N>
__global__ void __launch_bounds__(256) windows_forward(const T *__restrict__ x, T *__restrict__ y, PoolGeometry w, Acc<T> inv_count,
                                                       int64_t packs) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    PixelPosition<N> at(i, w.out_height, w.out_width, w.channels);
    Acc<T> sums[N] = {};
    for (int ky = 0; ky < w.size; ky++) {
        int iy = at.y * w.stride + ky - w.padding;
        if (iy < 0 || iy >= w.height) continue;
        for (int kx = 0; kx < w.size; kx++) {
            int ix = at.x * w.stride + kx - w.padding;
            if (ix < 0 || ix >= w.width) continue;
            auto values =
                Pack<T, N>::load(x + ((at.image * w.height + iy) * w.width + ix) * w.channels + at.channel);
#pragma unroll
            for (int k = 0; k < N; k++) sums[k] += to_acc(values.v[k]);
        }
    }
    Pack<T, N> result;
#pragma unroll
    for (int k = 0; k < N; k++) result.v[k] = from_acc<T>(sums[k] * inv_count);
    result.store(y + i * N);
}

template <class T, int N>
__global__ void __launch_bounds__(256) windows_backward(const T *__restrict__ dy, T *__restrict__ dx, PoolGeometry w,
                                                        Acc<T> inv_count, int64_t packs) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    PixelPosition<N> at(i, w.height, w.width, w.channels);
    Acc<T> sums[N] = {};
    for_windows(w, at.y, at.x, [&](int oy, int ox, int) {
        int64_t from = ((at.image * w.out_height + oy) * w.out_width + ox) * w.channels + at.channel;
        auto ds = Pack<T, N>::load(dy + from);
#pragma unroll
        for (int k = 0; k < N; k++) sums[k] += to_acc(ds.v[k]);
    });
    Pack<T, N> result;
#pragma unroll
    for (int k = 0; k < N; k++) result.v[k] = from_acc<T>(sums[k] * inv_count);
    result.store(dx + i * N);
}

// Each image is one unit with a single part.
template <class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS)
    global_forward(const T *__restrict__ x, T *__restrict__ y, Acc<T> inv_count, RowPartition partition, BlockLayout layout) {
    ThreadPosition at(partition, layout);
    Acc<T> sums[N] = {};
    x += at.pack * N;
    auto load = [&](int64_t row) { return Pack<T, N>::load(x + row * partition.channels); };
    for_each_row<4>(at, layout, load, [&](int64_t, const Pack<T, N> &values) {
#pragma unroll
        for (int k = 0; k < N; k++) sums[k] += to_acc(values.v[k]);
    });
    block_row_sum(sums, at, layout);
    if (at.y == 0 && at.in) {
        Pack<T, N> result;
#pragma unroll
        for (int k = 0; k < N; k++) result.v[k] = from_acc<T>(sums[k] * inv_count);
        result.store(y + int64_t(at.unit) * partition.channels + at.pack * N);
    }
}

template <class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS)
    global_backward(const T *__restrict__ dy, T *__restrict__ dx, Acc<T> inv_count, RowPartition partition, BlockLayout layout) {
    ThreadPosition at(partition, layout);
    if (!at.in) return;
    auto result = Pack<T, N>::load(dy + int64_t(at.unit) * partition.channels + at.pack * N);
#pragma unroll
    for (int k = 0; k < N; k++) result.v[k] = from_acc<T>(to_acc(result.v[k]) * inv_count);
    for (int64_t row = at.first; row < at.end; row += layout.block_rows) result.store(dx + row * partition.channels + at.pack * N);
}

} // namespace

extern "C" int avg_pool_forward(int type, const PoolGeometry *window, const void *x, void *y, cudaStream_t stream) {
    PoolGeometry w = *window;
    int64_t values = int64_t(w.batch) * w.out_height * w.out_width * w.channels;
    if (values == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        Acc<T> inv_count = Acc<T>(1.0 / (double(w.size) * w.size));
        if (aligned(w.channels * sizeof(T), {x, y}))
            windows_forward<T, N><<<blocks(values / N, 256), 256, 0, stream>>>((const T *)x, (T *)y, w, inv_count,
                                                                               values / N);
        else windows_forward<T, 1><<<blocks(values, 256), 256, 0, stream>>>((const T *)x, (T *)y, w, inv_count, values);
    })
    return cudaGetLastError();
}

extern "C" int avg_pool_backward(int type, const PoolGeometry *window, const void *dy, void *dx, cudaStream_t stream) {
    PoolGeometry w = *window;
    int64_t values = int64_t(w.batch) * w.height * w.width * w.channels;
    if (values == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        Acc<T> inv_count = Acc<T>(1.0 / (double(w.size) * w.size));
        if (aligned(w.channels * sizeof(T), {dy, dx}))
            windows_backward<T, N><<<blocks(values / N, 256), 256, 0, stream>>>((const T *)dy, (T *)dx, w, inv_count,
                                                                                values / N);
        else windows_backward<T, 1><<<blocks(values, 256), 256, 0, stream>>>((const T *)dy, (T *)dx, w, inv_count, values);
    })
    return cudaGetLastError();
}

// (batch, pixels, channels) to (batch, channels).
extern "C" int avg_pool_global_forward(int type, const void *x, void *y, int batch, int64_t pixels, int channels,
                             cudaStream_t stream) {
    if (int64_t(batch) * pixels * channels == 0) return 0;
    RowPartition partition{batch * pixels, pixels, pixels, 1, channels};
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        Acc<T> inv_count = Acc<T>(1.0 / double(pixels));
        bool vectorized = aligned(channels * sizeof(T), {x, y});
        BlockLayout layout(vectorized ? channels / N : channels);
        if (vectorized)
            global_forward<T, N><<<layout.blocks(partition), layout.threads(), 0, stream>>>((const T *)x, (T *)y, inv_count, partition, layout);
        else
            global_forward<T, 1><<<layout.blocks(partition), layout.threads(), 0, stream>>>((const T *)x, (T *)y, inv_count, partition, layout);
    })
    return cudaGetLastError();
}

extern "C" int avg_pool_global_backward(int type, const void *dy, void *dx, int batch, int64_t pixels, int channels,
                                      cudaStream_t stream) {
    if (int64_t(batch) * pixels * channels == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        Acc<T> inv_count = Acc<T>(1.0 / double(pixels));
        bool vectorized = aligned(channels * sizeof(T), {dy, dx});
        BlockLayout layout(vectorized ? channels / N : channels);
        // Sixteen rows per thread.
        int64_t chunk = layout.block_rows * 16, parts = (pixels + chunk - 1) / chunk;
        RowPartition partition{batch * pixels, pixels, chunk, int(parts), channels};
        if (vectorized)
            global_backward<T, N><<<layout.blocks(partition), layout.threads(), 0, stream>>>((const T *)dy, (T *)dx, inv_count, partition, layout);
        else
            global_backward<T, 1><<<layout.blocks(partition), layout.threads(), 0, stream>>>((const T *)dy, (T *)dx, inv_count, partition, layout);
    })
    return cudaGetLastError();
}
