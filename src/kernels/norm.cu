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

    __device__ __forceinline__ void take(const T *row, int count) {
        from = row, packs = count, lane = threadIdx.x % WARP;
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

// Rows that a warp has in hand: where they are short, the next is on its way while one is worked on.
constexpr int rows_each(int k) { return k == 2 ? 2 : 1; }

// `known`: the statistics are there, and only the output is made.
template <class T, int N, int K>
__global__ void __launch_bounds__(THREADS)
    forward(const T *x, const T *w, const T *b, T *y, Acc<T> *stats, int64_t rows, int n, Acc<T> eps, bool centred,
            bool known) {
    using R = Acc<T>;
    constexpr int HAND = rows_each(K);
    int64_t first = (int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP) * HAND;
    if (first >= rows) return;
    Row<T, N, K> all[HAND];
#pragma unroll
    for (int j = 0; j < HAND; j++) all[j].take(x + (first + j) * n, first + j < rows ? n / N : 0);
    int kept = centred ? 2 : 1;
    R share = R(1) / R(n);
#pragma unroll
    for (int j = 0; j < HAND; j++) {
        int64_t row = first + j;
        if (row >= rows) break;
        auto &values = all[j];
        R mean = 0, scale;
        if (known) {
            if (centred) mean = stats[row * kept];
            scale = stats[row * kept + kept - 1];
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
                v.v[i] = down<T>(normal<R>(up(v.v[i]), mean, scale, up(wide.v[i]), b ? up(add.v[i]) : R(0)));
            v.store(y + row * n + p * N);
        });
    }
}

// What a row's input gradient is made of: the means of its gradients, and of their products with the normal values.
template <class R> struct Slope {
    R mean, scale, along, level;
    __device__ __forceinline__ R normal(R x) const { return (x - mean) * scale; }
    __device__ __forceinline__ R operator()(R normal, R g) const { return scale * (g - level - normal * along); }
};

// Adds what a pack has to a row's sums.
template <class T, int N, class R>
__device__ __forceinline__ void add_to(Slope<R> &s, const Kept<T, N> &x, const Kept<T, N> &dy, const Kept<T, N> &w) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        R g = dy[i] * w[i];
        s.along += g * s.normal(x[i]);
        s.level += g;
    }
}

// What is left to do once the sums are whole.
template <class R> __device__ __forceinline__ void settle(Slope<R> &s, bool centred, int n) {
    R share = R(1) / R(n);
    s.along *= share;
    s.level = centred ? s.level * share : R(0);
}

// What a thread has of a row.
template <class T, int N> struct Taken {
    Kept<T, N> x, dy, onto;
    Slope<Acc<T>> s;
};

// Rows that a block of so many threads has in hand at once: as many as registers suffice for.
constexpr int in_hand(int threads) { return threads <= 128 ? 2 : 1; }

