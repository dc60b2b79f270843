// Layer norm and RMS norm: one warp per row, which stays in registers unless it is long.
#include "cuda/column_sums.cuh"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * WARP;

// One output value. The explicit fma leaves nothing for the compiler to contract, so `forward` and the recomputation in
// the backward pass give the same bits.
template <class R> __device__ __forceinline__ R normalized(R x, R mean, R scale, R w, R b) {
    return fma((x - mean) * scale, w, b);
}

__device__ __forceinline__ float rsqrt_of(float x) { return 1.0f / sqrtf(x); }
__device__ __forceinline__ double rsqrt_of(double x) { return 1.0 / sqrt(x); }

// A row of `packs` packs, distributed over a warp: each lane holds `K` packs, or rereads them each time if `K` is 0.
template <class T, int N, int K> struct Row {
    const T *from;
    int packs, lane;
    Pack<T, N> kept[K ? K : 1];

    __device__ __forceinline__ void prefetch(const T *row, int count) {
        from = row, packs = count, lane = threadIdx.x % WARP;
#pragma unroll
        for (int k = 0; k < K; k++)
            if (int p = lane + k * WARP; p < packs) kept[k] = Pack<T, N>::load(from + p * N);
    }

    // Calls `f(index, pack)` for the packs of this lane.
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

// Rows per warp: for short rows, the next row loads while the current one is processed.
constexpr int rows_each(int k) { return k == 2 ? 2 : 1; }

// `have_stats`: the statistics exist, and only the output is computed.
template <class T, int N, int K>
__global__ void __launch_bounds__(THREADS)
    forward(const T *x, const T *w, const T *b, T *y, Acc<T> *stats, int64_t rows, int n, Acc<T> eps, bool centred,
            bool have_stats) {
    using R = Acc<T>;
    constexpr int ROWS_IN_FLIGHT = rows_each(K);
    int64_t first = (int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP) * ROWS_IN_FLIGHT;
    if (first >= rows) return;
    Row<T, N, K> all[ROWS_IN_FLIGHT];
#pragma unroll
    for (int j = 0; j < ROWS_IN_FLIGHT; j++) all[j].prefetch(x + (first + j) * n, first + j < rows ? n / N : 0);
    int kept = centred ? 2 : 1;
    R inv_n = R(1) / R(n);
#pragma unroll
    for (int j = 0; j < ROWS_IN_FLIGHT; j++) {
        int64_t row = first + j;
        if (row >= rows) break;
        auto &values = all[j];
        R mean = 0, scale;
        if (have_stats) {
            if (centred) mean = stats[row * kept];
            scale = stats[row * kept + kept - 1];
        } else {
            if (centred) {
                R sum = 0;
                values.each([&](int, const Pack<T, N> &v) {
#pragma unroll
                    for (int i = 0; i < N; i++) sum += to_acc(v.v[i]);
                });
                mean = warp_sum(sum) * inv_n;
            }
            R square = 0;
            values.each([&](int, const Pack<T, N> &v) {
#pragma unroll
                for (int i = 0; i < N; i++) square += (to_acc(v.v[i]) - mean) * (to_acc(v.v[i]) - mean);
            });
            scale = rsqrt_of(warp_sum(square) * inv_n + eps);
            if (threadIdx.x % WARP == 0) {
                if (centred) stats[row * kept] = mean;
                stats[row * kept + kept - 1] = scale;
            }
        }
        values.each([&](int p, Pack<T, N> v) {
            auto wide = Pack<T, N>::load(w + p * N);
            Pack<T, N> add = {};
            if (b) add = Pack<T, N>::load(b + p * N);
#pragma unroll
            for (int i = 0; i < N; i++)
                v.v[i] = from_acc<T>(normalized<R>(to_acc(v.v[i]), mean, scale, to_acc(wide.v[i]), b ? to_acc(add.v[i]) : R(0)));
            v.store(y + row * n + p * N);
        });
    }
}

// What the input gradient of a row needs: the mean of the output gradients, and the mean of their products with xhat.
template <class R> struct InputGrad {
    R mean, scale, dot_xhat, mean_dy;
    __device__ __forceinline__ R normalized(R x) const { return (x - mean) * scale; }
    __device__ __forceinline__ R operator()(R normalized, R g) const { return scale * (g - mean_dy - normalized * dot_xhat); }
};

// Accumulates a pack into the sums of a row.
template <class T, int N, class R>
__device__ __forceinline__ void add_to(InputGrad<R> &s, const LazyPack<T, N> &x, const LazyPack<T, N> &dy, const LazyPack<T, N> &w) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        R g = dy[i] * w[i];
        s.dot_xhat += g * s.normalized(x[i]);
        s.mean_dy += g;
    }
}

