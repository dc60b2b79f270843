// Normalization of images with a fused clamp: what batch norm and group norm have in common.
//
// Statistics belong to a unit of rows and `size` adjacent channels: one channel in batch norm, the channels of a group
// in group norm. Reductions have two stages: every part of a unit writes two sums per channel, and a second kernel
// combines them in order, in f64. Values enter the sums relative to the unit's first row, so that values far from zero
// lose no precision.
#include "cuda/channels.cuh"

namespace {

struct ChannelNormFfi {
    int type, clip, size, channels;
    int64_t rows, unit, chunk;
    int parts;
    double eps;
    const void *x, *weight, *bias;
    void *saved_stats; // (units, 2, channels / size): mean and reciprocal standard deviation
    RowPartition partition() const { return {rows, unit, chunk, parts, channels}; }
};

enum Clip : int { CLAMP_NONE, CLAMP_RELU, CLAMP_RELU6 };

// Comparisons with NaN are false, so NaN propagates.
template <int clip, class R> __device__ __forceinline__ R clamped(R x) {
    if (clip != CLAMP_NONE) x = x < R(0) ? R(0) : x;
    if (clip == CLAMP_RELU6) x = x > R(6) ? R(6) : x;
    return x;
}

// `d` where the clamp passed the value unchanged, else 0.
template <int clip, class R> __device__ __forceinline__ R clamp_backward(R x, R d) {
    if (clip == CLAMP_NONE) return d;
    return x > R(0) && (clip == CLAMP_RELU || x < R(6)) ? d : R(0);
}

#define WITH_CLAMP(code, ...)                                                                                  \
    switch (code) {                                                                                           \
    case CLAMP_NONE: { constexpr int C = CLAMP_NONE; __VA_ARGS__; break; }                                          \
    case CLAMP_RELU: { constexpr int C = CLAMP_RELU; __VA_ARGS__; break; }                                      \
    case CLAMP_RELU6: { constexpr int C = CLAMP_RELU6; __VA_ARGS__; break; }                                    \
    default: return cudaErrorInvalidValue;                                                                    \
    }

// Index of the first of a channel's two sums in (units, parts, 2, channels).
__device__ __forceinline__ int64_t partial(const RowPartition &partition, int unit, int part, int channel) {
    return (int64_t(unit) * partition.parts + part) * 2 * partition.channels + channel;
}

// Sums of the values relative to the unit's first row, and of their squares.
template <class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS, COLUMN_BLOCKS) moments(const T *__restrict__ x, Acc<T> *partials, RowPartition partition, BlockLayout layout) {
    using R = Acc<T>;
    ThreadPosition at(partition, layout);
    R sums[2 * N] = {}, from[N];
    if (at.in) {
        auto first = Pack<T, N>::load(x + at.unit * partition.unit * partition.channels + at.pack * N);
#pragma unroll
        for (int k = 0; k < N; k++) from[k] = to_acc(first.v[k]);
    }
    x += at.pack * N;
    auto load = [&](int64_t row) { return Pack<T, N>::load(x + row * partition.channels); };
    for_each_row<4>(at, layout, load, [&](int64_t, const Pack<T, N> &values) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            R d = to_acc(values.v[k]) - from[k];
            sums[k] += d;
            sums[N + k] += d * d;
        }
    });
    block_row_sum(sums, at, layout);
    if (at.y == 0 && at.in) {
        R *to = partials + partial(partition, at.unit, at.part, at.pack * N);
#pragma unroll
        for (int k = 0; k < N; k++) to[k] = sums[k], to[partition.channels + k] = sums[N + k];
    }
}