// The input's gradient of a block's rows, and the sums of theirs that the parameters' gradients are made of:
// `partial[block, weight or bias, column]`. A thread has a pack of columns in every row. `AGAIN`: what `forward` gave is
// written over `dy`. `SUMS`: the sums of the input's gradient are the last of the partial ones.
template <class T, int N, int MOST, bool AGAIN, bool SUMS>
__global__ void __launch_bounds__(MOST, MOST == 128 ? 4 : 1)
    backward(const T *x, const Acc<T> *stats, T *dy, const T *w, const T *b, T *dx, const T *onto, Acc<T> *partial,
             int64_t rows, int n, int64_t rows_each, bool centred, bool bias) {
    using R = Acc<T>;
    constexpr int HAND = in_hand(MOST);
    __shared__ R sums[2][MOST / WARP][HAND][2]; // those of one turn are read while the next are written
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    int column = threadIdx.x * N;
    bool mine = column < n;
    int64_t first = blockIdx.x * rows_each, last = first + rows_each < rows ? first + rows_each : rows;
    R dw[N] = {}, db[N] = {}, sum[N] = {};
    Kept<T, N> wide = {}, add = {};
    if (mine) wide.load(w + column);
    if (AGAIN && mine && b) add.load(b + column);
    // Rows are on their way while those before them are worked on.
    Taken<T, N> now[HAND], next[HAND];
    auto take = [&](int64_t row) {
#pragma unroll
        for (int j = 0; j < HAND; j++) {
            if (row + j >= last) break;
            const R *own = stats + (row + j) * (centred ? 2 : 1);
            next[j].s = {centred ? own[0] : R(0), own[centred], 0, 0};
            if (!mine) continue;
            next[j].x.load(x + (row + j) * n + column);
            next[j].dy.load(dy + (row + j) * n + column);
            if (onto) next[j].onto.load(onto + (row + j) * n + column);
        }
    };
    take(first);
    int turn = 0;
    for (int64_t row = first; row < last; row += HAND, turn ^= 1) {
        int here = last - row < HAND ? int(last - row) : HAND;
#pragma unroll
        for (int j = 0; j < HAND; j++) now[j] = next[j];
        take(row + HAND);
#pragma unroll
        for (int j = 0; j < HAND; j++) {
            if (j >= here) break;
            auto &[x, dy, onto, s] = now[j];
            if (mine) add_to(s, x, dy, wide);
            s.along = warp_sum(s.along);
            s.level = warp_sum(s.level);
            if (lane == 0) sums[turn][warp][j][0] = s.along, sums[turn][warp][j][1] = s.level;
        }
        __syncthreads();
        if (!mine) continue;
#pragma unroll
        for (int j = 0; j < HAND; j++) {
            if (j >= here) break;
            auto &[x, given, other, s] = now[j];
            s.along = s.level = 0;
            for (int i = 0; i < warps; i++) s.along += sums[turn][i][j][0], s.level += sums[turn][i][j][1];
            settle(s, centred, n);
            Pack<T, N> out;
#pragma unroll
            for (int i = 0; i < N; i++) {
                R flat = s.normal(x[i]), d = given[i], slope = s(flat, d * wide[i]);
                dw[i] += d * flat;
                db[i] += d;
                out.v[i] = down<T>(onto ? slope + other[i] : slope);
                if constexpr (SUMS) sum[i] += up(out.v[i]);
            }
            if (dx) out.store(dx + (row + j) * n + column);
            if constexpr (AGAIN) {
#pragma unroll
                for (int i = 0; i < N; i++) out.v[i] = down<T>(normal<R>(x[i], s.mean, s.scale, wide[i], add[i]));
                out.store(dy + (row + j) * n + column);
            }
        }
    }
    if (!mine) return;
    int vectors = 1 + bias + SUMS;
    partial += int64_t(blockIdx.x) * vectors * n + column;
#pragma unroll
    for (int i = 0; i < N; i++) {
        partial[i] = dw[i];
        if (bias) partial[n + i] = db[i];
        if constexpr (SUMS) partial[(vectors - 1) * n + i] = sum[i];
    }
}

