// Layer norm and RMS norm: a warp a row, which it keeps in registers unless it is long.
#include "cuda/columns.cuh"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * WARP;

// One value of the output. `forward` and `again` give the same bits, for nothing here can be contracted.
template <class R> __device__ __forceinline__ R normal(R x, R mean, R scale, R w, R b) {
    return fma((x - mean) * scale, w, b);
}

__device__ __forceinline__ float one_over_root(float x) { return 1.0f / sqrtf(x); }
__device__ __forceinline__ double one_over_root(double x) { return 1.0 / sqrt(x); }

// A row of `packs` packs, spread over a warp: `K` of them in each lane, or read again each time if `K` is 0.
template <class T, int N, int K> struct Row {
    const T *from;
    int packs, lane;
    Pack<T, N> kept[K ? K : 1];

    __device__ __forceinline__ Row(const T *from, int packs) : from(from), packs(packs), lane(threadIdx.x % WARP) {
#pragma unroll
        for (int k = 0; k < K; k++)
            if (int p = lane + k * WARP; p < packs) kept[k] = Pack<T, N>::load(from + p * N);
    }

    // `f(pack's number, pack)` for those of this lane.
    template <class F> __device__ __forceinline__ void each(F f) const {
        if constexpr (K > 0) {
#pragma unroll
            for (int k = 0; k < K; k++)
                if (int p = lane + k * WARP; p < packs) f(p, kept[k]);
        } else {
            for (int p = lane; p < packs; p += WARP) f(p, Pack<T, N>::load(from + p * N));
        }
    }
};

// `known`: the statistics are there, and only the output is made.
template <class T, int N, int K>
__global__ void __launch_bounds__(THREADS)
    forward(const T *x, const T *w, const T *b, T *y, Acc<T> *stats, int64_t rows, int n, Acc<T> eps, bool centred,
            bool known) {
    using R = Acc<T>;
    int64_t row = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (row >= rows) return;
    Row<T, N, K> values(x + row * n, n / N);
    int kept = centred ? 2 : 1;
    R share = R(1) / R(n), mean = 0, scale;
    stats += row * kept;
    if (known) {
        if (centred) mean = stats[0];
        scale = stats[kept - 1];
    } else {
        if (centred) {
            R sum = 0;
            values.each([&](int, const Pack<T, N> &v) {
#pragma unroll
                for (int i = 0; i < N; i++) sum += up(v.v[i]);
            });
            mean = warp_sum(sum) * share;
        }
        R square = 0;
        values.each([&](int, const Pack<T, N> &v) {
#pragma unroll
            for (int i = 0; i < N; i++) square += (up(v.v[i]) - mean) * (up(v.v[i]) - mean);
        });
        scale = one_over_root(warp_sum(square) * share + eps);
        if (threadIdx.x % WARP == 0) {
            if (centred) stats[0] = mean;
            stats[kept - 1] = scale;
        }
    }
    y += row * n;
    values.each([&](int p, Pack<T, N> v) {
        auto wide = Pack<T, N>::load(w + p * N);
        if (b) {
            auto add = Pack<T, N>::load(b + p * N);
#pragma unroll
            for (int i = 0; i < N; i++)
                v.v[i] = down<T>(normal<R>(up(v.v[i]), mean, scale, up(wide.v[i]), up(add.v[i])));
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) v.v[i] = down<T>(normal<R>(up(v.v[i]), mean, scale, up(wide.v[i]), R(0)));
        }
        v.store(y + p * N);
    });
}

// What a row's input gradient is made of.
template <class R> struct Slope {
    R mean, scale, along, level;
    __device__ __forceinline__ R operator()(R x, R dy, R w) const {
        return scale * (dy * w - level - (x - mean) * along);
    }
};

