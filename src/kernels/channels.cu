// Normalisation of pictures with a clip fused: what batch norm and group norm have in common.
//
// Statistics belong to a unit of rows and `size` neighbouring channels: one channel in batch norm, a group's in group
// norm. Sums are made in two stages: every part of a unit writes two sums a channel, and these are put together in
// order, in f64. Sums are of distances from the unit's first row, so that values far from zero lose nothing.
#include "cuda/channels.cuh"

namespace {

struct Norm {
    int type, clip, size, channels;
    int64_t rows, unit, chunk;
    int parts;
    double eps;
    const void *x, *weight, *bias;
    void *kept; // (units, 2, channels / size): mean and one over the deviation
    Cut cut() const { return {rows, unit, chunk, parts, channels}; }
};

enum Clip : int { NOTHING, CLIP_RELU, CLIP_RELU6 };

// A NaN compares false and passes through.
template <int clip, class R> __device__ __forceinline__ R clipped(R x) {
    if (clip != NOTHING) x = x < R(0) ? R(0) : x;
    if (clip == CLIP_RELU6) x = x > R(6) ? R(6) : x;
    return x;
}

// `d` where the clip let the value through as it was, else 0.
template <int clip, class R> __device__ __forceinline__ R through(R x, R d) {
    if (clip == NOTHING) return d;
    return x > R(0) && (clip == CLIP_RELU || x < R(6)) ? d : R(0);
}

#define WITH_CLIP(code, ...)                                                                                  \
    switch (code) {                                                                                           \
    case NOTHING: { constexpr int C = NOTHING; __VA_ARGS__; break; }                                          \
    case CLIP_RELU: { constexpr int C = CLIP_RELU; __VA_ARGS__; break; }                                      \
    case CLIP_RELU6: { constexpr int C = CLIP_RELU6; __VA_ARGS__; break; }                                    \
    default: return cudaErrorInvalidValue;                                                                    \
    }

// Where the two sums of a channel lie: (units, parts, 2, channels).
__device__ __forceinline__ int64_t partial(const Cut &cut, int unit, int part, int channel) {
    return (int64_t(unit) * cut.parts + part) * 2 * cut.channels + channel;
}

// Sums of distances from the unit's first row, and of their squares.
template <class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS, COLUMN_BLOCKS) moments(const T *__restrict__ x, Acc<T> *partials, Cut cut, Lanes lanes) {
    using R = Acc<T>;
    Place at(cut, lanes);
    R sums[2 * N] = {}, from[N];
    if (at.in) {
        auto first = Pack<T, N>::load(x + at.unit * cut.unit * cut.channels + at.pack * N);
#pragma unroll
        for (int k = 0; k < N; k++) from[k] = up(first.v[k]);
    }
    x += at.pack * N;
    auto load = [&](int64_t row) { return Pack<T, N>::load(x + row * cut.channels); };
    go_down<4>(at, lanes, load, [&](int64_t, const Pack<T, N> &values) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            R d = up(values.v[k]) - from[k];
            sums[k] += d;
            sums[N + k] += d * d;
        }
    });
    add_up(sums, at, lanes);
    if (at.y == 0 && at.in) {
        R *to = partials + partial(cut, at.unit, at.part, at.pack * N);
#pragma unroll
        for (int k = 0; k < N; k++) to[k] = sums[k], to[cut.channels + k] = sums[N + k];
    }
}

// The two sums of a channel over all parts of a unit, in f64; valid in the threads of the first row. Blocks are of
// 32 channels and 32 rows, one for each unit and 32 channels.
template <class R>
__device__ __forceinline__ void put_together(const R *partials, const Cut &cut, int unit, int channel, double &a, double &b) {
    __shared__ double as[32][33], bs[32][33];
    a = b = 0;
    if (channel < cut.channels) {
        // All of a round is asked for before any of it is used.
        constexpr int ROUND = 8;
        for (int part = threadIdx.y; part < cut.parts; part += 32 * ROUND) {
            R as_read[ROUND], bs_read[ROUND];
#pragma unroll
            for (int u = 0; u < ROUND; u++) {
                bool in = part + 32 * u < cut.parts;
                const R *from = partials + partial(cut, unit, in ? part + 32 * u : part, channel);
                as_read[u] = in ? from[0] : R(0);
                bs_read[u] = in ? from[cut.channels] : R(0);
            }
#pragma unroll
            for (int u = 0; u < ROUND; u++) a += double(as_read[u]), b += double(bs_read[u]);
        }
    }
    as[threadIdx.x][threadIdx.y] = a;
    bs[threadIdx.x][threadIdx.y] = b;
    __syncthreads();
    // A warp has one channel now: the rows of the block are its lanes.
    a = warp_sum(as[threadIdx.y][threadIdx.x]);
    b = warp_sum(bs[threadIdx.y][threadIdx.x]);
    __syncthreads();
    if (threadIdx.x == 0) as[0][threadIdx.y] = a, bs[0][threadIdx.y] = b;
    __syncthreads();
    a = as[0][threadIdx.x];
    b = bs[0][threadIdx.x];
}

