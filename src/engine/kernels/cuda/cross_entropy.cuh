// What the cross-entropy kernels share.
#pragma once

#include "device.cuh"

// Targets with this value contribute to neither the loss nor the metrics.
constexpr uint32_t IGNORE_INDEX = UINT32_MAX;

// Flags of a row: it counts, its target is the top-1 class, its target is among the top 5.
constexpr uint32_t COUNTED = 1, TOP1 = 2, TOP5 = 4;

constexpr float LOG2_E = 1.4426950408889634f;

// 2^x, accurate enough for 16-bit logits.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
