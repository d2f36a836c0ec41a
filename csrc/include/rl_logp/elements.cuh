// The dtypes of logits on a device: 32-bit words to fp32 and back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "rl_logp/arithmetic.h"

namespace rl_logp {

template <class Element>
struct ElementTraits;

template <>
struct ElementTraits<__nv_bfloat16> {
  static constexpr int kPerWord = 2;
  static constexpr uint32_t kMinusInfinity = 0xff80u;
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(values[0], values[1]);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  // Clamped at kSmallestDividend.
  static __device__ __forceinline__ void unpack_dividend(uint32_t word, float* values) {
    asm("max.bf16x2 %0, %0, %1;" : "+r"(word) : "r"(0xdd80dd80u));
    unpack(word, values);
  }
  static __device__ __forceinline__ uint32_t larger_words(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  }
  static constexpr double kFastLse = rl_logp::kFastLse;
  static __device__ __forceinline__ uint32_t clamped_word(uint32_t word) {  // at kSmallestFast
    uint32_t result;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(word), "r"(0xca00ca00u));
    return result;
  }
  static __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ __forceinline__ __nv_bfloat16 from_float(float x) {
    return __float2bfloat16_rn(x);
  }
};

template <>
struct ElementTraits<__half> {
  static constexpr int kPerWord = 2;
  static constexpr uint32_t kMinusInfinity = 0xfc00u;
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(word));
    values[0] = pair.x;
    values[1] = pair.y;
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    const __half2 pair = __floats2half2_rn(values[0], values[1]);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  static __device__ __forceinline__ void unpack_dividend(uint32_t word, float* values) {
    unpack(word, values);
    values[0] = fmaxf(values[0], kSmallestDividend);
    values[1] = fmaxf(values[1], kSmallestDividend);
  }
  static __device__ __forceinline__ uint32_t larger_words(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  }
  // -inf becomes -65504, which must be as good as -inf to the row.
  static constexpr double kFastLse = 32768.0;
  static __device__ __forceinline__ uint32_t clamped_word(uint32_t word) {
    uint32_t result;
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(word), "r"(0xfbfffbffu));
    return result;
  }
  static __device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
  static __device__ __forceinline__ __half from_float(float x) { return __float2half_rn(x); }
};

template <>
struct ElementTraits<float> {
  static constexpr int kPerWord = 1;
  static constexpr uint32_t kMinusInfinity = 0xff800000u;
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    values[0] = __uint_as_float(word);
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    return __float_as_uint(values[0]);
  }
  static __device__ __forceinline__ void unpack_dividend(uint32_t word, float* values) {
    values[0] = fmaxf(__uint_as_float(word), kSmallestDividend);
  }
  static __device__ __forceinline__ uint32_t larger_words(uint32_t a, uint32_t b) {
    return __float_as_uint(larger(__uint_as_float(a), __uint_as_float(b)));
  }
  static constexpr double kFastLse = rl_logp::kFastLse;
  static __device__ __forceinline__ uint32_t clamped_word(uint32_t word) {
    return __float_as_uint(fmaxf(__uint_as_float(word), kSmallestFast));
  }
  static __device__ __forceinline__ float to_float(float x) { return x; }
  static __device__ __forceinline__ float from_float(float x) { return x; }
};

// 32-bit words that start kShift elements into `words`.
template <class Element, int kShift, int kWords>
__device__ __forceinline__ void realign(const uint32_t* words, uint32_t (&aligned)[kWords]) {
  constexpr int kPerWord = ElementTraits<Element>::kPerWord;
  constexpr int kFirst = kShift / kPerWord;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    aligned[i] = kShift % kPerWord == 0
                     ? words[kFirst + i]
                     : __funnelshift_r(words[kFirst + i], words[kFirst + i + 1], 16);
  }
}

// Calls `function` with shift, below kLimit, as a compile-time constant.
template <int kLimit, int kShift = 0, class Function>
__device__ __forceinline__ void with_constant(int shift, Function&& function) {
  if constexpr (kShift + 1 == kLimit) {
    function(std::integral_constant<int, kShift>{});
  } else if (shift == kShift) {
    function(std::integral_constant<int, kShift>{});
  } else {
    with_constant<kLimit, kShift + 1>(shift, function);
  }
}

}  // namespace rl_logp