__device__ __forceinline__ double unit_rows(const Cut &cut, int unit) {
    int64_t left = cut.rows - unit * cut.unit;
    return double(left < cut.unit ? left : cut.unit);
}

template <class R> __device__ __forceinline__ R mixed(R old, double next, double share) {
    return R((1 - share) * double(old) + share * next);
}

// Mean and summed squares around it of each unit and channel, (units, 2, channels), into `totals`; and what follows
// from them where a channel has its own statistics: `kept`, and the running ones where there is one unit.
template <class T>
__global__ void __launch_bounds__(1024) settle(const T *x, const Acc<T> *partials, double *totals, Acc<T> *kept,
                                               Acc<T> *running_mean, Acc<T> *running_var, double share, double eps,
                                               Cut cut, bool own) {
    int unit = blockIdx.y, channel = blockIdx.x * 32 + threadIdx.x;
    double a, b;
    put_together(partials, cut, unit, channel, a, b);
    if (threadIdx.y != 0 || channel >= cut.channels) return;
    double n = unit_rows(cut, unit);
    double mean = double(up(x[unit * cut.unit * cut.channels + channel])) + a / n;
    double m2 = b - a * a / n;
    m2 = m2 < 0 ? 0 : m2;
    int64_t to = int64_t(unit) * 2 * cut.channels + channel;
    totals[to] = mean;
    totals[to + cut.channels] = m2;
    if (!own) return;
    kept[to] = Acc<T>(mean);
    kept[to + cut.channels] = Acc<T>(1 / sqrt(m2 / n + eps));
    if (running_mean) {
        running_mean[channel] = mixed(running_mean[channel], mean, share);
        running_var[channel] = mixed(running_var[channel], m2 / (n > 2 ? n - 1 : 1), share);
    }
}

// Moves the running statistics, unit by unit.
template <class R>
__global__ void move_running(const double *totals, R *mean, R *var, double share, Cut cut, int units) {
    int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= cut.channels) return;
    R m = mean[channel], v = var[channel];
    for (int unit = 0; unit < units; unit++) {
        const double *from = totals + int64_t(unit) * 2 * cut.channels + channel;
        double n = unit_rows(cut, unit);
        m = mixed(m, from[0], share);
        v = mixed(v, from[cut.channels] / (n > 2 ? n - 1 : 1), share);
    }
    mean[channel] = m;
    var[channel] = v;
}

// The statistics of groups of `size` channels from those of their channels.
template <class R>
__global__ void settle_groups(const double *totals, R *kept, double eps, Cut cut, int size, int units) {
    int groups = cut.channels / size;
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= int64_t(units) * groups) return;
    int unit = int(i / groups), group = int(i % groups);
    const double *means = totals + int64_t(unit) * 2 * cut.channels + group * size, *m2s = means + cut.channels;
    double mean = 0, spread = 0;
    for (int c = 0; c < size; c++) mean += means[c], spread += m2s[c];
    mean /= size;
    double apart = 0;
    for (int c = 0; c < size; c++) apart += (means[c] - mean) * (means[c] - mean);
    double var = spread / size / unit_rows(cut, unit) + apart / size;
    kept[int64_t(unit) * 2 * groups + group] = R(mean);
    kept[(int64_t(unit) * 2 + 1) * groups + group] = R(1 / sqrt(var + eps));
}

// The running statistics as those of one unit.
template <class R> __global__ void judged(const R *mean, const R *var, R *kept, double eps, int channels) {
    int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    kept[channel] = mean[channel];
    kept[channels + channel] = R(1 / sqrt(double(var[channel]) + eps));
}

