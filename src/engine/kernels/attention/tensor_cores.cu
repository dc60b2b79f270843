// Attention with dropout in 16-bit types: MMA on tensor cores, scores in registers.
//
// A block handles a tile of 64 queries (or keys) of one head of one sample. Each of its four warps owns 16 of them as
// the rows of its MMAs and iterates over the other side STEP at a time. Those rows are double-buffered in shared
// memory, so the next copy overlaps the current MMAs. Rows are permuted so that a thread holds two adjacent rows and in
// each two adjacent columns: one square of the dropout mask. One thread, or four in a fixed order, compute every sum,
// so the results are deterministic.
#include <type_traits>

#include "cuda/attention.cuh"
#include "cuda/device.cuh"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * WARP, TILE = WARPS * 16;
constexpr float LOG2E = 1.4426950408889634f;

// Position of a thread: it holds rows `2 row` and `2 row + 1` of its warp, and columns `column` and `column + 1` of
// every eight.
struct Lane {
    int warp = threadIdx.x / WARP, row = threadIdx.x % WARP / 4, column = threadIdx.x % 4 * 2;
    __device__ int first() const { return warp * 16 + row * 2; }
};

template <class T> __device__ __forceinline__ uint32_t pack_pair(float a, float b) {
    T both[2] = {from_acc<T>(a), from_acc<T>(b)};
    return *reinterpret_cast<uint32_t *>(both);
}

// c += a b, with a (16, 16) and b (16, 8).
template <class T> __device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, bf16>)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t shared_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

// Loads four (8, 8) matrices; each thread passes the address of one row. `transposed` loads their transposes.
template <bool transposed> __device__ __forceinline__ void ldmatrix_x4(uint32_t (&m)[4], const void *row) {
    if constexpr (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                     : "r"(shared_address(row)));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                     : "r"(shared_address(row)));
}

// The row stride in shared memory is 16 bytes longer than the row, so that eight rows do not conflict on banks.
template <int HEAD> constexpr int STRIDE = HEAD + 8;

// Starts an asynchronous copy of ROWS rows from `first` on; zeros from row `limit` and from column `head` on.
template <int ROWS, int HEAD, class T>
__device__ __forceinline__ void cp_async_rows(T *to, const T *from, int64_t width, int first, int limit, int head) {
    constexpr int PACKS = HEAD / 8;
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * PACKS; i += THREADS) {
        int row = i / PACKS, c = i % PACKS * 8;
        bool in_bounds = first + row < limit && c < head;
        const T *source = in_bounds ? from + int64_t(first + row) * width + c : from;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to + row * STRIDE<HEAD> + c)),
                     "l"(source), "r"(in_bounds ? 16 : 0));
    }
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;"); }
// Waits for all but the last `N` copy groups, then for all threads.
template <int N> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N));
    __syncthreads();
}

// The 16 rows of a warp as A fragments, loaded from global memory.
template <int HEAD> using RowFragments = uint32_t[HEAD / 16][4];
template <int HEAD, class T>
__device__ __forceinline__ void load_row_fragments(RowFragments<HEAD> &a, const T *from, int64_t width, int first, int limit, int head, Lane lane) {
#pragma unroll
    for (int i = 0; i < HEAD / 16; i++)
#pragma unroll
        for (int part = 0; part < 4; part++) {
            int row = first + lane.first() + part % 2, c = i * 16 + part / 2 * 8 + lane.column;
            bool in_bounds = row < limit && c < head;
            a[i][part] = in_bounds ? *reinterpret_cast<const uint32_t *>(from + int64_t(row) * width + c) : 0;
        }
}

// s = a b^T, with the STEP rows of b.
template <class T, int STEP, int HEAD>
__device__ __forceinline__ void scores(float (&s)[STEP / 8][4], const RowFragments<HEAD> &a, const T *b) {
    int lane = threadIdx.x % WARP;
    const T *at = b + (lane % 8 + lane / 16 * 8) * STRIDE<HEAD> + lane / 8 % 2 * 8;
#pragma unroll
    for (int j = 0; j < STEP / 8; j++) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0;
#pragma unroll
    for (int i = 0; i < HEAD / 16; i++)
#pragma unroll
        for (int j = 0; j < STEP / 16; j++) {
            uint32_t m[4];
            ldmatrix_x4<false>(m, at + j * 16 * STRIDE<HEAD> + i * 16);
            mma_m16n8k16<T>(s[2 * j], a[i], m[0], m[1]);
            mma_m16n8k16<T>(s[2 * j + 1], a[i], m[2], m[3]);
        }
}