// The two sums of a channel over all parts of a unit, in f64; valid in threads with y = 0. A block has 32 x 32 threads
// and handles one unit and 32 channels.
template <class R>
__device__ __forceinline__ void combine_partials(const R *partials, const RowPartition &partition, int unit, int channel, double &a, double &b) {
    __shared__ double as[32][33], bs[32][33];
    a = b = 0;
    if (channel < partition.channels) {
        // Issues all loads of a round before it uses any of them.
        constexpr int ROUND = 8;
        for (int part = threadIdx.y; part < partition.parts; part += 32 * ROUND) {
            R as_read[ROUND], bs_read[ROUND];
#pragma unroll
            for (int u = 0; u < ROUND; u++) {
                bool in = part + 32 * u < partition.parts;
                const R *from = partials + partial(partition, unit, in ? part + 32 * u : part, channel);
                as_read[u] = in ? from[0] : R(0);
                bs_read[u] = in ? from[partition.channels] : R(0);
            }
#pragma unroll
            for (int u = 0; u < ROUND; u++) a += double(as_read[u]), b += double(bs_read[u]);
        }
    }
    as[threadIdx.x][threadIdx.y] = a;
    bs[threadIdx.x][threadIdx.y] = b;
    __syncthreads();
    // Transposed: each warp now reduces one channel.
    a = warp_sum(as[threadIdx.y][threadIdx.x]);
    b = warp_sum(bs[threadIdx.y][threadIdx.x]);
    __syncthreads();
    if (threadIdx.x == 0) as[0][threadIdx.y] = a, bs[0][threadIdx.y] = b;
    __syncthreads();
    a = as[0][threadIdx.x];
    b = bs[0][threadIdx.x];
}

__device__ __forceinline__ double unit_rows(const RowPartition &partition, int unit) {
    int64_t left = partition.rows - unit * partition.unit;
    return double(left < partition.unit ? left : partition.unit);
}

template <class R> __device__ __forceinline__ R ema(R old, double next, double momentum) {
    return R((1 - momentum) * double(old) + momentum * next);
}

// Writes the mean and the centred sum of squares of each unit and channel, (units, 2, channels), to `totals`. With
// per-channel statistics, also writes `saved_stats` and, if there is a single unit, updates the running statistics.
template <class T>
__global__ void __launch_bounds__(1024) finalize_stats(const T *x, const Acc<T> *partials, double *totals, Acc<T> *saved_stats,
                                               Acc<T> *running_mean, Acc<T> *running_var, double momentum, double eps,
                                               RowPartition partition, bool per_channel) {
    int unit = blockIdx.y, channel = blockIdx.x * 32 + threadIdx.x;
    double a, b;
    combine_partials(partials, partition, unit, channel, a, b);
    if (threadIdx.y != 0 || channel >= partition.channels) return;
    double n = unit_rows(partition, unit);
    double mean = double(to_acc(x[unit * partition.unit * partition.channels + channel])) + a / n;
    double m2 = b - a * a / n;
    m2 = m2 < 0 ? 0 : m2;
    int64_t to = int64_t(unit) * 2 * partition.channels + channel;
    totals[to] = mean;
    totals[to + partition.channels] = m2;
    if (!per_channel) return;
    saved_stats[to] = Acc<T>(mean);
    saved_stats[to + partition.channels] = Acc<T>(1 / sqrt(m2 / n + eps));
    if (running_mean) {
        running_mean[channel] = ema(running_mean[channel], mean, momentum);
        running_var[channel] = ema(running_var[channel], m2 / (n > 2 ? n - 1 : 1), momentum);
    }
}

// Updates the running statistics, unit by unit.
template <class R>
__global__ void update_running_stats(const double *totals, R *mean, R *var, double momentum, RowPartition partition, int units) {
    int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= partition.channels) return;
    R m = mean[channel], v = var[channel];
    for (int unit = 0; unit < units; unit++) {
        const double *from = totals + int64_t(unit) * 2 * partition.channels + channel;
        double n = unit_rows(partition, unit);
        m = ema(m, from[0], momentum);
        v = ema(v, from[partition.channels] / (n > 2 ? n - 1 : 1), momentum);
    }
    mean[channel] = m;
    var[channel] = v;
}

