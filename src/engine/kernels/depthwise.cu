// Depthwise convolution: direct sums over the cells of a window.
//
// A thread handles N adjacent channels. Each block transposes its weight, (channels, cells), to (cells, channels) in
// shared memory. The weight gradient is summed in two stages.
#include "cuda/channels.cuh"
#include "cuda/windows.cuh"

namespace {

// Geometry of a sum over windows: the forward pass or, with the kernel `flipped` and stride 1, the input
// gradient.
struct Windows {
    int batch, height, width, out_height, out_width, channels, kernel, stride, padding, dilation;
    bool flipped;
    __host__ __device__ int cells() const { return kernel * kernel; }
};

// Loads the weights of a block's channels as (cells, block_cols * N), flipped if `flipped`.
template <int N, class T>
__device__ __forceinline__ void load_weights(const T *weight, Acc<T> *to, const BlockLayout &layout, int channels, int cells,
                                     bool flipped) {
    int first = int(blockIdx.x % layout.tiles_x) * layout.block_cols * N, width = layout.block_cols * N;
    for (int i = threadIdx.x; i < width * cells; i += blockDim.x) {
        int channel = i / cells, cell = i % cells;
        Acc<T> w = 0;
        if (first + channel < channels) w = to_acc(weight[int64_t(first + channel) * cells + cell]);
        to[(flipped ? cells - 1 - cell : cell) * width + channel] = w;
    }
    __syncthreads();
}

template <class T, int N> __device__ __forceinline__ Pack<T, N> zero_pack() {
    Pack<T, N> zero;
#pragma unroll
    for (int k = 0; k < N; k++) zero.v[k] = from_acc<T>(Acc<T>(0));
    return zero;
}

// Loads a pack, or `zero` if out of bounds: predicated instead of branching, so that many loads can be in flight.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> load_if(bool there, const T *from, const Pack<T, N> &zero) {
    Pack<T, N> values = zero;
    if (there) values = Pack<T, N>::load(from);
    return values;
}

template <class R> __device__ __forceinline__ R *dynamic_smem() {
    extern __shared__ __align__(16) unsigned char bytes[];
    return reinterpret_cast<R *>(bytes);
}

// K x K windows with stride S: a thread computes W adjacent output pixels, whose windows overlap.
template <class T, int N, int K, int S, int W>
__global__ void __launch_bounds__(COLUMN_THREADS, K == 3 ? 2 : 1)
    strips(const T *__restrict__ x, const T *__restrict__ weight, T *__restrict__ y, Windows g, BlockLayout layout,
           int64_t work) {
    using R = Acc<T>;
    R *weights = dynamic_smem<R>();
    load_weights<N>(weight, weights, layout, g.channels, K * K, g.flipped);
    int tx = threadIdx.x % layout.block_cols, ty = threadIdx.x / layout.block_cols;
    int pack = int(blockIdx.x % layout.tiles_x) * layout.block_cols + tx;
    if (pack >= layout.packs) return;
    const R *w = weights + tx * N;
    auto zero = zero_pack<T, N>();
    int tiles_x = (g.out_width + W - 1) / W, width = layout.block_cols * N;
    int64_t step = int64_t(gridDim.x / layout.tiles_x) * layout.block_rows;
    for (int64_t i = int64_t(blockIdx.x / layout.tiles_x) * layout.block_rows + ty; i < work; i += step) {
        int64_t line = i / tiles_x, image = line / g.out_height;
        int ox = int(i - line * tiles_x) * W, oy = int(line - image * g.out_height);
        int y0 = oy * S - g.padding, x0 = ox * S - g.padding;
        R sums[W][N] = {};
#pragma unroll
        for (int ky = 0; ky < K; ky++) {
            constexpr int INPUT_TAPS = (W - 1) * S + K;
            int iy = y0 + ky;
            bool in = iy >= 0 && iy < g.height;
            const T *from = x + ((image * g.height + iy) * g.width + x0) * g.channels + pack * N;
            // Loads a whole line before it uses any of it.
            Pack<T, N> input_taps[INPUT_TAPS];
#pragma unroll
            for (int j = 0; j < INPUT_TAPS; j++)
                input_taps[j] = load_if(in && x0 + j >= 0 && x0 + j < g.width, from + int64_t(j) * g.channels, zero);
#pragma unroll
            for (int kx = 0; kx < K; kx++) {
                R of[N];
#pragma unroll
                for (int k = 0; k < N; k++) of[k] = w[(ky * K + kx) * width + k];
#pragma unroll
                for (int o = 0; o < W; o++)
#pragma unroll
                    for (int k = 0; k < N; k++) sums[o][k] += to_acc(input_taps[o * S + kx].v[k]) * of[k];
            }
        }
#pragma unroll
        for (int o = 0; o < W; o++) {
            if (ox + o >= g.out_width) break;
            Pack<T, N> result;
#pragma unroll
            for (int k = 0; k < N; k++) result.v[k] = from_acc<T>(sums[o][k]);
            result.store(y + (line * g.out_width + ox + o) * g.channels + pack * N);
        }
    }
}

