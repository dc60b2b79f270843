// Max pooling: forward stores the maxima and the index of each within its window. In the backward pass, every pixel
// gathers the gradients of the windows that cover it.
#include "cuda/device.cuh"
#include "cuda/pooling.cuh"

namespace {

template <class T, int N>
__global__ void __launch_bounds__(256) max_forward(const T *__restrict__ x, T *__restrict__ y, uint8_t *__restrict__ indices,
                                                   PoolGeometry w, int64_t packs) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    PixelPosition<N> at(i, w.out_height, w.out_width, w.channels);
    Pack<T, N> best;
    Pack<uint8_t, N> from;
#pragma unroll
    for (int k = 0; k < N; k++) best.v[k] = from_acc<T>(Acc<T>(0)), from.v[k] = 0;
    bool first = true;
    for (int ky = 0; ky < w.size; ky++) {
        int iy = at.y * w.stride + ky - w.padding;
        if (iy < 0 || iy >= w.height) continue;
        for (int kx = 0; kx < w.size; kx++) {
            int ix = at.x * w.stride + kx - w.padding;
            if (ix < 0 || ix >= w.width) continue;
            auto values =
                Pack<T, N>::load(x + ((at.image * w.height + iy) * w.width + ix) * w.channels + at.channel);
#pragma unroll
            for (int k = 0; k < N; k++) {
                bool larger = first || to_acc(values.v[k]) > to_acc(best.v[k]);
                best.v[k] = larger ? values.v[k] : best.v[k];
                from.v[k] = larger ? uint8_t(ky * w.size + kx) : from.v[k];
            }
            first = false;
        }
    }
    best.store(y + i * N);
    from.store(indices + i * N);
}

template <class T, int N>
__global__ void __launch_bounds__(256) max_backward(const uint8_t *__restrict__ indices, const T *__restrict__ dy,
                                                    T *__restrict__ dx, PoolGeometry w, int64_t packs) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    PixelPosition<N> at(i, w.height, w.width, w.channels);
    Acc<T> sums[N] = {};
    for_windows(w, at.y, at.x, [&](int oy, int ox, int cell) {
        int64_t from = ((at.image * w.out_height + oy) * w.out_width + ox) * w.channels + at.channel;
        auto cells = Pack<uint8_t, N>::load(indices + from);
        auto ds = Pack<T, N>::load(dy + from);
#pragma unroll
        for (int k = 0; k < N; k++) sums[k] += cells.v[k] == uint8_t(cell) ? to_acc(ds.v[k]) : Acc<T>(0);
    });
    Pack<T, N> result;
#pragma unroll
    for (int k = 0; k < N; k++) result.v[k] = from_acc<T>(sums[k]);
    result.store(dx + i * N);
}

// The same for 3 x 3 windows with stride 2 and padding 1: a thread computes 2 x 2 pixels, which 2 x 2 windows cover.
template <class T, int N>
__global__ void __launch_bounds__(256) max_backward_3x3s2(const uint8_t *__restrict__ indices, const T *__restrict__ dy,
                                                   T *__restrict__ dx, PoolGeometry w, int64_t packs) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    PixelPosition<N> at(i, (w.height + 1) / 2, (w.width + 1) / 2, w.channels);
    Pack<T, N> ds[2][2];
    Pack<uint8_t, N> cells[2][2];
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            bool in = at.y + r < w.out_height && at.x + c < w.out_width;
            int64_t line = at.image * w.out_height + (in ? at.y + r : at.y);
            int64_t from = (line * w.out_width + (in ? at.x + c : at.x)) * w.channels + at.channel;
            ds[r][c] = Pack<T, N>::load(dy + from);
            cells[r][c] = Pack<uint8_t, N>::load(indices + from);
            // 9 matches no cell: the window is out of bounds.
#pragma unroll
            for (int k = 0; k < N; k++) cells[r][c].v[k] = in ? cells[r][c].v[k] : 9;
        }
    // The gradient from window (a, b) to pixel (r, c): nonzero if the maximum of the window is that pixel.
    auto grad_from = [&](int r, int c, int a, int b, int k) {
        int cell = (r + 1 - 2 * a) * 3 + c + 1 - 2 * b;
        return cells[a][b].v[k] == uint8_t(cell) ? to_acc(ds[a][b].v[k]) : Acc<T>(0);
    };
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            int y = 2 * at.y + r, x = 2 * at.x + c;
            if (y >= w.height || x >= w.width) continue;
            Pack<T, N> result;
#pragma unroll
            for (int k = 0; k < N; k++) {
                Acc<T> sum = 0;
#pragma unroll
                for (int a = 0; a <= r; a++)
#pragma unroll
                    for (int b = 0; b <= c; b++) sum += grad_from(r, c, a, b, k);
                result.v[k] = from_acc<T>(sum);
            }
            result.store(dx + ((at.image * w.height + y) * w.width + x) * w.channels + at.channel);
        }
}

} // namespace

extern "C" int max_pool_forward(int type, const PoolGeometry *window, const void *x, void *y, void *indices, cudaStream_t stream) {
    PoolGeometry w = *window;
    int64_t values = int64_t(w.batch) * w.out_height * w.out_width * w.channels;
    if (values == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        if (aligned(w.channels * sizeof(T), {x, y, indices}))
            max_forward<T, N><<<blocks(values / N, 256), 256, 0, stream>>>((const T *)x, (T *)y, (uint8_t *)indices, w,
                                                                           values / N);
        else
            max_forward<T, 1><<<blocks(values, 256), 256, 0, stream>>>((const T *)x, (T *)y, (uint8_t *)indices, w, values);
    })
    return cudaGetLastError();
}

extern "C" int max_pool_backward(int type, const PoolGeometry *window, const void *indices, const void *dy, void *dx,
                                 cudaStream_t stream) {
    PoolGeometry w = *window;
    int64_t values = int64_t(w.batch) * w.height * w.width * w.channels;
    if (values == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        bool vectorized = aligned(w.channels * sizeof(T), {indices, dy, dx});
        int64_t squares = int64_t(w.batch) * ((w.height + 1) / 2) * ((w.width + 1) / 2) * (w.channels / N);
        if (vectorized && w.size == 3 && w.stride == 2 && w.padding == 1)
            max_backward_3x3s2<T, N><<<blocks(squares, 256), 256, 0, stream>>>((const uint8_t *)indices, (const T *)dy, (T *)dx, w,
                                                                        squares);
        else if (vectorized)
            max_backward<T, N><<<blocks(values / N, 256), 256, 0, stream>>>((const uint8_t *)indices, (const T *)dy,
                                                                            (T *)dx, w, values / N);
        else
            max_backward<T, 1><<<blocks(values, 256), 256, 0, stream>>>((const uint8_t *)indices, (const T *)dy, (T *)dx,
                                                                        w, values);
    })
    return cudaGetLastError();
}