// The statistics of groups of `size` channels, from those of their channels.
template <class R>
__global__ void finalize_group_stats(const double *totals, R *saved_stats, double eps, RowPartition partition, int size, int units) {
    int groups = partition.channels / size;
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= int64_t(units) * groups) return;
    int unit = int(i / groups), group = int(i % groups);
    const double *means = totals + int64_t(unit) * 2 * partition.channels + group * size, *m2s = means + partition.channels;
    double mean = 0, spread = 0;
    for (int c = 0; c < size; c++) mean += means[c], spread += m2s[c];
    mean /= size;
    double between_channels = 0;
    for (int c = 0; c < size; c++) between_channels += (means[c] - mean) * (means[c] - mean);
    double var = spread / size / unit_rows(partition, unit) + between_channels / size;
    saved_stats[int64_t(unit) * 2 * groups + group] = R(mean);
    saved_stats[(int64_t(unit) * 2 + 1) * groups + group] = R(1 / sqrt(var + eps));
}

// Presents the running statistics as those of one unit.
template <class R> __global__ void eval_stats(const R *mean, const R *var, R *saved_stats, double eps, int channels) {
    int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    saved_stats[channel] = mean[channel];
    saved_stats[channels + channel] = R(1 / sqrt(double(var[channel]) + eps));
}

// The affine map of a thread's channels: `clamp((x - mean) scale + shift)`, or with a residual
// `clamp((x - mean) scale + shift + residual)`.
template <class T, int N> struct Affine {
    using R = Acc<T>;
    R mean[N], scale[N], shift[N];
    __device__ __forceinline__ Affine(const ThreadPosition &at, const R *saved_stats, const T *weight, const T *bias, int channels,
                                      int size) {
        if (!at.in) return;
        int groups = channels / size;
        const R *means = saved_stats + int64_t(at.unit) * 2 * groups, *rstds = means + groups;
#pragma unroll
        for (int k = 0; k < N; k++) {
            int channel = at.pack * N + k, group = size == 1 ? channel : channel / size;
            mean[k] = means[group];
            scale[k] = rstds[group] * to_acc(weight[channel]);
            shift[k] = to_acc(bias[channel]);
        }
    }
    __device__ __forceinline__ R of(T x, int k) const { return (to_acc(x) - mean[k]) * scale[k] + shift[k]; }
};

template <int C, class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS, COLUMN_BLOCKS)
    apply(const T *__restrict__ x, T *__restrict__ y, const Acc<T> *saved_stats, const T *weight, const T *bias, RowPartition partition,
          BlockLayout layout, int size) {
    ThreadPosition at(partition, layout);
    Affine<T, N> map(at, saved_stats, weight, bias, partition.channels, size);
    x += at.pack * N, y += at.pack * N;
    auto load = [&](int64_t row) { return Pack<T, N>::load(x + row * partition.channels); };
    for_each_row<4>(at, layout, load, [&](int64_t row, const Pack<T, N> &values) {
        Pack<T, N> result;
#pragma unroll
        for (int k = 0; k < N; k++) result.v[k] = from_acc<T>(clamped<C>(map.of(values.v[k], k)));
        result.store(y + row * partition.channels);
    });
}

template <int C, class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS, COLUMN_BLOCKS)
    apply_residual(const T *__restrict__ x, const T *__restrict__ residual, T *__restrict__ y, const Acc<T> *saved_stats,
               const T *weight, const T *bias, RowPartition partition, BlockLayout layout, int size) {
    ThreadPosition at(partition, layout);
    Affine<T, N> map(at, saved_stats, weight, bias, partition.channels, size);
    x += at.pack * N, residual += at.pack * N, y += at.pack * N;
    auto load = [&](int64_t row) {
        return ValueAndGrad<T, N>{Pack<T, N>::load(x + row * partition.channels), Pack<T, N>::load(residual + row * partition.channels)};
    };
    for_each_row<4>(at, layout, load, [&](int64_t row, const ValueAndGrad<T, N> &both) {
        Pack<T, N> result;
#pragma unroll
        for (int k = 0; k < N; k++) result.v[k] = from_acc<T>(clamped<C>(map.of(both.x.v[k], k) + to_acc(both.d.v[k])));
        result.store(y + row * partition.channels);
    });
}

