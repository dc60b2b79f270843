// How blocks are laid out over rows of channels: a thread keeps N adjacent channels and walks down the rows, so
// per-channel values stay in registers and column sums cost no memory traffic.
#pragma once

#include "device.cuh"

// Rows are split into units, within which all rows share their per-channel parameters. Units are split into parts of
// `chunk` rows, one part per block. The last unit and the last part may be short.
struct RowPartition {
    int64_t rows, unit, chunk;
    int parts, channels;
    int units() const { return int((rows + unit - 1) / unit); }
};

// Threads per block, and resident blocks per SM.
constexpr int COLUMN_THREADS = 256, COLUMN_BLOCKS = 3;

// A block has `block_cols` threads along channels and `block_rows` along rows; `tiles_x` blocks cover all channels.
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

// The channels and rows that a thread processes.
struct ThreadPosition {
    int x, y; // within the block
    int pack; // index of its channel pack
    bool in;  // whether that pack exists
    int unit, part;
    int64_t first, end; // rows: first, first + block_rows, ... below end

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

// Walks a thread's rows, `U` at a time, and issues the loads of all `U` rows before it uses any of them.
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

// A pack of values and the matching gradients.
template <class T, int N> struct ValueAndGrad {
    Pack<T, N> x, d;
};

// Reduces `M` sums per thread along the rows of a block, in a fixed order. The threads with y = 0 hold the block's
// sums.
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