// Maximum number of output lines that a thread walks down.
constexpr int RUN = 28;

// 3 x 3 windows with stride 1: a thread walks down `RUN` output lines, W adjacent pixels wide. It keeps the sums of the
// three output lines that an input line contributes to, so it reads every input line once.
template <class T, int N, int W>
__global__ void __launch_bounds__(COLUMN_THREADS, 2)
    forward_columns(const T *__restrict__ x, const T *__restrict__ weight, T *__restrict__ y, Windows g, BlockLayout layout,
            int64_t work) {
    using R = Acc<T>;
    R *weights = dynamic_smem<R>();
    load_weights<N>(weight, weights, layout, g.channels, 9, g.flipped);
    int tx = threadIdx.x % layout.block_cols, ty = threadIdx.x / layout.block_cols;
    int pack = int(blockIdx.x % layout.tiles_x) * layout.block_cols + tx, width = layout.block_cols * N;
    if (pack >= layout.packs) return;
    R w[9][N];
#pragma unroll
    for (int cell = 0; cell < 9; cell++)
#pragma unroll
        for (int k = 0; k < N; k++) w[cell][k] = weights[cell * width + tx * N + k];
    auto zero = zero_pack<T, N>();
    unsigned tiles_x = (g.out_width + W - 1) / W, runs = (g.out_height + RUN - 1) / RUN;
    int64_t step = int64_t(gridDim.x / layout.tiles_x) * layout.block_rows;
    for (int64_t i = int64_t(blockIdx.x / layout.tiles_x) * layout.block_rows + ty; i < work; i += step) {
        unsigned line = unsigned(i) / tiles_x, image = line / runs;
        int ox = int(unsigned(i) - line * tiles_x) * W, first = int(line - image * runs) * RUN;
        int last = min(first + RUN, g.out_height), x0 = ox - g.padding;
        R sums[3][W][N] = {};
        // Adds the input line `first + j - padding`, which completes `sums[(j + 1) % 3]` and starts `sums[j % 3]`.
        auto take = [&](int j, auto &ends, auto &goes_on, auto &begins) {
            int iy = first + j - g.padding;
            bool in = iy >= 0 && iy < g.height;
            const T *from = x + ((int64_t(image) * g.height + iy) * g.width + x0) * g.channels + pack * N;
            Pack<T, N> input_taps[W + 2];
#pragma unroll
            for (int c = 0; c < W + 2; c++)
                input_taps[c] = load_if(in && x0 + c >= 0 && x0 + c < g.width, from + int64_t(c) * g.channels, zero);
#pragma unroll
            for (int o = 0; o < W; o++)
#pragma unroll
                for (int kx = 0; kx < 3; kx++)
#pragma unroll
                    for (int k = 0; k < N; k++) {
                        R v = to_acc(input_taps[o + kx].v[k]);
                        begins[o][k] += v * w[kx][k];
                        goes_on[o][k] += v * w[3 + kx][k];
                        ends[o][k] += v * w[6 + kx][k];
                    }
            int oy = first + j - 2;
#pragma unroll
            for (int o = 0; o < W; o++) {
                Pack<T, N> result;
#pragma unroll
                for (int k = 0; k < N; k++) result.v[k] = from_acc<T>(ends[o][k]), ends[o][k] = 0;
                if (j >= 2 && ox + o < g.out_width)
                    result.store(y + ((int64_t(image) * g.out_height + oy) * g.out_width + ox + o) * g.channels + pack * N);
            }
        };
        for (int j = 0; j < last - first + 2; j += 3) {
            take(j, sums[1], sums[2], sums[0]);
            if (j + 1 < last - first + 2) take(j + 1, sums[2], sums[0], sums[1]);
            if (j + 2 < last - first + 2) take(j + 2, sums[0], sums[1], sums[2]);
        }
    }
}