// Partial sums of `d`, the gradient after the clamp's backward, and of `d (x - mean)`.
template <int C, class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS, COLUMN_BLOCKS)
    gradient_partials(const T *__restrict__ x, const T *__restrict__ dy, Acc<T> *partials, const Acc<T> *saved_stats, const T *weight,
              const T *bias, RowPartition partition, BlockLayout layout, int size) {
    using R = Acc<T>;
    ThreadPosition at(partition, layout);
    Affine<T, N> map(at, saved_stats, weight, bias, partition.channels, size);
    R sums[2 * N] = {};
    x += at.pack * N, dy += at.pack * N;
    auto load = [&](int64_t row) {
        return ValueAndGrad<T, N>{Pack<T, N>::load(x + row * partition.channels), Pack<T, N>::load(dy + row * partition.channels)};
    };
    for_each_row<2>(at, layout, load, [&](int64_t, const ValueAndGrad<T, N> &both) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            R from = to_acc(both.x.v[k]) - map.mean[k];
            R d = clamp_backward<C>(from * map.scale[k] + map.shift[k], to_acc(both.d.v[k]));
            sums[k] += d;
            sums[N + k] += d * from;
        }
    });
    block_row_sum(sums, at, layout);
    if (at.y == 0 && at.in) {
        R *to = partials + partial(partition, at.unit, at.part, at.pack * N);
#pragma unroll
        for (int k = 0; k < N; k++) to[k] = sums[k], to[partition.channels + k] = sums[N + k];
    }
}

// The same sums for a layer with a residual before the clamp: the output tells which values the clamp passed, and `dy`
// is overwritten with the masked gradient.
template <int C, class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS, COLUMN_BLOCKS)
    gradient_partials_residual(const T *__restrict__ x, const T *__restrict__ y, T *__restrict__ dy, Acc<T> *partials,
                 const Acc<T> *saved_stats, RowPartition partition, BlockLayout layout, int size) {
    using R = Acc<T>;
    ThreadPosition at(partition, layout);
    R sums[2 * N] = {}, mean[N];
    if (at.in) {
        const R *means = saved_stats + int64_t(at.unit) * 2 * (partition.channels / size);
#pragma unroll
        for (int k = 0; k < N; k++) mean[k] = means[(at.pack * N + k) / size];
    }
    x += at.pack * N, y += at.pack * N, dy += at.pack * N;
    struct InputOutputGrad {
        Pack<T, N> x, y, d;
    };
    auto load = [&](int64_t row) {
        int64_t i = row * partition.channels;
        return InputOutputGrad{Pack<T, N>::load(x + i), Pack<T, N>::load(y + i), Pack<T, N>::load(dy + i)};
    };
    for_each_row<2>(at, layout, load, [&](int64_t row, const InputOutputGrad &three) {
        Pack<T, N> masked_grad;
#pragma unroll
        for (int k = 0; k < N; k++) {
            R d = clamp_backward<C>(to_acc(three.y.v[k]), to_acc(three.d.v[k]));
            masked_grad.v[k] = from_acc<T>(d);
            sums[k] += d;
            sums[N + k] += d * (to_acc(three.x.v[k]) - mean[k]);
        }
        masked_grad.store(dy + row * partition.channels);
    });
    block_row_sum(sums, at, layout);
    if (at.y == 0 && at.in) {
        R *to = partials + partial(partition, at.unit, at.part, at.pack * N);
#pragma unroll
        for (int k = 0; k < N; k++) to[k] = sums[k], to[partition.channels + k] = sums[N + k];
    }
}

