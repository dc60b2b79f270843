// Loss of each row of logits; the backward pass also replaces the row by its gradient in place. A block handles one row
// at a time. A row that fits is held in shared memory, where each pack is replaced by a pack of the block's next row as
// soon as its gradient is written. Longer rows are read twice: once for the statistics and once, from cache, for the
// gradient.
#include <cuda_pipeline.h>

#include "cuda/cross_entropy.cuh"

namespace {

// `exp(x - base)`; for 16-bit logits an approximation is accurate enough.
template <class T> __device__ __forceinline__ Acc<T> exp_from(Acc<T> x, Acc<T> base) {
    if constexpr (sizeof(T) == 2) return exp2_approx(fmaf(x, LOG2_E, -base * LOG2_E));
    else if constexpr (sizeof(T) == 4) return expf(x - base);
    else return exp(x - base);
}

// `CrossEntropyArgs` in cross_entropy/gpu.rs.
struct CrossEntropyArgs {
    int type, backward;
    void *logits;            // (rows, stride)
    const void *bias;        // (classes) or null
    const float *class_weights;    // (classes) or null
    const uint32_t *targets; // (rows, 1 to 3): a class; a class and its weight; two classes and a fraction
    double *loss, *weight;   // (rows)
    uint32_t *hits;          // (rows): COUNTED, TOP1, TOP5
    int64_t rows, stride;
    int classes, padded_classes, per_row; // columns classes..padded_classes get zero gradient
    double smoothing, focal_gamma, class_weight_sum, scale;
};

constexpr int THREADS = 512;

// The target classes of a row with their fractions and logits. Metrics count the first class, which has the larger
// fraction.
template <class R> struct SoftTarget {
    uint32_t classes[2];
    double fractions[2];
    R logits[2];
    double weight; // of the sample
    bool ignored, wrong;
};

template <class T> __device__ __forceinline__ SoftTarget<Acc<T>> soft_target_of(const CrossEntropyArgs &q, int64_t row) {
    const uint32_t *target = q.targets + row * q.per_row;
    SoftTarget<Acc<T>> soft_target = {{target[0], target[0]}, {1, 0}, {0, 0}, 1, target[0] == IGNORE_INDEX, false};
    if (soft_target.ignored) return soft_target;
    if (q.per_row == 2) soft_target.weight = double(__uint_as_float(target[1]));
    if (q.per_row == 3) {
        double share = double(__uint_as_float(target[2]));
        bool turn = share < 0.5;
        soft_target.classes[0] = target[turn], soft_target.classes[1] = target[!turn];
        soft_target.fractions[0] = turn ? 1 - share : share, soft_target.fractions[1] = turn ? share : 1 - share;
    }
    // An invalid class would read outside of the row: the loss becomes NaN instead.
    soft_target.wrong = soft_target.classes[0] >= uint32_t(q.classes) || soft_target.classes[1] >= uint32_t(q.classes);
    if (soft_target.wrong) return soft_target;
    const T *logits = (const T *)q.logits + row * q.stride, *bias = (const T *)q.bias;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t c = soft_target.classes[i];
        soft_target.logits[i] = bias ? to_acc(logits[c]) + to_acc(bias[c]) : to_acc(logits[c]);
    }
    return soft_target;
}

// Online softmax statistics of a row.
template <class T> struct RowStats {
    using R = Acc<T>;
    R max_logit = -INFINITY, total = 0; // sum of exp(logit - max_logit)
    double weighted_sum = 0;                // weighted sum of logits, for label smoothing
    unsigned higher_count = 0;              // logits above the target's, or equal at a lower index

    __device__ __forceinline__ void from(R top) {
        // While max_logit is still -infinity, the sum is empty.
        if (max_logit != R(-INFINITY)) total *= exp_from<T>(max_logit, top);
        max_logit = top;
    }

    __device__ __forceinline__ void join_warp(bool smooth) {
        from(warp_max(max_logit));
        total = warp_sum(total);
        higher_count = warp_sum(higher_count);
        if (smooth) weighted_sum = warp_sum(weighted_sum);
    }

    // Reduces over all threads of a block and returns the result to each. The caller must not reuse `smem` before all
    // threads have passed the next reduction.
    __device__ __forceinline__ void join_block(RowStats *smem, bool smooth) {
        int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = (blockDim.x + WARP - 1) / WARP;
        join_warp(smooth);
        if (warps == 1) return;
        if (lane == 0) smem[warp] = *this;
        __syncthreads();
        *this = lane < warps ? smem[lane] : RowStats{};
        join_warp(smooth);
    }
};

