// `Random::bits` of random.rs, bit for bit.
#pragma once

#include <cstdint>

struct Random {
    uint64_t a, b;

    __device__ __forceinline__ static uint64_t mix(uint64_t x) {
        x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
        x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
        return x ^ (x >> 32);
    }

    __device__ __forceinline__ uint64_t bits(uint64_t counter) const {
        return mix(mix(a + counter * 0x9e3779b97f4a7c15ull) + b);
    }
};

// Samples whose keys travel as an argument of a launch, so that nothing is copied to the card: arguments have 4 KiB.
// `SAMPLES` in cuda.rs.
constexpr int SAMPLES = 224;
