// Losses of single values: a warp a sample, whose predictions become their gradients in place.
#include "cuda/activation.cuh"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * WARP;

enum Kind : int { SQUARED, HUBER, BINARY };

__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }

template <class T, int kind>
__global__ void __launch_bounds__(THREADS)
    compare(T *p, const float *targets, double *loss, double *weight, uint32_t *hits, int64_t samples, int64_t values,
            Acc<T> delta, Acc<T> pull, bool learn) {
    using R = Acc<T>;
    int64_t sample = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (sample >= samples) return;
    p += sample * values;
    targets += sample * values;
    R sum = 0;
    bool agree = true;
    for (int64_t i = threadIdx.x % WARP; i < values; i += WARP) {
        R at = up(p[i]), t = R(targets[i]), value, slope;
        if constexpr (kind == SQUARED) {
            value = (at - t) * (at - t);
            slope = (at - t) + (at - t);
        } else if constexpr (kind == HUBER) {
            R d = at - t, size = d < R(0) ? -d : d;
            bool far = size > delta;
            value = far ? delta * (size - R(0.5) * delta) : R(0.5) * d * d;
            slope = far ? (d < R(0) ? -delta : delta) : d;
        } else {
            R small = exp_of(at < R(0) ? at : -at);
            R sigmoid = at < R(0) ? small / (R(1) + small) : R(1) / (R(1) + small);
            value = (at < R(0) ? R(0) : at) - at * t + log_of(R(1) + small);
            slope = sigmoid - t;
        }
        sum += value;
        agree &= (at > R(0)) == (t > R(0.5));
        if (learn) p[i] = down<T>(slope * pull);
    }
    sum = warp_sum(sum);
    agree = __all_sync(0xffffffff, agree);
    if (threadIdx.x % WARP == 0) {
        loss[sample] = double(sum) / double(values);
        weight[sample] = 1;
        hits[sample] = kind == BINARY && agree ? 7 : 1;
    }
}

} // namespace

extern "C" int pointwise_loss_compare(int type, int kind, void *p, const void *targets, double *loss, double *weight,
                                      uint32_t *hits, int64_t samples, int64_t values, double delta, double pull,
                                      int learn, cudaStream_t stream) {
    if (samples == 0 || values == 0) return 0;
    unsigned grid = blocks(samples, WARPS);
    auto *t = (const float *)targets;
#define COMPARE(KIND)                                                                                         \
    compare<T, KIND><<<grid, THREADS, 0, stream>>>((T *)p, t, loss, weight, hits, samples, values,            \
                                                   Acc<T>(delta), Acc<T>(pull), learn)
    WITH_TYPE(type, {
        switch (kind) {
        case SQUARED: COMPARE(SQUARED); break;
        case HUBER: COMPARE(HUBER); break;
        case BINARY: COMPARE(BINARY); break;
        default: return cudaErrorInvalidValue;
        }
    })
#undef COMPARE
    return cudaGetLastError();
}
