// AdamW with 8-bit moments: each thread block handles one block of 256 values, which share a scale.
#include "cuda/device.cuh"

namespace {

constexpr int BLOCK = 256;           // values per scale: `BLOCK` in adamw8bit.rs
constexpr uint32_t DROPPED_BITS = 20;     // dropped bits of an f32's mantissa
constexpr uint32_t ONE_CODE = 0x3f800000u >> DROPPED_BITS;
constexpr uint32_t SIGNED_STEPS = 127, UNSIGNED_STEPS = 255;

// `AdamW8bitArgs` in adamw8bit/gpu.rs.
struct AdamW8bitArgs {
    int type, compute_type;
    void *weights, *grads, *compute_weights;
    uint8_t *m, *v;
    float *m_scale, *v_scale;
    int64_t len, decayed_len;
    uint64_t step_number;
    double decay_factor;
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step, inv_root, grad_scale;
};

__device__ __forceinline__ uint32_t encode(float x, uint32_t random, uint32_t steps) {
    uint32_t kept = (__float_as_uint(x) + (random >> (32 - DROPPED_BITS))) >> DROPPED_BITS, least = ONE_CODE - steps;
    return kept > least ? kept - least : 0;
}

__device__ __forceinline__ float decode(uint32_t code, uint32_t steps) {
    return code == 0 ? 0.0f : __uint_as_float((code + (ONE_CODE - steps)) << DROPPED_BITS);
}

__device__ __forceinline__ float decode_signed(uint8_t code) {
    float size = decode(code & 127, SIGNED_STEPS);
    return code > 127 ? -size : size;
}

__device__ __forceinline__ uint32_t rounding_bits(uint32_t block_key, uint32_t i) {
    uint32_t x = (block_key ^ i * 0x9e3779b9u) * 0x85ebca6bu;
    x = (x ^ (x >> 15)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}

__device__ __forceinline__ uint32_t block_key(uint64_t step, uint64_t block) {
    uint64_t x = (step << 40 ^ block) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 29)) * 0x94d049bb133111ebull;
    return uint32_t(x >> 32);
}

// Products and sums round as on the CPU, one operation at a time: no fused multiply-add, so that the codes agree.
template <class R, class C> __global__ void __launch_bounds__(BLOCK) update(AdamW8bitArgs q) {
    int64_t block = blockIdx.x, at = block * BLOCK + threadIdx.x;
    bool in_range = at < q.len;
    R *w = (R *)q.weights, *g = (R *)q.grads;
    float first = 0, second = 0;
    if (in_range) {
        float d = __fmul_rn(float(g[at]), q.grad_scale);
        float m = __fmul_rn(__fmul_rn(q.beta1, decode_signed(q.m[at])), q.m_scale[block]);
        float v = __fmul_rn(__fmul_rn(q.beta2, decode(q.v[at], UNSIGNED_STEPS)), q.v_scale[block]);
        first = __fadd_rn(m, __fmul_rn(q.one_minus_beta1, d));
        second = __fadd_rn(v, __fmul_rn(__fmul_rn(q.one_minus_beta2, d), d));
        R kept = at < q.decayed_len ? w[at] * R(q.decay_factor) : w[at];
        float delta = __fdiv_rn(__fmul_rn(q.step, first), __fadd_rn(__fmul_rn(__fsqrt_rn(second), q.inv_root), q.eps));
        kept -= R(delta);
        w[at] = kept;
        g[at] = 0;
        if (q.compute_weights) ((C *)q.compute_weights)[at] = from_acc<C>(Acc<C>(kept));
    }
    // block_max synchronizes: all threads have read the old scales before thread 0 writes the new ones.
    float m_absmax = block_max(fabsf(first)), v_max = block_max(second);
    if (in_range) {
        float m_inv = m_absmax > 0 ? __fdiv_rn(1.0f, m_absmax) : 0, v_inv = v_max > 0 ? __fdiv_rn(1.0f, v_max) : 0;
        uint32_t random = rounding_bits(block_key(q.step_number, block), threadIdx.x);
        float normalized = __fmul_rn(first, m_inv);
        q.m[at] = uint8_t(encode(fabsf(normalized), random, SIGNED_STEPS) | (normalized < 0 ? 128 : 0));
        // A second moment of zero with a nonzero first moment would cause a huge step.
        uint32_t code = encode(__fmul_rn(second, v_inv), random << 16 | random >> 16, UNSIGNED_STEPS);
        q.v[at] = uint8_t(max(second > 0 ? 1u : 0u, min(code, UNSIGNED_STEPS)));
    }
    if (threadIdx.x == 0) q.m_scale[block] = m_absmax, q.v_scale[block] = v_max;
}

} // namespace

extern "C" int adamw8bit_update(const AdamW8bitArgs *args, cudaStream_t stream) {
    const AdamW8bitArgs &q = *args;
    if (q.len == 0) return 0;
    unsigned grid = blocks(q.len, BLOCK);
    if (q.type == F64) update<double, double><<<grid, BLOCK, 0, stream>>>(q);
    else if (q.type != F32) return cudaErrorInvalidValue;
    else if (q.compute_type == F16) update<float, f16><<<grid, BLOCK, 0, stream>>>(q);
    else update<float, bf16><<<grid, BLOCK, 0, stream>>>(q);
    return cudaGetLastError();
}