// o += p b, with the STEP rows of b.
template <class T, int STEP, int HEAD>
__device__ __forceinline__ void accumulate_product(float (&o)[HEAD / 8][4], const float (&p)[STEP / 8][4], const T *b) {
    int lane = threadIdx.x % WARP;
    const T *at = b + (lane % 8 + lane / 8 % 2 * 8) * STRIDE<HEAD> + lane / 16 * 8;
#pragma unroll
    for (int i = 0; i < STEP / 16; i++) {
        uint32_t a[4] = {pack_pair<T>(p[2 * i][0], p[2 * i][1]), pack_pair<T>(p[2 * i][2], p[2 * i][3]),
                         pack_pair<T>(p[2 * i + 1][0], p[2 * i + 1][1]), pack_pair<T>(p[2 * i + 1][2], p[2 * i + 1][3])};
#pragma unroll
        for (int j = 0; j < HEAD / 16; j++) {
            uint32_t m[4];
            ldmatrix_x4<true>(m, at + i * 16 * STRIDE<HEAD> + j * 16);
            mma_m16n8k16<T>(o[2 * j], a, m[0], m[1]);
            mma_m16n8k16<T>(o[2 * j + 1], a, m[2], m[3]);
        }
    }
}

template <int HEAD, class T>
__device__ __forceinline__ void write(T *to, const float (&o)[HEAD / 8][4], int64_t width, int first, int limit, int head,
                                      float scale0, float scale1, Lane lane) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = first + lane.first() + r;
        float scale = r ? scale1 : scale0;
        if (row >= limit) continue;
#pragma unroll
        for (int j = 0; j < HEAD / 8; j++)
            if (j * 8 < head)
                *reinterpret_cast<uint32_t *>(to + int64_t(row) * width + j * 8 + lane.column) =
                    pack_pair<T>(o[j][2 * r] * scale, o[j][2 * r + 1] * scale);
    }
}