// Any windows: a thread computes one output pixel.
template <class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS)
    pixels(const T *__restrict__ x, const T *__restrict__ weight, T *__restrict__ y, Windows g, BlockLayout layout,
           int64_t work) {
    using R = Acc<T>;
    R *weights = dynamic_smem<R>();
    load_weights<N>(weight, weights, layout, g.channels, g.cells(), g.flipped);
    int tx = threadIdx.x % layout.block_cols, ty = threadIdx.x / layout.block_cols;
    int pack = int(blockIdx.x % layout.tiles_x) * layout.block_cols + tx, width = layout.block_cols * N;
    if (pack >= layout.packs) return;
    const R *w = weights + tx * N;
    int64_t step = int64_t(gridDim.x / layout.tiles_x) * layout.block_rows;
    for (int64_t i = int64_t(blockIdx.x / layout.tiles_x) * layout.block_rows + ty; i < work; i += step) {
        int64_t line = i / g.out_width, image = line / g.out_height;
        int ox = int(i - line * g.out_width), oy = int(line - image * g.out_height);
        R sums[N] = {};
        for (int ky = 0; ky < g.kernel; ky++) {
            int iy = oy * g.stride + ky * g.dilation - g.padding;
            if (iy < 0 || iy >= g.height) continue;
            for (int kx = 0; kx < g.kernel; kx++) {
                int ix = ox * g.stride + kx * g.dilation - g.padding;
                if (ix < 0 || ix >= g.width) continue;
                auto values = Pack<T, N>::load(x + ((image * g.height + iy) * g.width + ix) * g.channels + pack * N);
#pragma unroll
                for (int k = 0; k < N; k++) sums[k] += to_acc(values.v[k]) * w[(ky * g.kernel + kx) * width + k];
            }
        }
        Pack<T, N> result;
#pragma unroll
        for (int k = 0; k < N; k++) result.v[k] = from_acc<T>(sums[k]);
        result.store(y + i * g.channels + pack * N);
    }
}

// The input gradient of 3 x 3 windows with stride 2 and padding 1: a thread computes 2 x 2W input pixels, which
// contribute to 2 x (W + 1) output pixels.
template <class T, int N, int W>
__global__ void __launch_bounds__(COLUMN_THREADS, 2)
    input_gradient_3x3s2(const T *__restrict__ dy, const T *__restrict__ weight, T *__restrict__ dx, Windows g, BlockLayout layout,
            int64_t work) {
    using R = Acc<T>;
    R *weights = dynamic_smem<R>();
    load_weights<N>(weight, weights, layout, g.channels, 9, false);
    int tx = threadIdx.x % layout.block_cols, ty = threadIdx.x / layout.block_cols;
    int pack = int(blockIdx.x % layout.tiles_x) * layout.block_cols + tx, width = layout.block_cols * N;
    if (pack >= layout.packs) return;
    const R *w = weights + tx * N;
    auto zero = zero_pack<T, N>();
    int tiles_x = (g.width + 2 * W - 1) / (2 * W), down_by = (g.height + 1) / 2;
    int64_t step = int64_t(gridDim.x / layout.tiles_x) * layout.block_rows;
    for (int64_t i = int64_t(blockIdx.x / layout.tiles_x) * layout.block_rows + ty; i < work; i += step) {
        int64_t line = i / tiles_x, image = line / down_by;
        int ox = int(i - line * tiles_x) * W, oy = int(line - image * down_by);
        Pack<T, N> ds[2][W + 1];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const T *from = dy + ((image * g.out_height + oy + r) * g.out_width + ox) * g.channels + pack * N;
#pragma unroll
            for (int j = 0; j <= W; j++)
                ds[r][j] = load_if(oy + r < g.out_height && ox + j < g.out_width, from + int64_t(j) * g.channels, zero);
        }
#pragma unroll
        for (int o = 0; o < W; o++) {
            Pack<T, N> result[2][2];
#pragma unroll
            for (int k = 0; k < N; k++) {
                auto cell = [&](int c) { return w[c * width + k]; };
                R here = to_acc(ds[0][o].v[k]), right = to_acc(ds[0][o + 1].v[k]);
                R below = to_acc(ds[1][o].v[k]), corner = to_acc(ds[1][o + 1].v[k]);
                result[0][0].v[k] = from_acc<T>(here * cell(4));
                result[0][1].v[k] = from_acc<T>(here * cell(5) + right * cell(3));
                result[1][0].v[k] = from_acc<T>(here * cell(7) + below * cell(1));
                result[1][1].v[k] = from_acc<T>(here * cell(8) + right * cell(6) + below * cell(2) + corner * cell(0));
            }
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    int iy = 2 * oy + r, ix = 2 * (ox + o) + c;
                    if (iy < g.height && ix < g.width)
                        result[r][c].store(dx + ((image * g.height + iy) * g.width + ix) * g.channels + pack * N);
                }
        }
    }
}

