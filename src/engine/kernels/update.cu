// Optimizer updates over flat buffers. A single pass reads the gradient and the state, writes the weights, their copy
// in the compute dtype and the state, and clears the gradient. Products are fused with sums explicitly: left to the
// compiler, packs and single values would be rounded differently.
#include "cuda/device.cuh"

namespace {

constexpr int THREADS = 256;

__device__ __forceinline__ float root(float x) { return sqrtf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }

// `UpdateArgs` of update.rs as scalars. `keep` is the factor of a decayed weight. `device_grad_scale`, if not null,
// replaces `grad_scale`.
template <class R> struct UpdateArgs {
    R lr, grad_scale, weight_decay, keep;
    int64_t decayed;
    const double *device_grad_scale;
};

template <class R> struct AdamW {
    static constexpr int STATES = 2;
    R b1, a1, b2, a2, eps, step, inv_root;
    static AdamW of(const double *n) {
        return {R(n[0]), R(1 - n[0]), R(n[1]), R(1 - n[1]), R(n[2]), R(n[3]), R(1 / n[4])};
    }
    __device__ __forceinline__ R operator()(R w, R g, R *state, const UpdateArgs<R> &c, bool decayed) const {
        R d = g * c.grad_scale;
        R first = fma(b1, state[0], a1 * d), second = fma(b2, state[1], a2 * d * d);
        state[0] = first, state[1] = second;
        return fma(w, decayed ? c.keep : R(1), -(step * first / fma(root(second), inv_root, eps)));
    }
};

// `STATES` is 0 without momentum.
template <class R, int S> struct Sgd {
    static constexpr int STATES = S;
    R momentum;
    bool nesterov, first;
    static Sgd of(const double *n) { return {R(n[0]), n[1] != 0, n[2] != 0}; }
    __device__ __forceinline__ R operator()(R w, R g, R *state, const UpdateArgs<R> &c, bool decayed) const {
        R d = fma(decayed ? c.weight_decay : R(0), w, g * c.grad_scale);
        if constexpr (S == 0) return fma(-c.lr, d, w);
        R velocity = first ? d : fma(momentum, state[0], d);
        state[0] = velocity;
        return fma(-c.lr, nesterov ? fma(momentum, velocity, d) : velocity, w);
    }
};

template <class R> struct Lion {
    static constexpr int STATES = 1;
    R b1, a1, b2, a2;
    static Lion of(const double *n) { return {R(n[0]), R(1 - n[0]), R(n[1]), R(1 - n[1])}; }
    __device__ __forceinline__ R operator()(R w, R g, R *state, const UpdateArgs<R> &c, bool decayed) const {
        if (decayed) w *= c.keep;
        R d = g * c.grad_scale, go = fma(b1, state[0], a1 * d);
        state[0] = fma(b2, state[0], a2 * d);
        return fma(-c.lr, R((go > R(0)) - (go < R(0))), w);
    }
};

// `compute_weights` may be null.
template <class R, int N, class C, class Rule>
__global__ void __launch_bounds__(THREADS)
    update(R *w, R *g, R *s0, R *s1, C *compute_weights, int64_t packs, UpdateArgs<R> c, Rule rule) {
    int64_t at = (int64_t(blockIdx.x) * THREADS + threadIdx.x);
    if (at >= packs) return;
    at *= N;
    if (c.device_grad_scale) {
        c.grad_scale = R(*c.device_grad_scale);
        if (isnan(c.grad_scale)) {
            Pack<R, N>{}.store(g + at);
            return;
        }
    }
    auto ws = Pack<R, N>::load(w + at), gs = Pack<R, N>::load(g + at);
    Pack<R, N> states[2];
    if constexpr (Rule::STATES > 0) states[0] = Pack<R, N>::load(s0 + at);
    if constexpr (Rule::STATES > 1) states[1] = Pack<R, N>::load(s1 + at);
    Pack<C, N> rounded;
#pragma unroll
    for (int k = 0; k < N; k++) {
        R state[2] = {states[0].v[k], states[1].v[k]};
        ws.v[k] = rule(ws.v[k], gs.v[k], state, c, at + k < c.decayed);
        gs.v[k] = 0;
        states[0].v[k] = state[0], states[1].v[k] = state[1];
        rounded.v[k] = from_acc<C>(Acc<C>(ws.v[k]));
    }
    ws.store(w + at);
    gs.store(g + at);
    if constexpr (Rule::STATES > 0) states[0].store(s0 + at);
    if constexpr (Rule::STATES > 1) states[1].store(s1 + at);
    if (compute_weights) rounded.store(compute_weights + at);
}

// Updates all whole packs, then the remainder value by value.
template <class R, class C, class Rule>
int launch(void *w, void *g, void *s0, void *s1, void *compute_weights, int64_t len, UpdateArgs<R> c, Rule rule, cudaStream_t stream) {
    constexpr int N = 16 / sizeof(R);
    int64_t packs = aligned(0, {w, g, s0, s1, compute_weights}) ? len / N : 0, done = packs * N;
    auto *ws = (R *)w, *gs = (R *)g, *first = (R *)s0, *second = (R *)s1;
    auto *cs = (C *)compute_weights;
    if (packs) update<R, N, C, Rule><<<blocks(packs, THREADS), THREADS, 0, stream>>>(ws, gs, first, second, cs, packs, c, rule);
    if (done < len) {
        c.decayed -= done;
        update<R, 1, C, Rule><<<blocks(len - done, THREADS), THREADS, 0, stream>>>(
            ws + done, gs + done, first ? first + done : first, second ? second + done : second, cs ? cs + done : cs,
            len - done, c, rule);
    }
    return cudaGetLastError();
}

// `UpdateBuffers` in update/gpu.rs: the arguments of every update.
struct UpdateBuffers {
    int type, compute_type; // dtype of the weights, f32 or f64, and of their copy
    void *weights, *grads, *first, *second, *compute_weights;
    int64_t len, decayed;
    double lr, grad_scale, weight_decay;
    const double *device_grad_scale;
};

template <class R> UpdateArgs<R> update_args(const UpdateBuffers &b) {
    return {R(b.lr), R(b.grad_scale), R(b.weight_decay), R(1 - b.lr * b.weight_decay), b.decayed, b.device_grad_scale};
}

template <template <class> class Rule> int apply(const UpdateBuffers &b, const double *hyperparams, cudaStream_t stream) {
    if (b.len == 0) return 0;
    auto go = [&](auto zero, auto rounded) {
        using R = decltype(zero);
        return launch<R, decltype(rounded)>(b.weights, b.grads, b.first, b.second, b.compute_weights, b.len, update_args<R>(b),
                                            Rule<R>::of(hyperparams), stream);
    };
    if (b.type == F64) return go(double(), double());
    if (b.type != F32) return cudaErrorInvalidValue;
    return b.compute_type == F16 ? go(float(), f16()) : go(float(), bf16());
}

template <class R> using Momentum = Sgd<R, 1>;
template <class R> using PlainSgd = Sgd<R, 0>;

template <class T, int N> __global__ void __launch_bounds__(THREADS) sum_of_squares(const T *values, double *sums, int64_t packs) {
    double sum = 0;
    for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < packs; i += int64_t(gridDim.x) * THREADS) {
        auto v = Pack<T, N>::load(values + i * N);
#pragma unroll
        for (int k = 0; k < N; k++) sum += double(to_acc(v.v[k])) * double(to_acc(v.v[k]));
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(1024) total(const double *sums, double *out, int n) {
    double sum = 0;
    for (int i = threadIdx.x; i < n; i += 1024) sum += sums[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *out = sum;
}

template <class F, class T, int N> __global__ void __launch_bounds__(THREADS) cast_to(const F *from, T *to, int64_t packs) {
    int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= packs) return;
    auto v = Pack<F, N>::load(from + i * N);
    Pack<T, N> out;
#pragma unroll
    for (int k = 0; k < N; k++) out.v[k] = from_acc<T>(Acc<T>(to_acc(v.v[k])));
    out.store(to + i * N);
}

template <class T, int N>
__global__ void __launch_bounds__(THREADS) ema(T *average, const T *values, int64_t packs, Acc<T> keep, Acc<T> rest) {
    int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= packs) return;
    auto a = Pack<T, N>::load(average + i * N), v = Pack<T, N>::load(values + i * N);
#pragma unroll
    for (int k = 0; k < N; k++) a.v[k] = from_acc<T>(fma(keep, to_acc(a.v[k]), rest * to_acc(v.v[k])));
    a.store(average + i * N);
}

template <class T, int N> __global__ void __launch_bounds__(THREADS) swap_values(T *a, T *b, int64_t packs) {
    int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= packs) return;
    auto left = Pack<T, N>::load(a + i * N), right = Pack<T, N>::load(b + i * N);
    right.store(a + i * N);
    left.store(b + i * N);
}

} // namespace

