// `RngKey` of random.rs, bit for bit.
#pragma once

#include <cstdint>

struct RngKey {
    uint64_t a, b;

    __device__ __forceinline__ static uint64_t mix(uint64_t x) {
        x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
        x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
        return x ^ (x >> 32);
    }

    // The key of one coordinate below this key.
    __device__ __forceinline__ RngKey fold_in(uint64_t coordinate) const {
        uint64_t first = mix((a + coordinate * 0x9e3779b97f4a7c15ull) ^ (b << 32 | b >> 32));
        return {first, mix((b + coordinate) ^ first)};
    }

    __device__ __forceinline__ uint64_t bits(uint64_t counter) const {
        return mix(mix(a + counter * 0x9e3779b97f4a7c15ull) + b);
    }
};
