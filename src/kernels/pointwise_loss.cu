// Pointwise losses: one warp per sample. The backward pass replaces predictions by their gradients in place.
#include "cuda/activation.cuh"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * WARP;

enum PointwiseLossFn : int { SQUARED_ERROR, HUBER, BCE_WITH_LOGITS, ABSOLUTE_ERROR };

__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }

template <class T, int kind>
__global__ void __launch_bounds__(THREADS)
    loss_and_grad(T *p, const float *targets, double *loss, double *weight, uint32_t *hits, int64_t samples, int64_t values,
            Acc<T> delta, Acc<T> grad_scale, bool backward) {
    using R = Acc<T>;
    int64_t sample = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (sample >= samples) return;
    p += sample * values;
    targets += sample * values;
    R sum = 0;
    bool all_correct = true;
    for (int64_t i = threadIdx.x % WARP; i < values; i += WARP) {
        R prediction = to_acc(p[i]), t = R(targets[i]), value, slope;
        if constexpr (kind == SQUARED_ERROR) {
            value = (prediction - t) * (prediction - t);
            slope = (prediction - t) + (prediction - t);
        } else if constexpr (kind == ABSOLUTE_ERROR) {
            R d = prediction - t;
            value = d < R(0) ? -d : d;
            slope = d < R(0) ? R(-1) : d > R(0) ? R(1) : R(0);
        } else if constexpr (kind == HUBER) {
            R d = prediction - t, size = d < R(0) ? -d : d;
            bool far = size > delta;
            value = far ? delta * (size - R(0.5) * delta) : R(0.5) * d * d;
            slope = far ? (d < R(0) ? -delta : delta) : d;
        } else {
            R small = exp_of(prediction < R(0) ? prediction : -prediction);
            R sigmoid = prediction < R(0) ? small / (R(1) + small) : R(1) / (R(1) + small);
            value = (prediction < R(0) ? R(0) : prediction) - prediction * t + log_of(R(1) + small);
            slope = sigmoid - t;
        }
        sum += value;
        all_correct &= (prediction > R(0)) == (t > R(0.5));
        if (backward) p[i] = from_acc<T>(slope * grad_scale);
    }
    sum = warp_sum(sum);
    all_correct = __all_sync(0xffffffff, all_correct);
    if (threadIdx.x % WARP == 0) {
        loss[sample] = double(sum) / double(values);
        weight[sample] = 1;
        hits[sample] = kind == BCE_WITH_LOGITS && all_correct ? 7 : 1;
    }
}

} // namespace

extern "C" int pointwise_loss_and_grad(int type, int kind, void *p, const void *targets, double *loss, double *weight,
                                      uint32_t *hits, int64_t samples, int64_t values, double delta, double grad_scale,
                                      int backward, cudaStream_t stream) {
    if (samples == 0 || values == 0) return 0;
    unsigned grid = blocks(samples, WARPS);
    auto *t = (const float *)targets;
#define COMPARE(KIND)                                                                                         \
    loss_and_grad<T, KIND><<<grid, THREADS, 0, stream>>>((T *)p, t, loss, weight, hits, samples, values,            \
                                                   Acc<T>(delta), Acc<T>(grad_scale), backward)
    WITH_TYPE(type, {
        switch (kind) {
        case SQUARED_ERROR: COMPARE(SQUARED_ERROR); break;
        case HUBER: COMPARE(HUBER); break;
        case BCE_WITH_LOGITS: COMPARE(BCE_WITH_LOGITS); break;
        case ABSOLUTE_ERROR: COMPARE(ABSOLUTE_ERROR); break;
        default: return cudaErrorInvalidValue;
        }
    })
#undef COMPARE
    return cudaGetLastError();
}
