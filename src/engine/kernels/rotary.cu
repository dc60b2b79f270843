// Applies RoPE to the queries and keys of packed projections. Angles are computed on the fly, in f64 and rounded like
// the CPU's tables, so no table takes GPU memory.
#include "cuda/device.cuh"

namespace {

struct RotaryArgs {
    int length, heads, kv_heads, half;
    double theta;
    bool inverse;
};

// A thread handles `N` adjacent pairs of one position of one sample, in every head. `to` may alias `from`; otherwise
// the values (V) are copied too.
template <class T, int N>
__global__ void __launch_bounds__(128) rotate(const T *from, T *to, RotaryArgs q) {
    using R = Acc<T>;
    int groups = q.half / N;
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= int64_t(q.length) * groups) return;
    int position = int(i / groups), pair = int(i % groups) * N;
    R cosines[N], sines[N];
#pragma unroll
    for (int k = 0; k < N; k++) {
        double angle = position * pow(q.theta, -2.0 * (pair + k) / (2 * q.half)), s, c;
        sincos(angle, &s, &c);
        cosines[k] = R(float(c));
        sines[k] = q.inverse ? -R(float(s)) : R(float(s));
    }
    int head = 2 * q.half, rotated_heads = q.heads + q.kv_heads, all = rotated_heads + q.kv_heads;
    int64_t row = (int64_t(blockIdx.y) * q.length + position) * all * head + pair;
    for (int h = 0; h < rotated_heads; h++, row += head) {
        auto a = Pack<T, N>::load(from + row), b = Pack<T, N>::load(from + row + q.half);
#pragma unroll
        for (int k = 0; k < N; k++) {
            R x = to_acc(a.v[k]), y = to_acc(b.v[k]);
            a.v[k] = from_acc<T>(x * cosines[k] - y * sines[k]);
            b.v[k] = from_acc<T>(y * cosines[k] + x * sines[k]);
        }
        a.store(to + row);
        b.store(to + row + q.half);
    }
    if (from == to) return;
    for (int h = rotated_heads; h < all; h++, row += head) {
        Pack<T, N>::load(from + row).store(to + row);
        Pack<T, N>::load(from + row + q.half).store(to + row + q.half);
    }
}

} // namespace

// (batch, length, (heads + 2 kv_heads) 2 half); `inverse` rotates backwards.
extern "C" int rotary_apply(int type, const void *from, void *to, int batch, int length, int heads, int kv_heads,
                           int half, double theta, int inverse, cudaStream_t stream) {
    if (batch == 0 || length == 0 || half == 0) return 0;
    RotaryArgs q{length, heads, kv_heads, half, theta, inverse != 0};
    WITH_TYPE(type, {
        uintptr_t bits = uintptr_t(from) | uintptr_t(to) | uintptr_t(half * sizeof(T));
        if (bits % (4 * sizeof(T)) == 0) {
            dim3 grid(blocks(int64_t(length) * (half / 4), 128), batch);
            rotate<T, 4><<<grid, 128, 0, stream>>>((const T *)from, (T *)to, q);
        } else {
            dim3 grid(blocks(int64_t(length) * half, 128), batch);
            rotate<T, 1><<<grid, 128, 0, stream>>>((const T *)from, (T *)to, q);
        }
    })
    return cudaGetLastError();
}
