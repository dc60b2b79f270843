// Tiled attention: used if cuDNN is missing, for dtypes it does not support, for padded samples and, except for what
// attention/tensor_cores.cu handles, for dropout. The scores of a tile live in shared memory; no (length, length)
// matrix exists. One thread computes each sum in a fixed order.
//
// The packed input is (batch, length, (heads + 2 kv_heads) head). A block handles one (tile of queries or keys, head,
// sample). Its 256 threads form a 16 by 16 grid, and each computes the (M, M) scores of its rows and columns.
#include "cuda/attention.cuh"
#include "cuda/device.cuh"

namespace {

constexpr int SIDE = 16;
constexpr int THREADS = SIDE * SIDE;

// Loads rows `first..first + TILE` of a head, scaled, from rows `width` values apart; zeros from row `limit` on.
template <int TILE, class T, class R>
__device__ void load(R *to, const T *from, int64_t width, int first, int limit, int head, R scale) {
    for (int i = threadIdx.x; i < TILE * head; i += THREADS) {
        int row = i / head, c = i % head;
        to[row * (head + 1) + c] = first + row < limit ? R(to_acc(from[int64_t(first + row) * width + c])) * scale : R(0);
    }
}

// s[i][j] = a[row i] . b[row j]; the rows are ty + 16 i of a and tx + 16 j of b.
template <int M, class R> __device__ void row_dots(R (&s)[M][M], const R *a, const R *b, int head) {
    int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int j = 0; j < M; j++) s[i][j] = 0;
    for (int c = 0; c < head; c++) {
        R x[M], y[M];
#pragma unroll
        for (int i = 0; i < M; i++) x[i] = a[(ty + SIDE * i) * (head + 1) + c], y[i] = b[(tx + SIDE * i) * (head + 1) + c];
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int j = 0; j < M; j++) s[i][j] += x[i] * y[j];
    }
}

// o[i][j] += sum over k of p(row i, k) b[k][column j]; `transposed` reads p(k, row i) instead.
template <int M, int C, int TILE, bool transposed, class R>
__device__ void accumulate_product(R (&o)[M][C], const R *p, const R *b, int head) {
    int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
    for (int k = 0; k < TILE; k++) {
        R y[C];
#pragma unroll
        for (int j = 0; j < C; j++) y[j] = tx + SIDE * j < head ? b[k * (head + 1) + tx + SIDE * j] : R(0);
#pragma unroll
        for (int i = 0; i < M; i++) {
            int row = ty + SIDE * i;
            R x = transposed ? p[k * (TILE + 1) + row] : p[row * (TILE + 1) + k];
#pragma unroll
            for (int j = 0; j < C; j++) o[i][j] += x * y[j];
        }
    }
}

template <int M, int C, int TILE, class T, class R>
__device__ void write(T *to, const R (&o)[M][C], int64_t width, int first, int limit, int head, const R *scale) {
    int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
#pragma unroll
    for (int i = 0; i < M; i++) {
        int row = first + ty + SIDE * i;
        if (row >= limit) continue;
#pragma unroll
        for (int j = 0; j < C; j++)
            if (tx + SIDE * j < head) to[int64_t(row) * width + tx + SIDE * j] = from_acc<T>(o[i][j] * scale[i]);
    }
}

// Reductions over the 16 threads of a row.
template <class R> __device__ R row_max(R x) {
#pragma unroll
    for (int o = SIDE / 2; o > 0; o /= 2) {
        R other = __shfl_xor_sync(0xffffffff, x, o);
        x = other > x ? other : x;
    }
    return x;
}
template <class R> __device__ R row_sum(R x) {
#pragma unroll
    for (int o = SIDE / 2; o > 0; o /= 2) x += __shfl_xor_sync(0xffffffff, x, o);
    return x;
}
// The factor on scores, in double precision where all else is.
template <class R> __device__ R scale_of(const AttentionDims &s) {
    return sizeof(R) > sizeof(float) ? R(1) / sqrt(R(s.head)) : R(s.scale);
}
__device__ float exp_of(float x) { return expf(x); }
__device__ double exp_of(double x) { return exp(x); }
__device__ float log_of(float x) { return logf(x); }
__device__ double log_of(double x) { return log(x); }

