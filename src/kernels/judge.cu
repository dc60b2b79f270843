// What is to be done with the gradients of an update: `Terms::judge` in judge.rs, by one thread.
#include "cuda/device.cuh"

namespace {

// (loss, weight, count, first, among five, norm, what gradients are multiplied with)
constexpr int TALLIED = 5, NORM = 5, GRAD_SCALE = 6;

__global__ void add(const double *sums, double *judged, bool first) {
    int i = threadIdx.x;
    if (i < TALLIED) judged[i] = first ? sums[i] : judged[i] + sums[i];
}

__global__ void decide(const double *squares, double *judged, double nominal, double scale, double clip) {
    double loss = judged[0], weight = judged[1];
    double factor = weight > 0 ? nominal / (weight * scale) : 0.0, norm = sqrt(*squares) * factor;
    double mean = loss / (weight > 0 ? weight : 1.0);
    double part = fmin(clip / norm, 1.0);
    judged[NORM] = norm;
    judged[GRAD_SCALE] = weight > 0 && isfinite(mean) && isfinite(norm) ? part * factor : double(NAN);
}

} // namespace

// `sums` are of one micro-batch; those of the `first` overwrite.
extern "C" int judge_add(const void *sums, void *judged, int first, cudaStream_t stream) {
    add<<<1, WARP, 0, stream>>>((const double *)sums, (double *)judged, first);
    return cudaGetLastError();
}

// `clip` is infinite where nothing is shortened.
extern "C" int judge(const void *squares, void *judged, double nominal, double scale, double clip, cudaStream_t stream) {
    decide<<<1, 1, 0, stream>>>((const double *)squares, (double *)judged, nominal, scale, clip);
    return cudaGetLastError();
}
