// Transposes one matrix per sample, in tiles that go through shared memory.
#include "cuda/device.cuh"

namespace {

constexpr int TILE = 32, BLOCK_ROWS = 8;

// `V` is any type of the element's size.
template <class V>
__global__ void __launch_bounds__(TILE *BLOCK_ROWS) transpose(const V *x, V *y, int64_t batch, int rows, int cols) {
    __shared__ V tile[TILE][TILE + 1];
    for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
        int64_t base = b * rows * cols;
        int col = blockIdx.x * TILE + threadIdx.x;
        for (int i = threadIdx.y; i < TILE; i += BLOCK_ROWS) {
            int64_t row = int64_t(blockIdx.y) * TILE + i;
            if (row < rows && col < cols) tile[i][threadIdx.x] = x[base + row * cols + col];
        }
        __syncthreads();
        int64_t row = int64_t(blockIdx.y) * TILE + threadIdx.x;
        for (int i = threadIdx.y; i < TILE; i += BLOCK_ROWS) {
            int64_t to = int64_t(blockIdx.x) * TILE + i;
            if (row < rows && to < cols) y[base + to * rows + row] = tile[threadIdx.x][i];
        }
        __syncthreads();
    }
}

} // namespace

// (batch, rows, cols) to (batch, cols, rows), with elements of `size` bytes.
extern "C" int transpose_forward(int size, const void *x, void *y, int64_t batch, int rows, int cols, cudaStream_t stream) {
    if (batch == 0 || rows == 0 || cols == 0) return 0;
    if (blocks(rows, TILE) > 65535) return cudaErrorInvalidConfiguration;
    dim3 grid(blocks(cols, TILE), blocks(rows, TILE), unsigned(batch < 65535 ? batch : 65535)), threads(TILE, BLOCK_ROWS);
    switch (size) {
    case 2: transpose<uint16_t><<<grid, threads, 0, stream>>>((const uint16_t *)x, (uint16_t *)y, batch, rows, cols); break;
    case 4: transpose<uint32_t><<<grid, threads, 0, stream>>>((const uint32_t *)x, (uint32_t *)y, batch, rows, cols); break;
    case 8: transpose<uint64_t><<<grid, threads, 0, stream>>>((const uint64_t *)x, (uint64_t *)y, batch, rows, cols); break;
    default: return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}
