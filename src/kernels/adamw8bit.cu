// AdamW with moments of a byte each: a block of the card takes a block of 256 values, which share a scale.
#include "cuda/device.cuh"

namespace {

constexpr int BLOCK = 256;           // values that share a scale: `BLOCK` in adamw8bit.rs
constexpr uint32_t DROPPED = 20;     // bits of an f32's mantissa that are dropped
constexpr uint32_t ONE = 0x3f800000u >> DROPPED;
constexpr uint32_t SIGNED = 127, UNSIGNED = 255;

// `State` and the numbers of the rule: `Asked` in adamw8bit/card.rs.
struct Asked {
    int type, copy_type;
    void *weights, *grads, *copy;
    uint8_t *m, *v;
    float *m_scale, *v_scale;
    int64_t len, decayed;
    uint64_t step_number;
    double keep;
    float beta1, rest1, beta2, rest2, eps, step, inv_root, grad_scale;
};

__device__ __forceinline__ uint32_t encode(float x, uint32_t random, uint32_t steps) {
    uint32_t kept = (__float_as_uint(x) + (random >> (32 - DROPPED))) >> DROPPED, least = ONE - steps;
    return kept > least ? kept - least : 0;
}

__device__ __forceinline__ float decode(uint32_t code, uint32_t steps) {
    return code == 0 ? 0.0f : __uint_as_float((code + (ONE - steps)) << DROPPED);
}

__device__ __forceinline__ float decode_signed(uint8_t code) {
    float size = decode(code & 127, SIGNED);
    return code > 127 ? -size : size;
}

__device__ __forceinline__ uint32_t mixed(uint32_t key, uint32_t i) {
    uint32_t x = (key ^ i * 0x9e3779b9u) * 0x85ebca6bu;
    x = (x ^ (x >> 15)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}

__device__ __forceinline__ uint32_t key(uint64_t step, uint64_t block) {
    uint64_t x = (step << 40 ^ block) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 29)) * 0x94d049bb133111ebull;
    return uint32_t(x >> 32);
}

// The products and sums are those of the CPU, one rounding each: no fused multiply-add, so that codes agree.
template <class R, class C> __global__ void __launch_bounds__(BLOCK) update(Asked q) {
    int64_t block = blockIdx.x, at = block * BLOCK + threadIdx.x;
    bool here = at < q.len;
    R *w = (R *)q.weights, *g = (R *)q.grads;
    float first = 0, second = 0;
    if (here) {
        float d = __fmul_rn(float(g[at]), q.grad_scale);
        float m = __fmul_rn(__fmul_rn(q.beta1, decode_signed(q.m[at])), q.m_scale[block]);
        float v = __fmul_rn(__fmul_rn(q.beta2, decode(q.v[at], UNSIGNED)), q.v_scale[block]);
        first = __fadd_rn(m, __fmul_rn(q.rest1, d));
        second = __fadd_rn(v, __fmul_rn(__fmul_rn(q.rest2, d), d));
        R kept = at < q.decayed ? w[at] * R(q.keep) : w[at];
        float go = __fdiv_rn(__fmul_rn(q.step, first), __fadd_rn(__fmul_rn(__fsqrt_rn(second), q.inv_root), q.eps));
        kept -= R(go);
        w[at] = kept;
        g[at] = 0;
        if (q.copy) ((C *)q.copy)[at] = down<C>(Acc<C>(kept));
    }
    // Every thread of the block has read the old scales before the new ones are written.
    float m_most = block_max(fabsf(first)), v_most = block_max(second);
    if (here) {
        float m_over = m_most > 0 ? __fdiv_rn(1.0f, m_most) : 0, v_over = v_most > 0 ? __fdiv_rn(1.0f, v_most) : 0;
        uint32_t random = mixed(key(q.step_number, block), threadIdx.x);
        float share = __fmul_rn(first, m_over);
        q.m[at] = uint8_t(encode(fabsf(share), random, SIGNED) | (share < 0 ? 128 : 0));
        // A second moment of zero under a first one that is not would make a giant step of it.
        uint32_t code = encode(__fmul_rn(second, v_over), random << 16 | random >> 16, UNSIGNED);
        q.v[at] = uint8_t(max(second > 0 ? 1u : 0u, min(code, UNSIGNED)));
    }
    if (threadIdx.x == 0) q.m_scale[block] = m_most, q.v_scale[block] = v_most;
}

} // namespace

extern "C" int adamw8bit_update(const Asked *asked, cudaStream_t stream) {
    const Asked &q = *asked;
    if (q.len == 0) return 0;
    unsigned grid = blocks(q.len, BLOCK);
    if (q.type == F64) update<double, double><<<grid, BLOCK, 0, stream>>>(q);
    else if (q.type != F32) return cudaErrorInvalidValue;
    else if (q.copy_type == F16) update<float, f16><<<grid, BLOCK, 0, stream>>>(q);
    else update<float, bf16><<<grid, BLOCK, 0, stream>>>(q);
    return cudaGetLastError();
}
