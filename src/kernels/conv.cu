// Convolution by gathered windows, and what goes before and after every convolution: bias and activation on the way
// out; their gradients on the way back.
#include "cuda/activation.cuh"
#include "cuda/channels.cuh"
#include "cuda/windows.cuh"

namespace {

// The windows of output pixels `first..first + rows`, counted over the batch, of one group, as rows of a matrix.
template <class T, int N>
__global__ void __launch_bounds__(256) gather(const T *__restrict__ x, T *__restrict__ to, Geometry g, int group,
                                              int64_t first, int64_t work) {
    int packs = g.depth() / N, row_packs = g.cells() * packs, pixels = g.out_height * g.out_width;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < work; i += int64_t(gridDim.x) * blockDim.x) {
        int64_t row = i / row_packs;
        int in_row = int(i - row * row_packs), cell = in_row / packs, pack = in_row % packs;
        int64_t picture = (first + row) / pixels;
        int pixel = int(first + row - picture * pixels);
        int y = pixel / g.out_width * g.stride + cell / g.kernel * g.dilation - g.padding;
        int at = pixel % g.out_width * g.stride + cell % g.kernel * g.dilation - g.padding;
        Pack<T, N> values;
        if (y >= 0 && y < g.height && at >= 0 && at < g.width) {
            int64_t from = ((picture * g.height + y) * g.width + at) * g.inputs + group * g.depth() + pack * N;
            values = Pack<T, N>::load(x + from);
        } else {
#pragma unroll
            for (int k = 0; k < N; k++) values.v[k] = down<T>(Acc<T>(0));
        }
        values.store(to + i * N);
    }
}

// The reverse: what the rows of output pixels `first..first + rows` give to the input pixels of the lines
// `line..line + lines`, counted over the batch, either alone or added to what is there. Every thread adds up its own.
template <class T, int N>
__global__ void __launch_bounds__(256)
    scatter(const Acc<T> *__restrict__ rows_of, T *__restrict__ dx, Geometry g, int group, int64_t first, int64_t rows,
            int64_t line, int64_t work, bool add) {
    using R = Acc<T>;
    int packs = g.depth() / N, pixels = g.out_height * g.out_width;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < work; i += int64_t(gridDim.x) * blockDim.x) {
        int64_t place = i / packs, lines = place / g.width + line, picture = lines / g.height;
        int pack = int(i - place * packs), ix = int(place % g.width), iy = int(lines - picture * g.height);
        R sums[N] = {};
        for (int ky = 0; ky < g.kernel; ky++) {
            int y = iy + g.padding - ky * g.dilation;
            if (y < 0 || y % g.stride != 0 || y / g.stride >= g.out_height) continue;
            for (int kx = 0; kx < g.kernel; kx++) {
                int at = ix + g.padding - kx * g.dilation;
                if (at < 0 || at % g.stride != 0 || at / g.stride >= g.out_width) continue;
                int64_t row = picture * pixels + y / g.stride * g.out_width + at / g.stride - first;
                if (row < 0 || row >= rows) continue;
                const R *from = rows_of + (row * g.cells() + ky * g.kernel + kx) * g.depth() + pack * N;
#pragma unroll
                for (int k = 0; k < N; k++) sums[k] += from[k];
            }
        }
        T *to = dx + ((picture * g.height + iy) * g.width + ix) * g.inputs + group * g.depth() + pack * N;
        Pack<T, N> values;
        if (add) values = Pack<T, N>::load(to);
#pragma unroll
        for (int k = 0; k < N; k++) values.v[k] = down<T>(add ? up(values.v[k]) + sums[k] : sums[k]);
        values.store(to);
    }
}

// `y = act(y + bias)` in place; what the activation was given goes to `pre` where there is one.
template <int A, class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS)
    finish(T *y, T *pre, const T *__restrict__ bias, Cut cut, Lanes lanes) {
    Place at(cut, lanes);
    Acc<T> shift[N] = {};
    if (at.in && bias) {
#pragma unroll
        for (int k = 0; k < N; k++) shift[k] = up(bias[at.pack * N + k]);
    }
    for (int64_t row = at.first; row < at.end; row += lanes.tall) {
        int64_t i = row * cut.channels + at.pack * N;
        auto values = Pack<T, N>::load(y + i), before = values;
#pragma unroll
        for (int k = 0; k < N; k++) {
            Acc<T> v = up(values.v[k]) + shift[k];
            before.v[k] = down<T>(v);
            values.v[k] = down<T>(value_of<A>(v));
        }
        if (pre) before.store(pre + i);
        values.store(y + i);
    }
}

// `dy = dy act'(v)` in place, where there is a `v`, and sums of the columns of the result, (parts, channels), where
// there is room for them.
template <int A, class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS)
    through(const T *__restrict__ v, T *dy, Acc<T> *partials, Cut cut, Lanes lanes) {
    using R = Acc<T>;
    Place at(cut, lanes);
    R sums[N] = {};
    for (int64_t row = at.first; row < at.end; row += lanes.tall) {
        int64_t i = row * cut.channels + at.pack * N;
        auto ds = Pack<T, N>::load(dy + i);
        if (A != IDENTITY) {
            auto values = Pack<T, N>::load(v + i);
#pragma unroll
            for (int k = 0; k < N; k++) ds.v[k] = down<T>(up(ds.v[k]) * slope_of<A>(up(values.v[k])));
            ds.store(dy + i);
        }
#pragma unroll
        for (int k = 0; k < N; k++) sums[k] += up(ds.v[k]);
    }
    if (!partials) return;
    add_up(sums, at, lanes);
    if (at.y == 0 && at.in) {
#pragma unroll
        for (int k = 0; k < N; k++) partials[int64_t(at.part) * cut.channels + at.pack * N + k] = sums[k];
    }
}