// The input gradient for a stride above 1: a thread computes one input pixel.
template <class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS)
    input_gradient(const T *__restrict__ dy, const T *__restrict__ weight, T *__restrict__ dx, Windows g, BlockLayout layout,
            int64_t work) {
    using R = Acc<T>;
    R *weights = dynamic_smem<R>();
    load_weights<N>(weight, weights, layout, g.channels, g.cells(), false);
    int tx = threadIdx.x % layout.block_cols, ty = threadIdx.x / layout.block_cols;
    int pack = int(blockIdx.x % layout.tiles_x) * layout.block_cols + tx, width = layout.block_cols * N;
    if (pack >= layout.packs) return;
    const R *w = weights + tx * N;
    int64_t step = int64_t(gridDim.x / layout.tiles_x) * layout.block_rows;
    for (int64_t i = int64_t(blockIdx.x / layout.tiles_x) * layout.block_rows + ty; i < work; i += step) {
        int64_t line = i / g.width, image = line / g.height;
        int ix = int(i - line * g.width), iy = int(line - image * g.height);
        R sums[N] = {};
        // In padded coordinates: windows that start at or before the pixel and end after it.
        iy += g.padding, ix += g.padding;
        int reach = (g.kernel - 1) * g.dilation + 1;
        int top = iy < reach ? 0 : (iy - reach) / g.stride + 1, left = ix < reach ? 0 : (ix - reach) / g.stride + 1;
        int bottom = min(iy / g.stride, g.out_height - 1), right = min(ix / g.stride, g.out_width - 1);
        for (int oy = top; oy <= bottom; oy++) {
            int ky = iy - oy * g.stride;
            if (g.dilation > 1 && ky % g.dilation != 0) continue;
            ky = g.dilation > 1 ? ky / g.dilation : ky;
            const T *from = dy + (image * g.out_height + oy) * g.out_width * g.channels + pack * N;
            for (int ox = left; ox <= right; ox++) {
                int kx = ix - ox * g.stride;
                if (g.dilation > 1 && kx % g.dilation != 0) continue;
                kx = g.dilation > 1 ? kx / g.dilation : kx;
                auto values = Pack<T, N>::load(from + int64_t(ox) * g.channels);
#pragma unroll
                for (int k = 0; k < N; k++) sums[k] += to_acc(values.v[k]) * w[(ky * g.kernel + kx) * width + k];
            }
        }
        Pack<T, N> result;
#pragma unroll
        for (int k = 0; k < N; k++) result.v[k] = from_acc<T>(sums[k]);
        result.store(dx + i * g.channels + pack * N);
    }
}

