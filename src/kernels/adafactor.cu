// Adafactor over one parameter, a matrix or a vector. What a step's length depends on stays on the card.
#include "cuda/columns.cuh"

namespace {

constexpr int THREADS = 256;
constexpr double TINY = 1.1920928955078125e-7;

// `Asked` in adafactor/card.rs.
struct Asked {
    int type;
    void *weights, *grads; // (rows, cols)
    void *state;           // a number a row, then, of a matrix, a number a column
    void *partial;         // (parts, cols): sums of columns
    double *sums;          // (blocks): sums of blocks
    double *found;         // the weights' squares, one over the rows' mean, the step's squares
    int64_t rows, cols;
    int parts, blocks;
    double grad_scale, fresh, keep, rate, eps, clip;
};

__device__ __forceinline__ float root(float x) { return sqrtf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }

// A part `fresh` of what was found takes the place of what was known.
template <class R> __device__ __forceinline__ R mix(R old, double fresh, double found) {
    return R((1 - fresh) * double(old) + fresh * found);
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

// The step at a value, before its length is known.
template <class R> struct Direction {
    const R *g, *state;
    int64_t rows, cols;
    R scale;
    __device__ __forceinline__ R operator()(int64_t at, double over) const {
        int64_t row = at / cols;
        R column = cols > 1 ? R(double(state[rows + at - row * cols]) * over) : R(1), v = state[row] * column;
        R least = R(TINY * TINY);
        return g[at] * scale / root(v > least ? v : least);
    }
};

template <class R> struct Square {
    const R *w;
    __device__ __forceinline__ double operator()(int64_t at, double) const { return double(w[at]) * double(w[at]); }
};
template <class R> struct Stepped {
    Direction<R> step;
    __device__ __forceinline__ double operator()(int64_t at, double over) const {
        double u = double(step(at, over));
        return u * u;
    }
};

template <class F>
__global__ void __launch_bounds__(THREADS) sum(F value, const double *over, double *sums, int64_t len) {
    double total = 0, factor = over ? *over : 1;
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

// A block a row.
template <class R> __global__ void __launch_bounds__(THREADS) remember_rows(Squares<R> square, R *state, double fresh) {
    R sum = 0;
    for (int64_t c = threadIdx.x; c < square.cols; c += blockDim.x) sum += square(blockIdx.x, c);
    sum = block_sum(sum);
    if (threadIdx.x == 0) state[blockIdx.x] = mix(state[blockIdx.x], fresh, double(sum) / double(square.cols));
}

template <class R>
__global__ void __launch_bounds__(THREADS)
    remember_columns(const R *partial, R *state, int64_t rows, int64_t cols, int parts, double fresh) {
    int64_t c = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    if (c >= cols) return;
    double sum = 0;
    for (int part = 0; part < parts; part++) sum += double(partial[part * cols + c]);
    state[c] = mix(state[c], fresh, sum / double(rows));
}

template <class R> __global__ void __launch_bounds__(1024) over_mean(const R *state, double *out, int64_t rows) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < rows; i += 1024) sum += double(state[i]);
    sum = block_sum(sum) / double(rows);
    if (threadIdx.x == 0) *out = 1 / (sum > TINY ? sum : TINY);
}

template <class R> __global__ void __launch_bounds__(THREADS) step(Asked q, Direction<R> direction) {
    int64_t at = int64_t(blockIdx.x) * THREADS + threadIdx.x, len = q.rows * q.cols;
    if (at >= len) return;
    double size = sqrt(q.found[0] / double(len)), length = sqrt(q.found[2] / double(len)) / q.clip;
    double go = q.rate * (size > q.eps ? size : q.eps) / (length > 1 ? length : 1);
    R *w = (R *)q.weights;
    w[at] = w[at] * R(q.keep) - R(go) * direction(at, q.found[1]);
    ((R *)q.grads)[at] = 0;
}

template <class R> void run(const Asked &q, cudaStream_t stream) {
    auto *w = (R *)q.weights, *g = (R *)q.grads, *state = (R *)q.state, *partial = (R *)q.partial;
    int64_t len = q.rows * q.cols;
    R scale = R(q.grad_scale);
    Squares<R> square{g, q.cols, scale};
    Direction<R> direction{g, state, q.rows, q.cols, scale};
    sum<<<q.blocks, THREADS, 0, stream>>>(Square<R>{w}, nullptr, q.sums, len);
    total<<<1, 1024, 0, stream>>>(q.sums, q.found, q.blocks);
    remember_rows<R><<<unsigned(q.rows), q.cols < THREADS ? WARP : THREADS, 0, stream>>>(square, state, q.fresh);
    if (q.cols > 1) {
        launch_parts<R>(partial, q.rows, q.cols, q.parts, square, stream);
        remember_columns<R><<<blocks(q.cols, THREADS), THREADS, 0, stream>>>(partial, state + q.rows, q.rows, q.cols,
                                                                           q.parts, q.fresh);
    }
    over_mean<R><<<1, 1024, 0, stream>>>(state, q.found + 1, q.rows);
    sum<<<q.blocks, THREADS, 0, stream>>>(Stepped<R>{direction}, q.found + 1, q.sums, len);
    total<<<1, 1024, 0, stream>>>(q.sums, q.found + 2, q.blocks);
    step<R><<<blocks(len, THREADS), THREADS, 0, stream>>>(q, direction);
}

} // namespace

extern "C" int adafactor_update(const Asked *asked, cudaStream_t stream) {
    if (asked->rows == 0 || asked->cols == 0) return 0;
    if (asked->type == F64) run<double>(*asked, stream);
    else if (asked->type == F32) run<float>(*asked, stream);
    else return cudaErrorInvalidValue;
    return cudaGetLastError();
}