// Rows that the whole grid processes at a time.
__device__ __forceinline__ int64_t grid_rows() { return int64_t(gridDim.x) * blockDim.y; }

// Processes row `row`. `packed(p)` returns its packs; a thread always reads the same ones. `done(p)` marks the last
// read of a pack. Returns the target of the thread block's next row.
template <class T, int N, class F, class D>
__device__ __forceinline__ SoftTarget<Acc<T>> loss_grad_row(const CrossEntropyArgs &q, const SoftTarget<Acc<T>> &soft_target, int64_t row, RowStats<T> *smem,
                                                  F packed, D done) {
    using R = Acc<T>;
    T *logits = (T *)q.logits + row * q.stride;
    const T *bias = (const T *)q.bias;
    int classes = q.classes, packs = classes / N; // the remainder is read value by value
    auto next = [&] { return row + grid_rows() < q.rows ? soft_target_of<T>(q, row + grid_rows()) : soft_target; };
    for (int c = classes + threadIdx.x; q.backward && c < q.padded_classes; c += blockDim.x) logits[c] = from_acc<T>(R(0));
    if (soft_target.ignored || soft_target.wrong) {
        Pack<T, N> none;
#pragma unroll
        for (int k = 0; k < N; k++) none.v[k] = from_acc<T>(R(0));
        for (int p = threadIdx.x; p < packs; p += blockDim.x) {
            if (q.backward) none.store(logits + p * N);
            done(p);
        }
        for (int c = packs * N + threadIdx.x; q.backward && c < classes; c += blockDim.x) logits[c] = from_acc<T>(R(0));
        if (threadIdx.x == 0) {
            q.loss[row] = soft_target.wrong ? double(NAN) : 0;
            q.weight[row] = 0;
            q.hits[row] = soft_target.wrong ? COUNTED : 0;
        }
        return next();
    }
    auto values = [&](R (&s)[N], int p) {
        auto v = packed(p);
#pragma unroll
        for (int k = 0; k < N; k++) s[k] = to_acc(v.v[k]);
        if (bias) {
#pragma unroll
            for (int k = 0; k < N; k++) s[k] += to_acc(bias[p * N + k]);
        }
    };
    auto value = [&](int c) { return bias ? to_acc(logits[c]) + to_acc(bias[c]) : to_acc(logits[c]); };
    int main_class = int(soft_target.classes[0]);
    R target_logit = soft_target.logits[0];
    bool smooth = q.smoothing > 0;

    RowStats<T> stats;
    auto accumulate = [&](const auto &s, int first) {
        constexpr int n = sizeof s / sizeof(R); // a constant, so that `s` stays in registers
        R top = s[0];
#pragma unroll
        for (int k = 1; k < n; k++) top = s[k] > top ? s[k] : top;
        if (top > stats.max_logit) stats.from(top);
        R base = stats.max_logit == R(-INFINITY) ? R(0) : stats.max_logit;
#pragma unroll
        for (int k = 0; k < n; k++) stats.total += exp_from<T>(s[k], base);
        // Before the target, equal logits rank higher too.
        if (first > main_class) {
#pragma unroll
            for (int k = 0; k < n; k++) stats.higher_count += s[k] > target_logit;
        } else if (first + n <= main_class) {
#pragma unroll
            for (int k = 0; k < n; k++) stats.higher_count += s[k] >= target_logit;
        } else {
#pragma unroll
            for (int k = 0; k < n; k++) stats.higher_count += s[k] > target_logit || (s[k] == target_logit && first + k < main_class);
        }
        if (smooth) {
#pragma unroll
            for (int k = 0; k < n; k++) stats.weighted_sum += double(q.class_weights ? q.class_weights[first + k] : 1.0f) * double(s[k]);
        }
    };
    for (int p = threadIdx.x; p < packs; p += blockDim.x) {
        R s[N];
        values(s, p);
        accumulate(s, p * N);
    }
    for (int c = packs * N + threadIdx.x; c < classes; c += blockDim.x) {
        R s[1] = {value(c)};
        accumulate(s, c);
    }
    stats.join_block(smem, smooth);
    R top = stats.max_logit, total = stats.total;
    auto after = next(); // loads while this row's gradients are computed

    double share = smooth ? q.smoothing / classes * soft_target.weight : 0, hard_weights[2], hard_weight_sum = 0;
    auto class_weight = [&](uint32_t c) { return q.class_weights ? double(q.class_weights[c]) : 1.0; };
    int of = q.per_row == 3 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        hard_weights[i] = i < of ? (1 - q.smoothing) * soft_target.weight * soft_target.fractions[i] * class_weight(soft_target.classes[i]) : 0;
        hard_weight_sum += hard_weights[i];
    }
    // Factors of the focal loss and of its gradient: those of the cross-entropy, times a function of the probability.
    double fade = 1, gradient_fade = 1;
    if (q.focal_gamma > 0) {
        double log_p = double(target_logit - top) - log(double(total)), missing = -expm1(log_p);
        fade = pow(missing, q.focal_gamma);
        gradient_fade = missing > 0 ? fade - q.focal_gamma * exp(log_p) * pow(missing, q.focal_gamma - 1) * log_p : 0;
    }
    // The last thread has the least other work.
    if (threadIdx.x == blockDim.x - 1) {
        double log_total = log(double(total)), loss = 0, weight = 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (i >= of) break;
            loss += fade * hard_weights[i] * (log_total - double(soft_target.logits[i] - top));
            weight += soft_target.weight * soft_target.fractions[i] * class_weight(soft_target.classes[i]);
        }
        if (smooth) loss += share * (q.class_weight_sum * log_total - (stats.weighted_sum - q.class_weight_sum * double(top)));
        bool known = target_logit == target_logit;
        q.loss[row] = loss;
        q.weight[row] = weight;
        q.hits[row] = COUNTED | (known && stats.higher_count == 0 ? TOP1 : 0) | (known && stats.higher_count < 5 ? TOP5 : 0);
    }
    if (!q.backward) {
        for (int p = threadIdx.x; p < packs; p += blockDim.x) done(p);
        return after;
    }
    R scale = R(q.scale), softmax_scale = scale * R(gradient_fade * hard_weight_sum + (smooth ? share * q.class_weight_sum : 0)) / total;
    R target_scales[2] = {scale * R(gradient_fade * hard_weights[0]), scale * R(gradient_fade * hard_weights[1])}, smoothing_scale = scale * R(share);
    auto slope = [&](R s) { return exp_from<T>(s, top) * softmax_scale; };
    auto smoothing_term = [&](int c) { return smooth ? smoothing_scale * R(q.class_weights ? q.class_weights[c] : 1.0f) : R(0); };
    // What the targets subtract from the gradient of a class.
    auto target_term = [&](int c) {
        return (c == soft_target.classes[0] ? target_scales[0] : R(0)) + (of == 2 && c == soft_target.classes[1] ? target_scales[1] : R(0));
    };
    for (int p = threadIdx.x; p < packs; p += blockDim.x) {
        R s[N];
        values(s, p);
#pragma unroll
        for (int k = 0; k < N; k++) s[k] = slope(s[k]);
        if (smooth) {
#pragma unroll
            for (int k = 0; k < N; k++) s[k] -= smoothing_term(p * N + k);
        }
        if (p == soft_target.classes[0] / N || p == soft_target.classes[1] / N) {
#pragma unroll
            for (int k = 0; k < N; k++) s[k] -= target_term(p * N + k);
        }
        Pack<T, N> d;
#pragma unroll
        for (int k = 0; k < N; k++) d.v[k] = from_acc<T>(s[k]);
        // An explicit 16-byte store: otherwise the compiler stores value by value.
        if constexpr (sizeof d == 16) __stwb((uint4 *)(logits + p * N), *(uint4 *)&d);
        else d.store(logits + p * N);
        done(p);
    }
    for (int c = packs * N + threadIdx.x; c < classes; c += blockDim.x)
        logits[c] = from_acc<T>(slope(value(c)) - smoothing_term(c) - target_term(c));
    return after;
}