// Partial weight gradients, (parts, cells, channels), of K x K windows with stride S. A thread handles strips of W
// adjacent output pixels, whose windows overlap, for all cells of the window.
template <class T, int N, int K, int S, int W>
__global__ void __launch_bounds__(COLUMN_THREADS, K == 3 ? 2 : 1)
    weight_gradient_strips(const T *__restrict__ x, const T *__restrict__ dy, Acc<T> *partials, Windows g, RowPartition partition, BlockLayout layout) {
    using R = Acc<T>;
    ThreadPosition at(partition, layout);
    R sums[K * K][N] = {};
    auto zero = zero_pack<T, N>();
    unsigned tiles_x = (g.out_width + W - 1) / W;
    for (int64_t row = at.first; row < at.end; row += layout.block_rows) {
        unsigned line = unsigned(row) / tiles_x, image = line / g.out_height;
        int ox = int(unsigned(row) - line * tiles_x) * W, oy = int(line - image * g.out_height);
        int y0 = oy * S - g.padding, x0 = ox * S - g.padding;
        Pack<T, N> ds[W];
        const T *of = dy + (int64_t(line) * g.out_width + ox) * g.channels + at.pack * N;
#pragma unroll
        for (int o = 0; o < W; o++) ds[o] = load_if(ox + o < g.out_width, of + int64_t(o) * g.channels, zero);
#pragma unroll
        for (int ky = 0; ky < K; ky++) {
            constexpr int INPUT_TAPS = (W - 1) * S + K;
            int iy = y0 + ky;
            bool in = iy >= 0 && iy < g.height;
            const T *from = x + ((int64_t(image) * g.height + iy) * g.width + x0) * g.channels + at.pack * N;
            Pack<T, N> input_taps[INPUT_TAPS];
#pragma unroll
            for (int j = 0; j < INPUT_TAPS; j++)
                input_taps[j] = load_if(in && x0 + j >= 0 && x0 + j < g.width, from + int64_t(j) * g.channels, zero);
#pragma unroll
            for (int kx = 0; kx < K; kx++)
#pragma unroll
                for (int o = 0; o < W; o++)
#pragma unroll
                    for (int k = 0; k < N; k++)
                        sums[ky * K + kx][k] += to_acc(input_taps[o * S + kx].v[k]) * to_acc(ds[o].v[k]);
        }
    }
#pragma unroll
    for (int cell = 0; cell < K * K; cell++) {
        block_row_sum(sums[cell], at, layout);
        if (at.y == 0 && at.in) {
            R *to = partials + (int64_t(at.part) * (K * K) + cell) * g.channels + at.pack * N;
#pragma unroll
            for (int k = 0; k < N; k++) to[k] = sums[cell][k];
        }
    }
}

// The same for any windows: a block handles one cell.
template <class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS)
    weight_gradient_taps(const T *__restrict__ x, const T *__restrict__ dy, Acc<T> *partials, Windows g, RowPartition partition, BlockLayout layout) {
    using R = Acc<T>;
    ThreadPosition at(partition, layout);
    int cell = blockIdx.y;
    R sums[N] = {};
    unsigned pixels = g.out_height * g.out_width;
    for (int64_t row = at.first; row < at.end; row += layout.block_rows) {
        unsigned image = unsigned(row) / pixels, pixel = unsigned(row) - image * pixels;
        unsigned oy = pixel / g.out_width, ox = pixel - oy * g.out_width;
        int iy = int(oy) * g.stride + cell / g.kernel * g.dilation - g.padding;
        int ix = int(ox) * g.stride + cell % g.kernel * g.dilation - g.padding;
        if (iy < 0 || iy >= g.height || ix < 0 || ix >= g.width) continue;
        auto ds = Pack<T, N>::load(dy + row * g.channels + at.pack * N);
        int64_t from = ((int64_t(image) * g.height + iy) * g.width + ix) * g.channels + at.pack * N;
        auto values = Pack<T, N>::load(x + from);
#pragma unroll
        for (int k = 0; k < N; k++) sums[k] += to_acc(values.v[k]) * to_acc(ds.v[k]);
    }
    block_row_sum(sums, at, layout);
    if (at.y == 0 && at.in) {
        R *to = partials + (int64_t(at.part) * g.cells() + cell) * g.channels + at.pack * N;
#pragma unroll
        for (int k = 0; k < N; k++) to[k] = sums[k];
    }
}

// Adds the partial sums, (parts, cells, channels), to the gradient, (channels, cells), in order.
template <class R>
__global__ void __launch_bounds__(1024) add_partials(const R *partials, R *into, int parts, int cells, int channels) {
    __shared__ R sums[32][33];
    int64_t all = int64_t(cells) * channels, column = int64_t(blockIdx.x) * 32 + threadIdx.x;
    R sum = 0;
    if (column < all) {
#pragma unroll 4
        for (int part = threadIdx.y; part < parts; part += 32) sum += partials[part * all + column];
    }
    sums[threadIdx.x][threadIdx.y] = sum;
    __syncthreads();
    sum = warp_sum(sums[threadIdx.y][threadIdx.x]);
    column = int64_t(blockIdx.x) * 32 + threadIdx.y;
    if (threadIdx.x == 0 && column < all) into[column % channels * cells + column / channels] += sum;
}

