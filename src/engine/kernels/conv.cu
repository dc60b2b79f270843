// Convolution by im2col, and the elementwise work around every convolution: bias and activation in the forward pass,
// their gradients in the backward pass.
#include "cuda/activation.cuh"
#include "cuda/channels.cuh"
#include "cuda/windows.cuh"

namespace {

// The top left input pixel of an output pixel's window, which may lie in the padding.
struct PatchOrigin {
    int64_t image;
    int y, x;
    __device__ __forceinline__ PatchOrigin(const ConvGeometry &g, int64_t pixel) {
        int pixels = g.out_height * g.out_width;
        image = pixel / pixels;
        int in = int(pixel - image * pixels), line = in / g.out_width;
        y = line * g.stride - g.padding;
        x = (in - line * g.out_width) * g.stride - g.padding;
    }
};

// im2col of one group, for the output pixels from `first` on, counted over the batch. A row of the matrix has `stride`
// values, padded with zeros. A pack of N values lies within one cell of the window.
template <class T, int N>
__global__ void __launch_bounds__(256) im2col(const T *__restrict__ x, T *__restrict__ to, ConvGeometry g, int group,
                                              int64_t first, int stride, int64_t work) {
    int packs = g.depth() / N, row_packs = stride / N;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < work; i += int64_t(gridDim.x) * blockDim.x) {
        int64_t row = i / row_packs;
        int in_row = int(i - row * row_packs), cell = in_row / packs, pack = in_row % packs;
        PatchOrigin at(g, first + row);
        int iy = at.y + cell / g.kernel * g.dilation, ix = at.x + cell % g.kernel * g.dilation;
        Pack<T, N> values;
        if (cell < g.cells() && iy >= 0 && iy < g.height && ix >= 0 && ix < g.width) {
            int64_t from = ((at.image * g.height + iy) * g.width + ix) * g.inputs + group * g.depth() + pack * N;
            values = Pack<T, N>::load(x + from);
        } else {
#pragma unroll
            for (int k = 0; k < N; k++) values.v[k] = from_acc<T>(Acc<T>(0));
        }
        values.store(to + i * N);
    }
}

// The same if cells are not whole packs: a thread walks across cells and writes a pack at a time.
template <class T>
__global__ void __launch_bounds__(256) im2col_narrow(const T *__restrict__ x, T *__restrict__ to, ConvGeometry g, int group,
                                                     int64_t first, int stride, unsigned work) {
    constexpr int N = Pack<T>::size;
    int depth = g.depth();
    unsigned row_packs = stride / N;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < work; i += gridDim.x * blockDim.x) {
        unsigned row = i / row_packs;
        int in_row = int(i - row * row_packs) * N, cell = in_row / depth, channel = in_row - cell * depth;
        int ky = cell / g.kernel, kx = cell - ky * g.kernel;
        PatchOrigin at(g, first + row);
        const T *image = x + at.image * g.height * g.width * g.inputs + group * depth;
        Pack<T, N> values;
#pragma unroll
        for (int k = 0; k < N; k++) {
            int iy = at.y + ky * g.dilation, ix = at.x + kx * g.dilation;
            bool in = ky < g.kernel && iy >= 0 && iy < g.height && ix >= 0 && ix < g.width;
            values.v[k] = in ? image[(int64_t(iy) * g.width + ix) * g.inputs + channel] : from_acc<T>(Acc<T>(0));
            if (++channel == depth) {
                channel = 0;
                if (++kx == g.kernel) kx = 0, ky++;
            }
        }
        values.store(to + int64_t(i) * N);
    }
}

// Copies the rows of a matrix and pads each with zeros up to `stride`.
template <class T> __global__ void pad_rows(const T *from, T *to, int64_t rows, int columns, int stride) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, row = i / stride;
    int column = int(i - row * stride);
    if (row < rows) to[i] = column < columns ? from[row * columns + column] : from_acc<T>(Acc<T>(0));
}

