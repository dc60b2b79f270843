// Rows of scores: their losses, and the rows turned into gradients in place. A block has a row at a time. A row that fits
// is held in shared memory, where each value makes room for one of the block's next row as soon as its gradient is
// written; else it is read once for its statistics and once, out of the caches, for the gradient.
#include <cuda_pipeline.h>

#include "cuda/scores.cuh"

namespace {

// `exp(x - base)`. Scores of 16 bits are worth no exact exponential.
template <class T> __device__ __forceinline__ Acc<T> exp_from(Acc<T> x, Acc<T> base) {
    if constexpr (sizeof(T) == 2) return power_of_two(fmaf(x, LOG2_E, -base * LOG2_E));
    else if constexpr (sizeof(T) == 4) return expf(x - base);
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
    int classes, filled, per_row; // columns from `classes` to `filled` get no gradient
    double smoothing, all_weights, scale;
};

constexpr int THREADS = 512;

// The classes a row is to have, with their shares and scores. What is judged is the first, whose share is the larger.
template <class R> struct Goal {
    uint32_t classes[2];
    double shares[2];
    R scores[2];
    bool ignored, wrong;
};

template <class T> __device__ __forceinline__ Goal<Acc<T>> goal_of(const Asked &q, int64_t row) {
    const uint32_t *target = q.targets + row * q.per_row;
    Goal<Acc<T>> goal = {{target[0], target[0]}, {1, 0}, {0, 0}, target[0] == IGNORE, false};
    if (goal.ignored) return goal;
    if (q.per_row == 3) {
        double share = double(__uint_as_float(target[2]));
        bool turn = share < 0.5;
        goal.classes[0] = target[turn], goal.classes[1] = target[!turn];
        goal.shares[0] = turn ? 1 - share : share, goal.shares[1] = turn ? share : 1 - share;
    }
    // A class that is not there would be read outside of the row: the loss is not a number.
    goal.wrong = goal.classes[0] >= uint32_t(q.classes) || goal.classes[1] >= uint32_t(q.classes);
    if (goal.wrong) return goal;
    const T *scores = (const T *)q.scores + row * q.stride, *bias = (const T *)q.bias;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t c = goal.classes[i];
        goal.scores[i] = bias ? up(scores[c]) + up(bias[c]) : up(scores[c]);
    }
    return goal;
}

// What is known of a row once its scores were met.
template <class T> struct Met {
    using R = Acc<T>;
    R largest = -INFINITY, total = 0; // the sum of exponentials, from the largest
    double spread = 0;                // the weighted sum of scores, where labels are smooth
    unsigned better = 0;              // higher than the target, or as high and before it

    __device__ __forceinline__ void from(R top) {
        // Nothing was added yet where the largest is still infinitely low.
        if (largest != R(-INFINITY)) total *= exp_from<T>(largest, top);
        largest = top;
    }

    __device__ __forceinline__ void join_warp(bool smooth) {
        from(warp_max(largest));
        total = warp_sum(total);
        better = warp_sum(better);
        if (smooth) spread = warp_sum(spread);
    }

    // Of all threads of a block, given to each. `room` is not touched again before all have passed the next such sum.
    __device__ __forceinline__ void join_block(Met *room, bool smooth) {
        int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = (blockDim.x + WARP - 1) / WARP;
        join_warp(smooth);
        if (warps == 1) return;
        if (lane == 0) room[warp] = *this;
        __syncthreads();
        *this = lane < warps ? room[lane] : Met{};
        join_warp(smooth);
    }
};

// Rows that all blocks have in hand.
__device__ __forceinline__ int64_t rows_at_once() { return int64_t(gridDim.x) * blockDim.y; }