// Reductions over the four threads of a row.
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Sets masked scores to -infinity; `first` is the thread's first query.
template <int STEP> __device__ __forceinline__ void apply_mask(float (&s)[STEP / 8][4], const AttentionDims &sizes, int first, int from, int keys) {
#pragma unroll
    for (int j = 0; j < STEP / 8; j++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            if (sizes.is_masked(first + c / 2, from + j * 8 + c % 2, keys)) s[j][c] = -INFINITY;
}

template <class T, int STEP, int HEAD>
__global__ void __launch_bounds__(THREADS) forward(AttentionDims s, DropoutMask masks, const T *qkv, T *y, float *logsumexp) {
    extern __shared__ __align__(16) unsigned char bytes[];
    constexpr int PART = STEP * STRIDE<HEAD>;
    T *smem_tiles = (T *)bytes; // keys and values, double-buffered
    // With a causal mask the last tiles have the most work: start them first.
    int first = (gridDim.x - 1 - blockIdx.x) * TILE, h = blockIdx.y, sample = blockIdx.z;
    int kv_head = h / (s.heads / s.kv_heads), keys = s.keys(sample);
    int limit = s.visible_keys(sample, first + TILE);
    const SampleDropoutMask mask = masks.of(sample);
    Lane lane;
    int64_t width = s.qkv_width();
    const T *base = qkv + int64_t(sample) * s.length * width;
    const T *k_at = base + (s.heads + kv_head) * s.head, *v_at = k_at + s.kv_heads * s.head;
    auto prefetch = [&](int from) {
        T *to = smem_tiles + from / STEP % 2 * 2 * PART;
        cp_async_rows<STEP, HEAD>(to, k_at, width, from, limit, s.head);
        cp_async_rows<STEP, HEAD>(to + PART, v_at, width, from, limit, s.head);
        cp_async_commit();
    };
    if (limit > 0) prefetch(0);
    RowFragments<HEAD> q;
    load_row_fragments<HEAD>(q, base + h * s.head, width, first, s.length, s.head, lane);
    float o[HEAD / 8][4] = {}, max_score[2] = {-INFINITY, -INFINITY}, exp_sum[2] = {}, scale_log2 = s.scale * LOG2E, kept_scale = mask.scale;
    int my_row = first + lane.first();
    for (int from = 0; from < limit; from += STEP) {
        if (from + STEP < limit) prefetch(from + STEP), cp_async_wait<1>();
        else cp_async_wait<0>();
        const T *k = smem_tiles + from / STEP % 2 * 2 * PART, *v = k + PART;
        float p[STEP / 8][4];
        scores<T, STEP, HEAD>(p, q, k);
        int column = from + lane.column;
        if (from + STEP > limit || (s.causal && from + STEP > first + lane.warp * 16)) apply_mask<STEP>(p, s, my_row, column, keys);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float new_max = max_score[r];
#pragma unroll
            for (int j = 0; j < STEP / 8; j++) new_max = fmaxf(new_max, fmaxf(p[j][2 * r], p[j][2 * r + 1]));
            new_max = row_max(new_max);
            // A row with no visible key so far keeps its zeros.
            float shift = new_max == -INFINITY ? 0 : new_max * scale_log2, rescale = exp2f(max_score[r] * scale_log2 - shift), sum = 0;
            max_score[r] = new_max;
#pragma unroll
            for (int j = 0; j < STEP / 8; j++)
#pragma unroll
                for (int c = 2 * r; c < 2 * r + 2; c++) sum += p[j][c] = exp2f(p[j][c] * scale_log2 - shift);
            exp_sum[r] = exp_sum[r] * rescale + sum;
#pragma unroll
            for (int j = 0; j < HEAD / 8; j++) o[j][2 * r] *= rescale, o[j][2 * r + 1] *= rescale;
        }
#pragma unroll
        for (int j = 0; j < STEP / 8; j++) {
            uint64_t square = mask.square(h, my_row, column + j * 8);
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (!mask.keeps(square, c)) p[j][c] = 0;
        }
        accumulate_product<T, STEP, HEAD>(o, p, v);
        __syncthreads(); // the next prefetch overwrites these tiles
    }
    float scale[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float all = row_sum(exp_sum[r]);
        scale[r] = all > 0 ? kept_scale / all : 0;
        if (lane.column == 0 && my_row + r < s.length)
            logsumexp[(int64_t(sample) * s.heads + h) * s.length + my_row + r] = max_score[r] * s.scale + logf(all);
    }
    T *out = y + int64_t(sample) * s.length * s.width() + h * s.head;
    write<HEAD>(out, o, s.width(), first, s.length, s.head, scale[0], scale[1], lane);
}

template <class T, int STEP, int HEAD>
__global__ void __launch_bounds__(THREADS) backward_dq(AttentionDims s, DropoutMask masks, const T *qkv, const T *dy,
                                                   const float *logsumexp, const float *delta, T *dx) {
    extern __shared__ __align__(16) unsigned char bytes[];
    constexpr int PART = STEP * STRIDE<HEAD>;
    T *smem_tiles = (T *)bytes;
    int first = (gridDim.x - 1 - blockIdx.x) * TILE, h = blockIdx.y, sample = blockIdx.z;
    int kv_head = h / (s.heads / s.kv_heads), keys = s.keys(sample);
    int limit = s.visible_keys(sample, first + TILE);
    const SampleDropoutMask mask = masks.of(sample);
    Lane lane;
    int64_t width = s.qkv_width(), at = int64_t(sample) * s.length;
    const T *base = qkv + at * width;
    const T *k_at = base + (s.heads + kv_head) * s.head, *v_at = k_at + s.kv_heads * s.head;
    auto prefetch = [&](int from) {
        T *to = smem_tiles + from / STEP % 2 * 2 * PART;
        cp_async_rows<STEP, HEAD>(to, k_at, width, from, limit, s.head);
        cp_async_rows<STEP, HEAD>(to + PART, v_at, width, from, limit, s.head);
        cp_async_commit();
    };
    if (limit > 0) prefetch(0);
    RowFragments<HEAD> q, d;
    load_row_fragments<HEAD>(q, base + h * s.head, width, first, s.length, s.head, lane);
    load_row_fragments<HEAD>(d, dy + at * s.width() + h * s.head, s.width(), first, s.length, s.head, lane);
    float dq[HEAD / 8][4] = {}, scale_log2 = s.scale * LOG2E, kept_scale = mask.scale, sum[2], a[2];
    int my_row = first + lane.first();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int64_t row = (int64_t(sample) * s.heads + h) * s.length + my_row + r;
        bool in_bounds = my_row + r < s.length;
        sum[r] = in_bounds ? logsumexp[row] * LOG2E : 0, a[r] = in_bounds ? delta[row] : 0;
    }
    for (int from = 0; from < limit; from += STEP) {
        if (from + STEP < limit) prefetch(from + STEP), cp_async_wait<1>();
        else cp_async_wait<0>();
        const T *k = smem_tiles + from / STEP % 2 * 2 * PART, *v = k + PART;
        float p[STEP / 8][4], dp[STEP / 8][4];
        scores<T, STEP, HEAD>(p, q, k);
        scores<T, STEP, HEAD>(dp, d, v);
        int column = from + lane.column;
        if (from + STEP > limit || (s.causal && from + STEP > first + lane.warp * 16))
            apply_mask<STEP>(p, s, my_row, column, keys);
#pragma unroll
        for (int j = 0; j < STEP / 8; j++) {
            uint64_t square = mask.square(h, my_row, column + j * 8);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                float slope = mask.keeps(square, c) ? dp[j][c] * kept_scale : 0;
                p[j][c] = exp2f(p[j][c] * scale_log2 - sum[c / 2]) * (slope - a[c / 2]);
            }
        }
        accumulate_product<T, STEP, HEAD>(dq, p, k);
        __syncthreads();
    }
    write<HEAD>(dx + at * width + h * s.head, dq, width, first, s.length, s.head, s.scale, s.scale, lane);
}