template <class T, int N, bool IN_SMEM> __global__ void __launch_bounds__(THREADS, IN_SMEM ? 2 : 1) loss_grad(CrossEntropyArgs q) {
    extern __shared__ char shared[];
    __shared__ __align__(16) char sums[2][sizeof(RowStats<T>) * THREADS / WARP];
    // Each thread reads only what it copied itself, so no barrier is needed.
    auto *smem_row = (Pack<T, N> *)shared;
    int packs = q.classes / N, turn = 0;
    auto from = [&](int64_t row, int p) { return (const T *)q.logits + row * q.stride + p * N; };
    if constexpr (IN_SMEM)
        for (int p = threadIdx.x; p < packs; p += blockDim.x)
            __pipeline_memcpy_async(smem_row + p, from(blockIdx.x, p), sizeof(Pack<T, N>));
    int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= q.rows) return;
    auto soft_target = soft_target_of<T>(q, row);
    for (; row < q.rows; row += grid_rows(), turn ^= 1) {
        auto packed = [&](int p) {
            if constexpr (IN_SMEM) return smem_row[p];
            else return Pack<T, N>::load(from(row, p));
        };
        auto done = [&](int p) {
            if constexpr (IN_SMEM)
                if (row + grid_rows() < q.rows)
                    __pipeline_memcpy_async(smem_row + p, from(row + grid_rows(), p), sizeof(Pack<T, N>));
        };
        if constexpr (IN_SMEM) {
            __pipeline_commit();
            __pipeline_wait_prior(0);
        }
        soft_target = loss_grad_row<T, N>(q, soft_target, row, (RowStats<T> *)sums[turn], packed, done);
    }
}