// What is done to the values of a thread's channels: `clip((x - mean) scale + shift)`, or, with something to add to it
// first, `clip((x - mean) scale + shift + onto)`.
template <class T, int N> struct Affine {
    using R = Acc<T>;
    R mean[N], scale[N], shift[N];
    __device__ __forceinline__ Affine(const Place &at, const R *kept, const T *weight, const T *bias, int channels,
                                      int size) {
        if (!at.in) return;
        int groups = channels / size;
        const R *means = kept + int64_t(at.unit) * 2 * groups, *rstds = means + groups;
#pragma unroll
        for (int k = 0; k < N; k++) {
            int channel = at.pack * N + k, group = size == 1 ? channel : channel / size;
            mean[k] = means[group];
            scale[k] = rstds[group] * up(weight[channel]);
            shift[k] = up(bias[channel]);
        }
    }
    __device__ __forceinline__ R of(T x, int k) const { return (up(x) - mean[k]) * scale[k] + shift[k]; }
};

template <int C, class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS, COLUMN_BLOCKS)
    apply(const T *__restrict__ x, T *__restrict__ y, const Acc<T> *kept, const T *weight, const T *bias, Cut cut,
          Lanes lanes, int size) {
    Place at(cut, lanes);
    Affine<T, N> map(at, kept, weight, bias, cut.channels, size);
    x += at.pack * N, y += at.pack * N;
    auto load = [&](int64_t row) { return Pack<T, N>::load(x + row * cut.channels); };
    go_down<4>(at, lanes, load, [&](int64_t row, const Pack<T, N> &values) {
        Pack<T, N> made;
#pragma unroll
        for (int k = 0; k < N; k++) made.v[k] = down<T>(clipped<C>(map.of(values.v[k], k)));
        made.store(y + row * cut.channels);
    });
}

template <int C, class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS, COLUMN_BLOCKS)
    apply_onto(const T *__restrict__ x, const T *__restrict__ onto, T *__restrict__ y, const Acc<T> *kept,
               const T *weight, const T *bias, Cut cut, Lanes lanes, int size) {
    Place at(cut, lanes);
    Affine<T, N> map(at, kept, weight, bias, cut.channels, size);
    x += at.pack * N, onto += at.pack * N, y += at.pack * N;
    auto load = [&](int64_t row) {
        return Both<T, N>{Pack<T, N>::load(x + row * cut.channels), Pack<T, N>::load(onto + row * cut.channels)};
    };
    go_down<4>(at, lanes, load, [&](int64_t row, const Both<T, N> &both) {
        Pack<T, N> made;
#pragma unroll
        for (int k = 0; k < N; k++) made.v[k] = down<T>(clipped<C>(map.of(both.x.v[k], k) + up(both.d.v[k])));
        made.store(y + row * cut.channels);
    });
}

// Sums of `d`, the gradient that comes through the clip, and of `d (x - mean)`.
template <int C, class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS, COLUMN_BLOCKS)
    sums_back(const T *__restrict__ x, const T *__restrict__ dy, Acc<T> *partials, const Acc<T> *kept, const T *weight,
              const T *bias, Cut cut, Lanes lanes, int size) {
    using R = Acc<T>;
    Place at(cut, lanes);
    Affine<T, N> map(at, kept, weight, bias, cut.channels, size);
    R sums[2 * N] = {};
    x += at.pack * N, dy += at.pack * N;
    auto load = [&](int64_t row) {
        return Both<T, N>{Pack<T, N>::load(x + row * cut.channels), Pack<T, N>::load(dy + row * cut.channels)};
    };
    go_down<2>(at, lanes, load, [&](int64_t, const Both<T, N> &both) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            R from = up(both.x.v[k]) - map.mean[k];
            R d = through<C>(from * map.scale[k] + map.shift[k], up(both.d.v[k]));
            sums[k] += d;
            sums[N + k] += d * from;
        }
    });
    add_up(sums, at, lanes);
    if (at.y == 0 && at.in) {
        R *to = partials + partial(cut, at.unit, at.part, at.pack * N);
#pragma unroll
        for (int k = 0; k < N; k++) to[k] = sums[k], to[cut.channels + k] = sums[N + k];
    }
}