// Here the rows are keys. The block iterates over queries with their gradients, log-sum-exp and `delta`.
template <class T, int STEP, int HEAD>
__global__ void __launch_bounds__(THREADS) backward_dkv(AttentionDims s, DropoutMask masks, const T *qkv, const T *dy,
                                                           const float *logsumexp, const float *delta, T *dx) {
    extern __shared__ __align__(16) unsigned char bytes[];
    constexpr int PART = STEP * STRIDE<HEAD>;
    __shared__ float row_logsumexp[2][STEP], row_delta[2][STEP];
    T *smem_tiles = (T *)bytes;
    int from = blockIdx.x * TILE, kv_head = blockIdx.y, sample = blockIdx.z, group = s.heads / s.kv_heads;
    int keys = s.keys(sample);
    const SampleDropoutMask mask = masks.of(sample);
    Lane lane;
    int64_t width = s.qkv_width(), at = int64_t(sample) * s.length;
    const T *base = qkv + at * width;
    int k_column = (s.heads + kv_head) * s.head, v_column = k_column + s.kv_heads * s.head;
    // Walks all query heads that share these keys, and the steps of each head.
    int start = s.causal ? from : 0, each = (s.length - start + STEP - 1) / STEP, steps = from < keys ? each * group : 0;
    auto prefetch = [&](int step) {
        int h = kv_head * group + step / each, first = start + step % each * STEP;
        T *to = smem_tiles + step % 2 * 2 * PART;
        cp_async_rows<STEP, HEAD>(to, base + h * s.head, width, first, s.length, s.head);
        cp_async_rows<STEP, HEAD>(to + PART, dy + at * s.width() + h * s.head, s.width(), first, s.length, s.head);
        if (int i = threadIdx.x; i < STEP) {
            int64_t row = (int64_t(sample) * s.heads + h) * s.length + first + i;
            bool in_bounds = first + i < s.length;
            row_logsumexp[step % 2][i] = in_bounds ? logsumexp[row] * LOG2E : 0, row_delta[step % 2][i] = in_bounds ? delta[row] : 0;
        }
        cp_async_commit();
    };
    if (steps > 0) prefetch(0);
    RowFragments<HEAD> k, v;
    load_row_fragments<HEAD>(k, base + k_column, width, from, keys, s.head, lane);
    load_row_fragments<HEAD>(v, base + v_column, width, from, keys, s.head, lane);
    float dk[HEAD / 8][4] = {}, dv[HEAD / 8][4] = {}, scale_log2 = s.scale * LOG2E, kept_scale = mask.scale;
    int my_row = from + lane.first();
    for (int step = 0; step < steps; step++) {
        if (step + 1 < steps) prefetch(step + 1), cp_async_wait<1>();
        else cp_async_wait<0>();
        int h = kv_head * group + step / each, first = start + step % each * STEP;
        const T *q = smem_tiles + step % 2 * 2 * PART, *d = q + PART;
        float p[STEP / 8][4], ds[STEP / 8][4];
        scores<T, STEP, HEAD>(p, k, q);
        scores<T, STEP, HEAD>(ds, v, d);
        bool whole = first + STEP <= s.length && from + TILE <= keys && (!s.causal || first >= from + TILE);
#pragma unroll
        for (int j = 0; j < STEP / 8; j++) {
            int column = j * 8 + lane.column;
            uint64_t square = mask.square(h, first + column, my_row);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                // Odd columns are odd queries, which use the upper half of the draw.
                bool kept = mask.keeps(square, c % 2 * 2 + c / 2);
                bool is_masked = !whole && s.is_masked(first + column + c % 2, my_row + c / 2, keys);
                float weight = is_masked ? 0 : exp2f(p[j][c] * scale_log2 - row_logsumexp[step % 2][column + c % 2]);
                float slope = kept ? ds[j][c] * kept_scale : 0;
                ds[j][c] = weight * (slope - row_delta[step % 2][column + c % 2]);
                p[j][c] = kept ? weight : 0;
            }
        }
        accumulate_product<T, STEP, HEAD>(dv, p, d);
        accumulate_product<T, STEP, HEAD>(dk, ds, q);
        __syncthreads();
    }
    write<HEAD>(dx + at * width + k_column, dk, width, from, s.length, s.head, s.scale, s.scale, lane);
    write<HEAD>(dx + at * width + v_column, dv, width, from, s.length, s.head, kept_scale, kept_scale, lane);
}

