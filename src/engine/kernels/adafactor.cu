// Adafactor for one parameter, a matrix or a vector. The norms that determine the step size stay on the device.
#include "cuda/column_sums.cuh"

namespace {

constexpr int THREADS = 256;
constexpr double MIN_SECOND_MOMENT = 1.1920928955078125e-7;

// `AdafactorArgs` in adafactor/gpu.rs.
struct AdafactorArgs {
    int type;
    void *weights, *grads; // (rows, cols)
    void *state;           // one value per row, then for a matrix one per column
    void *partial;         // (parts, cols): partial column sums
    double *sums;          // (blocks): partial sums per block
    double *measured;         // sum of w^2, reciprocal of the mean row moment, sum of step^2
    int64_t rows, cols;
    int parts, blocks;
    double grad_scale, one_minus_beta2, decay_factor, rho, eps, clip;
};

__device__ __forceinline__ float root(float x) { return sqrtf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }

// Exponential moving average.
template <class R> __device__ __forceinline__ R mix(R old, double one_minus_beta2, double measured) {
    return R((1 - one_minus_beta2) * double(old) + one_minus_beta2 * measured);
}

template <class R> struct Squares {
    const R *g;
    int64_t cols;
    R scale;
    __device__ __forceinline__ R operator()(int64_t row, int64_t column) const {
        R d = g[row * cols + column] * scale;
        return d * d;
    }
};

// The update direction at a value, before its scaling is known.
template <class R> struct Direction {
    const R *g, *state;
    int64_t rows, cols;
    R scale;
    __device__ __forceinline__ R operator()(int64_t at, double inv_mean) const {
        int64_t row = at / cols;
        R column = cols > 1 ? R(double(state[rows + at - row * cols]) * inv_mean) : R(1), v = state[row] * column;
        R least = R(MIN_SECOND_MOMENT * MIN_SECOND_MOMENT);
        return g[at] * scale / root(v > least ? v : least);
    }
};

template <class R> struct Square {
    const R *w;
    __device__ __forceinline__ double operator()(int64_t at, double) const { return double(w[at]) * double(w[at]); }
};
template <class R> struct SquaredStep {
    Direction<R> step;
    __device__ __forceinline__ double operator()(int64_t at, double inv_mean) const {
        double u = double(step(at, inv_mean));
        return u * u;
    }
};

template <class F>
__global__ void __launch_bounds__(THREADS) sum(F value, const double *inv_mean, double *sums, int64_t len) {
    double total = 0, factor = inv_mean ? *inv_mean : 1;
    for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < len; i += int64_t(gridDim.x) * THREADS)
        total += value(i, factor);
    total = block_sum(total);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

__global__ void __launch_bounds__(1024) total(const double *sums, double *out, int n) {
    double all = 0;
    for (int i = threadIdx.x; i < n; i += 1024) all += sums[i];
    all = block_sum(all);
    if (threadIdx.x == 0) *out = all;
}

// One block per row.
template <class R> __global__ void __launch_bounds__(THREADS) update_row_moments(Squares<R> square, R *state, double one_minus_beta2) {
    R sum = 0;
    for (int64_t c = threadIdx.x; c < square.cols; c += blockDim.x) sum += square(blockIdx.x, c);
    sum = block_sum(sum);
    if (threadIdx.x == 0) state[blockIdx.x] = mix(state[blockIdx.x], one_minus_beta2, double(sum) / double(square.cols));
}

template <class R>
__global__ void __launch_bounds__(THREADS)
    update_column_moments(const R *partial, R *state, int64_t rows, int64_t cols, int parts, double one_minus_beta2) {
    int64_t c = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    if (c >= cols) return;
    double sum = 0;
    for (int part = 0; part < parts; part++) sum += double(partial[part * cols + c]);
    state[c] = mix(state[c], one_minus_beta2, sum / double(rows));
}

template <class R> __global__ void __launch_bounds__(1024) inverse_mean(const R *state, double *out, int64_t rows) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < rows; i += 1024) sum += double(state[i]);
    sum = block_sum(sum) / double(rows);
    if (threadIdx.x == 0) *out = 1 / (sum > MIN_SECOND_MOMENT ? sum : MIN_SECOND_MOMENT);
}

template <class R> __global__ void __launch_bounds__(THREADS) step(AdafactorArgs q, Direction<R> direction) {
    int64_t at = int64_t(blockIdx.x) * THREADS + threadIdx.x, len = q.rows * q.cols;
    if (at >= len) return;
    double param_rms = sqrt(q.measured[0] / double(len)), update_rms = sqrt(q.measured[2] / double(len)) / q.clip;
    double alpha = q.rho * (param_rms > q.eps ? param_rms : q.eps) / (update_rms > 1 ? update_rms : 1);
    R *w = (R *)q.weights;
    w[at] = w[at] * R(q.decay_factor) - R(alpha) * direction(at, q.measured[1]);
    ((R *)q.grads)[at] = 0;
}

template <class R> void run(const AdafactorArgs &q, cudaStream_t stream) {
    auto *w = (R *)q.weights, *g = (R *)q.grads, *state = (R *)q.state, *partial = (R *)q.partial;
    int64_t len = q.rows * q.cols;
    R scale = R(q.grad_scale);
    Squares<R> square{g, q.cols, scale};
    Direction<R> direction{g, state, q.rows, q.cols, scale};
    sum<<<q.blocks, THREADS, 0, stream>>>(Square<R>{w}, nullptr, q.sums, len);
    total<<<1, 1024, 0, stream>>>(q.sums, q.measured, q.blocks);
    update_row_moments<R><<<unsigned(q.rows), q.cols < THREADS ? WARP : THREADS, 0, stream>>>(square, state, q.one_minus_beta2);
    if (q.cols > 1) {
        launch_partial_sums<R>(partial, q.rows, q.cols, q.parts, square, stream);
        update_column_moments<R><<<blocks(q.cols, THREADS), THREADS, 0, stream>>>(partial, state + q.rows, q.rows, q.cols,
                                                                           q.parts, q.one_minus_beta2);
    }
    inverse_mean<R><<<1, 1024, 0, stream>>>(state, q.measured + 1, q.rows);
    sum<<<q.blocks, THREADS, 0, stream>>>(SquaredStep<R>{direction}, q.measured + 1, q.sums, len);
    total<<<1, 1024, 0, stream>>>(q.sums, q.measured + 2, q.blocks);
    step<R><<<blocks(len, THREADS), THREADS, 0, stream>>>(q, direction);
}

} // namespace

extern "C" int adafactor_update(const AdafactorArgs *args, cudaStream_t stream) {
    if (args->rows == 0 || args->cols == 0) return 0;
    if (args->type == F64) run<double>(*args, stream);
    else if (args->type == F32) run<float>(*args, stream);
    else return cudaErrorInvalidValue;
    return cudaGetLastError();
}
