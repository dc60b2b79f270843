// What our own attention kernels share: dimensions, masks and dropout.
#pragma once

#include "random.cuh"

// `AttentionArgs` in attention/gpu.rs.
struct AttentionArgs {
    int type, batch, length, heads, kv_heads, head, causal;
    float scale;
    const uint32_t *lengths; // per sample, on the device; null: no padding
    const RngKey *keys;      // per sample, on the device; null: no dropout
    uint32_t threshold;
    double kept_scale;
};

struct AttentionDims {
    int length, heads, kv_heads, head, causal;
    float scale;
    const uint32_t *lengths;

    explicit AttentionDims(const AttentionArgs &c)
        : length(c.length), heads(c.heads), kv_heads(c.kv_heads), head(c.head), causal(c.causal), scale(c.scale),
          lengths(c.lengths) {}
    __device__ int qkv_width() const { return (heads + 2 * kv_heads) * head; }
    __device__ int width() const { return heads * head; }
    __device__ int keys(int sample) const {
        return lengths ? min(int(lengths[sample]), length) : length;
    }
    // Number of keys that the queries before `end` may attend to.
    __device__ int visible_keys(int sample, int end) const { return causal ? min(keys(sample), end) : keys(sample); }
    __device__ bool is_masked(int query, int key, int keys) const {
        return key >= keys || query >= length || (causal && key > query);
    }
};

// The dropout mask of a sample, drawn as in attention/dropout_mask.rs: one 64-bit draw serves two queries by two keys.
struct SampleDropoutMask {
    uint32_t threshold;
    double scale; // of the kept weights
    RngKey drawn;

    // The 16 bits of (query, key) start at bit 32 (query % 2) + 16 (key % 2).
    __device__ __forceinline__ uint64_t square(int head, int query, int key) const {
        return drawn.bits(uint64_t(head) << 48 | uint64_t(query / 2) << 24 | uint64_t(key / 2));
    }
    __device__ __forceinline__ bool keeps(uint64_t square, int lane) const {
        return ((square >> (16 * lane)) & 0xffff) >= threshold;
    }
    // The factor of one attention weight.
    template <class R> __device__ R kept(int head, int query, int key) const {
        return keeps(square(head, query, key), 2 * (query % 2) + key % 2) ? R(scale) : R(0);
    }
};

struct DropoutMask {
    uint32_t threshold;
    double scale;
    const RngKey *keys;

    explicit DropoutMask(const AttentionArgs &c) : threshold(c.threshold), scale(c.kept_scale), keys(c.keys) {}
    __device__ __forceinline__ SampleDropoutMask of(int sample) const { return {threshold, scale, keys[sample]}; }
};

// Stands in for a mask when dropout is off.
struct NoDropout {
    __device__ __forceinline__ NoDropout of(int) const { return {}; }
    template <class R> __device__ R kept(int, int, int) const { return R(1); }
};