// `hyperparams`: beta1, beta2, eps, bias-corrected step size, divisor of the second moment's root.
extern "C" int update_adamw(const UpdateBuffers *buffers, const double *hyperparams, cudaStream_t stream) {
    return apply<AdamW>(*buffers, hyperparams, stream);
}

// `hyperparams`: momentum, Nesterov flag, first-update flag.
extern "C" int update_sgd(const UpdateBuffers *buffers, const double *hyperparams, cudaStream_t stream) {
    return buffers->first ? apply<Momentum>(*buffers, hyperparams, stream) : apply<PlainSgd>(*buffers, hyperparams, stream);
}

// `hyperparams`: beta1, beta2.
extern "C" int update_lion(const UpdateBuffers *buffers, const double *hyperparams, cudaStream_t stream) {
    return apply<Lion>(*buffers, hyperparams, stream);
}

// `sums` holds `parts` partial sums, followed by the total.
extern "C" int update_sum_of_squares(int type, const void *values, void *sums, int parts, int64_t len, cudaStream_t stream) {
    auto *out = (double *)sums;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        if (aligned(len * sizeof(T), {values}))
            sum_of_squares<T, N><<<parts, THREADS, 0, stream>>>((const T *)values, out, len / N);
        else sum_of_squares<T, 1><<<parts, THREADS, 0, stream>>>((const T *)values, out, len);
    })
    total<<<1, 1024, 0, stream>>>(out, out + parts, parts);
    return cudaGetLastError();
}