template <class T, int N, int K>
__device__ __forceinline__ Slope<Acc<T>> slope(const Row<T, N, K> &x, const Row<T, N, K> &dy, const T *w,
                                               const Acc<T> *stats, bool centred, int n) {
    using R = Acc<T>;
    Slope<R> s{centred ? stats[0] : R(0), stats[centred], 0, 0};
    auto add = [&](int p, const Pack<T, N> &x, const Pack<T, N> &dy) {
        auto wide = Pack<T, N>::load(w + p * N);
#pragma unroll
        for (int i = 0; i < N; i++) {
            R g = up(dy.v[i]) * up(wide.v[i]);
            s.along += g * (up(x.v[i]) - s.mean);
            s.level += g;
        }
    };
    if constexpr (K > 0) {
#pragma unroll
        for (int k = 0; k < K; k++)
            if (int p = x.lane + k * WARP; p < x.packs) add(p, x.kept[k], dy.kept[k]);
    } else {
        x.each([&](int p, const Pack<T, N> &v) { add(p, v, Pack<T, N>::load(dy.from + p * N)); });
    }
    R share = R(1) / R(n);
    s.along = warp_sum(s.along) * s.scale * s.scale * share;
    s.level = centred ? warp_sum(s.level) * share : R(0);
    return s;
}

// The input's gradient of a block's rows, and the sums of theirs that the parameters' gradients are made of:
// `partial[block, weight or bias, column]`.
template <class T, int N, int K>
__global__ void __launch_bounds__(THREADS)
    backward(const T *x, const Acc<T> *stats, const T *dy, const T *w, T *dx, const T *onto, Acc<T> *partial,
             int64_t rows, int n, int64_t rows_each, bool centred, bool bias) {
    using R = Acc<T>;
    __shared__ R sums[WARPS][K * WARP * N];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, packs = n / N;
    int64_t first = blockIdx.x * rows_each, last = first + rows_each < rows ? first + rows_each : rows;
    R dw[K][N] = {}, db[K][N] = {};
    for (int64_t row = first + warp; row < last; row += WARPS) {
        Row<T, N, K> xs(x + row * n, packs), dys(dy + row * n, packs);
        auto s = slope<T, N, K>(xs, dys, w, stats + row * (centred ? 2 : 1), centred, n);
#pragma unroll
        for (int k = 0; k < K; k++) {
            int p = lane + k * WARP;
            if (p >= packs) continue;
#pragma unroll
            for (int i = 0; i < N; i++) {
                R d = up(dys.kept[k].v[i]);
                dw[k][i] += d * (up(xs.kept[k].v[i]) - s.mean) * s.scale;
                db[k][i] += d;
            }
            if (!dx) continue;
            auto wide = Pack<T, N>::load(w + p * N);
            Pack<T, N> out;
            if (onto) out = Pack<T, N>::load(onto + row * n + p * N);
#pragma unroll
            for (int i = 0; i < N; i++) {
                R d = s(up(xs.kept[k].v[i]), up(dys.kept[k].v[i]), up(wide.v[i]));
                out.v[i] = down<T>(onto ? d + up(out.v[i]) : d);
            }
            out.store(dx + row * n + p * N);
        }
    }
    int vectors = bias ? 2 : 1;
    partial += int64_t(blockIdx.x) * vectors * n;
    for (int vector = 0; vector < vectors; vector++) {
#pragma unroll
        for (int k = 0; k < K; k++)
#pragma unroll
            for (int i = 0; i < N; i++)
                sums[warp][(k * WARP + lane) * N + i] = vector == 0 ? dw[k][i] : db[k][i];
        __syncthreads();
        for (int c = threadIdx.x; c < n; c += THREADS) {
            R sum = sums[0][c];
#pragma unroll
            for (int i = 1; i < WARPS; i++) sum += sums[i][c];
            partial[vector * n + c] = sum;
        }
        __syncthreads();
    }
}

// The input's gradient of rows too long for registers.
template <class T, int N>
__global__ void __launch_bounds__(THREADS)
    backward_long(const T *x, const Acc<T> *stats, const T *dy, const T *w, T *dx, const T *onto, int64_t rows, int n,
                  bool centred) {
    using R = Acc<T>;
    int64_t row = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (row >= rows) return;
    Row<T, N, 0> xs(x + row * n, n / N), dys(dy + row * n, n / N);
    auto s = slope<T, N, 0>(xs, dys, w, stats + row * (centred ? 2 : 1), centred, n);
    dx += row * n;
    xs.each([&](int p, Pack<T, N> v) {
        auto d = Pack<T, N>::load(dys.from + p * N), wide = Pack<T, N>::load(w + p * N);
#pragma unroll
        for (int i = 0; i < N; i++) {
            R g = s(up(v.v[i]), up(d.v[i]), up(wide.v[i]));
            v.v[i] = down<T>(onto ? g + up(onto[row * n + p * N + i]) : g);
        }
        v.store(dx + p * N);
    });
}

