// Embedding lookup, and gradients without floating-point atomics, so that results are deterministic.
//
// The backward pass sorts the rows by token: a counting sort fills the buckets in arbitrary order, then sorts each
// bucket. The sorted rows are split into segments. A block sums the runs of equal tokens in its segment and adds
// complete runs to the table. Partial sums of runs that cross a segment boundary are joined afterwards, in order.
#include "cuda/device.cuh"

namespace {

constexpr int SEGMENT_LEN = 32; // `SEGMENT_LEN` in embedding.rs
constexpr int PREFETCH = 8;  // loads in flight

// A token outside of the vocabulary yields NaN: a kernel cannot report an error.
template <class T, int N>
__global__ void __launch_bounds__(256)
    forward(const uint32_t *ids, const T *tokens, const T *positions, const T *token_types, T *y, int64_t packs_all, int packs,
            int length, uint32_t vocab) {
    using R = Acc<T>;
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs_all) return;
    int64_t row = i / packs, n = int64_t(packs) * N;
    int p = int(i - row * packs) * N;
    uint32_t id = ids[row];
    Pack<T, N> v;
    if (id < vocab) {
        v = Pack<T, N>::load(tokens + id * n + p);
    } else {
#pragma unroll
        for (int k = 0; k < N; k++) v.v[k] = from_acc<T>(R(NAN));
    }
    auto add = [&](const T *from) {
        auto other = Pack<T, N>::load(from);
#pragma unroll
        for (int k = 0; k < N; k++) v.v[k] = from_acc<T>(to_acc(v.v[k]) + to_acc(other.v[k]));
    };
    if (positions) add(positions + (row % length) * n + p);
    if (token_types) add(token_types + p);
    v.store(y + row * n + p);
}

__global__ void count(const uint32_t *ids, uint32_t *counts, int64_t rows, uint32_t vocab) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < rows && ids[i] < vocab) atomicAdd(&counts[ids[i]], 1);
}

// Inclusive prefix sum over a warp.
__device__ __forceinline__ uint32_t warp_inclusive_scan(uint32_t x) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        uint32_t other = __shfl_up_sync(0xffffffff, x, offset);
        if (lane >= offset) x += other;
    }
    return x;
}

// `starts` (vocab + 1) receives the exclusive prefix sums of the counts; each count becomes the next insertion index.
__global__ void __launch_bounds__(1024) exclusive_scan(uint32_t *counts, uint32_t *starts, uint32_t vocab) {
    constexpr int EACH = 8; // values per thread at a time, 1024 apart
    __shared__ uint32_t sums[EACH][WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    uint32_t before = 0; // sum of all earlier chunks, in the first warp
    for (uint32_t base = 0; base < vocab; base += 1024 * EACH) {
        uint32_t own[EACH], inclusive[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            uint32_t at = base + k * 1024 + threadIdx.x;
            own[k] = at < vocab ? counts[at] : 0;
        }
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            inclusive[k] = warp_inclusive_scan(own[k]);
            if (lane == WARP - 1) sums[k][warp] = inclusive[k];
        }
        __syncthreads();
        if (warp == 0) {
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                uint32_t sum = sums[k][lane], all = warp_inclusive_scan(sum);
                sums[k][lane] = before + all - sum;
                before += __shfl_sync(0xffffffff, all, WARP - 1);
            }
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            uint32_t at = base + k * 1024 + threadIdx.x;
            if (at < vocab) counts[at] = starts[at] = sums[k][warp] + inclusive[k] - own[k];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) starts[vocab] = before;
}

__global__ void scatter_rows(const uint32_t *ids, uint32_t *next, uint32_t *sorted_rows, int64_t rows, uint32_t vocab) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < rows && ids[i] < vocab) sorted_rows[atomicAdd(&next[ids[i]], 1)] = uint32_t(i);
}

