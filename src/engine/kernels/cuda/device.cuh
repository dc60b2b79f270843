// The basis of every kernel: element types, 16-byte packs, and warp and block reductions in a fixed order, so that
// results are deterministic.
//
// A launcher is an `extern "C"` function of plain pointers and sizes. It returns a CUDA error code, 0 for success. It
// allocates nothing and does not synchronize. Its Rust declaration stands in the kernel's own file.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <initializer_list>

#include "type.h"

// As `kernels::grid` in Rust, which says why it is a constant.
constexpr int GRID_SMS = 132;

using bf16 = __nv_bfloat16;
using f16 = __half;

// The type in which kernels compute and accumulate.
template <class T> struct AccOf { using type = float; };
template <> struct AccOf<double> { using type = double; };
template <class T> using Acc = typename AccOf<T>::type;

template <class T> __device__ __forceinline__ Acc<T> to_acc(T x) { return x; }
template <> __device__ __forceinline__ float to_acc(bf16 x) { return __bfloat162float(x); }
template <> __device__ __forceinline__ float to_acc(f16 x) { return __half2float(x); }

template <class T> __device__ __forceinline__ T from_acc(Acc<T> x) { return x; }
template <> __device__ __forceinline__ bf16 from_acc<bf16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ f16 from_acc<f16>(float x) { return __float2half_rn(x); }

// Runs the body with `T` as the type of a type code.
#define WITH_TYPE(code, ...)                                                                                  \
    switch (code) {                                                                                           \
    case F32: { using T = float; __VA_ARGS__; break; }                                                        \
    case F64: { using T = double; __VA_ARGS__; break; }                                                       \
    case BF16: { using T = bf16; __VA_ARGS__; break; }                                                        \
    case F16: { using T = f16; __VA_ARGS__; break; }                                                          \
    default: return cudaErrorInvalidValue;                                                                    \
    }

// `N` adjacent values, moved in one access; `Pack<T>` is 16 bytes.
template <class T, int N = 16 / sizeof(T)> struct alignas(sizeof(T) * N) Pack {
    T v[N];
    static constexpr int size = N;
    __device__ __forceinline__ static Pack load(const T *p) { return *reinterpret_cast<const Pack *>(p); }
    __device__ __forceinline__ void store(T *p) const { *reinterpret_cast<Pack *>(p) = *this; }
};

// A pack that stays packed until a value is read: unpacked, each 16-bit value would occupy a 32-bit register.
template <class T, int N> struct LazyPack {
    Pack<T, N> values;
    __device__ __forceinline__ void load(const T *p) { values = Pack<T, N>::load(p); }
    __device__ __forceinline__ Acc<T> operator[](int i) const { return to_acc(values.v[i]); }
};
template <> struct LazyPack<bf16, 8> {
    uint4 words;
    __device__ __forceinline__ void load(const bf16 *p) { words = *reinterpret_cast<const uint4 *>(p); }
    __device__ __forceinline__ float operator[](int i) const {
        uint32_t word = i < 2 ? words.x : i < 4 ? words.y : i < 6 ? words.z : words.w;
        return __uint_as_float(i % 2 ? word & 0xffff0000 : word << 16);
    }
};
template <> struct LazyPack<bf16, 4> {
    uint2 words;
    __device__ __forceinline__ void load(const bf16 *p) { words = *reinterpret_cast<const uint2 *>(p); }
    __device__ __forceinline__ float operator[](int i) const {
        uint32_t word = i < 2 ? words.x : words.y;
        return __uint_as_float(i % 2 ? word & 0xffff0000 : word << 16);
    }
};

// Whether rows and pointers permit 16-byte accesses.
inline bool aligned(int64_t row_bytes, std::initializer_list<const void *> pointers) {
    uintptr_t bits = uintptr_t(row_bytes);
    for (const void *p : pointers) bits |= uintptr_t(p);
    return bits % 16 == 0;
}

constexpr int WARP = 32;

template <class R> __device__ __forceinline__ R warp_sum(R x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffff, x, offset);
    return x;
}

template <class R> __device__ __forceinline__ R warp_max(R x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        R other = __shfl_xor_sync(0xffffffff, x, offset);
        x = other > x ? other : x;
    }
    return x;
}

// The sum over a block of at most 1024 threads, returned to all of them. Reusable: it ends with a barrier.
template <class R> __device__ __forceinline__ R block_sum(R x) {
    __shared__ R sums[WARP];
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = x;
    __syncthreads();
    int warps = (blockDim.x + WARP - 1) / WARP;
    x = warp_sum(threadIdx.x % WARP < warps ? sums[threadIdx.x % WARP] : R(0));
    __syncthreads();
    return x;
}

template <class R> __device__ __forceinline__ R block_max(R x) {
    __shared__ R tops[WARP];
    x = warp_max(x);
    if (threadIdx.x % WARP == 0) tops[threadIdx.x / WARP] = x;
    __syncthreads();
    int warps = (blockDim.x + WARP - 1) / WARP;
    x = warp_max(tops[threadIdx.x % WARP < warps ? threadIdx.x % WARP : 0]);
    __syncthreads();
    return x;
}

inline unsigned blocks(int64_t work, int64_t each) { return unsigned((work + each - 1) / each); }
