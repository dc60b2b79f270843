// Sums the metrics of all rows: (loss, weight, count, top1, top5).
#include "cuda/device.cuh"

namespace {

__global__ void __launch_bounds__(1024)
    reduce_rows(const double *loss, const double *weight, const uint32_t *hits, double *metric_sums, int64_t rows) {
    double sums[5] = {};
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < rows; i += 1024) {
        uint32_t hit = hits[i];
        sums[0] += loss[i];
        sums[1] += weight[i];
        sums[2] += hit & 1;
        sums[3] += hit >> 1 & 1;
        sums[4] += hit >> 2 & 1;
    }
#pragma unroll
    for (int k = 0; k < 5; k++) {
        double sum = block_sum(sums[k]);
        if (threadIdx.x == 0) metric_sums[k] = sum;
    }
}

} // namespace

extern "C" int metric_sums_reduce(const void *loss, const void *weight, const void *hits, void *metric_sums, int64_t rows,
                         cudaStream_t stream) {
    reduce_rows<<<1, 1024, 0, stream>>>((const double *)loss, (const double *)weight, (const uint32_t *)hits, (double *)metric_sums,
                                rows);
    return cudaGetLastError();
}
