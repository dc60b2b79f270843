// The elementwise backward work of a linear layer around its GEMMs, in one pass over `d`: `d *= act'(v)` in place,
// `v = act(v)` if the activation must be recomputed, and the column sums of `d`, accumulated into the bias gradient.
// Sums run over fixed ranges of rows and are added in order, so that results are deterministic.
#include "cuda/activation.cuh"

namespace {

// A block owns a tile of columns in a range of rows, with `LANES` threads along the columns. A thread loads
// `ROWS_IN_FLIGHT` rows at a time, more if each row is a single load.
constexpr int THREADS = 256;
template <int A> constexpr int ROWS_IN_FLIGHT = A == IDENTITY ? 4 : 2;
template <int N> constexpr int LANES = N == 1 ? 32 : 16;
template <int N> constexpr int WIDTH = LANES<N> * N;

// Per column tile, the number of blocks that have written their sums. Zero between launches; launches on one stream do
// not overlap.
constexpr int TILES = 4096;
__device__ unsigned arrived_blocks[TILES];

// Handles `columns` columns of a matrix with rows of `n` values. The last block of a tile to arrive adds up the partial
// sums.
template <int A, class T, int N>
__global__ void __launch_bounds__(THREADS) activation_bias_backward(T *v, T *d, Acc<T> *partial, Acc<T> *bias, int64_t rows, int n,
                                                   int columns, int64_t range, bool recompute) {
    using R = Acc<T>;
    constexpr int ROW_LANES = THREADS / LANES<N>;
    __shared__ R sums[ROW_LANES][WIDTH<N> + 1];
    __shared__ bool is_last;
    int lane = threadIdx.x % LANES<N>, row_lane = threadIdx.x / LANES<N>;
    int column = blockIdx.x * WIDTH<N> + lane * N;
    int64_t first = blockIdx.y * range, last = first + range < rows ? first + range : rows;
    R sum[N] = {};
    if (column < columns) {
        for (int64_t top = first + row_lane; top < last; top += ROWS_IN_FLIGHT<A> * ROW_LANES) {
            Pack<T, N> values[ROWS_IN_FLIGHT<A>], at[ROWS_IN_FLIGHT<A>];
            auto each = [&](auto f) {
#pragma unroll
                for (int i = 0; i < ROWS_IN_FLIGHT<A>; i++)
                    if (int64_t row = top + i * ROW_LANES; row < last) f(values[i], at[i], row * n + column);
            };
            each([&](auto &values, auto &at, int64_t place) {
                values = Pack<T, N>::load(d + place);
                if constexpr (A != IDENTITY) at = Pack<T, N>::load(v + place);
            });
            each([&](auto &values, auto &at, int64_t place) {
                if constexpr (A != IDENTITY) {
#pragma unroll
                    for (int k = 0; k < N; k++)
                        values.v[k] = from_acc<T>(to_acc(values.v[k]) * slope_of<A, is_low_precision<T>>(to_acc(at.v[k])));
                    values.store(d + place);
                    if (recompute) {
#pragma unroll
                        for (int k = 0; k < N; k++) at.v[k] = from_acc<T>(value_of<A, is_low_precision<T>>(to_acc(at.v[k])));
                        at.store(v + place);
                    }
                }
#pragma unroll
                for (int k = 0; k < N; k++) sum[k] += to_acc(values.v[k]);
            });
        }
    }
#pragma unroll
    for (int k = 0; k < N; k++) sums[row_lane][lane * N + k] = sum[k];
    __syncthreads();
    // From here on, each thread handles one column.
    column = blockIdx.x * WIDTH<N> + threadIdx.x % WIDTH<N>;
    int share = threadIdx.x / WIDTH<N>, shares = THREADS / WIDTH<N>;
    if (share == 0 && column < columns) {
        R all = 0;
#pragma unroll
        for (int i = 0; i < ROW_LANES; i++) all += sums[i][threadIdx.x];
        partial[int64_t(blockIdx.y) * n + column] = all;
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&arrived_blocks[blockIdx.x], 1) == gridDim.y - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    R all = 0;
    if (column < columns)
        for (int part = share; part < gridDim.y; part += shares) all += __ldcg(partial + int64_t(part) * n + column);
    sums[share][threadIdx.x % WIDTH<N>] = all;
    __syncthreads();
    if (share == 0 && column < columns) {
        for (int i = 1; i < shares; i++) all += sums[i][threadIdx.x];
        bias[column] += all;
    }
    if (threadIdx.x == 0) arrived_blocks[blockIdx.x] = 0;
}

template <int A, class T, int N>
void launch(T *v, T *d, Acc<T> *partial, Acc<T> *bias, int64_t rows, int n, int ranges, bool recompute, cudaStream_t stream) {
    for (int from = 0; from < n; from += TILES * WIDTH<N>) {
        int columns = n - from < TILES * WIDTH<N> ? n - from : TILES * WIDTH<N>;
        dim3 grid(blocks(columns, WIDTH<N>), ranges);
        activation_bias_backward<A, T, N><<<grid, THREADS, 0, stream>>>(v ? v + from : v, d + from, partial + from, bias + from, rows, n,
                                                       columns, (rows + ranges - 1) / ranges, recompute);
    }
}

} // namespace

// `partial` holds `ranges` rows of `n` sums. `v` is null without an activation.
extern "C" int linear_activation_bias_backward(int type, int act, void *v, void *d, void *partial, void *bias, int64_t rows, int n,
                              int ranges, int recompute, cudaStream_t stream) {
    if (rows == 0 || n == 0) return 0;
    WITH_TYPE(type, {
        using R = Acc<T>;
        constexpr int N = Pack<T>::size;
        bool wide = aligned(int64_t(n) * sizeof(T), {v, d});
        WITH_ACT(act, {
            if (wide) launch<A, T, N>((T *)v, (T *)d, (R *)partial, (R *)bias, rows, n, ranges, recompute, stream);
            else launch<A, T, 1>((T *)v, (T *)d, (R *)partial, (R *)bias, rows, n, ranges, recompute, stream);
        })
    })
    return cudaGetLastError();
}
