// An exact, order-free sum of exponentials (docs/numerics.md explains it).
//
// A row's sum of exp(y) is cut into groups of 16 consecutive columns. A group's term is a 24-bit
// integer times a power of two, a function of its 16 values alone. Terms are added as integers, in
// 32-bit bins at absolute exponents, so neither the order of the groups nor who adds them (thread,
// block, GPU) can reach the bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "rl_logp/arithmetic.h"

namespace rl_logp {

// The values of `top` order what a row may hold: nothing < everything below -2^29 < finite sums
// < something above 2^29 < +inf < NaN. The larger of two tops wins whole.
constexpr int32_t kEmptyTop = INT32_MIN;
constexpr int32_t kWideTop = 1 << 26;  // |top| of a finite sum stays below (|y| < 2^29)
constexpr int32_t kInfTop = INT32_MAX - 1;
constexpr int32_t kNanTop = INT32_MAX;

constexpr float kWideLimit = 536870912.0f;   // 2^29: from here fp32 values are 64 or more apart
constexpr uint32_t kWideBits = 0x4e000000u;  // of 2^29

// sum = (high * 2^64 + middle * 2^32 + low) * 2^(32 * (top - 2)). Each counter collects the 32-bit
// pieces of one bin and never carries into the next: 2^32 terms fit.
// In a wide sum (|top| >= kWideTop) `top` encodes the largest value and `middle` counts it: the
// next smaller fp32 value is at least 32 away, and exp(-32) is nothing beside 1.
struct ExactSum {
  int32_t top = kEmptyTop;
  uint64_t high = 0, middle = 0, low = 0;
};

RL_LOGP_HOST_DEVICE inline bool is_wide_top(int32_t top) {
  return top >= kWideTop || top <= -kWideTop;
}

// Moves the counters down to make room for a higher bin. Only whole bins are dropped, and what
// falls below the third bin is dropped whoever holds it, so that the order of additions cannot
// show.
RL_LOGP_HOST_DEVICE inline void raise_top(ExactSum& sum, int32_t top) {
  uint32_t bins = static_cast<uint32_t>(top) - static_cast<uint32_t>(sum.top);
  if (is_wide_top(top) || is_wide_top(sum.top)) bins = bins == 0 ? 0 : 3;
  sum.top = top;
  if (bins == 0) return;
  sum.low = bins == 1 ? sum.middle : bins == 2 ? sum.high : 0;
  sum.middle = bins == 1 ? sum.high : 0;
  sum.high = 0;
}

// sum += value * 2^exponent, for a positive normal value.
RL_LOGP_HOST_DEVICE inline void add_term(ExactSum& sum, float value, int32_t exponent) {
  const uint32_t bits = float_bits(value);
  const uint32_t mantissa = (bits & 0x7fffffu) | 0x800000u;
  const int32_t lowest = static_cast<int32_t>(bits >> 23) - 150 + exponent;  // of the last bit
  const int32_t top = (lowest >> 5) + 1;
  const uint64_t shifted = static_cast<uint64_t>(mantissa) << (lowest & 31);
  const uint32_t upper = static_cast<uint32_t>(shifted >> 32);
  const uint32_t lower = static_cast<uint32_t>(shifted);
  if (top > sum.top) raise_top(sum, top);
  const uint32_t below = static_cast<uint32_t>(sum.top) - static_cast<uint32_t>(top);
  if (below == 0) {
    sum.high += upper;
    sum.middle += lower;
  } else if (below == 1) {
    sum.middle += upper;
    sum.low += lower;
  } else if (below == 2) {
    sum.low += upper;
  }
}

RL_LOGP_HOST_DEVICE inline void merge(ExactSum& sum, ExactSum other) {
  if (other.top > sum.top) raise_top(sum, other.top);
  if (sum.top > other.top) raise_top(other, sum.top);
  sum.high += other.high;
  sum.middle += other.middle;
  sum.low += other.low;
}

// `top` of a wide value, monotone in it.
RL_LOGP_HOST_DEVICE inline int32_t wide_top(float value) {
  const int32_t above = static_cast<int32_t>((float_bits(value) & 0x7fffffffu) - kWideBits);
  return value > 0 ? kWideTop + above : -kWideTop - above;
}

RL_LOGP_HOST_DEVICE inline float wide_value(int32_t top) {
  const bool positive = top > 0;
  const uint32_t above = static_cast<uint32_t>(positive ? top - kWideTop : -(top + kWideTop));
  return bits_float((kWideBits + above) | (positive ? 0u : 0x80000000u));
}

// How a group is scaled whose largest value is within kFastLimit: its columns' powers are summed by
// the tree, and the sum, corrected, is worth 2^exponent.
struct FastScale {
  float rounded;
  float correction;
  int32_t exponent;

  RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE explicit FastScale(float largest) {
    const float shifted = fused_multiply_add(largest, kLog2e, kRoundShift);
    rounded = subtract(shifted, kRoundShift);
    // kLog2e is too small by kLog2eTail, which shrinks exp(y) by exp(-y * kLog2eTail * ln2). The
    // columns that matter are near `largest`, so one correction serves the group.
    correction = multiply(largest, kTailLn2);
    exponent = static_cast<int32_t>(float_bits(shifted)) - kRoundShiftBits;
  }

  RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE float power(float y) const {
    return exp2_approx(fused_multiply_add(y, kLog2e, -rounded));
  }

  RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE float corrected(float sum) const {
    return fused_multiply_add(sum, correction, sum);
  }
};

// The same for a largest value beyond kFastLimit and short of kWideLimit, in double.
struct SlowScale {
  double rounded;
  int32_t exponent;

  RL_LOGP_HOST_DEVICE explicit SlowScale(float largest)
      : rounded(round_to_integer(largest * kLog2eDouble)),
        exponent(static_cast<int32_t>(rounded)) {}

  RL_LOGP_HOST_DEVICE float power(float y) const {
    const double scaled = fused_multiply_add(static_cast<double>(y), kLog2eDouble, -rounded);
    return exp2_approx(static_cast<float>(scaled + y * kLog2eDoubleTail));
  }

  RL_LOGP_HOST_DEVICE float corrected(float sum) const { return sum; }
};

// The term of a group beyond the fast range: NaN, infinite, wide, or beyond kFastLimit. Rare, and
// so a function of its own: its code and its local array stay out of the loops that call it.
struct GroupValues {
  float y[kGroup];
};

RL_LOGP_HOST_DEVICE RL_LOGP_NOINLINE inline ExactSum slow_term(GroupValues group, float largest) {
  ExactSum term;
  if (largest != largest) {
    term.top = kNanTop;
  } else if (largest == kInfinity) {
    term.top = kInfTop;
  } else if (largest >= kWideLimit || largest <= -kWideLimit) {
    term.top = wide_top(largest);
    for (int i = 0; i < kGroup; ++i) term.middle += group.y[i] == largest;
  } else {
    const SlowScale scale(largest);
    for (int i = 0; i < kGroup; ++i) group.y[i] = scale.power(group.y[i]);
    add_term(term, scale.corrected(sum_tree(group.y)), scale.exponent);
  }
  return term;
}

// A group whose largest value is within kFastLimit.
RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE void add_group_fast(
    ExactSum& sum, const float (&y)[kGroup], float largest) {
  const FastScale scale(largest);
  float e[kGroup];
#pragma unroll
  for (int i = 0; i < kGroup; ++i) e[i] = scale.power(y[i]);
  add_term(sum, scale.corrected(sum_tree(e)), scale.exponent);
}

// Adds a group of 16 columns, of which `largest` is the largest or NaN if any is NaN. Columns that
// do not exist are -inf: they add exactly nothing.
RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE void add_group(
    ExactSum& sum, const float (&y)[kGroup], float largest) {
  if (absolute(largest) < kFastLimit) {
    add_group_fast(sum, y, largest);
  } else if (largest != -kInfinity) {
    GroupValues group;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) group.y[i] = y[i];
    merge(sum, slow_term(group, largest));
  }
}

// The term of a group that is divided by a temperature beyond what Divisor's shortcuts allow, or is
// out of the fast range when it is divided.
RL_LOGP_HOST_DEVICE RL_LOGP_NOINLINE inline ExactSum divided_term(
    GroupValues group, float temperature) {
  for (int i = 0; i < kGroup; ++i) group.y[i] = divide(group.y[i], temperature);
  ExactSum term;
  add_group(term, group.y, largest_of(group.y));  // NaN where an infinity meets an infinity
  return term;
}

// sum -= term, where the term is part of the sum.
RL_LOGP_HOST_DEVICE inline void subtract_term(ExactSum& sum, ExactSum term) {
  if (sum.top > term.top) raise_top(term, sum.top);
  sum.high -= term.high;
  sum.middle -= term.middle;
  sum.low -= term.low;
}

}  // namespace rl_logp