template <class T, class Masked, int TILE, int HEAD>
__global__ void __launch_bounds__(THREADS)
    forward(AttentionDims s, Masked masks, const T *qkv, T *y, Acc<T> *logsumexp) {
    using R = Acc<T>;
    constexpr int M = TILE / SIDE, C = (HEAD + SIDE - 1) / SIDE;
    extern __shared__ __align__(16) unsigned char bytes[];
    R *q = (R *)bytes, *kv = q + TILE * (s.head + 1), *p = kv + TILE * (s.head + 1);
    int first = blockIdx.x * TILE, h = blockIdx.y, sample = blockIdx.z, kv_head = h / (s.heads / s.kv_heads);
    int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE, width = s.qkv_width();
    const auto mask = masks.of(sample);
    const T *base = qkv + int64_t(sample) * s.length * width;
    const T *k_at = base + (s.heads + kv_head) * s.head, *v_at = base + (s.heads + s.kv_heads + kv_head) * s.head;
    load<TILE>(q, base + h * s.head, width, first, s.length, s.head, scale_of<R>(s));
    R o[M][C] = {}, max_score[M], exp_sum[M];
#pragma unroll
    for (int i = 0; i < M; i++) max_score[i] = -INFINITY, exp_sum[i] = 0;
    int keys = s.keys(sample), limit = s.visible_keys(sample, min(first + TILE, s.length));
    for (int from = 0; from < limit; from += TILE) {
        __syncthreads();
        load<TILE>(kv, k_at, width, from, limit, s.head, R(1));
        __syncthreads();
        R scores[M][M];
        row_dots<M>(scores, q, kv, s.head);
#pragma unroll
        for (int i = 0; i < M; i++) {
            int query = first + ty + SIDE * i;
            R new_max = max_score[i];
#pragma unroll
            for (int j = 0; j < M; j++) {
                if (s.is_masked(query, from + tx + SIDE * j, keys)) scores[i][j] = -INFINITY;
                new_max = scores[i][j] > new_max ? scores[i][j] : new_max;
            }
            new_max = row_max(new_max);
            // A row with no visible key so far keeps its zeros.
            R shift = new_max == R(-INFINITY) ? R(0) : new_max, rescale = exp_of(max_score[i] - shift), sum = 0;
#pragma unroll
            for (int j = 0; j < M; j++) {
                R e = exp_of(scores[i][j] - shift);
                R kept = mask.template kept<R>(h, query, from + tx + SIDE * j);
                p[(ty + SIDE * i) * (TILE + 1) + tx + SIDE * j] = e * kept;
                sum += e;
            }
            exp_sum[i] = exp_sum[i] * rescale + row_sum(sum);
            max_score[i] = new_max;
#pragma unroll
            for (int j = 0; j < C; j++) o[i][j] *= rescale;
        }
        __syncthreads();
        load<TILE>(kv, v_at, width, from, limit, s.head, R(1));
        __syncthreads();
        accumulate_product<M, C, TILE, false>(o, p, kv, s.head);
    }
    R scale[M];
#pragma unroll
    for (int i = 0; i < M; i++) {
        scale[i] = exp_sum[i] > 0 ? R(1) / exp_sum[i] : R(0);
        int query = first + ty + SIDE * i;
        if (tx == 0 && query < s.length)
            logsumexp[(int64_t(sample) * s.heads + h) * s.length + query] = max_score[i] + log_of(exp_sum[i]);
    }
    int out = s.heads * s.head;
    write<M, C, TILE>(y + int64_t(sample) * s.length * out + h * s.head, o, out, first, s.length, s.head, scale);
}