// The transpose, col2im: what the rows of output pixels `first..first + rows` contribute to the input pixels of lines
// `line..line + lines`, counted over the batch. Overwrites or accumulates. A thread gathers all contributions to its
// own pixel.
template <class T, int N>
__global__ void __launch_bounds__(256)
    col2im(const Acc<T> *__restrict__ rows_of, T *__restrict__ dx, ConvGeometry g, int group, int64_t first, int64_t rows,
            int64_t line, int64_t work, bool add) {
    using R = Acc<T>;
    int packs = g.depth() / N, pixels = g.out_height * g.out_width;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < work; i += int64_t(gridDim.x) * blockDim.x) {
        int64_t place = i / packs, lines = place / g.width + line, image = lines / g.height;
        int pack = int(i - place * packs), ix = int(place % g.width), iy = int(lines - image * g.height);
        R sums[N] = {};
        for (int ky = 0; ky < g.kernel; ky++) {
            int y = iy + g.padding - ky * g.dilation;
            if (y < 0 || y % g.stride != 0 || y / g.stride >= g.out_height) continue;
            for (int kx = 0; kx < g.kernel; kx++) {
                int at = ix + g.padding - kx * g.dilation;
                if (at < 0 || at % g.stride != 0 || at / g.stride >= g.out_width) continue;
                int64_t row = image * pixels + y / g.stride * g.out_width + at / g.stride - first;
                if (row < 0 || row >= rows) continue;
                const R *from = rows_of + (row * g.cells() + ky * g.kernel + kx) * g.depth() + pack * N;
#pragma unroll
                for (int k = 0; k < N; k++) sums[k] += from[k];
            }
        }
        T *to = dx + ((image * g.height + iy) * g.width + ix) * g.inputs + group * g.depth() + pack * N;
        Pack<T, N> values;
        if (add) values = Pack<T, N>::load(to);
#pragma unroll
        for (int k = 0; k < N; k++) values.v[k] = from_acc<T>(add ? to_acc(values.v[k]) + sums[k] : sums[k]);
        values.store(to);
    }
}

// `y = act(y + bias)` in place; the pre-activation goes to `pre` if that is not null.
template <int A, class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS)
    bias_activation(T *y, T *pre, const T *__restrict__ bias, RowPartition partition, BlockLayout layout) {
    ThreadPosition at(partition, layout);
    Acc<T> shift[N] = {};
    if (at.in && bias) {
#pragma unroll
        for (int k = 0; k < N; k++) shift[k] = to_acc(bias[at.pack * N + k]);
    }
    auto load = [&](int64_t row) { return Pack<T, N>::load(y + row * partition.channels + at.pack * N); };
    for_each_row<4>(at, layout, load, [&](int64_t row, const Pack<T, N> &values) {
        int64_t i = row * partition.channels + at.pack * N;
        Pack<T, N> preact, result;
#pragma unroll
        for (int k = 0; k < N; k++) {
            Acc<T> v = to_acc(values.v[k]) + shift[k];
            preact.v[k] = from_acc<T>(v);
            result.v[k] = from_acc<T>(value_of<A>(v));
        }
        if (pre) preact.store(pre + i);
        result.store(y + i);
    });
}

// `dy = dy act'(v)` in place if `v` is not null, and partial column sums of the result, (parts, channels), if
// `partials` is not null.
template <int A, class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS)
    activation_backward(const T *__restrict__ v, T *dy, Acc<T> *partials, RowPartition partition, BlockLayout layout) {
    using R = Acc<T>;
    ThreadPosition at(partition, layout);
    R sums[N] = {};
    auto load = [&](int64_t row) {
        int64_t i = row * partition.channels + at.pack * N;
        ValueAndGrad<T, N> both;
        both.d = Pack<T, N>::load(dy + i);
        if (A != IDENTITY) both.x = Pack<T, N>::load(v + i);
        return both;
    };
    for_each_row<4>(at, layout, load, [&](int64_t row, const ValueAndGrad<T, N> &both) {
        auto ds = both.d;
        if (A != IDENTITY) {
#pragma unroll
            for (int k = 0; k < N; k++) ds.v[k] = from_acc<T>(to_acc(ds.v[k]) * slope_of<A>(to_acc(both.x.v[k])));
            ds.store(dy + row * partition.channels + at.pack * N);
        }
#pragma unroll
        for (int k = 0; k < N; k++) sums[k] += to_acc(ds.v[k]);
    });
    if (!partials) return;
    block_row_sum(sums, at, layout);
    if (at.y == 0 && at.in) {
#pragma unroll
        for (int k = 0; k < N; k++) partials[int64_t(at.part) * partition.channels + at.pack * N + k] = sums[k];
    }
}

// Adds the partial sums to a gradient, in order: 32 columns and 32 rows of threads per block.
template <class R> __global__ void __launch_bounds__(1024) add_partials(const R *partials, R *into, int parts, int channels) {
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

// `into += what`, whose rows are `stride` values apart.
template <class T, class R> __global__ void accumulate_gradient(const T *what, R *into, int64_t len, int columns, int stride) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= len) return;
    int64_t row = stride == columns ? 0 : i / columns;
    into[i] += R(to_acc(what[i + row * (stride - columns)]));
}

// Enough blocks to fill a GPU; each loops over more work.
unsigned grid_blocks(int64_t work) {
    int64_t wanted = (work + 255) / 256;
    return unsigned(wanted < GRID_SMS * 64 ? wanted : GRID_SMS * 64);
}

} // namespace

