// What kernels of cross-entropy share.
#pragma once

#include "device.cuh"

// A target that is not to be learned nor counted.
constexpr uint32_t IGNORE_INDEX = UINT32_MAX;

// Hits of a row.
constexpr uint32_t COUNTED = 1, TOP1 = 2, TOP5 = 4;

constexpr float LOG2_E = 1.4426950408889634f;

// Two to the power of `x`, as exact as scores of 16 bits are worth.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
