// Arithmetic that is the same on the host and on every device: explicit roundings, explicit
// contractions, no fast-math. Nothing here knows torch.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "rl_logp/exp2.h"

#ifdef __CUDACC__
#define RL_LOGP_HOST_DEVICE __host__ __device__
#define RL_LOGP_FORCEINLINE __forceinline__
#define RL_LOGP_NOINLINE __noinline__
#else
#define RL_LOGP_HOST_DEVICE
#define RL_LOGP_FORCEINLINE inline
#define RL_LOGP_NOINLINE
#endif

namespace rl_logp {

constexpr int kGroup = 16;  // columns of a group; groups start at multiples of it

constexpr float kInfinity = __builtin_huge_valf();
constexpr float kNan = __builtin_nanf("");

// log2(e) in fp32, and what is missing; likewise in double.
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLog2eTail = 1.9259629911266175e-08f;
constexpr float kTailLn2 = 1.3349758e-08f;  // kLog2eTail * ln(2)
constexpr double kLog2eDouble = 1.4426950408889634074;
constexpr double kLog2eDoubleTail = 2.0355273740931033e-17;
constexpr double kLn2Double = 0.69314718055994530942;

// Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits of the sum.
constexpr float kRoundShift = 12582912.0f;
constexpr int32_t kRoundShiftBits = 0x4B400000;

// Groups whose largest |y| is below take the fast path: the correction by kTailLn2 is linear, and
// its square must not show (2^12 * 1.3e-8 squared is 3e-9).
constexpr float kFastLimit = 4096.0f;

// The backward's fast path: |lse| below 2^20, and columns below this are clamped to it. Their
// softmax is 0 all the same, and -inf stays out of the arithmetic.
constexpr double kFastLse = 1048576.0;
constexpr float kSmallestFast = -2097152.0f;

// What is below may be clamped to it before it is divided by a temperature of 2^20 or less: its
// exponential is 0 in any group that takes the fast path, and no infinity meets its negative.
constexpr float kSmallestDividend = -1152921504606846976.0f;  // -2^60

RL_LOGP_HOST_DEVICE inline uint32_t float_bits(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

RL_LOGP_HOST_DEVICE inline float bits_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

RL_LOGP_HOST_DEVICE inline uint64_t double_bits(double value) {
#ifdef __CUDA_ARCH__
  return static_cast<uint64_t>(__double_as_longlong(value));
#else
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

RL_LOGP_HOST_DEVICE inline double bits_double(uint64_t bits) {
#ifdef __CUDA_ARCH__
  return __longlong_as_double(static_cast<long long>(bits));
#else
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

RL_LOGP_HOST_DEVICE inline float absolute(float value) { return std::fabs(value); }

RL_LOGP_HOST_DEVICE inline double absolute(double value) { return std::fabs(value); }

RL_LOGP_HOST_DEVICE inline float fused_multiply_add(float a, float b, float c) {
  return std::fma(a, b, c);
}

RL_LOGP_HOST_DEVICE inline double fused_multiply_add(double a, double b, double c) {
  return std::fma(a, b, c);
}

// Plain operations that the compiler may not contract into an fma.
RL_LOGP_HOST_DEVICE inline float add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

RL_LOGP_HOST_DEVICE inline float subtract(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fsub_rn(a, b);
#else
  return a - b;
#endif
}

RL_LOGP_HOST_DEVICE inline float multiply(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

RL_LOGP_HOST_DEVICE inline double multiply(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

// The value, or 0 of its sign where it is subnormal.
RL_LOGP_HOST_DEVICE inline float flushed(float value) {
  return std::fabs(value) < 1.17549435e-38f ? std::copysign(0.0f, value) : value;
}

// a * b, where a subnormal operand or result is 0 of its sign.
RL_LOGP_HOST_DEVICE inline float multiply_flushed(float a, float b) {
#ifdef __CUDA_ARCH__
  float result;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return flushed(flushed(a) * flushed(b));
#endif
}

RL_LOGP_HOST_DEVICE inline double round_to_integer(double value) { return std::rint(value); }

// Halves go to the even one. |value| must be below 2^31.
RL_LOGP_HOST_DEVICE inline int32_t nearest_integer(float value) {
#ifdef __CUDA_ARCH__
  return __float2int_rn(value);
#else
  return static_cast<int32_t>(std::rint(value));
#endif
}

RL_LOGP_HOST_DEVICE inline double log_1_plus(double value) { return std::log1p(value); }

RL_LOGP_HOST_DEVICE inline double exponential(double value) { return std::exp(value); }

RL_LOGP_HOST_DEVICE inline double exp_base_2(double value) { return std::exp2(value); }

// 2^x, x being at most 127: the hardware's approximation on a device (2 ulp, results below 2^-126
// are 0), and that of the CPU kernel on the host.
RL_LOGP_HOST_DEVICE inline float exp2_approx(float x) {
#ifdef __CUDA_ARCH__
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return exp2_fp32(x);
#endif
}

// The larger, or NaN if either is.
RL_LOGP_HOST_DEVICE inline float larger(float a, float b) {
#ifdef __CUDA_ARCH__
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a != a || b != b ? kNan : (a > b ? a : b);
#endif
}

RL_LOGP_HOST_DEVICE inline float largest_of(const float (&y)[kGroup]) {
  float largest = y[0];
#pragma unroll
  for (int i = 1; i < kGroup; ++i) largest = larger(largest, y[i]);
  return largest;
}

// The one tree that a group is summed in: neighbours first. Any contiguous half or quarter of it
// may be computed elsewhere, and halves may change places.
template <int kCount>
RL_LOGP_HOST_DEVICE inline float sum_tree(float (&e)[kCount]) {
#pragma unroll
  for (int width = 1; width < kCount; width *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2 * width) e[i] = add(e[i], e[i + width]);
  }
  return e[0];
}

RL_LOGP_HOST_DEVICE inline float divide(float x, float divisor) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(x, divisor);
#else
  return x / divisor;
#endif
}

// Where it is rare: its code stays out of the loops that call it.
RL_LOGP_HOST_DEVICE RL_LOGP_NOINLINE inline float divide_rarely(float x, float divisor) {
  return divide(x, divisor);
}

// What a row's columns are divided by: x / value rounded to nearest, without a division per column.
//
// With the reciprocal in two parts, high + low, fma(x, high, x * low) is less than an ulp off, and
// one correction by its remainder makes it the rounded quotient (Markstein, IBM J. Res. Dev. 34,
// 1990; Brisebarre, Muller and Raina, IEEE Trans. Comput. 53, 2004). Where the quotient is below
// kSmallestRounded its remainder may be too small for fp32, and it may be off: no exponential sees
// that, but a comparison does.
constexpr float kSmallestRounded = 7.888609052210118e-31f;  // 2^-100

struct Divisor {
  float value = 1.0f, high = 1.0f, low = 0.0f;
  bool fast = true;  // otherwise the remainders may leave the range of fp32

  Divisor() = default;

  RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE explicit Divisor(float temperature)
      : value(temperature),
        high(divide(1.0f, temperature)),
        low(divide(fused_multiply_add(-high, temperature, 1.0f), temperature)),
        fast(is_fast(temperature)) {}

  static RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE bool is_fast(float temperature) {
    return temperature > 1.0f / 1048576.0f && temperature < 1048576.0f;
  }

  // Whether fast_quotient of x is sure to be the rounded quotient.
  static RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE bool is_rounded(float x, float fast_quotient) {
    return x == 0 || !(absolute(fast_quotient) < kSmallestRounded);
  }

  // The rounded quotient; or its neighbour, for the few x whose quotient is as near to halfway
  // between two fp32 numbers as a quotient by `value` can be. In both, x must be within
  // kSmallestDividend and its negative.
  RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE float near_quotient(float x) const {
    return fused_multiply_add(x, high, multiply(x, low));
  }

  RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE float fast_quotient(float x) const {
    const float quotient = near_quotient(x);
    return fused_multiply_add(fused_multiply_add(-quotient, value, x), high, quotient);
  }
};

constexpr double kWideLse = 536870912.0;  // 2^29

// The lse of a row whose values are beyond 2^29 is the largest value plus the log of how often it
// occurs, which one double cannot hold. The value is an fp32 number: its double has 29 empty
// bits, and they take the log in steps of 2^-23. |wide_lse| >= 2^29, and only a wide lse is.
RL_LOGP_HOST_DEVICE inline double wide_lse(float value, double log_count) {
  const uint64_t fraction = static_cast<uint64_t>(round_to_integer(log_count * 8388608.0));
  return bits_double(double_bits(static_cast<double>(value)) | fraction);
}

constexpr uint64_t kWideLseMask = (uint64_t{1} << 29) - 1;

RL_LOGP_HOST_DEVICE inline double wide_lse_value(double lse) {
  return bits_double(double_bits(lse) & ~kWideLseMask);
}

RL_LOGP_HOST_DEVICE inline double wide_lse_log_count(double lse) {
  return static_cast<double>(double_bits(lse) & kWideLseMask) * 1.1920928955078125e-07;
}

}  // namespace rl_logp