extern "C" int conv_im2col(int type, const ConvGeometry *geometry, const void *x, void *to, int group, int64_t first,
                           int64_t rows, int stride, cudaStream_t stream) {
    ConvGeometry g = *geometry;
    if (rows == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        int64_t packs = rows * stride / N;
        // The kernel's indices advance by the size of the grid and must fit in 32 bits.
        if (packs > INT32_MAX) return cudaErrorInvalidValue;
        if (aligned(g.depth() * sizeof(T), {x}))
            im2col<T, N><<<grid_blocks(packs), 256, 0, stream>>>((const T *)x, (T *)to, g, group, first, stride, packs);
        else
            im2col_narrow<T><<<grid_blocks(packs), 256, 0, stream>>>((const T *)x, (T *)to, g, group, first, stride,
                                                                 unsigned(packs));
    })
    return cudaGetLastError();
}

extern "C" int conv_pad_rows(int type, const void *from, void *to, int64_t rows, int columns, int stride,
                           cudaStream_t stream) {
    if (rows == 0) return 0;
    WITH_TYPE(type, {
        pad_rows<<<blocks(rows * stride, 256), 256, 0, stream>>>((const T *)from, (T *)to, rows, columns, stride);
    })
    return cudaGetLastError();
}

extern "C" int conv_col2im(int type, const ConvGeometry *geometry, const void *rows_of, void *dx, int group, int64_t first,
                            int64_t rows, int64_t line, int64_t lines, int add, cudaStream_t stream) {
    ConvGeometry g = *geometry;
    if (lines == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        int64_t values = lines * g.width * g.depth();
        if (aligned(g.depth() * sizeof(T), {dx}))
            col2im<T, N><<<grid_blocks(values / N), 256, 0, stream>>>((const Acc<T> *)rows_of, (T *)dx, g, group, first,
                                                                   rows, line, values / N, add != 0);
        else
            col2im<T, 1><<<grid_blocks(values), 256, 0, stream>>>((const Acc<T> *)rows_of, (T *)dx, g, group, first, rows,
                                                               line, values, add != 0);
    })
    return cudaGetLastError();
}

extern "C" int conv_bias_activation(int type, int act, void *y, void *pre, const void *bias, int64_t rows, int channels,
                           int64_t chunk, int parts, cudaStream_t stream) {
    RowPartition partition{rows, rows, chunk, parts, channels};
    if (rows == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        bool vectorized = aligned(channels * sizeof(T), {y, pre});
        BlockLayout layout(vectorized ? channels / N : channels);
        WITH_ACT(act, {
            if (vectorized)
                bias_activation<A, T, N><<<layout.blocks(partition), layout.threads(), 0, stream>>>((T *)y, (T *)pre, (const T *)bias,
                                                                                   partition, layout);
            else
                bias_activation<A, T, 1><<<layout.blocks(partition), layout.threads(), 0, stream>>>((T *)y, (T *)pre, (const T *)bias,
                                                                                   partition, layout);
        })
    })
    return cudaGetLastError();
}

// `partials` (parts, channels) and `dbias` are null if no bias gradient is needed.
extern "C" int conv_activation_backward(int type, int act, const void *v, void *dy, void *partials, void *dbias, int64_t rows,
                            int channels, int64_t chunk, int parts, cudaStream_t stream) {
    RowPartition partition{rows, rows, chunk, parts, channels};
    if (rows == 0) return 0;
    WITH_TYPE(type, {
        using R = Acc<T>;
        constexpr int N = Pack<T>::size;
        bool vectorized = aligned(channels * sizeof(T), {v, dy});
        BlockLayout layout(vectorized ? channels / N : channels);
        WITH_ACT(act, {
            if (vectorized)
                activation_backward<A, T, N><<<layout.blocks(partition), layout.threads(), 0, stream>>>((const T *)v, (T *)dy, (R *)partials,
                                                                                    partition, layout);
            else
                activation_backward<A, T, 1><<<layout.blocks(partition), layout.threads(), 0, stream>>>((const T *)v, (T *)dy, (R *)partials,
                                                                                    partition, layout);
        })
        if (dbias)
            add_partials<R><<<blocks(channels, 32), dim3(32, 32), 0, stream>>>((const R *)partials, (R *)dbias, parts,
                                                                            channels);
    })
    return cudaGetLastError();
}

// Accumulates a gradient, (rows, columns) with rows `stride` values apart, into one in the accumulation type.
extern "C" int conv_accumulate_gradient(int type, const void *what, void *into, int64_t rows, int columns, int stride,
                           cudaStream_t stream) {
    int64_t len = rows * columns;
    if (len == 0) return 0;
    WITH_TYPE(type, {
        accumulate_gradient<<<blocks(len, 256), 256, 0, stream>>>((const T *)what, (Acc<T> *)into, len, columns, stride);
    })
    return cudaGetLastError();
}
