// Rows of scores: their losses, and the rows turned into gradients in place. A block has a row at a time. Where two
// rows fit in shared memory, one is worked on there while the next is on its way; else a row is read once for its
// statistics and once, out of the caches, for the gradient.
#include <cuda_pipeline.h>

#include "cuda/device.cuh"

namespace {

constexpr uint32_t IGNORE = UINT32_MAX;

// `exp(x - base)`. Scores of 16 bits are worth no exact exponential.
template <class T> __device__ __forceinline__ Acc<T> exp_from(Acc<T> x, Acc<T> base) {
    if constexpr (sizeof(T) == 2) {
        constexpr float LOG2_E = 1.4426950408889634f;
        float y;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaf(x, LOG2_E, -base * LOG2_E)));
        return y;
    } else if constexpr (sizeof(T) == 4) return expf(x - base);
    else return exp(x - base);
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

// Threads of a block that holds its rows, or does not.
constexpr int threads_if(bool held) { return held ? 1024 : 512; }

// Row `row` of `scores`. `packed(p)` gives its packs, in one thread the same each time.
template <class T, int N, class F> __device__ void score_row(const Asked &q, int64_t row, F packed) {
    using R = Acc<T>;
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
    auto values = [&](R (&s)[N], int p) {
        auto v = packed(p);
#pragma unroll
        for (int k = 0; k < N; k++) s[k] = up(v.v[k]);
        if (bias) {
#pragma unroll
            for (int k = 0; k < N; k++) s[k] += up(bias[p * N + k]);
        }
    };
    auto value = [&](T s, int c) { return bias ? up(s) + up(bias[c]) : up(s); };
    R of_target = value(scores[goals[0]], goals[0]), of_other = value(scores[goals[1]], goals[1]);
    int judged = int(goals[0]);
    bool smooth = q.smoothing > 0;

    R largest = -INFINITY, total = 0;
    double spread = 0;
    unsigned better = 0; // higher than the target, or as high and before it
    auto meet = [&](const auto &s, int first) {
        constexpr int n = sizeof s / sizeof(R); // known, so that `s` stays in registers
        R top = s[0];
#pragma unroll
        for (int k = 1; k < n; k++) top = s[k] > top ? s[k] : top;
        if (top > largest) {
            // Nothing was added yet where the largest is still infinitely low.
            total = largest == R(-INFINITY) ? total : total * exp_from<T>(largest, top);
            largest = top;
        }
        R base = largest == R(-INFINITY) ? R(0) : largest;
#pragma unroll
        for (int k = 0; k < n; k++) total += exp_from<T>(s[k], base);
        // Of what lies before the target, the equal are better too.
        if (first > judged) {
#pragma unroll
            for (int k = 0; k < n; k++) better += s[k] > of_target;
        } else if (first + n <= judged) {
#pragma unroll
            for (int k = 0; k < n; k++) better += s[k] >= of_target;
        } else {
#pragma unroll
            for (int k = 0; k < n; k++) better += s[k] > of_target || (s[k] == of_target && first + k < judged);
        }
        if (smooth) {
#pragma unroll
            for (int k = 0; k < n; k++) spread += double(q.weights ? q.weights[first + k] : 1.0f) * double(s[k]);
        }
    };
    for (int p = threadIdx.x; p < packs; p += blockDim.x) {
        R s[N];
        values(s, p);
        meet(s, p * N);
    }
    for (int c = packs * N + threadIdx.x; c < classes; c += blockDim.x) {
        R s[1] = {value(scores[c], c)};
        meet(s, c);
    }
    R top = block_max(largest);
    total = block_sum(largest == R(-INFINITY) ? total : total * exp_from<T>(largest, top));
    better = block_sum(better);
    if (smooth) spread = block_sum(spread) - q.all_weights * double(top);

    double share = smooth ? q.smoothing / classes : 0, hard[2], all_hard = 0;
    auto class_weight = [&](uint32_t c) { return q.weights ? double(q.weights[c]) : 1.0; };
    int of = q.per_row == 3 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        hard[i] = i < of ? (1 - q.smoothing) * shares[i] * class_weight(goals[i]) : 0;
        all_hard += hard[i];
    }
    // The last thread has the least to do.
    if (threadIdx.x == blockDim.x - 1) {
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
    R scale = R(q.scale), pull = scale * R(all_hard + (smooth ? share * q.all_weights : 0)) / total;
    R pull0 = scale * R(hard[0]), pull1 = scale * R(hard[1]), even = scale * R(share);
    // All have read the target's scores: the sums above waited for every thread.
    auto slope = [&](R s) { return exp_from<T>(s, top) * pull; };
    auto smoothed = [&](int c) { return smooth ? even * R(q.weights ? q.weights[c] : 1.0f) : R(0); };
    for (int p = threadIdx.x; p < packs; p += blockDim.x) {
        R s[N];
        values(s, p);
#pragma unroll
        for (int k = 0; k < N; k++) s[k] = slope(s[k]);
        if (smooth) {
#pragma unroll
            for (int k = 0; k < N; k++) s[k] -= smoothed(p * N + k);
        }
        Pack<T, N> d;
#pragma unroll
        for (int k = 0; k < N; k++) d.v[k] = down<T>(s[k]);
        // Said outright: left to itself the compiler writes value by value.
        if constexpr (sizeof d == 16) __stwb((uint4 *)(scores + p * N), *(uint4 *)&d);
        else d.store(scores + p * N);
    }
    for (int c = packs * N + threadIdx.x; c < classes; c += blockDim.x)
        scores[c] = down<T>(slope(value(scores[c], c)) - smoothed(c));
    // The targets' own, once the others are written: no comparison for each class.
    __syncthreads();
    if (threadIdx.x == 0) {
        bool same = goals[0] == goals[1];
        R first = slope(of_target) - smoothed(goals[0]) - pull0 - (of == 2 && same ? pull1 : R(0));
        if (of == 2 && !same) scores[goals[1]] = down<T>(slope(of_other) - smoothed(goals[1]) - pull1);
        scores[goals[0]] = down<T>(first);
    }
}