// The same sums where something was added before the clip: its output says what it let through, and `dy` becomes that.
template <int C, class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS, COLUMN_BLOCKS)
    sums_through(const T *__restrict__ x, const T *__restrict__ y, T *__restrict__ dy, Acc<T> *partials,
                 const Acc<T> *kept, Cut cut, Lanes lanes, int size) {
    using R = Acc<T>;
    Place at(cut, lanes);
    R sums[2 * N] = {}, mean[N];
    if (at.in) {
        const R *means = kept + int64_t(at.unit) * 2 * (cut.channels / size);
#pragma unroll
        for (int k = 0; k < N; k++) mean[k] = means[(at.pack * N + k) / size];
    }
    x += at.pack * N, y += at.pack * N, dy += at.pack * N;
    struct Three {
        Pack<T, N> x, y, d;
    };
    auto load = [&](int64_t row) {
        int64_t i = row * cut.channels;
        return Three{Pack<T, N>::load(x + i), Pack<T, N>::load(y + i), Pack<T, N>::load(dy + i)};
    };
    go_down<2>(at, lanes, load, [&](int64_t row, const Three &three) {
        Pack<T, N> passed;
#pragma unroll
        for (int k = 0; k < N; k++) {
            R d = through<C>(up(three.y.v[k]), up(three.d.v[k]));
            passed.v[k] = down<T>(d);
            sums[k] += d;
            sums[N + k] += d * (up(three.x.v[k]) - mean[k]);
        }
        passed.store(dy + row * cut.channels);
    });
    add_up(sums, at, lanes);
    if (at.y == 0 && at.in) {
        R *to = partials + partial(cut, at.unit, at.part, at.pack * N);
#pragma unroll
        for (int k = 0; k < N; k++) to[k] = sums[k], to[cut.channels + k] = sums[N + k];
    }
}

// From the sums of a unit and channel: `totals` (units, 2, channels); and, where a channel has its own statistics,
// what pulls its gradients, and the gradients of the parameters where there is one unit.
template <class T>
__global__ void __launch_bounds__(1024)
    settle_back(const Acc<T> *partials, double *totals, Acc<T> *pull, const Acc<T> *kept, const T *weight,
                Acc<T> *dweight, Acc<T> *dbias, Cut cut, bool own) {
    using R = Acc<T>;
    int unit = blockIdx.y, channel = blockIdx.x * 32 + threadIdx.x;
    double sum, cross;
    put_together(partials, cut, unit, channel, sum, cross);
    if (threadIdx.y != 0 || channel >= cut.channels) return;
    int64_t to = int64_t(unit) * 2 * cut.channels + channel;
    totals[to] = sum;
    totals[to + cut.channels] = cross;
    if (!own) return;
    double n = unit_rows(cut, unit), r = double(kept[to + cut.channels]), w = double(up(weight[channel]));
    pull[to] = R(cross * w * r * r * r / n);
    pull[to + cut.channels] = R(sum * w * r / n);
    if (dweight) dweight[channel] += R(cross * r);
    if (dbias) dbias[channel] += R(sum);
}

// The gradients of the parameters: over all units, in order.
template <class R>
__global__ void parameters_back(const double *totals, const R *kept, R *dweight, R *dbias, Cut cut, int size, int units) {
    int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= cut.channels) return;
    int groups = cut.channels / size;
    double w = 0, b = 0;
#pragma unroll 4
    for (int unit = 0; unit < units; unit++) {
        const double *from = totals + int64_t(unit) * 2 * cut.channels + channel;
        b += from[0];
        w += from[cut.channels] * double(kept[(int64_t(unit) * 2 + 1) * groups + channel / size]);
    }
    dweight[channel] += R(w);
    if (dbias) dbias[channel] += R(b);
}

// What pulls the gradients of a group of channels: (units, 2, groups).
template <class T>
__global__ void pull_groups(const double *totals, const Acc<T> *kept, const T *weight, Acc<T> *pull, Cut cut, int size,
                            int units) {
    int groups = cut.channels / size;
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= int64_t(units) * groups) return;
    int unit = int(i / groups), group = int(i % groups);
    const double *sums = totals + int64_t(unit) * 2 * cut.channels + group * size, *crosses = sums + cut.channels;
    double sum = 0, cross = 0;
    for (int c = 0; c < size; c++) {
        double w = double(up(weight[group * size + c]));
        sum += sums[c] * w;
        cross += crosses[c] * w;
    }
    double n = unit_rows(cut, unit) * size, r = double(kept[(int64_t(unit) * 2 + 1) * groups + group]);
    pull[int64_t(unit) * 2 * groups + group] = Acc<T>(cross * r * r * r / n);
    pull[(int64_t(unit) * 2 + 1) * groups + group] = Acc<T>(sum * r / n);
}

