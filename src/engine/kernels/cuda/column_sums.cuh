// Sums over rows, per column, in two stages and a fixed order: blocks sum ranges of rows, then a second kernel adds the
// partial sums of all ranges to the gradient. `linear::cuda_row_ranges` in Rust chooses the number of ranges.
#pragma once

#include "device.cuh"

namespace {

constexpr int COLUMN_ROWS = 8; // rows that a block of `partial_column_sums` reads at a time

// `partial[part, column]` is the sum of `value(row, column)` over the rows of the part.
template <class R, class F>
__global__ void __launch_bounds__(WARP *COLUMN_ROWS)
    partial_column_sums(R *partial, int64_t rows, int64_t columns, int64_t rows_each, F value) {
    __shared__ R sums[COLUMN_ROWS][WARP];
    int64_t column = int64_t(blockIdx.x) * WARP + threadIdx.x;
    int64_t first = blockIdx.y * rows_each, last = first + rows_each < rows ? first + rows_each : rows;
    R sum = 0;
    if (column < columns)
        for (int64_t row = first + threadIdx.y; row < last; row += COLUMN_ROWS) sum += value(row, column);
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < columns) {
#pragma unroll
        for (int i = 1; i < COLUMN_ROWS; i++) sum += sums[i][threadIdx.x];
        partial[blockIdx.y * columns + column] = sum;
    }
}

// The gradients to accumulate into; the first `count` are used.
template <class R> struct GradTargets {
    R *gradients[3];
    int count;
};

// Columns per block of `add_partial_sums`, and groups of parts that it sums in parallel.
constexpr int ADD_COLUMNS = 8, ADD_SPLITS = 128;

// `into[y][column] += sum over parts of partial[part, y, column]`. A block covers ADD_COLUMNS columns of one `y`.
template <class R>
__global__ void __launch_bounds__(ADD_COLUMNS *ADD_SPLITS)
    add_partial_sums(const R *partial, GradTargets<R> into, int parts, int64_t columns) {
    __shared__ R sums[ADD_SPLITS][ADD_COLUMNS + 1];
    if (!into.gradients[blockIdx.y]) return; // of a frozen parameter
    int64_t column = int64_t(blockIdx.x) * ADD_COLUMNS + threadIdx.x;
    R sum = 0;
    if (column < columns) {
#pragma unroll 4
        for (int part = threadIdx.y; part < parts; part += ADD_SPLITS)
            sum += partial[(int64_t(part) * gridDim.y + blockIdx.y) * columns + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    // From here on, a warp reduces one column.
    int thread = threadIdx.y * ADD_COLUMNS + threadIdx.x, lane = thread % WARP, mine = thread / WARP;
    column = int64_t(blockIdx.x) * ADD_COLUMNS + mine;
    if (mine >= ADD_COLUMNS || column >= columns) return;
    sum = 0;
#pragma unroll
    for (int i = 0; i < ADD_SPLITS; i += WARP) sum += sums[lane + i][mine];
    sum = warp_sum(sum);
    if (lane == 0) into.gradients[blockIdx.y][column] += sum;
}

template <class R, class F>
void launch_partial_sums(R *partial, int64_t rows, int64_t columns, int parts, F value, cudaStream_t stream) {
    dim3 grid(blocks(columns, WARP), parts), threads(WARP, COLUMN_ROWS);
    partial_column_sums<R, F><<<grid, threads, 0, stream>>>(partial, rows, columns, (rows + parts - 1) / parts, value);
}

template <class R>
void launch_add_partials(const R *partial, GradTargets<R> into, int parts, int64_t columns, cudaStream_t stream) {
    dim3 grid(blocks(columns, ADD_COLUMNS), into.count), threads(ADD_COLUMNS, ADD_SPLITS);
    add_partial_sums<R><<<grid, threads, 0, stream>>>(partial, into, parts, columns);
}

// Reads a matrix; `stride` is the distance between rows in values.
template <class T> struct MatrixValues {
    const T *of;
    int64_t stride;
    __device__ __forceinline__ Acc<T> operator()(int64_t row, int64_t column) const {
        return to_acc(of[row * stride + column]);
    }
};

} // namespace