// out[sample, head, query] = y . dy of a head.
template <class T> __global__ void delta(const T *y, const T *dy, Acc<T> *out, int length, int heads, int head, int64_t rows) {
    int64_t row = int64_t(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP; // (sample, query, head)
    if (row >= rows) return;
    Acc<T> sum = 0;
    for (int c = threadIdx.x % WARP; c < head; c += WARP) sum += to_acc(y[row * head + c]) * to_acc(dy[row * head + c]);
    sum = warp_sum(sum);
    int64_t h = row % heads, query = row / heads % length, sample = row / heads / length;
    if (threadIdx.x % WARP == 0) out[(sample * heads + h) * length + query] = sum;
}

// Computes the score gradients of a tile of queries and a tile of keys into shared memory and, if `p` is given, the
// attention weights after dropout.
template <int M, int TILE, class Masked, class R>
__device__ void score_grads(const AttentionDims &s, const Masked &mask, int h, R *ds, R *p, const R *q, const R *k,
                       const R *v, const R *dy, const R *logsumexp, const R *delta, int first, int from, int keys) {
    int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
    R scores[M][M], dp[M][M];
    row_dots<M>(scores, q, k, s.head);
    row_dots<M>(dp, dy, v, s.head);
#pragma unroll
    for (int i = 0; i < M; i++) {
        int query = first + ty + SIDE * i;
        R sum = query < s.length ? logsumexp[query] : R(0), a = query < s.length ? delta[query] : R(0);
#pragma unroll
        for (int j = 0; j < M; j++) {
            bool is_masked = s.is_masked(query, from + tx + SIDE * j, keys);
            R e = is_masked ? R(0) : exp_of(scores[i][j] - sum);
            int at = (ty + SIDE * i) * (TILE + 1) + tx + SIDE * j;
            R kept = mask.template kept<R>(h, query, from + tx + SIDE * j);
            if (p) p[at] = e * kept;
            ds[at] = e * (dp[i][j] * kept - a);
        }
    }
}

template <class T, class Masked, int TILE, int HEAD>
__global__ void __launch_bounds__(THREADS)
    backward_dq(AttentionDims s, Masked masks, const T *qkv, const T *dy, const Acc<T> *logsumexp, const Acc<T> *delta,
            T *dx) {
    using R = Acc<T>;
    constexpr int M = TILE / SIDE, C = (HEAD + SIDE - 1) / SIDE;
    extern __shared__ __align__(16) unsigned char bytes[];
    int tile = TILE * (s.head + 1);
    R *q = (R *)bytes, *d = q + tile, *k = d + tile, *v = k + tile, *ds = v + tile;
    int first = blockIdx.x * TILE, h = blockIdx.y, sample = blockIdx.z, kv_head = h / (s.heads / s.kv_heads);
    int width = s.qkv_width(), out = s.heads * s.head;
    const auto mask = masks.of(sample);
    int64_t at = int64_t(sample) * s.length;
    const T *base = qkv + at * width;
    load<TILE>(q, base + h * s.head, width, first, s.length, s.head, scale_of<R>(s));
    load<TILE>(d, dy + at * out + h * s.head, out, first, s.length, s.head, R(1));
    const R *row_logsumexp = logsumexp + (int64_t(sample) * s.heads + h) * s.length;
    const R *row_delta = delta + (int64_t(sample) * s.heads + h) * s.length;
    R o[M][C] = {}, scale[M];
    int keys = s.keys(sample), limit = s.visible_keys(sample, min(first + TILE, s.length));
    for (int from = 0; from < limit; from += TILE) {
        __syncthreads();
        load<TILE>(k, base + (s.heads + kv_head) * s.head, width, from, limit, s.head, R(1));
        load<TILE>(v, base + (s.heads + s.kv_heads + kv_head) * s.head, width, from, limit, s.head, R(1));
        __syncthreads();
        score_grads<M, TILE>(s, mask, h, ds, (R *)nullptr, q, k, v, d, row_logsumexp, row_delta, first, from, keys);
        __syncthreads();
        accumulate_product<M, C, TILE, false>(o, ds, k, s.head);
    }
#pragma unroll
    for (int i = 0; i < M; i++) scale[i] = scale_of<R>(s);
    write<M, C, TILE>(dx + at * width + h * s.head, o, width, first, s.length, s.head, scale);
}

template <class T, class Masked, int TILE, int HEAD>
__global__ void __launch_bounds__(THREADS)
    backward_dkv(AttentionDims s, Masked masks, const T *qkv, const T *dy, const Acc<T> *logsumexp,
                    const Acc<T> *delta, T *dx) {
    using R = Acc<T>;
    constexpr int M = TILE / SIDE, C = (HEAD + SIDE - 1) / SIDE;
    extern __shared__ __align__(16) unsigned char bytes[];
    int tile = TILE * (s.head + 1);
    R *q = (R *)bytes, *d = q + tile, *k = d + tile, *v = k + tile, *ds = v + tile, *p = ds + TILE * (TILE + 1);
    int from = blockIdx.x * TILE, kv_head = blockIdx.y, sample = blockIdx.z, group = s.heads / s.kv_heads;
    int width = s.qkv_width(), out = s.heads * s.head, keys = s.keys(sample);
    const auto mask = masks.of(sample);
    int64_t at = int64_t(sample) * s.length;
    const T *base = qkv + at * width;
    int k_column = (s.heads + kv_head) * s.head, v_column = (s.heads + s.kv_heads + kv_head) * s.head;
    load<TILE>(k, base + k_column, width, from, keys, s.head, R(1));
    load<TILE>(v, base + v_column, width, from, keys, s.head, R(1));
    R dk[M][C] = {}, dv[M][C] = {}, one[M];
    for (int g = 0; g < group && from < keys; g++) {
        int h = kv_head * group + g;
        const R *row_logsumexp = logsumexp + (int64_t(sample) * s.heads + h) * s.length;
        const R *row_delta = delta + (int64_t(sample) * s.heads + h) * s.length;
        for (int first = s.causal ? from : 0; first < s.length; first += TILE) {
            __syncthreads();
            load<TILE>(q, base + h * s.head, width, first, s.length, s.head, scale_of<R>(s));
            load<TILE>(d, dy + at * out + h * s.head, out, first, s.length, s.head, R(1));
            __syncthreads();
            score_grads<M, TILE>(s, mask, h, ds, p, q, k, v, d, row_logsumexp, row_delta, first, from, keys);
            __syncthreads();
            accumulate_product<M, C, TILE, true>(dv, p, d, s.head);
            accumulate_product<M, C, TILE, true>(dk, ds, q, s.head); // q is already scaled
        }
    }
#pragma unroll
    for (int i = 0; i < M; i++) one[i] = R(1);
    write<M, C, TILE>(dx + at * width + k_column, dk, width, from, s.length, s.head, one);
    write<M, C, TILE>(dx + at * width + v_column, dv, width, from, s.length, s.head, one);
}

// Launches a kernel with dynamic shared memory. Beyond 48 KiB a kernel must opt in; it opts in to what its largest head
// needs, so that concurrent calls never lower each other's limit.
template <class K, class... Args>
int launch(K kernel, dim3 grid, size_t shared, size_t most, cudaStream_t stream, Args... args) {
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(most)))
        return error;
    kernel<<<grid, THREADS, shared, stream>>>(args...);
    return cudaGetLastError();
}