// `dx = scale d - slope (x - mean) - level`
template <int C, class T, int N>
__global__ void __launch_bounds__(COLUMN_THREADS, COLUMN_BLOCKS)
    backward(const T *__restrict__ x, const T *__restrict__ dy, T *__restrict__ dx, const Acc<T> *kept,
             const Acc<T> *pull, const T *weight, const T *bias, Cut cut, Lanes lanes, int size) {
    using R = Acc<T>;
    Place at(cut, lanes);
    Affine<T, N> map(at, kept, weight, bias, cut.channels, size);
    R slope[N], level[N];
    if (at.in) {
        int groups = cut.channels / size;
        const R *slopes = pull + int64_t(at.unit) * 2 * groups, *levels = slopes + groups;
#pragma unroll
        for (int k = 0; k < N; k++) {
            int group = (at.pack * N + k) / size;
            slope[k] = slopes[group];
            level[k] = levels[group];
        }
    }
    x += at.pack * N, dy += at.pack * N, dx += at.pack * N;
    auto load = [&](int64_t row) {
        return Both<T, N>{Pack<T, N>::load(x + row * cut.channels), Pack<T, N>::load(dy + row * cut.channels)};
    };
    go_down<2>(at, lanes, load, [&](int64_t row, const Both<T, N> &both) {
        Pack<T, N> made;
#pragma unroll
        for (int k = 0; k < N; k++) {
            R from = up(both.x.v[k]) - map.mean[k];
            R d = through<C>(from * map.scale[k] + map.shift[k], up(both.d.v[k]));
            made.v[k] = down<T>(map.scale[k] * d - slope[k] * from - level[k]);
        }
        made.store(dx + row * cut.channels);
    });
}

// Runs `body` with N, the channels of a thread, and the lanes that follow: 16 bytes where rows allow it.
#define WITH_LANES(norm, pointers, ...)                                                                       \
    if (aligned((norm).channels * sizeof(T), pointers)) {                                                     \
        constexpr int N = Pack<T>::size;                                                                      \
        Lanes lanes((norm).channels / N);                                                                     \
        __VA_ARGS__;                                                                                          \
    } else {                                                                                                  \
        constexpr int N = 1;                                                                                  \
        Lanes lanes((norm).channels);                                                                         \
        __VA_ARGS__;                                                                                          \
    }

using Pointers = std::initializer_list<const void *>;

int apply_all(const Norm &n, const void *onto, void *y, cudaStream_t stream) {
    Cut cut = n.cut();
    Pointers pointers = {n.x, onto, y};
    WITH_TYPE(n.type, WITH_CLIP(n.clip, WITH_LANES(n, pointers, {
        if (onto)
            apply_onto<C, T, N><<<lanes.blocks(cut), lanes.threads(), 0, stream>>>(
                (const T *)n.x, (const T *)onto, (T *)y, (const Acc<T> *)n.kept, (const T *)n.weight,
                (const T *)n.bias, cut, lanes, n.size);
        else
            apply<C, T, N><<<lanes.blocks(cut), lanes.threads(), 0, stream>>>(
            (const T *)n.x, (T *)y, (const Acc<T> *)n.kept, (const T *)n.weight, (const T *)n.bias, cut, lanes, n.size);
    })))
    return cudaGetLastError();
}

} // namespace

// `scratch` is of totals (units, 2, channels) in f64, then sums (units, parts, 2, channels) in the type computed
// with. `running_mean` may be null, and `onto`, which is added before the clip.
extern "C" int channels_forward(const Norm *norm, const void *onto, void *y, void *scratch, void *running_mean, void *running_var,
                                double share, cudaStream_t stream) {
    const Norm &n = *norm;
    if (n.rows == 0) return 0;
    Cut cut = n.cut();
    int units = cut.units();
    if (units > 65535) return cudaErrorInvalidValue;
    bool own = n.size == 1, alone = own && units == 1;
    double *totals = (double *)scratch;
    void *partials = totals + int64_t(units) * 2 * n.channels;
    dim3 blocks_of((n.channels + 31) / 32, units);
    Pointers pointers = {n.x};
    WITH_TYPE(n.type, {
        using R = Acc<T>;
        WITH_LANES(n, pointers, {
            moments<T, N><<<lanes.blocks(cut), lanes.threads(), 0, stream>>>((const T *)n.x, (R *)partials, cut, lanes);
        })
        settle<T><<<blocks_of, dim3(32, 32), 0, stream>>>(
            (const T *)n.x, (const R *)partials, totals, (R *)n.kept, alone ? (R *)running_mean : nullptr,
            alone ? (R *)running_var : nullptr, share, n.eps, cut, own);
        if (!own) {
            int64_t work = int64_t(units) * (n.channels / n.size);
            settle_groups<R><<<blocks(work, 128), 128, 0, stream>>>(totals, (R *)n.kept, n.eps, cut, n.size, units);
        } else if (!alone && running_mean) {
            move_running<R><<<blocks(n.channels, 128), 128, 0, stream>>>(totals, (R *)running_mean, (R *)running_var,
                                                                         share, cut, units);
        }
    })
    return apply_all(n, onto, y, stream);
}

