// `GradStatsConfig::compute` of grad_stats.rs on the device, in a single thread.
#include "cuda/device.cuh"

namespace {

// (loss, weight, count, top1, top5, norm, grad_scale)
constexpr int METRICS = 5, NORM = 5, GRAD_SCALE = 6;

__global__ void accumulate(const double *sums, double *stats, bool first) {
    int i = threadIdx.x;
    if (i < METRICS) stats[i] = first ? sums[i] : stats[i] + sums[i];
}

__global__ void finalize(const double *squares, double *stats, double divisor, double loss_scale, double max_norm) {
    double loss = stats[0], weight = stats[1];
    double factor = weight > 0 ? divisor / (weight * loss_scale) : 0.0, norm = sqrt(*squares) * factor;
    double mean = loss / (weight > 0 ? weight : 1.0);
    double clip_factor = fmin(max_norm / norm, 1.0);
    stats[NORM] = norm;
    stats[GRAD_SCALE] = weight > 0 && isfinite(mean) && isfinite(norm) ? clip_factor * factor : double(NAN);
}

} // namespace

// `sums` are the metric sums of one micro-batch; those of the `first` one overwrite.
extern "C" int grad_stats_accumulate(const void *sums, void *stats, int first, cudaStream_t stream) {
    accumulate<<<1, WARP, 0, stream>>>((const double *)sums, (double *)stats, first);
    return cudaGetLastError();
}

// `max_norm` is infinite without clipping.
extern "C" int grad_stats_finalize(const void *squares, void *stats, double divisor, double loss_scale, double max_norm, cudaStream_t stream) {
    finalize<<<1, 1, 0, stream>>>((const double *)squares, (double *)stats, divisor, loss_scale, max_norm);
    return cudaGetLastError();
}