// Runs the body with the constants `HEAD`, an upper bound of the head size, and the `TILE` that suits it.
#define WITH_HEAD(head, ...)                                                                                  \
    if (head <= 64) { constexpr int HEAD = 64, TILE = 32; __VA_ARGS__; }                                      \
    else if (head <= 128) { constexpr int HEAD = 128, TILE = 32; __VA_ARGS__; }                               \
    else if (head <= 256) { constexpr int HEAD = 256, TILE = 16; __VA_ARGS__; }                               \
    else return cudaErrorInvalidValue;

} // namespace

extern "C" int attention_forward(const AttentionArgs *attn_args, const void *qkv, void *y, void *logsumexp, cudaStream_t stream) {
    int batch = attn_args->batch, length = attn_args->length, head = attn_args->head;
    WITH_TYPE(attn_args->type, {
        using R = Acc<T>;
        WITH_HEAD(head, {
            auto shared = [](int head) { return (2 * TILE * (head + 1) + TILE * (TILE + 1)) * sizeof(R); };
            auto run = [&](auto mask) {
                return launch(forward<T, decltype(mask), TILE, HEAD>, dim3(blocks(length, TILE), attn_args->heads, batch),
                             shared(head), shared(HEAD), stream, AttentionDims(*attn_args), mask, (const T *)qkv, (T *)y, (R *)logsumexp);
            };
            return attn_args->keys ? run(DropoutMask(*attn_args)) : run(NoDropout());
        })
    })
}

// delta = y . dy of every row of each head, (batch, heads, length) in the accumulation type.
extern "C" int attention_delta(const AttentionArgs *attn_args, const void *y, const void *dy, void *to, cudaStream_t stream) {
    int64_t rows = int64_t(attn_args->batch) * attn_args->length * attn_args->heads;
    WITH_TYPE(attn_args->type, {
        delta<T><<<blocks(rows, 8), 8 * WARP, 0, stream>>>((const T *)y, (const T *)dy, (Acc<T> *)to, attn_args->length,
                                                           attn_args->heads, attn_args->head, rows);
    })
    return cudaGetLastError();
}

// `delta` is the result of `attention_delta`.
extern "C" int attention_backward(const AttentionArgs *attn_args, const void *qkv, const void *logsumexp, const void *dy, const void *delta,
                                  void *dx, cudaStream_t stream) {
    int batch = attn_args->batch, length = attn_args->length, head = attn_args->head;
    WITH_TYPE(attn_args->type, {
        using R = Acc<T>;
        WITH_HEAD(head, {
            auto shared = [](int head, int scores) {
                return (4 * TILE * (head + 1) + scores * TILE * (TILE + 1)) * sizeof(R);
            };
            auto run = [&](auto mask) {
                using Masked = decltype(mask);
                unsigned tiles = blocks(length, TILE);
                int error = launch(backward_dq<T, Masked, TILE, HEAD>, dim3(tiles, attn_args->heads, batch), shared(head, 1),
                                  shared(HEAD, 1), stream, AttentionDims(*attn_args), mask, (const T *)qkv, (const T *)dy,
                                  (const R *)logsumexp, (const R *)delta, (T *)dx);
                if (error) return error;
                return launch(backward_dkv<T, Masked, TILE, HEAD>, dim3(tiles, attn_args->kv_heads, batch), shared(head, 2),
                             shared(HEAD, 2), stream, AttentionDims(*attn_args), mask, (const T *)qkv, (const T *)dy, (const R *)logsumexp,
                             (const R *)delta, (T *)dx);
            };
            return attn_args->keys ? run(DropoutMask(*attn_args)) : run(NoDropout());
        })
    })
}
