// Rows of channels, and how blocks lie over them: a thread keeps N neighbouring channels and goes down the rows, so
// that what belongs to a channel stays in registers and sums of columns cost no traffic.
#pragma once

#include "device.cuh"

// Rows are cut into units (what shares its numbers a channel), units into parts of `chunk` rows, one of which a block
// goes down; the last of each may be short.
struct Cut {
    int64_t rows, unit, chunk;
    int parts, channels;
    int units() const { return int((rows + unit - 1) / unit); }
};

constexpr int COLUMN_THREADS = 256;

// A block of `wide` threads along channels and `tall` along rows, `across` of which lie side by side.
struct Lanes {
    int packs, wide, tall, across;
    explicit Lanes(int packs) : packs(packs) {
        across = (packs + 63) / 64;
        wide = (packs + across - 1) / across;
        tall = COLUMN_THREADS / wide;
    }
    int threads() const { return wide * tall; }
    unsigned blocks(const Cut &cut) const { return unsigned(int64_t(across) * cut.parts * cut.units()); }
};

// Where a thread of a block stands.
struct Place {
    int x, y; // in its block
    int pack; // its channels
    bool in;  // whether there are such
    int unit, part;
    int64_t first, end; // rows: first, first + tall, ... before end

    __device__ __forceinline__ Place(const Cut &cut, const Lanes &lanes) {
        x = threadIdx.x % lanes.wide;
        y = threadIdx.x / lanes.wide;
        unsigned block = blockIdx.x;
        pack = int(block % lanes.across) * lanes.wide + x;
        in = pack < lanes.packs;
        block /= lanes.across;
        part = block % cut.parts;
        unit = block / cut.parts;
        int64_t start = unit * cut.unit, stop = start + cut.unit;
        stop = stop < cut.rows ? stop : cut.rows;
        first = start + part * cut.chunk;
        end = first + cut.chunk;
        end = end < stop ? end : stop;
        first += y;
        if (!in) end = first;
    }
};

// Adds up `M` sums of each thread along the rows of a block, in the same order always; those of the threads y = 0
// are the block's.
template <int M, class R> __device__ __forceinline__ void add_up(R (&sums)[M], const Place &at, const Lanes &lanes) {
    __shared__ R all[M][COLUMN_THREADS];
    int left = lanes.tall;
#pragma unroll
    for (int m = 0; m < M; m++) all[m][threadIdx.x] = sums[m];
    __syncthreads();
    while (left > 1) {
        int half = (left + 1) / 2;
        if (at.y + half < left) {
#pragma unroll
            for (int m = 0; m < M; m++) all[m][threadIdx.x] += all[m][threadIdx.x + half * lanes.wide];
        }
        __syncthreads();
        left = half;
    }
#pragma unroll
    for (int m = 0; m < M; m++) sums[m] = all[m][threadIdx.x];
}