// The output from what `kept` has.
extern "C" int channels_apply(const Norm *norm, void *y, cudaStream_t stream) {
    if (norm->rows == 0) return 0;
    return apply_all(*norm, nullptr, y, stream);
}

// The output by running statistics; `kept` is written first, and is of one unit.
extern "C" int channels_judge(const Norm *norm, const void *mean, const void *var, void *y, cudaStream_t stream) {
    const Norm &n = *norm;
    if (n.rows == 0) return 0;
    WITH_TYPE(n.type, {
        using R = Acc<T>;
        judged<R><<<blocks(n.channels, 128), 128, 0, stream>>>((const R *)mean, (const R *)var, (R *)n.kept, n.eps,
                                                               n.channels);
    })
    return apply_all(n, nullptr, y, stream);
}

// Adds the gradients of weight and bias, of which the latter may be null, and makes the input's unless `dx` is null.
// `scratch` is of totals as above, then (units, 2, channels / size) of the type computed with, then sums as above. `y` is
// null, or the output where something was added before the clip: `dy` then becomes the gradient before that.
extern "C" int channels_backward(const Norm *norm, void *dy, const void *y, void *dx, void *dweight, void *dbias,
                                 void *scratch, cudaStream_t stream) {
    const Norm &n = *norm;
    if (n.rows == 0) return 0;
    Cut cut = n.cut();
    int units = cut.units(), groups = n.channels / n.size;
    if (units > 65535) return cudaErrorInvalidValue;
    bool own = n.size == 1, alone = own && units == 1;
    double *totals = (double *)scratch;
    dim3 blocks_of((n.channels + 31) / 32, units);
    Pointers read = {n.x, dy, y}, touched = {n.x, dy, dx};
    int clip_left = y ? int(NOTHING) : n.clip;
    WITH_TYPE(n.type, {
        using R = Acc<T>;
        R *pull = (R *)(totals + int64_t(units) * 2 * n.channels), *partials = pull + int64_t(units) * 2 * groups;
        const T *x = (const T *)n.x;
        const T *weight = (const T *)n.weight;
        const T *bias = (const T *)n.bias;
        const R *kept = (const R *)n.kept;
        WITH_CLIP(n.clip, WITH_LANES(n, read, {
            if (y)
                sums_through<C, T, N><<<lanes.blocks(cut), lanes.threads(), 0, stream>>>(
                    x, (const T *)y, (T *)dy, partials, kept, cut, lanes, n.size);
            else
                sums_back<C, T, N><<<lanes.blocks(cut), lanes.threads(), 0, stream>>>(
                    x, (const T *)dy, partials, kept, weight, bias, cut, lanes, n.size);
        }))
        settle_back<T><<<blocks_of, dim3(32, 32), 0, stream>>>(partials, totals, pull, kept, weight,
                                                               alone ? (R *)dweight : nullptr,
                                                               alone ? (R *)dbias : nullptr, cut, own);
        if (!alone)
            parameters_back<R><<<blocks(n.channels, 64), 64, 0, stream>>>(totals, kept, (R *)dweight, (R *)dbias, cut,
                                                                          n.size, units);
        if (dx && !own)
            pull_groups<T><<<blocks(int64_t(units) * groups, 128), 128, 0, stream>>>(totals, kept, weight, pull, cut,
                                                                                     n.size, units);
        if (dx)
            WITH_CLIP(clip_left, WITH_LANES(n, touched, {
                backward<C, T, N><<<lanes.blocks(cut), lanes.threads(), 0, stream>>>(
                    x, (const T *)dy, (T *)dx, kept, pull, weight, bias, cut, lanes, n.size);
            }))
    })
    return cudaGetLastError();
}