// Row `row`. `packed(p)` gives its packs, in one thread the same each time; `done(p)` says that it was for the last time.
template <class T, int N, class F, class D>
__device__ __forceinline__ Goal<Acc<T>> score_row(const Asked &q, const Goal<Acc<T>> &goal, int64_t row, Met<T> *room,
                                                  F packed, D done) {
    using R = Acc<T>;
    T *scores = (T *)q.scores + row * q.stride;
    const T *bias = (const T *)q.bias;
    int classes = q.classes, packs = classes / N; // what is left over is read value by value
    auto next = [&] { return row + rows_at_once() < q.rows ? goal_of<T>(q, row + rows_at_once()) : goal; };
    for (int c = classes + threadIdx.x; q.learn && c < q.filled; c += blockDim.x) scores[c] = down<T>(R(0));
    if (goal.ignored || goal.wrong) {
        Pack<T, N> none;
#pragma unroll
        for (int k = 0; k < N; k++) none.v[k] = down<T>(R(0));
        for (int p = threadIdx.x; p < packs; p += blockDim.x) {
            if (q.learn) none.store(scores + p * N);
            done(p);
        }
        for (int c = packs * N + threadIdx.x; q.learn && c < classes; c += blockDim.x) scores[c] = down<T>(R(0));
        if (threadIdx.x == 0) {
            q.loss[row] = goal.wrong ? double(NAN) : 0;
            q.weight[row] = 0;
            q.hits[row] = goal.wrong ? JUDGED : 0;
        }
        return next();
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
    auto value = [&](int c) { return bias ? up(scores[c]) + up(bias[c]) : up(scores[c]); };
    int judged = int(goal.classes[0]);
    R of_target = goal.scores[0];
    bool smooth = q.smoothing > 0;

    Met<T> met;
    auto meet = [&](const auto &s, int first) {
        constexpr int n = sizeof s / sizeof(R); // known, so that `s` stays in registers
        R top = s[0];
#pragma unroll
        for (int k = 1; k < n; k++) top = s[k] > top ? s[k] : top;
        if (top > met.largest) met.from(top);
        R base = met.largest == R(-INFINITY) ? R(0) : met.largest;
#pragma unroll
        for (int k = 0; k < n; k++) met.total += exp_from<T>(s[k], base);
        // Of what lies before the target, the equal are better too.
        if (first > judged) {
#pragma unroll
            for (int k = 0; k < n; k++) met.better += s[k] > of_target;
        } else if (first + n <= judged) {
#pragma unroll
            for (int k = 0; k < n; k++) met.better += s[k] >= of_target;
        } else {
#pragma unroll
            for (int k = 0; k < n; k++) met.better += s[k] > of_target || (s[k] == of_target && first + k < judged);
        }
        if (smooth) {
#pragma unroll
            for (int k = 0; k < n; k++) met.spread += double(q.weights ? q.weights[first + k] : 1.0f) * double(s[k]);
        }
    };
    for (int p = threadIdx.x; p < packs; p += blockDim.x) {
        R s[N];
        values(s, p);
        meet(s, p * N);
    }
    for (int c = packs * N + threadIdx.x; c < classes; c += blockDim.x) {
        R s[1] = {value(c)};
        meet(s, c);
    }
    met.join_block(room, smooth);
    R top = met.largest, total = met.total;
    auto after = next(); // on its way while this row's gradients are made

    double share = smooth ? q.smoothing / classes : 0, hard[2], all_hard = 0;
    auto class_weight = [&](uint32_t c) { return q.weights ? double(q.weights[c]) : 1.0; };
    int of = q.per_row == 3 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        hard[i] = i < of ? (1 - q.smoothing) * goal.shares[i] * class_weight(goal.classes[i]) : 0;
        all_hard += hard[i];
    }
    // The last thread has the least to do.
    if (threadIdx.x == blockDim.x - 1) {
        double log_total = log(double(total)), loss = 0, weight = 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (i >= of) break;
            loss += hard[i] * (log_total - double(goal.scores[i] - top));
            weight += goal.shares[i] * class_weight(goal.classes[i]);
        }
        if (smooth) loss += share * (q.all_weights * log_total - (met.spread - q.all_weights * double(top)));
        bool known = of_target == of_target;
        q.loss[row] = loss;
        q.weight[row] = weight;
        q.hits[row] = JUDGED | (known && met.better == 0 ? TOP1 : 0) | (known && met.better < 5 ? TOP5 : 0);
    }
    if (!q.learn) {
        for (int p = threadIdx.x; p < packs; p += blockDim.x) done(p);
        return after;
    }
    R scale = R(q.scale), pull = scale * R(all_hard + (smooth ? share * q.all_weights : 0)) / total;
    R pulls[2] = {scale * R(hard[0]), scale * R(hard[1])}, even = scale * R(share);
    auto slope = [&](R s) { return exp_from<T>(s, top) * pull; };
    auto smoothed = [&](int c) { return smooth ? even * R(q.weights ? q.weights[c] : 1.0f) : R(0); };
    // What the goals take off a class.
    auto pulled = [&](int c) {
        return (c == goal.classes[0] ? pulls[0] : R(0)) + (of == 2 && c == goal.classes[1] ? pulls[1] : R(0));
    };
    for (int p = threadIdx.x; p < packs; p += blockDim.x) {
        R s[N];
        values(s, p);
#pragma unroll
        for (int k = 0; k < N; k++) s[k] = slope(s[k]);
        if (smooth) {
#pragma unroll
            for (int k = 0; k < N; k++) s[k] -= smoothed(p * N + k);
        }
        if (p == goal.classes[0] / N || p == goal.classes[1] / N) {
#pragma unroll
            for (int k = 0; k < N; k++) s[k] -= pulled(p * N + k);
        }
        Pack<T, N> d;
#pragma unroll
        for (int k = 0; k < N; k++) d.v[k] = down<T>(s[k]);
        // Said outright: left to itself the compiler writes value by value.
        if constexpr (sizeof d == 16) __stwb((uint4 *)(scores + p * N), *(uint4 *)&d);
        else d.store(scores + p * N);
        done(p);
    }
    for (int c = packs * N + threadIdx.x; c < classes; c += blockDim.x)
        scores[c] = down<T>(slope(value(c)) - smoothed(c) - pulled(c));
    return after;
}