// An attribute of the current device.
int device_attribute(cudaDeviceAttr what) {
    int device = 0, found = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&found, what, device);
    return found;
}

} // namespace

extern "C" int cross_entropy_loss_grad(const CrossEntropyArgs *args, cudaStream_t stream) {
    const CrossEntropyArgs &q = *args;
    if (q.rows == 0 || q.classes == 0) return 0;
    WITH_TYPE(q.type, {
        constexpr int N = Pack<T>::size;
        bool wide = aligned(q.stride * sizeof(T), {q.logits});
        int packs = wide ? q.classes / N : q.classes;
        // Minus what the block reductions use.
        static const int smem = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 4096;
        static const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
        int64_t bytes = int64_t(packs) * sizeof(Pack<T, N>);
        if (wide && packs > 1024 && bytes <= smem) {
            auto *kernel = loss_grad<T, N, true>;
            static const auto allowed =
                cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
            if (allowed) return allowed;
            int each = 1;
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, THREADS, bytes);
            int64_t grid = int64_t(processors) * (each > 0 ? each : 1);
            kernel<<<unsigned(q.rows < grid ? q.rows : grid), THREADS, bytes, stream>>>(q);
            return cudaGetLastError();
        }
        // If a warp suffices for a row, a block of four warps processes four rows.
        dim3 threads = packs > 512 ? dim3(512) : packs > 64 ? dim3(128) : dim3(WARP, 4);
        if (wide) loss_grad<T, N, false><<<blocks(q.rows, threads.y), threads, 0, stream>>>(q);
        else loss_grad<T, 1, false><<<blocks(q.rows, threads.y), threads, 0, stream>>>(q);
    })
    return cudaGetLastError();
}