// Launches a kernel with double-buffered dynamic shared memory; beyond 48 KiB a kernel must opt in.
template <int STEP, int HEAD, class K, class... Args>
int start(K kernel, const AttentionArgs &attn_args, int heads, cudaStream_t stream, Args... args) {
    constexpr int bytes = 4 * STEP * STRIDE<HEAD> * 2;
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;
    dim3 grid(blocks(attn_args.length, TILE), heads, attn_args.batch);
    kernel<<<grid, THREADS, bytes, stream>>>(AttentionDims(attn_args), DropoutMask(attn_args), args...);
    return cudaGetLastError();
}

// Runs the body with `T` as the type and `HEAD` as an upper bound of the head size, which is a multiple of 8 up to 128.
#define WITH_HEAD(attn_args, ...)                                                                                  \
    if ((attn_args).head % 8) return cudaErrorInvalidValue;                                                        \
    if ((attn_args).type == BF16) { using T = bf16; WITH_LARGEST((attn_args).head, __VA_ARGS__) }                       \
    if ((attn_args).type == F16) { using T = f16; WITH_LARGEST((attn_args).head, __VA_ARGS__) }                         \
    return cudaErrorInvalidValue;
#define WITH_LARGEST(head, ...)                                                                               \
    if (head <= 32) { constexpr int HEAD = 32; __VA_ARGS__ }                                                  \
    if (head <= 64) { constexpr int HEAD = 64; __VA_ARGS__ }                                                  \
    if (head <= 128) { constexpr int HEAD = 128; __VA_ARGS__ }

} // namespace

extern "C" int attention_tensor_core_forward(const AttentionArgs *attn_args, const void *qkv, void *y, void *logsumexp, cudaStream_t stream) {
    WITH_HEAD(*attn_args, {
        constexpr int STEP = HEAD <= 64 ? 64 : 32; // as many as keep the scores in registers
        return start<STEP, HEAD>(forward<T, STEP, HEAD>, *attn_args, attn_args->heads, stream, (const T *)qkv, (T *)y, (float *)logsumexp);
    })
}

// `delta` holds y . dy of every row of each head.
extern "C" int attention_tensor_core_backward(const AttentionArgs *attn_args, const void *qkv, const void *logsumexp, const void *dy,
                                         const void *delta, void *dx, cudaStream_t stream) {
    WITH_HEAD(*attn_args, {
        constexpr int STEP = 32;
        int error = start<STEP, HEAD>(backward_dq<T, STEP, HEAD>, *attn_args, attn_args->heads, stream, (const T *)qkv, (const T *)dy,
                                      (const float *)logsumexp, (const float *)delta, (T *)dx);
        if (error) return error;
        return start<STEP, HEAD>(backward_dkv<T, STEP, HEAD>, *attn_args, attn_args->kv_heads, stream, (const T *)qkv,
                                 (const T *)dy, (const float *)logsumexp, (const float *)delta, (T *)dx);
    })
}