extern "C" int update_cast(int from_type, int type, const void *from, void *to, int64_t len, cudaStream_t stream) {
    if (len == 0) return 0;
    bool wide = len % 4 == 0 && aligned(0, {from, to});
    WITH_TYPE(from_type, {
        using F = T;
        WITH_TYPE(type, {
            // Packs of four: 16 bytes of f32, the usual case.
            if (wide && sizeof(F) <= 4 && sizeof(T) <= 4)
                cast_to<F, T, 4><<<blocks(len / 4, THREADS), THREADS, 0, stream>>>((const F *)from, (T *)to, len / 4);
            else cast_to<F, T, 1><<<blocks(len, THREADS), THREADS, 0, stream>>>((const F *)from, (T *)to, len);
        })
    })
    return cudaGetLastError();
}

extern "C" int update_ema(int type, void *average, const void *values, int64_t len, double keep, cudaStream_t stream) {
    if (len == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        auto *a = (T *)average;
        auto *v = (const T *)values;
        auto k = Acc<T>(keep), r = Acc<T>(1 - keep);
        if (aligned(len * sizeof(T), {a, v})) ema<T, N><<<blocks(len / N, THREADS), THREADS, 0, stream>>>(a, v, len / N, k, r);
        else ema<T, 1><<<blocks(len, THREADS), THREADS, 0, stream>>>(a, v, len, k, r);
    })
    return cudaGetLastError();
}

extern "C" int update_swap(int type, void *a, void *b, int64_t len, cudaStream_t stream) {
    if (len == 0) return 0;
    WITH_TYPE(type, {
        constexpr int N = Pack<T>::size;
        if (aligned(len * sizeof(T), {a, b}))
            swap_values<T, N><<<blocks(len / N, THREADS), THREADS, 0, stream>>>((T *)a, (T *)b, len / N);
        else swap_values<T, 1><<<blocks(len, THREADS), THREADS, 0, stream>>>((T *)a, (T *)b, len);
    })
    return cudaGetLastError();
}

extern "C" int update_clear(void *values, int64_t bytes, cudaStream_t stream) {
    return bytes == 0 ? 0 : cudaMemsetAsync(values, 0, bytes, stream);
}