// Writes the sums of each unit and channel to `totals` (units, 2, channels). With per-channel statistics, also writes
// the corrections of the input gradient and, if there is a single unit, accumulates the parameter gradients.
template <class T>
__global__ void __launch_bounds__(1024)
    finalize_gradient_sums(const Acc<T> *partials, double *totals, Acc<T> *corrections, const Acc<T> *saved_stats, const T *weight,
                Acc<T> *dweight, Acc<T> *dbias, RowPartition partition, bool per_channel) {
    using R = Acc<T>;
    int unit = blockIdx.y, channel = blockIdx.x * 32 + threadIdx.x;
    double sum, cross;
    combine_partials(partials, partition, unit, channel, sum, cross);
    if (threadIdx.y != 0 || channel >= partition.channels) return;
    int64_t to = int64_t(unit) * 2 * partition.channels + channel;
    totals[to] = sum;
    totals[to + partition.channels] = cross;
    if (!per_channel) return;
    double n = unit_rows(partition, unit), r = double(saved_stats[to + partition.channels]), w = double(to_acc(weight[channel]));
    corrections[to] = R(cross * w * r * r * r / n);
    corrections[to + partition.channels] = R(sum * w * r / n);
    if (dweight) dweight[channel] += R(cross * r);
    if (dbias) dbias[channel] += R(sum);
}

// The parameter gradients: sums over all units, in order.
template <class R>
__global__ void parameter_gradients(const double *totals, const R *saved_stats, R *dweight, R *dbias, RowPartition partition, int size, int units) {
    int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= partition.channels) return;
    int groups = partition.channels / size;
    double w = 0, b = 0;
#pragma unroll 4
    for (int unit = 0; unit < units; unit++) {
        const double *from = totals + int64_t(unit) * 2 * partition.channels + channel;
        b += from[0];
        w += from[partition.channels] * double(saved_stats[(int64_t(unit) * 2 + 1) * groups + channel / size]);
    }
    if (dweight) dweight[channel] += R(w);
    if (dbias) dbias[channel] += R(b);
}

// The corrections of the input gradient per group of channels: (units, 2, groups).
template <class T>
__global__ void group_corrections(const double *totals, const Acc<T> *saved_stats, const T *weight, Acc<T> *corrections, RowPartition partition, int size,
                            int units) {
    int groups = partition.channels / size;
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= int64_t(units) * groups) return;
    int unit = int(i / groups), group = int(i % groups);
    const double *sums = totals + int64_t(unit) * 2 * partition.channels + group * size, *crosses = sums + partition.channels;
    double sum = 0, cross = 0;
    for (int c = 0; c < size; c++) {
        double w = double(to_acc(weight[group * size + c]));
        sum += sums[c] * w;
        cross += crosses[c] * w;
    }
    double n = unit_rows(partition, unit) * size, r = double(saved_stats[(int64_t(unit) * 2 + 1) * groups + group]);
    corrections[int64_t(unit) * 2 * groups + group] = Acc<T>(cross * r * r * r / n);
    corrections[(int64_t(unit) * 2 + 1) * groups + group] = Acc<T>(sum * r / n);
}

// `dx = scale d - slope (x - mean) - level`: the last two terms are the corrections.
template <int C, class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS, COLUMN_BLOCKS)
    backward(const T *__restrict__ x, const T *__restrict__ dy, T *__restrict__ dx, const Acc<T> *saved_stats,
             const Acc<T> *corrections, const T *weight, const T *bias, RowPartition partition, BlockLayout layout, int size) {
    using R = Acc<T>;
    ThreadPosition at(partition, layout);
    Affine<T, N> map(at, saved_stats, weight, bias, partition.channels, size);
    R slope[N], level[N];
    if (at.in) {
        int groups = partition.channels / size;
        const R *slopes = corrections + int64_t(at.unit) * 2 * groups, *levels = slopes + groups;
#pragma unroll
        for (int k = 0; k < N; k++) {
            int group = (at.pack * N + k) / size;
            slope[k] = slopes[group];
            level[k] = levels[group];
        }
    }
    x += at.pack * N, dy += at.pack * N, dx += at.pack * N;
    auto load = [&](int64_t row) {
        return ValueAndGrad<T, N>{Pack<T, N>::load(x + row * partition.channels), Pack<T, N>::load(dy + row * partition.channels)};
    };
    for_each_row<2>(at, layout, load, [&](int64_t row, const ValueAndGrad<T, N> &both) {
        Pack<T, N> result;
#pragma unroll
        for (int k = 0; k < N; k++) {
            R from = to_acc(both.x.v[k]) - map.mean[k];
            R d = clamp_backward<C>(from * map.scale[k] + map.shift[k], to_acc(both.d.v[k]));
            result.v[k] = from_acc<T>(map.scale[k] * d - slope[k] * from - level[k]);
        }
        result.store(dx + row * partition.channels);
    });
}