// The same for rows so short that a warp has all of one, `K` packs a lane: it waits for no other until the block's sums
// are made of its warps'. `BLOCKS` are at once on a processor.
template <class T, int N, int K, int BLOCKS, bool AGAIN, bool SUMS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    backward_short(const T *x, const Acc<T> *stats, T *dy, const T *w, const T *b, T *dx, const T *onto,
                   Acc<T> *partial, int64_t rows, int n, int64_t rows_each, bool centred, bool bias) {
    using R = Acc<T>;
    constexpr int VECTORS = 2 + SUMS;
    __shared__ R whole[WARPS][K * N * WARP];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int64_t first = blockIdx.x * rows_each, last = first + rows_each < rows ? first + rows_each : rows;
    R sums[VECTORS][K][N] = {};
    Kept<T, N> wide[K] = {}, add[K] = {};
    int column[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        column[k] = (k * WARP + lane) * N;
        if (column[k] >= n) continue;
        wide[k].load(w + column[k]);
        if (AGAIN && b) add[k].load(b + column[k]);
    }
    struct {
        Kept<T, N> x[K], dy[K], onto[K];
        R mean, scale;
    } now, next = {};
    auto take = [&](int64_t row) {
        if (row >= last) return;
        const R *own = stats + row * (centred ? 2 : 1);
        next.mean = centred ? own[0] : R(0), next.scale = own[centred];
#pragma unroll
        for (int k = 0; k < K; k++) {
            if (column[k] >= n) continue;
            next.x[k].load(x + row * n + column[k]);
            next.dy[k].load(dy + row * n + column[k]);
            if (onto) next.onto[k].load(onto + row * n + column[k]);
        }
    };
    take(first + warp);
    for (int64_t row = first + warp; row < last; row += WARPS) {
        now = next;
        take(row + WARPS);
        Slope<R> s{now.mean, now.scale, 0, 0};
#pragma unroll
        for (int k = 0; k < K; k++) add_to(s, now.x[k], now.dy[k], wide[k]);
        s.along = warp_sum(s.along);
        s.level = warp_sum(s.level);
        settle(s, centred, n);
#pragma unroll
        for (int k = 0; k < K; k++) {
            if (column[k] >= n) continue;
            Pack<T, N> out;
#pragma unroll
            for (int i = 0; i < N; i++) {
                R flat = s.normal(now.x[k][i]), d = now.dy[k][i], slope = s(flat, d * wide[k][i]);
                sums[0][k][i] += d * flat;
                sums[1][k][i] += d;
                out.v[i] = down<T>(onto ? slope + now.onto[k][i] : slope);
                if constexpr (SUMS) sums[2][k][i] += up(out.v[i]);
            }
            if (dx) out.store(dx + row * n + column[k]);
            if constexpr (AGAIN) {
#pragma unroll
                for (int i = 0; i < N; i++)
                    out.v[i] = down<T>(normal<R>(now.x[k][i], s.mean, s.scale, wide[k][i], add[k][i]));
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
            for (int i = 0; i < N; i++) whole[warp][column[k] + i] = sums[v][k][i];
        __syncthreads();
        R *to = partial + (v == 2 ? vectors - 1 : v) * n;
        for (int c = threadIdx.x; c < n; c += THREADS) {
            R sum = 0;
#pragma unroll
            for (int i = 0; i < WARPS; i++) sum += whole[i][c];
            to[c] = sum;
        }
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
    stats += row * (centred ? 2 : 1);
    x += row * n, dy += row * n, dx += row * n;
    Slope<R> s{centred ? stats[0] : R(0), stats[centred], 0, 0};
    Kept<T, N> xs, dys, wide;
    auto load = [&](int p) { xs.load(x + p), dys.load(dy + p), wide.load(w + p); };
    for (int p = threadIdx.x % WARP * N; p < n; p += WARP * N) {
        load(p);
        add_to(s, xs, dys, wide);
    }
    s.along = warp_sum(s.along);
    s.level = warp_sum(s.level);
    settle(s, centred, n);
    for (int p = threadIdx.x % WARP * N; p < n; p += WARP * N) {
        load(p);
        Pack<T, N> out;
#pragma unroll
        for (int i = 0; i < N; i++) {
            R g = s(s.normal(xs[i]), dys[i] * wide[i]);
            out.v[i] = down<T>(onto ? g + up(onto[row * n + p + i]) : g);
        }
        out.store(dx + p);
    }
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

// Packs a lane has of a short row.
constexpr int SHORT_PACKS = 3;

// Packs a lane holds of a row: the fewest of those compiled that suffice, 0 where none does.
int held(int packs) {
    for (int k : {2, 3, 4, 8})
        if (packs <= k * WARP) return k;
    return 0;
}

} // namespace

// Makes `y` and the statistics, or `y` from statistics that are `known`.
extern "C" int norm_forward(int type, const void *x, const void *w, const void *b, void *y, void *stats, int64_t rows,
                            int n, double eps, int centred, int known, cudaStream_t stream) {
    if (rows == 0 || n == 0) return 0;
#define FORWARD(N, K)                                                                                         \
    forward<T, N, K><<<blocks(rows, WARPS * rows_each(K)), THREADS, 0, stream>>>(                             \
        (const T *)x, (const T *)w, (const T *)b, (T *)y, (Acc<T> *)stats, rows, n, Acc<T>(eps), centred, known)
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        if (!aligned(int64_t(n) * sizeof(T), {x, w, b, y})) FORWARD(1, 0);
        else switch (held(n / N)) {
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

// `dx` may be null, and so may `onto`, which is added to it. `partial` is (parts, weight, bias and sums, n); the sums are
// added onto `dw` and `db`, and those of `dx` onto `sums`, if these are there. With `again`, `dy` becomes what
// `norm_forward` gave, for which `b` is there.
extern "C" int norm_backward(int type, const void *x, const void *stats, void *dy, const void *w, const void *b, void *dx,
                             const void *onto, void *partial, void *dw, void *db, void *sums, int64_t rows,
                             int n, int parts, int centred, int again, cudaStream_t stream) {
    if (rows == 0 || n == 0) return 0;
#define ARGUMENTS                                                                                             \
    (const T *)x, (const R *)stats, (T *)dy, (const T *)w, (const T *)b, (T *)dx, (const T *)onto, (R *)partial, rows, n, \
        (rows + parts - 1) / parts, centred, db != nullptr
#define KINDS(LAUNCH, ...)                                                                                    \
    if (again && sums) LAUNCH(__VA_ARGS__, true, true);                                                       \
    else if (again) LAUNCH(__VA_ARGS__, true, false);                                                         \
    else if (sums) LAUNCH(__VA_ARGS__, false, true);                                                          \
    else LAUNCH(__VA_ARGS__, false, false)
#define SHORT(N, BLOCKS, AGAIN, SUMS)                                                                         \
    backward_short<T, N, SHORT_PACKS, BLOCKS, AGAIN, SUMS><<<parts, THREADS, 0, stream>>>(ARGUMENTS)
#define MIDDLE(MOST, AGAIN, SUMS) backward<T, N, MOST, AGAIN, SUMS><<<parts, threads, 0, stream>>>(ARGUMENTS)
#define LONG(N)                                                                                               \
    backward_long<T, N><<<blocks(rows, WARPS), THREADS, 0, stream>>>((const T *)x, (const R *)stats,          \
                                                                     (const T *)dy, (const T *)w, (T *)dx,    \
                                                                     (const T *)onto, rows, n, centred)
    WITH_TYPE(type, {
        using R = Acc<T>;
        constexpr int N = Pack<T>::size;
        bool wide = aligned(int64_t(n) * sizeof(T), {x, dy, w, dx, onto});
        int threads = (n / N + WARP - 1) / WARP * WARP;
        if (wide && threads <= 1024) {
            // `card_parts` in Rust has the same sizes.
            if (n <= SHORT_PACKS * WARP * N / 2) { KINDS(SHORT, N / 2, 4); }
            else if (n <= SHORT_PACKS * WARP * N) { KINDS(SHORT, N, 2); }
            else if (threads <= 128) { KINDS(MIDDLE, 128); }
            else if (threads <= 256) { KINDS(MIDDLE, 256); }
            else if (threads <= 512) { KINDS(MIDDLE, 512); }
            else { KINDS(MIDDLE, 1024); }
            Into<R> into{{(R *)dw}, 1};
            for (void *more : {db, sums})
                if (more) into.gradients[into.count++] = (R *)more;
            launch_add<R>((R *)partial, into, parts, n, stream);
        } else {
            if (dx && wide) LONG(N);
            else if (dx) LONG(1);
            // One vector after the other, through the same room.
            Along<T> along{(const T *)x, (const T *)dy, (const R *)stats, n, bool(centred)};
            launch_parts<R>((R *)partial, rows, n, parts, along, stream);
            launch_add<R>((R *)partial, {{(R *)dw}, 1}, parts, n, stream);
            auto plain = [&](const void *of, void *into) {
                if (!into) return;
                launch_parts<R>((R *)partial, rows, n, parts, Plain<T>{(const T *)of, n}, stream);
                launch_add<R>((R *)partial, {{(R *)into}, 1}, parts, n, stream);
            };
            plain(dy, db);
            plain(dx, sums);
            if (again) return norm_forward(type, x, w, b, dy, const_cast<void *>(stats), rows, n, 0, centred, 1, stream);
        }
    })
#undef ARGUMENTS
#undef KINDS
#undef SHORT
#undef MIDDLE
#undef LONG
    return cudaGetLastError();
}