template <class T, int N, bool HELD> __global__ void __launch_bounds__(threads_if(HELD)) score(Asked q) {
    auto scores = [&](int64_t row, int p) { return (const T *)q.scores + row * q.stride + p * N; };
    if constexpr (HELD) {
        extern __shared__ char shared[];
        // A thread reads what it fetched itself, so none waits for another.
        auto *held = (Pack<T, N> *)shared;
        int packs = q.classes / N, at = 0;
        auto fetch = [&](int64_t row, int at) {
            for (int p = threadIdx.x; row < q.rows && p < packs; p += blockDim.x)
                __pipeline_memcpy_async(held + at * packs + p, scores(row, p), sizeof(Pack<T, N>));
            __pipeline_commit();
        };
        fetch(blockIdx.x, at);
        for (int64_t row = blockIdx.x; row < q.rows; row += gridDim.x, at ^= 1) {
            fetch(row + gridDim.x, at ^ 1);
            __pipeline_wait_prior(1);
            score_row<T, N>(q, row, [&](int p) { return held[at * packs + p]; });
        }
    } else {
        int64_t row = blockIdx.x;
        score_row<T, N>(q, row, [&](int p) { return Pack<T, N>::load(scores(row, p)); });
    }
}

// What the card in use has of something.
int card_has(cudaDeviceAttr what) {
    int device = 0, found = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&found, what, device);
    return found;
}

} // namespace

extern "C" int cross_entropy_score(const Asked *asked, cudaStream_t stream) {
    const Asked &q = *asked;
    if (q.rows == 0 || q.classes == 0) return 0;
    WITH_TYPE(q.type, {
        constexpr int N = Pack<T>::size;
        bool wide = aligned(q.stride * sizeof(T), {q.scores});
        int packs = wide ? q.classes / N : q.classes;
        // Two rows, and what the sums over a block take.
        static const int room = card_has(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 2048;
        static const int processors = card_has(cudaDevAttrMultiProcessorCount);
        int64_t bytes = 2 * int64_t(packs) * sizeof(Pack<T, N>);
        if (wide && packs > 1024 && bytes <= room) {
            auto *kernel = score<T, N, true>;
            static const auto allowed =
                cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room);
            if (allowed) return allowed;
            unsigned grid = q.rows < processors ? unsigned(q.rows) : unsigned(processors);
            kernel<<<grid, threads_if(true), bytes, stream>>>(q);
            return cudaGetLastError();
        }
        int threads = packs > 512 ? 512 : packs > 64 ? 128 : 32;
        if (wide) score<T, N, false><<<unsigned(q.rows), threads, 0, stream>>>(q);
        else score<T, 1, false><<<unsigned(q.rows), threads, 0, stream>>>(q);
    })
    return cudaGetLastError();
}