// Sorts the rows of each token, with `W` warps per token. For a token with more than 32 rows, the warps scan all ids
// instead, each of them a range.
constexpr int ORDER_WARPS = 8;
template <int W>
__global__ void __launch_bounds__(ORDER_WARPS *WARP)
    sort_segments(const uint32_t *ids, const uint32_t *starts, uint32_t *sorted_rows, int64_t rows, uint32_t vocab) {
    __shared__ uint32_t founds[ORDER_WARPS];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = warp % W;
    uint32_t token = blockIdx.x * (ORDER_WARPS / W) + warp / W;
    if (token >= vocab) return;
    uint32_t start = starts[token], n = starts[token + 1] - start;
    if (n < 2) return;
    if (n <= WARP) {
        if (part > 0) return;
        uint32_t own = lane < n ? sorted_rows[start + lane] : UINT32_MAX, rank = 0;
        for (int i = 0; i < int(n); i++) rank += __shfl_sync(0xffffffff, own, i) < own;
        __syncwarp();
        if (lane < n) sorted_rows[start + rank] = own;
        return;
    }
    int64_t first = rows * part / W, last = rows * (part + 1) / W;
    uint32_t found = 0;
    // Calls `take(row, number of matches before it in the range)` for each match.
    auto find = [&](auto take) {
        for (int64_t base = first; base < last; base += WARP * PREFETCH) {
            bool here[PREFETCH];
#pragma unroll
            for (int k = 0; k < PREFETCH; k++) {
                int64_t at = base + k * WARP + lane;
                here[k] = at < last && ids[at] == token;
            }
#pragma unroll
            for (int k = 0; k < PREFETCH; k++) {
                unsigned all = __ballot_sync(0xffffffff, here[k]);
                if (here[k]) take(base + k * WARP + lane, found + __popc(all & ((1u << lane) - 1)));
                found += __popc(all);
            }
        }
    };
    if constexpr (W > 1) {
        find([](int64_t, uint32_t) {});
        if (lane == 0) founds[warp] = found;
        __syncthreads();
        found = 0;
        for (int i = warp - part; i < warp; i++) found += founds[i];
    }
    find([&](int64_t place, uint32_t before) { sorted_rows[start + before] = uint32_t(place); });
}

// Sums the runs of one segment. `boundaries` is (segments, 2, n): the partial sum of the run that enters the segment,
// and of the one that starts in it and continues past its end.
template <class T, int N>
__global__ void __launch_bounds__(256)
    sum_runs(const uint32_t *ids, const uint32_t *starts, const uint32_t *sorted_rows, const T *dy, Acc<T> *table, Acc<T> *boundaries,
         int packs, uint32_t vocab) {
    using R = Acc<T>;
    __shared__ uint32_t place[SEGMENT_LEN], token[SEGMENT_LEN];
    uint32_t first = blockIdx.x * SEGMENT_LEN, all = starts[vocab];
    if (first >= all) return;
    int len = int(min(uint32_t(SEGMENT_LEN), all - first));
    if (threadIdx.x < len) {
        place[threadIdx.x] = sorted_rows[first + threadIdx.x];
        token[threadIdx.x] = ids[place[threadIdx.x]];
    }
    __syncthreads();
    int64_t n = int64_t(packs) * N;
    for (int p = threadIdx.x; p < packs; p += blockDim.x) {
        R sum[N] = {};
        for (int base = 0; base < len; base += PREFETCH) {
            Pack<T, N> ahead[PREFETCH];
#pragma unroll
            for (int i = 0; i < PREFETCH; i++)
                if (base + i < len) ahead[i] = Pack<T, N>::load(dy + place[base + i] * n + p * N);
#pragma unroll
            for (int i = 0; i < PREFETCH; i++) {
                int j = base + i;
                if (j >= len) break;
#pragma unroll
                for (int k = 0; k < N; k++) sum[k] += to_acc(ahead[i].v[k]);
                if (j + 1 < len && token[j + 1] == token[j]) continue;
                bool before = starts[token[j]] < first, after = starts[token[j] + 1] > first + len;
                R *into = before ? boundaries + blockIdx.x * 2 * n : after ? boundaries + (blockIdx.x * 2 + 1) * n : nullptr;
                if (into) {
#pragma unroll
                    for (int k = 0; k < N; k++) into[p * N + k] = sum[k];
                } else {
                    into = table + token[j] * n;
#pragma unroll
                    for (int k = 0; k < N; k++) into[p * N + k] += sum[k];
                }
#pragma unroll
                for (int k = 0; k < N; k++) sum[k] = 0;
            }
        }
    }
}

// Joins the parts of a run that starts in a segment and continues past its end.
template <class R>
__global__ void __launch_bounds__(256)
    join_boundaries(const uint32_t *ids, const uint32_t *starts, const uint32_t *sorted_rows, const R *boundaries, R *table, int64_t n,
         uint32_t vocab) {
    uint32_t first = blockIdx.x * SEGMENT_LEN, all = starts[vocab];
    if (first + SEGMENT_LEN >= all) return; // last segment: no run continues
    uint32_t token = ids[sorted_rows[first + SEGMENT_LEN - 1]];
    uint32_t from = starts[token], to = starts[token + 1];
    if (from < first || to <= first + SEGMENT_LEN) return;
    uint32_t last = (to - 1) / SEGMENT_LEN;
    for (int64_t c = threadIdx.x; c < n; c += blockDim.x) {
        R sum = boundaries[(blockIdx.x * 2 + 1) * n + c];
#pragma unroll 4
        for (uint32_t segment = blockIdx.x + 1; segment <= last; segment++) sum += boundaries[int64_t(segment) * 2 * n + c];
        table[token * n + c] += sum;
    }
}