// Runs the body with N, the number of channels per thread, and the matching block layout: 16 bytes if the rows are
// aligned.
#define WITH_LANES(norm, pointers, ...)                                                                       \
    if (aligned((norm).channels * sizeof(T), pointers)) {                                                     \
        constexpr int N = Pack<T>::size;                                                                      \
        BlockLayout layout((norm).channels / N);                                                                     \
        __VA_ARGS__;                                                                                          \
    } else {                                                                                                  \
        constexpr int N = 1;                                                                                  \
        BlockLayout layout((norm).channels);                                                                         \
        __VA_ARGS__;                                                                                          \
    }

using Pointers = std::initializer_list<const void *>;

int apply_all(const ChannelNormFfi &n, const void *residual, void *y, cudaStream_t stream) {
    RowPartition partition = n.partition();
    Pointers pointers = {n.x, residual, y};
    WITH_TYPE(n.type, WITH_CLAMP(n.clip, WITH_LANES(n, pointers, {
        if (residual)
            apply_residual<C, T, N><<<layout.blocks(partition), layout.threads(), 0, stream>>>(
                (const T *)n.x, (const T *)residual, (T *)y, (const Acc<T> *)n.saved_stats, (const T *)n.weight,
                (const T *)n.bias, partition, layout, n.size);
        else
            apply<C, T, N><<<layout.blocks(partition), layout.threads(), 0, stream>>>(
            (const T *)n.x, (T *)y, (const Acc<T> *)n.saved_stats, (const T *)n.weight, (const T *)n.bias, partition, layout, n.size);
    })))
    return cudaGetLastError();
}

} // namespace

// `scratch` holds totals (units, 2, channels) in f64, then partial sums (units, parts, 2, channels) in the accumulation
// type. `running_mean` may be null, and so may `residual`, which is added before the clamp.
extern "C" int channels_forward(const ChannelNormFfi *norm, const void *residual, void *y, void *scratch, void *running_mean, void *running_var,
                                double momentum, cudaStream_t stream) {
    const ChannelNormFfi &n = *norm;
    if (n.rows == 0) return 0;
    RowPartition partition = n.partition();
    int units = partition.units();
    if (units > 65535) return cudaErrorInvalidValue;
    bool per_channel = n.size == 1, single_unit = per_channel && units == 1;
    double *totals = (double *)scratch;
    void *partials = totals + int64_t(units) * 2 * n.channels;
    dim3 grid_blocks((n.channels + 31) / 32, units);
    Pointers pointers = {n.x};
    WITH_TYPE(n.type, {
        using R = Acc<T>;
        WITH_LANES(n, pointers, {
            moments<T, N><<<layout.blocks(partition), layout.threads(), 0, stream>>>((const T *)n.x, (R *)partials, partition, layout);
        })
        finalize_stats<T><<<grid_blocks, dim3(32, 32), 0, stream>>>(
            (const T *)n.x, (const R *)partials, totals, (R *)n.saved_stats, single_unit ? (R *)running_mean : nullptr,
            single_unit ? (R *)running_var : nullptr, momentum, n.eps, partition, per_channel);
        if (!per_channel) {
            int64_t work = int64_t(units) * (n.channels / n.size);
            finalize_group_stats<R><<<blocks(work, 128), 128, 0, stream>>>(totals, (R *)n.saved_stats, n.eps, partition, n.size, units);
        } else if (!single_unit && running_mean) {
            update_running_stats<R><<<blocks(n.channels, 128), 128, 0, stream>>>(totals, (R *)running_mean, (R *)running_var,
                                                                         momentum, partition, units);
        }
    })
    return apply_all(n, residual, y, stream);
}

