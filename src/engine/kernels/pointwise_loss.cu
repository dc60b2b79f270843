// Pointwise losses: one warp per sample. The backward pass replaces predictions by their gradients in place.
#include "cuda/activation.cuh"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * WARP;

enum PointwiseLossFn : int { SQUARED_ERROR, HUBER, BCE_WITH_LOGITS, ABSOLUTE_ERROR, FOCAL };

__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }

// `PointwiseLossArgs` in pointwise_loss/gpu.rs.
struct PointwiseLossArgs {
    int type, kind, backward;
    void *p;                       // (samples, values)
    const float *targets;          // (samples, per_sample)
    const float *positive_weights; // (outputs) or null
    double *loss, *weight;         // (samples)
    uint32_t *hits;                // (samples)
    int64_t samples, values, per_sample, outputs; // per_sample is values, or values + 1 with the sample's weight last
    double parameter;              // delta of Huber, gamma of the focal loss
    double smoothing, grad_scale;
};

template <class T, int kind> __global__ void __launch_bounds__(THREADS) loss_and_grad(PointwiseLossArgs q) {
    using R = Acc<T>;
    constexpr bool binary = kind == BCE_WITH_LOGITS || kind == FOCAL;
    int64_t sample = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (sample >= q.samples) return;
    T *p = (T *)q.p + sample * q.values;
    const float *targets = q.targets + sample * q.per_sample;
    double weight = q.per_sample > q.values ? double(targets[q.values]) : 1.0;
    R delta = R(q.parameter), grad_scale = R(q.grad_scale * weight), sum = 0;
    R kept = R(1 - q.smoothing), moved = R(q.smoothing / 2);
    bool all_correct = true;
    for (int64_t i = threadIdx.x % WARP; i < q.values; i += WARP) {
        R prediction = to_acc(p[i]), t = R(targets[i]) * kept + moved, value, slope;
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
            R small = exp_of(prediction < R(0) ? prediction : -prediction), log = log_of(R(1) + small);
            R large_part = R(1) / (R(1) + small), small_part = small / (R(1) + small);
            R yes = prediction < R(0) ? small_part : large_part, no = prediction < R(0) ? large_part : small_part;
            // Losses for the targets 1 and 0.
            R if_one = (prediction < R(0) ? -prediction : R(0)) + log, if_zero = (prediction < R(0) ? R(0) : prediction) + log;
            R one = q.positive_weights ? t * R(q.positive_weights[i % q.outputs]) : t, zero = R(1) - t;
            if constexpr (kind == FOCAL) {
                R gamma = delta, fade_one = exp_of(-gamma * if_zero), fade_zero = exp_of(-gamma * if_one);
                value = one * fade_one * if_one + zero * fade_zero * if_zero;
                slope = zero * fade_zero * (yes + gamma * no * if_zero) - one * fade_one * (no + gamma * yes * if_one);
            } else {
                value = one * if_one + zero * if_zero;
                slope = zero * yes - one * no;
            }
        }
        sum += value;
        all_correct &= (prediction > R(0)) == (t > R(0.5));
        if (q.backward) p[i] = from_acc<T>(slope * grad_scale);
    }
    sum = warp_sum(sum);
    all_correct = __all_sync(0xffffffff, all_correct);
    if (threadIdx.x % WARP == 0) {
        q.loss[sample] = weight * (double(sum) / double(q.values));
        q.weight[sample] = weight;
        q.hits[sample] = binary && all_correct ? 7 : 1;
    }
}

} // namespace

extern "C" int pointwise_loss_and_grad(const PointwiseLossArgs *args, cudaStream_t stream) {
    const PointwiseLossArgs &q = *args;
    if (q.samples == 0 || q.values == 0) return 0;
    unsigned grid = blocks(q.samples, WARPS);
#define COMPARE(KIND) loss_and_grad<T, KIND><<<grid, THREADS, 0, stream>>>(q)
    WITH_TYPE(q.type, {
        switch (q.kind) {
        case SQUARED_ERROR: COMPARE(SQUARED_ERROR); break;
        case HUBER: COMPARE(HUBER); break;
        case BCE_WITH_LOGITS: COMPARE(BCE_WITH_LOGITS); break;
        case ABSOLUTE_ERROR: COMPARE(ABSOLUTE_ERROR); break;
        case FOCAL: COMPARE(FOCAL); break;
        default: return cudaErrorInvalidValue;
        }
    })
#undef COMPARE
    return cudaGetLastError();
}