// Turns the complete sums into means.
template <class R> __device__ __forceinline__ void finalize_sums(InputGrad<R> &s, bool centred, int n) {
    R inv_n = R(1) / R(n);
    s.dot_xhat *= inv_n;
    s.mean_dy = centred ? s.mean_dy * inv_n : R(0);
}

// A thread's slice of a row.
template <class T, int N> struct RowSlice {
    LazyPack<T, N> x, dy, residual_grad;
    InputGrad<Acc<T>> s;
};

// Rows that a block of this many threads processes at once: as many as the registers permit.
constexpr int rows_in_flight(int threads) { return threads <= 128 ? 2 : 1; }

// The input gradient of a block's rows, and the block's partial sums of the parameter gradients:
// `partial[block, weight or bias, column]`. A thread owns the same pack of columns in every row. `RECOMPUTE` overwrites
// `dy` with the output of `forward`. `SUMS` appends the column sums of the input gradient to the partial sums.
template <class T, int N, int MAX_THREADS, bool RECOMPUTE, bool SUMS>
__global__ void __launch_bounds__(MAX_THREADS, MAX_THREADS == 128 ? 4 : 1)
    backward(const T *x, const Acc<T> *stats, T *dy, const T *w, const T *b, T *dx, const T *residual_grad, Acc<T> *partial,
             int64_t rows, int n, int64_t rows_each, bool centred, bool bias) {
    using R = Acc<T>;
    constexpr int ROWS_IN_FLIGHT = rows_in_flight(MAX_THREADS);
    __shared__ R sums[2][MAX_THREADS / WARP][ROWS_IN_FLIGHT][2]; // double-buffered: read one, write the other
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    int column = threadIdx.x * N;
    bool in_range = column < n;
    int64_t first = blockIdx.x * rows_each, last = first + rows_each < rows ? first + rows_each : rows;
    R dw[N] = {}, db[N] = {}, sum[N] = {};
    LazyPack<T, N> wide = {}, add = {};
    if (in_range) wide.load(w + column);
    if (RECOMPUTE && in_range && b) add.load(b + column);
    // The next rows load while the current ones are processed.
    RowSlice<T, N> now[ROWS_IN_FLIGHT], next[ROWS_IN_FLIGHT];
    auto prefetch = [&](int64_t row) {
#pragma unroll
        for (int j = 0; j < ROWS_IN_FLIGHT; j++) {
            if (row + j >= last) break;
            const R *own = stats + (row + j) * (centred ? 2 : 1);
            next[j].s = {centred ? own[0] : R(0), own[centred], 0, 0};
            if (!in_range) continue;
            next[j].x.load(x + (row + j) * n + column);
            next[j].dy.load(dy + (row + j) * n + column);
            if (residual_grad) next[j].residual_grad.load(residual_grad + (row + j) * n + column);
        }
    };
    prefetch(first);
    int turn = 0;
    for (int64_t row = first; row < last; row += ROWS_IN_FLIGHT, turn ^= 1) {
        int here = last - row < ROWS_IN_FLIGHT ? int(last - row) : ROWS_IN_FLIGHT;
#pragma unroll
        for (int j = 0; j < ROWS_IN_FLIGHT; j++) now[j] = next[j];
        prefetch(row + ROWS_IN_FLIGHT);
#pragma unroll
        for (int j = 0; j < ROWS_IN_FLIGHT; j++) {
            if (j >= here) break;
            auto &[x, dy, residual_grad, s] = now[j];
            if (in_range) add_to(s, x, dy, wide);
            s.dot_xhat = warp_sum(s.dot_xhat);
            s.mean_dy = warp_sum(s.mean_dy);
            if (lane == 0) sums[turn][warp][j][0] = s.dot_xhat, sums[turn][warp][j][1] = s.mean_dy;
        }
        __syncthreads();
        if (!in_range) continue;
#pragma unroll
        for (int j = 0; j < ROWS_IN_FLIGHT; j++) {
            if (j >= here) break;
            auto &[x, given, other, s] = now[j];
            s.dot_xhat = s.mean_dy = 0;
            for (int i = 0; i < warps; i++) s.dot_xhat += sums[turn][i][j][0], s.mean_dy += sums[turn][i][j][1];
            finalize_sums(s, centred, n);
            Pack<T, N> out;
#pragma unroll
            for (int i = 0; i < N; i++) {
                R xhat = s.normalized(x[i]), d = given[i], slope = s(xhat, d * wide[i]);
                dw[i] += d * xhat;
                db[i] += d;
                out.v[i] = from_acc<T>(residual_grad ? slope + other[i] : slope);
                if constexpr (SUMS) sum[i] += to_acc(out.v[i]);
            }
            if (dx) out.store(dx + (row + j) * n + column);
            if constexpr (RECOMPUTE) {
#pragma unroll
                for (int i = 0; i < N; i++) out.v[i] = from_acc<T>(normalized<R>(x[i], s.mean, s.scale, wide[i], add[i]));
                out.store(dy + (row + j) * n + column);
            }
        }
    }
    if (!in_range) return;
    int vectors = 1 + bias + SUMS;
    partial += int64_t(blockIdx.x) * vectors * n + column;
#pragma unroll
    for (int i = 0; i < N; i++) {
        partial[i] = dw[i];
        if (bias) partial[n + i] = db[i];
        if constexpr (SUMS) partial[(vectors - 1) * n + i] = sum[i];
    }
}