// Adds the sums of parts to what is there, in order: 32 columns and 32 rows of threads a block.
template <class R> __global__ void __launch_bounds__(1024) add_parts(const R *partials, R *into, int parts, int channels) {
    __shared__ R sums[32][33];
    int channel = blockIdx.x * 32 + threadIdx.x;
    R sum = 0;
    if (channel < channels) {
#pragma unroll 4
        for (int part = threadIdx.y; part < parts; part += 32) sum += partials[int64_t(part) * channels + channel];
    }
    sums[threadIdx.x][threadIdx.y] = sum;
    __syncthreads();
    sum = warp_sum(sums[threadIdx.y][threadIdx.x]);
    channel = blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x == 0 && channel < channels) into[channel] += sum;
}

// `into += what`
template <class T, class R> __global__ void add_to(const T *what, R *into, int64_t len) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < len) into[i] += R(up(what[i]));
}

// Enough blocks to fill a card, each of which goes on with more work.
unsigned filling(int64_t work) {
    int64_t wanted = (work + 255) / 256;
    return unsigned(wanted < 132 * 64 ? wanted : 132 * 64);
}

} // namespace

extern "C" int conv_gather(int type, const Geometry *geometry, const void *x, void *to, int group, int64_t first,
                           int64_t rows, cudaStream_t stream) {
    Geometry g = *geometry;
    if (rows == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        int64_t values = rows * g.cells() * g.depth();
        if (aligned(g.depth() * sizeof(T), {x, to}))
            gather<T, N><<<filling(values / N), 256, 0, stream>>>((const T *)x, (T *)to, g, group, first, values / N);
        else gather<T, 1><<<filling(values), 256, 0, stream>>>((const T *)x, (T *)to, g, group, first, values);
    })
    return cudaGetLastError();
}

extern "C" int conv_scatter(int type, const Geometry *geometry, const void *rows_of, void *dx, int group, int64_t first,
                            int64_t rows, int64_t line, int64_t lines, int add, cudaStream_t stream) {
    Geometry g = *geometry;
    if (lines == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        int64_t values = lines * g.width * g.depth();
        if (aligned(g.depth() * sizeof(T), {dx}))
            scatter<T, N><<<filling(values / N), 256, 0, stream>>>((const Acc<T> *)rows_of, (T *)dx, g, group, first,
                                                                   rows, line, values / N, add != 0);
        else
            scatter<T, 1><<<filling(values), 256, 0, stream>>>((const Acc<T> *)rows_of, (T *)dx, g, group, first, rows,
                                                               line, values, add != 0);
    })
    return cudaGetLastError();
}

extern "C" int conv_finish(int type, int act, void *y, void *pre, const void *bias, int64_t rows, int channels,
                           int64_t chunk, int parts, cudaStream_t stream) {
    Cut cut{rows, rows, chunk, parts, channels};
    if (rows == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        bool many = aligned(channels * sizeof(T), {y, pre});
        Lanes lanes(many ? channels / N : channels);
        WITH_ACT(act, {
            if (many)
                finish<A, T, N><<<lanes.blocks(cut), lanes.threads(), 0, stream>>>((T *)y, (T *)pre, (const T *)bias,
                                                                                   cut, lanes);
            else
                finish<A, T, 1><<<lanes.blocks(cut), lanes.threads(), 0, stream>>>((T *)y, (T *)pre, (const T *)bias,
                                                                                   cut, lanes);
        })
    })
    return cudaGetLastError();
}

// `partials` (parts, channels) and `dbias` are null where no sums are wanted.
extern "C" int conv_through(int type, int act, const void *v, void *dy, void *partials, void *dbias, int64_t rows,
                            int channels, int64_t chunk, int parts, cudaStream_t stream) {
    Cut cut{rows, rows, chunk, parts, channels};
    if (rows == 0) return 0;
    WITH_TYPE(type, {
        using R = Acc<T>;
        constexpr int N = Pack<T>::size;
        bool many = aligned(channels * sizeof(T), {v, dy});
        Lanes lanes(many ? channels / N : channels);
        WITH_ACT(act, {
            if (many)
                through<A, T, N><<<lanes.blocks(cut), lanes.threads(), 0, stream>>>((const T *)v, (T *)dy, (R *)partials,
                                                                                    cut, lanes);
            else
                through<A, T, 1><<<lanes.blocks(cut), lanes.threads(), 0, stream>>>((const T *)v, (T *)dy, (R *)partials,
                                                                                    cut, lanes);
        })
        if (dbias)
            add_parts<R><<<blocks(channels, 32), dim3(32, 32), 0, stream>>>((const R *)partials, (R *)dbias, parts,
                                                                            channels);
    })
    return cudaGetLastError();
}

// Adds a gradient of f32, or of a shorter type, to one of f32.
extern "C" int conv_add_to(int type, const void *what, void *into, int64_t len, cudaStream_t stream) {
    if (len == 0) return 0;
    switch (type) {
    case F32: add_to<<<blocks(len, 256), 256, 0, stream>>>((const float *)what, (float *)into, len); break;
    case BF16: add_to<<<blocks(len, 256), 256, 0, stream>>>((const bf16 *)what, (float *)into, len); break;
    case F16: add_to<<<blocks(len, 256), 256, 0, stream>>>((const f16 *)what, (float *)into, len); break;
    default: return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}
