// Average pooling: over windows, where padding counts as zeros, and over whole pictures.
#include "cuda/channels.cuh"
#include "cuda/pooling.cuh"

namespace {

template <class T, int N>
__global__ void __launch_bounds__(256) windows_forward(const T *__restrict__ x, T *__restrict__ y, Window w, Acc<T> share,
                                                       int64_t packs) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    Spot<N> at(i, w.out_height, w.out_width, w.channels);
    Acc<T> sums[N] = {};
    for (int ky = 0; ky < w.size; ky++) {
        int iy = at.y * w.stride + ky - w.padding;
        if (iy < 0 || iy >= w.height) continue;
        for (int kx = 0; kx < w.size; kx++) {
            int ix = at.x * w.stride + kx - w.padding;
            if (ix < 0 || ix >= w.width) continue;
            auto values =
                Pack<T, N>::load(x + ((at.picture * w.height + iy) * w.width + ix) * w.channels + at.channel);
#pragma unroll
            for (int k = 0; k < N; k++) sums[k] += up(values.v[k]);
        }
    }
    Pack<T, N> made;
#pragma unroll
    for (int k = 0; k < N; k++) made.v[k] = down<T>(sums[k] * share);
    made.store(y + i * N);
}

template <class T, int N>
__global__ void __launch_bounds__(256) windows_backward(const T *__restrict__ dy, T *__restrict__ dx, Window w,
                                                        Acc<T> share, int64_t packs) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    Spot<N> at(i, w.height, w.width, w.channels);
    Acc<T> sums[N] = {};
    for_windows(w, at.y, at.x, [&](int oy, int ox, int) {
        int64_t from = ((at.picture * w.out_height + oy) * w.out_width + ox) * w.channels + at.channel;
        auto ds = Pack<T, N>::load(dy + from);
#pragma unroll
        for (int k = 0; k < N; k++) sums[k] += up(ds.v[k]);
    });
    Pack<T, N> made;
#pragma unroll
    for (int k = 0; k < N; k++) made.v[k] = down<T>(sums[k] * share);
    made.store(dx + i * N);
}

// A picture is a unit of one part.
template <class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS)
    whole_forward(const T *__restrict__ x, T *__restrict__ y, Acc<T> share, Cut cut, Lanes lanes) {
    Place at(cut, lanes);
    Acc<T> sums[N] = {};
#pragma unroll 4
    for (int64_t row = at.first; row < at.end; row += lanes.tall) {
        auto values = Pack<T, N>::load(x + row * cut.channels + at.pack * N);
#pragma unroll
        for (int k = 0; k < N; k++) sums[k] += up(values.v[k]);
    }
    add_up(sums, at, lanes);
    if (at.y == 0 && at.in) {
        Pack<T, N> made;
#pragma unroll
        for (int k = 0; k < N; k++) made.v[k] = down<T>(sums[k] * share);
        made.store(y + int64_t(at.unit) * cut.channels + at.pack * N);
    }
}

template <class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS)
    whole_backward(const T *__restrict__ dy, T *__restrict__ dx, Acc<T> share, Cut cut, Lanes lanes) {
    Place at(cut, lanes);
    if (!at.in) return;
    auto made = Pack<T, N>::load(dy + int64_t(at.unit) * cut.channels + at.pack * N);
#pragma unroll
    for (int k = 0; k < N; k++) made.v[k] = down<T>(up(made.v[k]) * share);
    for (int64_t row = at.first; row < at.end; row += lanes.tall) made.store(dx + row * cut.channels + at.pack * N);
}

} // namespace

extern "C" int average_windows(int type, const Window *window, const void *x, void *y, cudaStream_t stream) {
    Window w = *window;
    int64_t values = int64_t(w.batch) * w.out_height * w.out_width * w.channels;
    if (values == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        Acc<T> share = Acc<T>(1.0 / (double(w.size) * w.size));
        if (aligned(w.channels * sizeof(T), {x, y}))
            windows_forward<T, N><<<blocks(values / N, 256), 256, 0, stream>>>((const T *)x, (T *)y, w, share,
                                                                               values / N);
        else windows_forward<T, 1><<<blocks(values, 256), 256, 0, stream>>>((const T *)x, (T *)y, w, share, values);
    })
    return cudaGetLastError();
}

extern "C" int average_windows_backward(int type, const Window *window, const void *dy, void *dx, cudaStream_t stream) {
    Window w = *window;
    int64_t values = int64_t(w.batch) * w.height * w.width * w.channels;
    if (values == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        Acc<T> share = Acc<T>(1.0 / (double(w.size) * w.size));
        if (aligned(w.channels * sizeof(T), {dy, dx}))
            windows_backward<T, N><<<blocks(values / N, 256), 256, 0, stream>>>((const T *)dy, (T *)dx, w, share,
                                                                                values / N);
        else windows_backward<T, 1><<<blocks(values, 256), 256, 0, stream>>>((const T *)dy, (T *)dx, w, share, values);
    })
    return cudaGetLastError();
}

// (batch, pixels, channels) to (batch, channels).
extern "C" int average_whole(int type, const void *x, void *y, int batch, int64_t pixels, int channels,
                             cudaStream_t stream) {
    if (int64_t(batch) * pixels * channels == 0) return 0;
    Cut cut{batch * pixels, pixels, pixels, 1, channels};
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        Acc<T> share = Acc<T>(1.0 / double(pixels));
        bool many = aligned(channels * sizeof(T), {x, y});
        Lanes lanes(many ? channels / N : channels);
        if (many)
            whole_forward<T, N><<<lanes.blocks(cut), lanes.threads(), 0, stream>>>((const T *)x, (T *)y, share, cut, lanes);
        else
            whole_forward<T, 1><<<lanes.blocks(cut), lanes.threads(), 0, stream>>>((const T *)x, (T *)y, share, cut, lanes);
    })
    return cudaGetLastError();
}

extern "C" int average_whole_backward(int type, const void *dy, void *dx, int batch, int64_t pixels, int channels,
                                      cudaStream_t stream) {
    if (int64_t(batch) * pixels * channels == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        Acc<T> share = Acc<T>(1.0 / double(pixels));
        bool many = aligned(channels * sizeof(T), {dy, dx});
        Lanes lanes(many ? channels / N : channels);
        // Sixteen rows a thread.
        int64_t chunk = lanes.tall * 16, parts = (pixels + chunk - 1) / chunk;
        Cut cut{batch * pixels, pixels, chunk, int(parts), channels};
        if (many)
            whole_backward<T, N><<<lanes.blocks(cut), lanes.threads(), 0, stream>>>((const T *)dy, (T *)dx, share, cut, lanes);
        else
            whole_backward<T, 1><<<lanes.blocks(cut), lanes.threads(), 0, stream>>>((const T *)dy, (T *)dx, share, cut, lanes);
    })
    return cudaGetLastError();
}