// The same for rows short enough that one warp holds a whole row, `K` packs per lane. A warp synchronizes with the
// others only for the final sums of the block. `BLOCKS` is the number of blocks per SM.
template <class T, int N, int K, int BLOCKS, bool RECOMPUTE, bool SUMS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    backward_short(const T *x, const Acc<T> *stats, T *dy, const T *w, const T *b, T *dx, const T *residual_grad,
                   Acc<T> *partial, int64_t rows, int n, int64_t rows_each, bool centred, bool bias) {
    using R = Acc<T>;
    constexpr int VECTORS = 2 + SUMS;
    __shared__ R warp_sums[WARPS][K * N * WARP];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int64_t first = blockIdx.x * rows_each, last = first + rows_each < rows ? first + rows_each : rows;
    R sums[VECTORS][K][N] = {};
    LazyPack<T, N> wide[K] = {}, add[K] = {};
    int column[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        column[k] = (k * WARP + lane) * N;
        if (column[k] >= n) continue;
        wide[k].load(w + column[k]);
        if (RECOMPUTE && b) add[k].load(b + column[k]);
    }
    struct {
        LazyPack<T, N> x[K], dy[K], residual_grad[K];
        R mean, scale;
    } now, next = {};
    auto prefetch = [&](int64_t row) {
        if (row >= last) return;
        const R *own = stats + row * (centred ? 2 : 1);
        next.mean = centred ? own[0] : R(0), next.scale = own[centred];
#pragma unroll
        for (int k = 0; k < K; k++) {
            if (column[k] >= n) continue;
            next.x[k].load(x + row * n + column[k]);
            next.dy[k].load(dy + row * n + column[k]);
            if (residual_grad) next.residual_grad[k].load(residual_grad + row * n + column[k]);
        }
    };
    prefetch(first + warp);
    for (int64_t row = first + warp; row < last; row += WARPS) {
        now = next;
        prefetch(row + WARPS);
        InputGrad<R> s{now.mean, now.scale, 0, 0};
#pragma unroll
        for (int k = 0; k < K; k++) add_to(s, now.x[k], now.dy[k], wide[k]);
        s.dot_xhat = warp_sum(s.dot_xhat);
        s.mean_dy = warp_sum(s.mean_dy);
        finalize_sums(s, centred, n);
#pragma unroll
        for (int k = 0; k < K; k++) {
            if (column[k] >= n) continue;
            Pack<T, N> out;
#pragma unroll
            for (int i = 0; i < N; i++) {
                R xhat = s.normalized(now.x[k][i]), d = now.dy[k][i], slope = s(xhat, d * wide[k][i]);
                sums[0][k][i] += d * xhat;
                sums[1][k][i] += d;
                out.v[i] = from_acc<T>(residual_grad ? slope + now.residual_grad[k][i] : slope);
                if constexpr (SUMS) sums[2][k][i] += to_acc(out.v[i]);
            }
            if (dx) out.store(dx + row * n + column[k]);
            if constexpr (RECOMPUTE) {
#pragma unroll
                for (int i = 0; i < N; i++)
                    out.v[i] = from_acc<T>(normalized<R>(now.x[k][i], s.mean, s.scale, wide[k][i], add[k][i]));
                out.store(dy + row * n + column[k]);
            }
        }
    }
    int vectors = 1 + bias + SUMS;
    partial += int64_t(blockIdx.x) * vectors * n;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (v == 1 && !bias) continue;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < K; k++)
