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
  static constexpr bool kWeighted = false;
  int32_t top = kEmptyTop;
  uint64_t high = 0, middle = 0, low = 0;
};

RL_LOGP_HOST_DEVICE inline bool is_wide_top(int32_t top) {
  return top >= kWideTop || top <= -kWideTop;
}

// By how many bins `top` is above that of the sum; 3 drops all of them.
RL_LOGP_HOST_DEVICE inline uint32_t bins_above(const ExactSum& sum, int32_t top) {
  const uint32_t bins = static_cast<uint32_t>(top) - static_cast<uint32_t>(sum.top);
  return bins != 0 && (is_wide_top(top) || is_wide_top(sum.top)) ? 3 : bins;
}

// Moves the counters down to make room for a higher bin. Only whole bins are dropped, and what
// falls below the third bin is dropped whoever holds it, so that the order of additions cannot
// show.
RL_LOGP_HOST_DEVICE inline void raise_top(ExactSum& sum, int32_t top) {
  const uint32_t bins = bins_above(sum, top);
  sum.top = top;
  if (bins == 0) return;
  sum.low = bins == 1 ? sum.middle : bins == 2 ? sum.high : 0;
  sum.middle = bins == 1 ? sum.high : 0;
  sum.high = 0;
}

// value * 2^exponent of a positive normal value, as pieces of the bins `top` and `top` - 1.
struct TermPieces {
  uint32_t mantissa;  // of 24 bits
  int32_t lowest;     // the place of its last bit
  int32_t top;
  uint32_t upper, lower;

  RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE TermPieces(float value, int32_t exponent) {
    const uint32_t bits = float_bits(value);
    mantissa = (bits & 0x7fffffu) | 0x800000u;
    lowest = static_cast<int32_t>(bits >> 23) - 150 + exponent;
    top = (lowest >> 5) + 1;
    const uint64_t shifted = static_cast<uint64_t>(mantissa) << (lowest & 31);
    upper = static_cast<uint32_t>(shifted >> 32);
    lower = static_cast<uint32_t>(shifted);
  }
};

// sum += value * 2^exponent, for a positive normal value.
RL_LOGP_HOST_DEVICE inline void add_term(ExactSum& sum, float value, int32_t exponent) {
  const TermPieces term(value, exponent);
  if (term.top > sum.top) raise_top(sum, term.top);
  const uint32_t below = static_cast<uint32_t>(sum.top) - static_cast<uint32_t>(term.top);
  if (below == 0) {
    sum.high += term.upper;
    sum.middle += term.lower;
  } else if (below == 1) {
    sum.middle += term.upper;
    sum.low += term.lower;
  } else if (below == 2) {
    sum.low += term.upper;
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

// sum -= term, where the term is part of the sum.
RL_LOGP_HOST_DEVICE inline void subtract_term(ExactSum& sum, ExactSum term) {
  if (sum.top > term.top) raise_top(term, sum.top);
  sum.high -= term.high;
  sum.middle -= term.middle;
  sum.low -= term.low;
}

}  // namespace rl_logp