template <class T, int N, bool HELD> __global__ void __launch_bounds__(THREADS, HELD ? 2 : 1) score(Asked q) {
    extern __shared__ char shared[];
    __shared__ __align__(16) char sums[2][sizeof(Met<T>) * THREADS / WARP];
    // A thread reads what it fetched itself, so none waits for another.
    auto *held = (Pack<T, N> *)shared;
    int packs = q.classes / N, turn = 0;
    auto from = [&](int64_t row, int p) { return (const T *)q.scores + row * q.stride + p * N; };
    if constexpr (HELD)
        for (int p = threadIdx.x; p < packs; p += blockDim.x)
            __pipeline_memcpy_async(held + p, from(blockIdx.x, p), sizeof(Pack<T, N>));
    int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= q.rows) return;
    auto goal = goal_of<T>(q, row);
    for (; row < q.rows; row += rows_at_once(), turn ^= 1) {
        auto packed = [&](int p) {
            if constexpr (HELD) return held[p];
            else return Pack<T, N>::load(from(row, p));
        };
        auto done = [&](int p) {
            if constexpr (HELD)
                if (row + rows_at_once() < q.rows)
                    __pipeline_memcpy_async(held + p, from(row + rows_at_once(), p), sizeof(Pack<T, N>));
        };
        if constexpr (HELD) {
            __pipeline_commit();
            __pipeline_wait_prior(0);
        }
        goal = score_row<T, N>(q, goal, row, (Met<T> *)sums[turn], packed, done);
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
        // Less what the sums over a block take.
        static const int room = card_has(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 4096;
        static const int processors = card_has(cudaDevAttrMultiProcessorCount);
        int64_t bytes = int64_t(packs) * sizeof(Pack<T, N>);
        if (wide && packs > 1024 && bytes <= room) {
            auto *kernel = score<T, N, true>;
            static const auto allowed =
                cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room);
            if (allowed) return allowed;
            int each = 1;
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, THREADS, bytes);
            int64_t grid = int64_t(processors) * (each > 0 ? each : 1);
            kernel<<<unsigned(q.rows < grid ? q.rows : grid), THREADS, bytes, stream>>>(q);
            return cudaGetLastError();
        }
        // Warps that need none other have rows of their own.
        dim3 threads = packs > 512 ? dim3(512) : packs > 64 ? dim3(128) : dim3(WARP, 4);
        if (wide) score<T, N, false><<<blocks(q.rows, threads.y), threads, 0, stream>>>(q);
        else score<T, 1, false><<<blocks(q.rows, threads.y), threads, 0, stream>>>(q);
    })
    return cudaGetLastError();
}