#pragma unroll
            for (int i = 0; i < N; i++) warp_sums[warp][column[k] + i] = sums[v][k][i];
        __syncthreads();
        R *to = partial + (v == 2 ? vectors - 1 : v) * n;
        for (int c = threadIdx.x; c < n; c += THREADS) {
            R sum = 0;
#pragma unroll
            for (int i = 0; i < WARPS; i++) sum += warp_sums[i][c];
            to[c] = sum;
        }
    }
}

// The input gradient of rows too long for registers.
template <class T, int N>
__global__ void __launch_bounds__(THREADS)
    backward_long(const T *x, const Acc<T> *stats, const T *dy, const T *w, T *dx, const T *residual_grad, int64_t rows, int n,
                  bool centred) {
    using R = Acc<T>;
    int64_t row = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (row >= rows) return;
    stats += row * (centred ? 2 : 1);
    x += row * n, dy += row * n, dx += row * n;
    InputGrad<R> s{centred ? stats[0] : R(0), stats[centred], 0, 0};
    LazyPack<T, N> xs, dys, wide;
    auto load = [&](int p) { xs.load(x + p), dys.load(dy + p), wide.load(w + p); };
    for (int p = threadIdx.x % WARP * N; p < n; p += WARP * N) {
        load(p);
        add_to(s, xs, dys, wide);
    }
    s.dot_xhat = warp_sum(s.dot_xhat);
    s.mean_dy = warp_sum(s.mean_dy);
    finalize_sums(s, centred, n);
    for (int p = threadIdx.x % WARP * N; p < n; p += WARP * N) {
        load(p);
        Pack<T, N> out;
#pragma unroll
        for (int i = 0; i < N; i++) {
            R g = s(s.normalized(xs[i]), dys[i] * wide[i]);
            out.v[i] = from_acc<T>(residual_grad ? g + to_acc(residual_grad[row * n + p + i]) : g);
        }
        out.store(dx + p);
    }
}

// The summand of the weight gradient.
template <class T> struct WeightGradTerm {
    const T *x, *dy;
    const Acc<T> *stats;
    int64_t n;
    bool centred;
    __device__ __forceinline__ Acc<T> operator()(int64_t row, int64_t column) const {
        const Acc<T> *s = stats + row * (centred ? 2 : 1);
        Acc<T> mean = centred ? s[0] : Acc<T>(0);
        return to_acc(dy[row * n + column]) * (to_acc(x[row * n + column]) - mean) * s[centred];
    }
};

// Packs per lane of a short row.
constexpr int SHORT_PACKS = 3;

// Packs per lane of a row: the smallest compiled count that suffices, 0 if none does.
int packs_per_lane(int packs) {
    for (int k : {2, 3, 4, 8})
        if (packs <= k * WARP) return k;
    return 0;
}

} // namespace

// Computes `y` and the statistics, or with `have_stats` only `y`.
extern "C" int norm_forward(int type, const void *x, const void *w, const void *b, void *y, void *stats, int64_t rows,
                            int n, double eps, int centred, int have_stats, cudaStream_t stream) {
    if (rows == 0 || n == 0) return 0;
#define FORWARD(N, K)                                                                                         \
    forward<T, N, K><<<blocks(rows, WARPS * rows_each(K)), THREADS, 0, stream>>>(                             \
        (const T *)x, (const T *)w, (const T *)b, (T *)y, (Acc<T> *)stats, rows, n, Acc<T>(eps), centred, have_stats)
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        if (!aligned(int64_t(n) * sizeof(T), {x, w, b, y})) FORWARD(1, 0);
        else switch (packs_per_lane(n / N)) {
            case 2: FORWARD(N, 2); break;
            case 3: FORWARD(N, 3); break;
            case 4: FORWARD(N, 4); break;
            case 8: FORWARD(N, 8); break;
            default: FORWARD(N, 0);
            }
    })
#undef FORWARD
    return cudaGetLastError();
}

