// What a linear map does beside its products: `d *= act'(v)` in place, and the column sums of `d` onto the
// gradient of its bias. One pass over `d`; sums are of fixed ranges of rows, added up in order.
#include "cuda/activation.cuh"
#include "cuda/columns.cuh"

namespace {

constexpr int THREADS = 128;

// Thread x of block (columns, range) owns N columns of a range of rows.
template <int A, class T, int N>
__global__ void __launch_bounds__(THREADS) through(const T *v, T *d, Acc<T> *partial, int64_t rows, int n, int64_t range) {
    int column = (blockIdx.x * THREADS + threadIdx.x) * N;
    if (column >= n) return;
    int64_t first = blockIdx.y * range, last = first + range < rows ? first + range : rows;
    Acc<T> sums[N] = {};
#pragma unroll 4
    for (int64_t row = first; row < last; row++) {
        auto values = Pack<T, N>::load(d + row * n + column);
        if constexpr (A != IDENTITY) {
            auto at = Pack<T, N>::load(v + row * n + column);
#pragma unroll
            for (int k = 0; k < N; k++) values.v[k] = down<T>(up(values.v[k]) * slope_of<A, is_narrow<T>>(up(at.v[k])));
            values.store(d + row * n + column);
        }
#pragma unroll
        for (int k = 0; k < N; k++) sums[k] += up(values.v[k]);
    }
#pragma unroll
    for (int k = 0; k < N; k++) partial[int64_t(blockIdx.y) * n + column + k] = sums[k];
}

} // namespace

// `partial` has room for `ranges` rows of `n` sums. `v` is null where there is no activation.
extern "C" int linear_through(int type, int act, const void *v, void *d, void *partial, void *bias, int64_t rows, int n,
                              int ranges, cudaStream_t stream) {
    if (rows == 0 || n == 0) return 0;
    int64_t range = (rows + ranges - 1) / ranges;
    WITH_TYPE(type, {
        using R = Acc<T>;
        constexpr int N = Pack<T>::size;
        bool wide = aligned(int64_t(n) * sizeof(T), {v, d});
        WITH_ACT(act, {
            if (wide) {
                dim3 grid(blocks(n, THREADS * N), ranges);
                through<A, T, N><<<grid, THREADS, 0, stream>>>((const T *)v, (T *)d, (R *)partial, rows, n, range);
            } else {
                dim3 grid(blocks(n, THREADS), ranges);
                through<A, T, 1><<<grid, THREADS, 0, stream>>>((const T *)v, (T *)d, (R *)partial, rows, n, range);
            }
        })
        launch_add<R>((const R *)partial, (R *)bias, nullptr, ranges, n, stream);
    })
    return cudaGetLastError();
}
