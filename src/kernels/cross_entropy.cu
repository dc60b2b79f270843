// Rows of scores: their losses, and the rows turned into gradients in place. A block a row, which is read once
// for its statistics and once, out of the caches, for the gradient.
#include "cuda/device.cuh"

namespace {

constexpr uint32_t IGNORE = UINT32_MAX;


// Scores of 16 bits are worth no exact exponential.
template <class T> __device__ __forceinline__ Acc<T> exp_for(Acc<T> x) {
    if constexpr (sizeof(T) == 2) return __expf(x);
    else if constexpr (sizeof(T) == 4) return expf(x);
    else return exp(x);
}

// `Asked` in cross_entropy/card.rs.
struct Asked {
    int type, learn;
    void *scores;            // (rows, stride)
    const void *bias;        // (classes) or null
    const float *weights;    // (classes) or null
    const uint32_t *targets; // (rows, 1 or 3)
    double *loss, *weight;   // (rows)
    uint32_t *hits;          // (rows): judged, right, among the first five
    int64_t rows, stride;
    int classes, per_row;
    double smoothing, all_weights, scale;
};

constexpr uint32_t JUDGED = 1, TOP1 = 2, TOP5 = 4;

template <class T, int N> __global__ void __launch_bounds__(512) score(Asked q) {
    using R = Acc<T>;
    int64_t row = blockIdx.x;
    T *scores = (T *)q.scores + row * q.stride;
    const T *bias = (const T *)q.bias;
    const uint32_t *target = q.targets + row * q.per_row;
    int classes = q.classes, packs = classes / N; // what is left over is read value by value
    uint32_t goals[2] = {target[0], target[0]};
    double shares[2] = {1, 0};
    bool ignored = target[0] == IGNORE;
    if (q.per_row == 3 && !ignored) {
        // What is judged is the first, so the larger share comes first.
        double share = double(__uint_as_float(target[2]));
        bool turn = share < 0.5;
        goals[turn] = target[0], goals[!turn] = target[1];
        shares[turn] = share, shares[!turn] = 1 - share;
    }
    // A class that is not there would be read outside of the row: the loss is not a number.
    bool wrong = !ignored && (goals[0] >= uint32_t(classes) || goals[1] >= uint32_t(classes));
    if (ignored || wrong) {
        if (q.learn)
            for (int c = threadIdx.x; c < classes; c += blockDim.x) scores[c] = down<T>(R(0));
        if (threadIdx.x == 0) {
            q.loss[row] = wrong ? double(NAN) : 0;
            q.weight[row] = 0;
            q.hits[row] = wrong ? JUDGED : 0;
        }
        return;
    }
    auto value = [&](T s, int c) { return bias ? up(s) + up(bias[c]) : up(s); };
    R of_target = value(scores[goals[0]], goals[0]), of_other = value(scores[goals[1]], goals[1]);
    int judged = int(goals[0]);
    bool smooth = q.smoothing > 0;

    R largest = -INFINITY, total = 0;
    double spread = 0;
    unsigned better = 0; // higher than the target, or as high and before it
    auto meet = [&](const R *s, int first, int n) {
        R top = s[0];
        for (int k = 1; k < n; k++) top = s[k] > top ? s[k] : top;
        if (top > largest) {
            // Nothing was added yet where the largest is still infinitely low.
            total = largest == R(-INFINITY) ? total : total * exp_for<T>(largest - top);
            largest = top;
        }
        R base = largest == R(-INFINITY) ? R(0) : largest;
        // Of what lies before the target, the equal are better too.
        bool before = first + n <= judged, after = first > judged;
        for (int k = 0; k < n; k++) {
            total += exp_for<T>(s[k] - base);
            better += s[k] > of_target;
            if (!after) better += s[k] == of_target && (before || first + k < judged);
            if (smooth) spread += double(q.weights ? q.weights[first + k] : 1.0f) * double(s[k]);
        }
    };
    for (int p = threadIdx.x; p < packs; p += blockDim.x) {
        auto v = Pack<T, N>::load(scores + p * N);
        R s[N];
#pragma unroll
        for (int k = 0; k < N; k++) s[k] = value(v.v[k], p * N + k);
        meet(s, p * N, N);
    }
    for (int c = packs * N + threadIdx.x; c < classes; c += blockDim.x) {
        R s = value(scores[c], c);
        meet(&s, c, 1);
    }
    R top = block_max(largest);
    total = block_sum(largest == R(-INFINITY) ? total : total * exp_for<T>(largest - top));
    better = block_sum(better);
    if (smooth) spread = block_sum(spread) - q.all_weights * double(top);

    double share = q.smoothing / classes, hard[2], all_hard = 0;
    auto class_weight = [&](uint32_t c) { return q.weights ? double(q.weights[c]) : 1.0; };
    int of = q.per_row == 3 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        hard[i] = i < of ? (1 - q.smoothing) * shares[i] * class_weight(goals[i]) : 0;
        all_hard += hard[i];
    }
    if (threadIdx.x == 0) {
        double log_total = log(double(total));
        double loss = hard[0] * (log_total - double(of_target - top));
        double weight = shares[0] * class_weight(goals[0]);
        if (of == 2) {
            loss += hard[1] * (log_total - double(of_other - top));
            weight += shares[1] * class_weight(goals[1]);
        }
        if (smooth) loss += share * (q.all_weights * log_total - spread);
        bool known = of_target == of_target;
        q.loss[row] = loss;
        q.weight[row] = weight;
        q.hits[row] = JUDGED | (known && better == 0 ? TOP1 : 0) | (known && better < 5 ? TOP5 : 0);
    }
    if (!q.learn) return;
    R pull = R(q.scale * (all_hard + (smooth ? share * q.all_weights : 0))) / total;
    R pull0 = R(q.scale * hard[0]), pull1 = R(q.scale * hard[1]), even = R(q.scale * share);
    // All have read the target's scores: the sums above waited for every thread.
    auto slope = [&](R s, int c) {
        R d = exp_for<T>(s - top) * pull;
        if (smooth) d -= even * R(q.weights ? q.weights[c] : 1.0f);
        return d;
    };
    for (int p = threadIdx.x; p < packs; p += blockDim.x) {
        auto v = Pack<T, N>::load(scores + p * N);
#pragma unroll
        for (int k = 0; k < N; k++) v.v[k] = down<T>(slope(value(v.v[k], p * N + k), p * N + k));
        v.store(scores + p * N);
    }
    for (int c = packs * N + threadIdx.x; c < classes; c += blockDim.x) scores[c] = down<T>(slope(value(scores[c], c), c));
    // The targets' own, once the others are written: no comparison for each class.
    __syncthreads();
    if (threadIdx.x == 0) {
        bool same = goals[0] == goals[1];
        R first = slope(of_target, goals[0]) - pull0 - (of == 2 && same ? pull1 : R(0));
        if (of == 2 && !same) scores[goals[1]] = down<T>(slope(of_other, goals[1]) - pull1);
        scores[goals[0]] = down<T>(first);
    }
}

} // namespace

extern "C" int cross_entropy_score(const Asked *asked, cudaStream_t stream) {
    const Asked &q = *asked;
    if (q.rows == 0 || q.classes == 0) return 0;
    WITH_TYPE(q.type, {
        constexpr int N = Pack<T>::size;
        bool wide = aligned(q.stride * sizeof(T), {q.scores});
        int packs = wide ? q.classes / N : q.classes;
        int threads = packs > 512 ? 512 : packs > 64 ? 128 : 32;
        if (wide) score<T, N><<<unsigned(q.rows), threads, 0, stream>>>(q);
        else score<T, 1><<<unsigned(q.rows), threads, 0, stream>>>(q);
    })
    return cudaGetLastError();
}