// `dx` may be null, and so may `residual_grad`, which is added to it. `partial` is (parts, weight, bias and sums, n).
// The sums accumulate into `dw` and `db`, and those of `dx` into `sums`, where these are not null. With
// `recompute_output`, `dy` is overwritten with the output of `norm_forward`, for which `b` is read if it is not null.
extern "C" int norm_backward(int type, const void *x, const void *stats, void *dy, const void *w, const void *b, void *dx,
                             const void *residual_grad, void *partial, void *dw, void *db, void *sums, int64_t rows,
                             int n, int parts, int centred, int recompute_output, cudaStream_t stream) {
    if (rows == 0 || n == 0) return 0;
#define ARGUMENTS                                                                                             \
    (const T *)x, (const R *)stats, (T *)dy, (const T *)w, (const T *)b, (T *)dx, (const T *)residual_grad, (R *)partial, rows, n, \
        (rows + parts - 1) / parts, centred, db != nullptr
#define DISPATCH_FLAGS(LAUNCH, ...)                                                                                    \
    if (recompute_output && sums) LAUNCH(__VA_ARGS__, true, true);                                                       \
    else if (recompute_output) LAUNCH(__VA_ARGS__, true, false);                                                         \
    else if (sums) LAUNCH(__VA_ARGS__, false, true);                                                          \
    else LAUNCH(__VA_ARGS__, false, false)
#define SHORT(N, BLOCKS, RECOMPUTE, SUMS)                                                                         \
    backward_short<T, N, SHORT_PACKS, BLOCKS, RECOMPUTE, SUMS><<<parts, THREADS, 0, stream>>>(ARGUMENTS)
#define MIDDLE(MAX_THREADS, RECOMPUTE, SUMS) backward<T, N, MAX_THREADS, RECOMPUTE, SUMS><<<parts, threads, 0, stream>>>(ARGUMENTS)
#define LONG(N)                                                                                               \
    backward_long<T, N><<<blocks(rows, WARPS), THREADS, 0, stream>>>((const T *)x, (const R *)stats,          \
                                                                     (const T *)dy, (const T *)w, (T *)dx,    \
                                                                     (const T *)residual_grad, rows, n, centred)
    WITH_TYPE(type, {
        using R = Acc<T>;
        constexpr int N = Pack<T>::size;
        bool wide = aligned(int64_t(n) * sizeof(T), {x, dy, w, dx, residual_grad});
        int threads = (n / N + WARP - 1) / WARP * WARP;
        if (wide && threads <= 1024) {
            // The thresholds must match `norm::cuda_row_ranges` in Rust.
            if (n <= SHORT_PACKS * WARP * N / 2) { DISPATCH_FLAGS(SHORT, N / 2, 4); }
            else if (n <= SHORT_PACKS * WARP * N) { DISPATCH_FLAGS(SHORT, N, 2); }
            else if (threads <= 128) { DISPATCH_FLAGS(MIDDLE, 128); }
            else if (threads <= 256) { DISPATCH_FLAGS(MIDDLE, 256); }
            else if (threads <= 512) { DISPATCH_FLAGS(MIDDLE, 512); }
            else { DISPATCH_FLAGS(MIDDLE, 1024); }
            GradTargets<R> into{{(R *)dw}, 1};
            for (void *more : {db, sums})
                if (more) into.gradients[into.count++] = (R *)more;
            launch_add_partials<R>((R *)partial, into, parts, n, stream);
        } else {
            if (dx && wide) LONG(N);
            else if (dx) LONG(1);
            // One vector at a time, through the same buffer.
            WeightGradTerm<T> dot_xhat{(const T *)x, (const T *)dy, (const R *)stats, n, bool(centred)};
            if (dw) {
                launch_partial_sums<R>((R *)partial, rows, n, parts, dot_xhat, stream);
                launch_add_partials<R>((R *)partial, {{(R *)dw}, 1}, parts, n, stream);
            }
            auto plain = [&](const void *of, void *into) {
                if (!into) return;
                launch_partial_sums<R>((R *)partial, rows, n, parts, MatrixValues<T>{(const T *)of, n}, stream);
                launch_add_partials<R>((R *)partial, {{(R *)into}, 1}, parts, n, stream);
            };
            plain(dy, db);
            plain(dx, sums);
            if (recompute_output) return norm_forward(type, x, w, b, dy, const_cast<void *>(stats), rows, n, 0, centred, 1, stream);
        }
    })
#undef ARGUMENTS
#undef DISPATCH_FLAGS
#undef SHORT
#undef MIDDLE
#undef LONG
    return cudaGetLastError();
}
