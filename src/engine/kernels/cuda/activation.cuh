// The activations of `activation.rs`: value and derivative. The codes are those of `Activation as i32` there.
#pragma once

#include <type_traits>

#include "device.cuh"

enum Act : int { IDENTITY, RELU, RELU6, GELU, GELU_TANH, SILU, SIGMOID, TANH };

__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
__device__ __forceinline__ float erf_of(float x) { return erff(x); }
__device__ __forceinline__ double erf_of(double x) { return erf(x); }
__device__ __forceinline__ float exp_of(float x) { return expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }

template <class R> __device__ __forceinline__ R sigmoid_of(R x) { return R(1) / (R(1) + exp_of(-x)); }

// The hardware's tanh, accurate to 11 bits: enough for bf16, which keeps 8, and a third of the time.
__device__ __forceinline__ float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// GPT-2's tanh GELU and its derivative, in as few operations as possible: a power-limited GPU slows down with each one.
// `approx` is for results that are rounded to bf16 anyway.
template <class R> struct GeluTanh {
    // The argument of tanh is `LINEAR x + CUBIC x^3`.
    static constexpr double LINEAR = 0.7978845608028654, CUBIC = LINEAR * 0.044715;
    R square, gate, value;
    template <bool approx> __device__ __forceinline__ static GeluTanh at(R x) {
        R square = x * x, inner = x * (R(LINEAR) + R(CUBIC) * square), t;
        if constexpr (approx) t = tanh_approx(inner);
        else t = tanh_of(inner);
        R gate = R(0.5) + R(0.5) * t;
        return {square, gate, x * gate};
    }
    __device__ __forceinline__ R slope() const {
        return gate + (value - value * gate) * (R(2 * LINEAR) + R(6 * CUBIC) * square);
    }
};

// Comparisons with NaN are false, so NaN propagates.
template <int act, bool approx = false, class R> __device__ __forceinline__ R value_of(R x) {
    if constexpr (act == RELU) return x < R(0) ? R(0) : x;
    else if constexpr (act == RELU6) return x < R(0) ? R(0) : x > R(6) ? R(6) : x;
    else if constexpr (act == GELU) return R(0.5) * x * (R(1) + erf_of(x * R(0.7071067811865476)));
    else if constexpr (act == GELU_TANH) return GeluTanh<R>::template at<approx>(x).value;
    else if constexpr (act == SILU) return x * sigmoid_of(x);
    else if constexpr (act == SIGMOID) return sigmoid_of(x);
    else if constexpr (act == TANH) return tanh_of(x);
    else return x;
}

// The derivative in terms of the input or the output, whichever `Activation::saved_for_backward` names.
template <int act, bool approx = false, class R> __device__ __forceinline__ R slope_of(R v) {
    if constexpr (act == RELU) return v > R(0) ? R(1) : R(0);
    else if constexpr (act == RELU6) return v > R(0) && v < R(6) ? R(1) : R(0);
    else if constexpr (act == GELU)
        return R(0.5) * (R(1) + erf_of(v * R(0.7071067811865476))) + v * exp_of(R(-0.5) * v * v) * R(0.3989422804014327);
    else if constexpr (act == GELU_TANH) return GeluTanh<R>::template at<approx>(v).slope();
    else if constexpr (act == SILU) {
        R s = sigmoid_of(v);
        return s * (R(1) + v * (R(1) - s));
    } else if constexpr (act == SIGMOID) return v * (R(1) - v);
    else if constexpr (act == TANH) return R(1) - v * v;
    else return R(1);
}

// Runs the body with the activation code as the constant `A`.
#define WITH_ACT(code, ...)                                                                                   \
    switch (code) {                                                                                           \
    case IDENTITY: { constexpr int A = IDENTITY; __VA_ARGS__; break; }                                        \
    case RELU: { constexpr int A = RELU; __VA_ARGS__; break; }                                                \
    case RELU6: { constexpr int A = RELU6; __VA_ARGS__; break; }                                              \
    case GELU: { constexpr int A = GELU; __VA_ARGS__; break; }                                                \
    case GELU_TANH: { constexpr int A = GELU_TANH; __VA_ARGS__; break; }                                      \
    case SILU: { constexpr int A = SILU; __VA_ARGS__; break; }                                                \
    case SIGMOID: { constexpr int A = SIGMOID; __VA_ARGS__; break; }                                          \
    case TANH: { constexpr int A = TANH; __VA_ARGS__; break; }                                                \
    default: return cudaErrorInvalidValue;                                                                    \
    }

// Whether a type has so few significant bits that the approximate functions do not change its values.
template <class T> constexpr bool is_low_precision = std::is_same<T, bf16>::value;