// `table[t] += sum over samples of dy[sample, t]`.
template <class T, int N>
__global__ void __launch_bounds__(64)
    sum_over_samples(const T *dy, Acc<T> *table, int64_t packs_all, int samples) {
    using R = Acc<T>;
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs_all) return;
    R sum[N] = {};
#pragma unroll 16
    for (int sample = 0; sample < samples; sample++) {
        auto d = Pack<T, N>::load(dy + (sample * packs_all + i) * N);
#pragma unroll
        for (int k = 0; k < N; k++) sum[k] += to_acc(d.v[k]);
    }
#pragma unroll
    for (int k = 0; k < N; k++) table[i * N + k] += sum[k];
}

} // namespace

extern "C" int embedding_forward(int type, const void *ids, const void *tokens, const void *positions,
                                 const void *token_types, void *y, int64_t rows, int length, int n, int64_t vocab,
                                 cudaStream_t stream) {
    if (rows == 0 || n == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        bool wide = aligned(int64_t(n) * sizeof(T), {tokens, positions, token_types, y});
        int packs = wide ? n / N : n;
        unsigned grid = blocks(rows * packs, 256);
        auto *i = (const uint32_t *)ids;
        auto *t = (const T *)tokens, *p = (const T *)positions, *k = (const T *)token_types;
        if (wide) forward<T, N><<<grid, 256, 0, stream>>>(i, t, p, k, (T *)y, rows * packs, packs, length, vocab);
        else forward<T, 1><<<grid, 256, 0, stream>>>(i, t, p, k, (T *)y, rows * packs, packs, length, vocab);
    })
    return cudaGetLastError();
}

// `sort_buffer` has 2 vocab + 1 + rows values, `boundaries` is (segments, 2, n).
extern "C" int embedding_backward_tokens(int type, const void *ids, const void *dy, void *table, void *sort_buffer,
                                         void *boundaries, int64_t rows, int n, int64_t vocab, cudaStream_t stream) {
    if (rows == 0 || n == 0 || vocab == 0) return 0;
    auto *counts = (uint32_t *)sort_buffer, *starts = counts + vocab, *sorted_rows = starts + vocab + 1;
    auto *i = (const uint32_t *)ids;
    uint32_t v = uint32_t(vocab);
    if (cudaError_t error = cudaMemsetAsync(counts, 0, vocab * sizeof(uint32_t), stream)) return error;
    count<<<blocks(rows, 256), 256, 0, stream>>>(i, counts, rows, v);
    exclusive_scan<<<1, 1024, 0, stream>>>(counts, starts, v);
    scatter_rows<<<blocks(rows, 256), 256, 0, stream>>>(i, counts, sorted_rows, rows, v);
    // If most tokens have many rows, a whole block sorts each token.
    if (rows > 8 * vocab) sort_segments<ORDER_WARPS><<<v, ORDER_WARPS * WARP, 0, stream>>>(i, starts, sorted_rows, rows, v);
    else sort_segments<1><<<blocks(vocab, ORDER_WARPS), ORDER_WARPS * WARP, 0, stream>>>(i, starts, sorted_rows, rows, v);
    unsigned segments = blocks(rows, SEGMENT_LEN);
    WITH_TYPE(type, {
        using R = Acc<T>;
        constexpr int N = Pack<T>::size;
        auto *d = (const T *)dy;
        auto *into = (R *)table, *e = (R *)boundaries;
        auto threads = [](int packs) { return packs >= 256 ? 256 : (packs + WARP - 1) / WARP * WARP; };
        if (aligned(int64_t(n) * sizeof(T), {dy}))
            sum_runs<T, N><<<segments, threads(n / N), 0, stream>>>(i, starts, sorted_rows, d, into, e, n / N, v);
        else sum_runs<T, 1><<<segments, threads(n), 0, stream>>>(i, starts, sorted_rows, d, into, e, n, v);
        join_boundaries<R><<<segments, 256, 0, stream>>>(i, starts, sorted_rows, e, into, n, v);
    })
    return cudaGetLastError();
}

// `dy` is (samples, length, n).
extern "C" int embedding_backward_positions(int type, const void *dy, void *table, int samples, int length, int n,
                                            cudaStream_t stream) {
    if (samples == 0 || length == 0 || n == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        int64_t len = int64_t(length) * n;
        if (aligned(len * sizeof(T), {dy}))
            sum_over_samples<T, N><<<blocks(len / N, 64), 64, 0, stream>>>((const T *)dy, (Acc<T> *)table, len / N, samples);
        else sum_over_samples<T, 1><<<blocks(len, 64), 64, 0, stream>>>((const T *)dy, (Acc<T> *)table, len, samples);
    })
    return cudaGetLastError();
}
