// Rows of channels, and how blocks lie over them: a thread keeps N neighbouring channels and goes down the rows, so
// that what belongs to a channel stays in registers and sums of columns cost no traffic.
#pragma once

#include "device.cuh"

// Rows are cut into units (what shares its numbers a channel), units into parts of `chunk` rows, one of which a block
// goes down; the last of each may be short.
struct RowPartition {
    int64_t rows, unit, chunk;
    int parts, channels;
    int units() const { return int((rows + unit - 1) / unit); }
};

// Threads of a block, and blocks that a multiprocessor runs at once.
constexpr int COLUMN_THREADS = 256, COLUMN_BLOCKS = 3;

// A block of `wide` threads along channels and `tall` along rows, `across` of which lie side by side.
struct BlockLayout {
    int packs, block_cols, block_rows, tiles_x;
    explicit BlockLayout(int packs) : packs(packs) {
        tiles_x = (packs + 63) / 64;
        block_cols = (packs + tiles_x - 1) / tiles_x;
        block_rows = COLUMN_THREADS / block_cols;
    }
    int threads() const { return block_cols * block_rows; }
    unsigned blocks(const RowPartition &partition) const { return unsigned(int64_t(tiles_x) * partition.parts * partition.units()); }
};

// Where a thread of a block stands.
struct ThreadPosition {
    int x, y; // in its block
    int pack; // its channels
    bool in;  // whether there are such
    int unit, part;
    int64_t first, end; // rows: first, first + tall, ... before end

    __device__ __forceinline__ ThreadPosition(const RowPartition &partition, const BlockLayout &layout) {
        x = threadIdx.x % layout.block_cols;
        y = threadIdx.x / layout.block_cols;
        unsigned block = blockIdx.x;
        pack = int(block % layout.tiles_x) * layout.block_cols + x;
        in = pack < layout.packs;
        block /= layout.tiles_x;
        part = block % partition.parts;
        unit = block / partition.parts;
        int64_t start = unit * partition.unit, stop = start + partition.unit;
        stop = stop < partition.rows ? stop : partition.rows;
        first = start + part * partition.chunk;
        end = first + partition.chunk;
        end = end < stop ? end : stop;
        first += y;
        if (!in) end = first;
    }
};

// Goes down a thread's rows, `U` at once: what all of them load is asked for before any of it is used.
template <int U, class Load, class Use>
__device__ __forceinline__ void for_each_row(const ThreadPosition &at, const BlockLayout &layout, Load load, Use use) {
    int64_t row = at.first, block_rows = layout.block_rows;
    for (; row + (U - 1) * block_rows < at.end; row += U * block_rows) {
        decltype(load(row)) loaded[U];
#pragma unroll
        for (int u = 0; u < U; u++) loaded[u] = load(row + u * block_rows);
#pragma unroll
        for (int u = 0; u < U; u++) use(row + u * block_rows, loaded[u]);
    }
    for (; row < at.end; row += block_rows) use(row, load(row));
}

// Values and the gradients beside them.
template <class T, int N> struct ValueAndGrad {
    Pack<T, N> x, d;
};

// Adds up `M` sums of each thread along the rows of a block, in the same order always; those of the threads y = 0
// are the block's.
template <int M, class R> __device__ __forceinline__ void block_row_sum(R (&sums)[M], const ThreadPosition &at, const BlockLayout &layout) {
    __shared__ R all[M][COLUMN_THREADS];
    int left = layout.block_rows;
#pragma unroll
    for (int m = 0; m < M; m++) all[m][threadIdx.x] = sums[m];
    __syncthreads();
    while (left > 1) {
        int half = (left + 1) / 2;
        if (at.y + half < left) {
#pragma unroll
            for (int m = 0; m < M; m++) all[m][threadIdx.x] += all[m][threadIdx.x + half * layout.block_cols];
        }
        __syncthreads();
        left = half;
    }
#pragma unroll
    for (int m = 0; m < M; m++) sums[m] = all[m][threadIdx.x];
}