Windows forward_of(const ConvGeometry &g, int batch) {
    return {batch,    g.height, g.width,   g.out_height, g.out_width, g.inputs,
            g.kernel, g.stride, g.padding, g.dilation,   false};
}

// Shared memory per block that needs no opt-in.
constexpr size_t SHARED = 48 * 1024;

// A block layout whose weights fit in shared memory; empty if not even those of one thread do.
template <class T, int N> BlockLayout layout_in_smem(const Windows &g) {
    BlockLayout layout(g.channels / N);
    size_t each = sizeof(Acc<T>) * N * g.cells();
    if (layout.block_cols * each > SHARED) {
        layout.block_cols = int(SHARED / each);
        if (layout.block_cols == 0) return layout;
        layout.tiles_x = (layout.packs + layout.block_cols - 1) / layout.block_cols;
        layout.block_rows = COLUMN_THREADS / layout.block_cols;
    }
    return layout;
}

// Enough blocks to fill a GPU, in groups that cover all channels; each loops over more work.
unsigned grid_blocks(const BlockLayout &layout, int64_t work) {
    int64_t wanted = (work + layout.block_rows - 1) / layout.block_rows, most = (GRID_SMS * 16 + layout.tiles_x - 1) / layout.tiles_x;
    return unsigned((wanted < most ? wanted : most) * layout.tiles_x);
}

template <class T, int N> int launch_windows(const Windows &g, const T *x, const T *w, T *y, cudaStream_t stream) {
    if (N > 1 && g.dilation == 1 && g.kernel == 3 && g.stride == 1) {
        // As many channels as keep three lines of sums in registers.
        constexpr int M = N < 4 ? N : 4, W = 4;
        BlockLayout layout = layout_in_smem<T, M>(g);
        int64_t work = int64_t(g.batch) * ((g.out_height + RUN - 1) / RUN) * ((g.out_width + W - 1) / W);
        if (work > INT32_MAX) return cudaErrorInvalidValue;
        size_t shared = sizeof(Acc<T>) * M * layout.block_cols * 9;
        forward_columns<T, M, W><<<grid_blocks(layout, work), layout.threads(), shared, stream>>>(x, w, y, g, layout, work);
        return cudaGetLastError();
    }
    BlockLayout layout = layout_in_smem<T, N>(g);
    if (layout.block_cols == 0) return cudaErrorInvalidValue;
    size_t shared = sizeof(Acc<T>) * N * layout.block_cols * g.cells();
    int64_t lines = int64_t(g.batch) * g.out_height;
    auto run = [&](auto kernel, int64_t work) {
        kernel<<<grid_blocks(layout, work), layout.threads(), shared, stream>>>(x, w, y, g, layout, work);
        return int(cudaGetLastError());
    };
    // Narrower strips if windows overlap less.
    int64_t four = lines * ((g.out_width + 3) / 4), two = lines * ((g.out_width + 1) / 2);
    if (N > 1 && g.dilation == 1 && g.kernel == 3 && g.stride == 2) return run(strips<T, N, 3, 2, 2>, two);
    if (N > 1 && g.dilation == 1 && g.kernel == 5 && g.stride == 1) return run(strips<T, N, 5, 1, 4>, four);
    if (N > 1 && g.dilation == 1 && g.kernel == 5 && g.stride == 2) return run(strips<T, N, 5, 2, 2>, two);
    return run(pixels<T, N>, lines * g.out_width);
}

template <class T, int N> int launch_input_gradient(const Windows &g, const T *dy, const T *w, T *dx, cudaStream_t stream) {
    if (g.stride == 1) {
        Windows back{g.batch,    g.out_height, g.out_width, g.height, g.width, g.channels, g.kernel, 1,
                     (g.kernel - 1) * g.dilation - g.padding, g.dilation, true};
        return launch_windows<T, N>(back, dy, w, dx, stream);
    }
    BlockLayout layout = layout_in_smem<T, N>(g);
    if (layout.block_cols == 0) return cudaErrorInvalidValue;
    size_t shared = sizeof(Acc<T>) * N * layout.block_cols * g.cells();
    if (N > 1 && g.kernel == 3 && g.stride == 2 && g.padding == 1 && g.dilation == 1) {
        int64_t work = int64_t(g.batch) * ((g.height + 1) / 2) * ((g.width + 3) / 4);
        input_gradient_3x3s2<T, N, 2><<<grid_blocks(layout, work), layout.threads(), shared, stream>>>(dy, w, dx, g, layout, work);
        return cudaGetLastError();
    }
    int64_t work = int64_t(g.batch) * g.height * g.width;
    input_gradient<T, N><<<grid_blocks(layout, work), layout.threads(), shared, stream>>>(dy, w, dx, g, layout, work);
    return cudaGetLastError();
}

} // namespace