// Computes the output from `saved_stats`.
extern "C" int channels_apply(const ChannelNormFfi *norm, void *y, cudaStream_t stream) {
    if (norm->rows == 0) return 0;
    return apply_all(*norm, nullptr, y, stream);
}

// Computes the output from the running statistics; first writes `saved_stats`, as those of one unit.
extern "C" int channels_evaluate(const ChannelNormFfi *norm, const void *mean, const void *var, void *y, cudaStream_t stream) {
    const ChannelNormFfi &n = *norm;
    if (n.rows == 0) return 0;
    WITH_TYPE(n.type, {
        using R = Acc<T>;
        eval_stats<R><<<blocks(n.channels, 128), 128, 0, stream>>>((const R *)mean, (const R *)var, (R *)n.saved_stats, n.eps,
                                                               n.channels);
    })
    return apply_all(n, nullptr, y, stream);
}

// Accumulates the gradients of weight and bias, which may be null, and computes that of the input unless `dx` is null.
// `scratch` holds totals as above, then corrections (units, 2, channels / size) in the accumulation type, then partial
// sums as above. `y` is null, or the output of a layer with a residual before the clamp: `dy` is then overwritten with
// the gradient of the residual.
extern "C" int channels_backward(const ChannelNormFfi *norm, void *dy, const void *y, void *dx, void *dweight, void *dbias,
                                 void *scratch, cudaStream_t stream) {
    const ChannelNormFfi &n = *norm;
    if (n.rows == 0) return 0;
    RowPartition partition = n.partition();
    int units = partition.units(), groups = n.channels / n.size;
    if (units > 65535) return cudaErrorInvalidValue;
    bool per_channel = n.size == 1, single_unit = per_channel && units == 1;
    double *totals = (double *)scratch;
    dim3 grid_blocks((n.channels + 31) / 32, units);
    Pointers read = {n.x, dy, y}, touched = {n.x, dy, dx};
    int remaining_clamp = y ? int(CLAMP_NONE) : n.clip;
    WITH_TYPE(n.type, {
        using R = Acc<T>;
        R *corrections = (R *)(totals + int64_t(units) * 2 * n.channels), *partials = corrections + int64_t(units) * 2 * groups;
        const T *x = (const T *)n.x;
        const T *weight = (const T *)n.weight;
        const T *bias = (const T *)n.bias;
        const R *saved_stats = (const R *)n.saved_stats;
        WITH_CLAMP(n.clip, WITH_LANES(n, read, {
            if (y)
                gradient_partials_residual<C, T, N><<<layout.blocks(partition), layout.threads(), 0, stream>>>(
                    x, (const T *)y, (T *)dy, partials, saved_stats, partition, layout, n.size);
            else
                gradient_partials<C, T, N><<<layout.blocks(partition), layout.threads(), 0, stream>>>(
                    x, (const T *)dy, partials, saved_stats, weight, bias, partition, layout, n.size);
        }))
        finalize_gradient_sums<T><<<grid_blocks, dim3(32, 32), 0, stream>>>(partials, totals, corrections, saved_stats, weight,
                                                               single_unit ? (R *)dweight : nullptr,
                                                               single_unit ? (R *)dbias : nullptr, partition, per_channel);
        if (!single_unit)
            parameter_gradients<R><<<blocks(n.channels, 64), 64, 0, stream>>>(totals, saved_stats, (R *)dweight, (R *)dbias, partition,
                                                                          n.size, units);
        if (dx && !per_channel)
            group_corrections<T><<<blocks(int64_t(units) * groups, 128), 128, 0, stream>>>(totals, saved_stats, weight, corrections, partition,
                                                                                     n.size, units);
        if (dx)
            WITH_CLAMP(remaining_clamp, WITH_LANES(n, touched, {
                backward<C, T, N><<<layout.blocks(partition), layout.threads(), 0, stream>>>(
                    x, (const T *)dy, (T *)dx, saved_stats, corrections, weight, bias, partition, layout, n.size);
            }))
    })
    return cudaGetLastError();
}