// What the weight's gradient sums.
template <class T> struct Along {
    const T *x, *dy;
    const Acc<T> *stats;
    int64_t n;
    bool centred;
    __device__ __forceinline__ Acc<T> operator()(int64_t row, int64_t column) const {
        const Acc<T> *s = stats + row * (centred ? 2 : 1);
        Acc<T> mean = centred ? s[0] : Acc<T>(0);
        return up(dy[row * n + column]) * (up(x[row * n + column]) - mean) * s[centred];
    }
};

// Packs a lane holds of a row: the fewest of those compiled that suffice, 0 where none does.
int held(int packs) { return packs <= 2 * WARP ? 2 : packs <= 4 * WARP ? 4 : packs <= 8 * WARP ? 8 : 0; }

} // namespace

// Makes `y` and the statistics, or `y` from statistics that are `known`.
extern "C" int norm_forward(int type, const void *x, const void *w, const void *b, void *y, void *stats, int64_t rows,
                            int n, double eps, int centred, int known, cudaStream_t stream) {
    if (rows == 0 || n == 0) return 0;
    unsigned grid = blocks(rows, WARPS);
#define FORWARD(N, K)                                                                                         \
    forward<T, N, K><<<grid, THREADS, 0, stream>>>((const T *)x, (const T *)w, (const T *)b, (T *)y,          \
                                                   (Acc<T> *)stats, rows, n, Acc<T>(eps), centred, known)
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        if (!aligned(int64_t(n) * sizeof(T), {x, w, b, y})) FORWARD(1, 0);
        else switch (held(n / N)) {
            case 2: FORWARD(N, 2); break;
            case 4: FORWARD(N, 4); break;
            case 8: FORWARD(N, 8); break;
            default: FORWARD(N, 0);
            }
    })
#undef FORWARD
    return cudaGetLastError();
}

// `dx` may be null, and so may `onto`, which is added to it. `partial` is (parts, weight and bias, n); the sums are added onto `dw` and `db`.
extern "C" int norm_backward(int type, const void *x, const void *stats, const void *dy, const void *w, void *dx,
                             const void *onto, void *partial, void *dw, void *db, int64_t rows, int n, int parts, int centred,
                             cudaStream_t stream) {
    if (rows == 0 || n == 0) return 0;
#define BACKWARD(N, K)                                                                                        \
    backward<T, N, K><<<parts, THREADS, 0, stream>>>((const T *)x, (const R *)stats, (const T *)dy,           \
                                                     (const T *)w, (T *)dx, (const T *)onto, (R *)partial,    \
                                                     rows, n, (rows + parts - 1) / parts, centred, db != nullptr)
#define LONG(N)                                                                                               \
    backward_long<T, N><<<blocks(rows, WARPS), THREADS, 0, stream>>>((const T *)x, (const R *)stats,          \
                                                                     (const T *)dy, (const T *)w, (T *)dx,    \
                                                                     (const T *)onto, rows, n, centred)
    WITH_TYPE(type, {
        using R = Acc<T>;
        constexpr int N = Pack<T>::size;
        bool wide = aligned(int64_t(n) * sizeof(T), {x, dy, w, dx, onto});
        int k = wide ? held(n / N) : 0;
        if (k == 2) BACKWARD(N, 2);
        else if (k == 4) BACKWARD(N, 4);
        else if (k == 8) BACKWARD(N, 8);
        if (k) {
            launch_add<R>((R *)partial, (R *)dw, (R *)db, parts, n, stream);
        } else {
            if (dx && wide) LONG(N);
            else if (dx) LONG(1);
            // One vector after the other, through the same room.
            Along<T> along{(const T *)x, (const T *)dy, (const R *)stats, n, bool(centred)};
            launch_parts<R>((R *)partial, rows, n, parts, along, stream);
            launch_add<R>((R *)partial, (R *)dw, nullptr, parts, n, stream);
            if (db) {
                launch_parts<R>((R *)partial, rows, n, parts, Plain<T>{(const T *)dy, n}, stream);
                launch_add<R>((R *)partial, (R *)db, nullptr, parts, n, stream);
            }
        }
    })
#undef BACKWARD
#undef LONG
    return cudaGetLastError();
}
