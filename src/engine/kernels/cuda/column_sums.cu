// Column sums of a strided matrix, accumulated into a gradient.
#include "column_sums.cuh"

// `d` is (rows, columns) with rows `stride` apart; `partial` is (parts, columns), `into` (columns).
extern "C" int column_sums_accumulate(int type, const void *d, void *partial, void *into, int64_t rows, int64_t stride,
                           int64_t columns, int parts, cudaStream_t stream) {
    if (rows == 0 || columns == 0) return 0;
    WITH_TYPE(type, {
        using R = Acc<T>;
        launch_partial_sums<R>((R *)partial, rows, columns, parts, MatrixValues<T>{(const T *)d, stride}, stream);
        launch_add_partials<R>((R *)partial, {{(R *)into}, 1}, parts, columns, stream);
    })
    return cudaGetLastError();
}