extern "C" int depthwise_forward(int type, const ConvGeometry *geometry, int batch, const void *x, const void *weight,
                                 void *y, cudaStream_t stream) {
    Windows g = forward_of(*geometry, batch);
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        if (aligned(g.channels * sizeof(T), {x, y}))
            return launch_windows<T, N>(g, (const T *)x, (const T *)weight, (T *)y, stream);
        return launch_windows<T, 1>(g, (const T *)x, (const T *)weight, (T *)y, stream);
    })
    return 0;
}

extern "C" int depthwise_input_gradient(int type, const ConvGeometry *geometry, int batch, const void *dy, const void *weight,
                               void *dx, cudaStream_t stream) {
    Windows g = forward_of(*geometry, batch);
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        if (aligned(g.channels * sizeof(T), {dy, dx}))
            return launch_input_gradient<T, N>(g, (const T *)dy, (const T *)weight, (T *)dx, stream);
        return launch_input_gradient<T, 1>(g, (const T *)dy, (const T *)weight, (T *)dx, stream);
    })
    return 0;
}

// Accumulates the weight gradient; `partials` is (parts, cells, channels).
extern "C" int depthwise_weight_gradient(int type, const ConvGeometry *geometry, int batch, const void *x, const void *dy,
                                void *partials, void *dweight, int64_t chunk, int parts, cudaStream_t stream) {
    Windows g = forward_of(*geometry, batch);
    int64_t rows = int64_t(batch) * g.out_height * g.out_width;
    if (rows == 0) return 0;
    if (rows > INT32_MAX || g.cells() > 65535) return cudaErrorInvalidValue;
    RowPartition partition{rows, rows, chunk, parts, g.channels};
    WITH_TYPE(type, {
        using R = Acc<T>;
        // As many channels as keep the sums of all cells in registers.
        constexpr int N = Pack<T>::size < 4 ? Pack<T>::size : 4;
        auto run = [&](auto kernel, const RowPartition &partition, BlockLayout layout, unsigned cells) {
            kernel<<<dim3(layout.blocks(partition), cells), layout.threads(), 0, stream>>>((const T *)x, (const T *)dy,
                                                                                  (R *)partials, g, partition, layout);
        };
        // The same number of parts, over strips of `pixels` pixels.
        auto strip_partition = [&](int pixels) {
            int64_t strips = int64_t(batch) * g.out_height * ((g.out_width + pixels - 1) / pixels);
            return RowPartition{strips, strips, (strips + parts - 1) / parts, parts, g.channels};
        };
        bool vectorized = aligned(g.channels * sizeof(T), {x, dy}), dense = vectorized && g.dilation == 1;
        BlockLayout layout(vectorized ? g.channels / N : g.channels);
        if (dense && g.kernel == 3 && g.stride == 1) run(weight_gradient_strips<T, N, 3, 1, 4>, strip_partition(4), layout, 1);
        else if (dense && g.kernel == 3 && g.stride == 2) run(weight_gradient_strips<T, N, 3, 2, 2>, strip_partition(2), layout, 1);
        else if (dense && g.kernel == 5 && g.stride == 1) run(weight_gradient_strips<T, N, 5, 1, 4>, strip_partition(4), layout, 1);
        else if (dense && g.kernel == 5 && g.stride == 2) run(weight_gradient_strips<T, N, 5, 2, 2>, strip_partition(2), layout, 1);
        else if (vectorized) run(weight_gradient_taps<T, N>, partition, layout, g.cells());
        else run(weight_gradient_taps<T, 1>, partition, layout, g.cells());
        add_partials<R><<<blocks(int64_t(g.cells()) * g.channels, 32), dim3(32, 32), 0, stream>>>(
            (const R *)partials, (R *)dweight, parts, g.cells(), g.channels);
    })
    return cudaGetLastError();
}
