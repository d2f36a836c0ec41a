// exp(y - lse), the softmax of the backward, and log(softmax) of one column, from a row's saved
// lse.
#pragma once

#include "rl_logp/arithmetic.h"

namespace rl_logp {

// y - lse in nats, for one column of a row. NaN where lse is not finite, as in torch.
RL_LOGP_HOST_DEVICE inline double log_softmax(float y, double lse) {
  if (!(absolute(lse) < static_cast<double>(kInfinity))) return static_cast<double>(kNan);
  double logp = y - lse;
  if (absolute(lse) >= kWideLse) logp = (y - wide_lse_value(lse)) - wide_lse_log_count(lse);
  return logp > 0 ? 0.0 : logp;  // lse is rounded, and may be short of a column that is all of it
}

// factor * exp(y - lse), plus added, of any row, rounded to fp32 once. In double: factors that are
// quotients by a small temperature may leave the range of fp32 where the gradient does not, and at
// the target, where the factor is added, 1 - p is next to nothing where p is nearly 1.
RL_LOGP_HOST_DEVICE inline float gradient_of_any(float y, double lse, double factor, double added) {
  return static_cast<float>(fused_multiply_add(exponential(log_softmax(y, lse)), factor, added));
}

// A row's lse and the factor of its softmax, prepared for factor * exp(y - lse) of its columns.
//
// With lse * log2(e) = integer + fraction and n the integer nearest to y * log2(e),
//     factor * exp(y - lse) = (factor * 2^(n - integer)) * 2^(y * log2(e) - n - fraction):
// the argument of exp2 is small and its error that of one rounding, the power of two is exact, and
// the one product is rounded once.
struct RowSoftmax {
  double lse;
  float factor;
  float fraction;
  int32_t to_exponent;  // what turns the low bits of y * log2(e) + kRoundShift into n - integer
  int32_t underflow;    // the power of two that makes factor a subnormal, which counts as 0
  bool fast;

  // lse_limit: how far lse may be from 0 for the fast arithmetic, 2^20 or less.
  static RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE bool is_fast(
      double lse, float factor, double lse_limit) {
    return lse < lse_limit && lse > -lse_limit && exponent_of(factor) > 0 &&
           exponent_of(factor) < 250;
  }

  static RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE int32_t exponent_of(float value) {
    return static_cast<int32_t>(float_bits(value) >> 23 & 0xff);
  }

  RL_LOGP_HOST_DEVICE RowSoftmax(double row_lse, float row_factor, double lse_limit)
      : lse(row_lse), factor(row_factor) {
    fast = is_fast(lse, factor, lse_limit);
    const double scaled = fast ? lse * kLog2eDouble : 0.0;
    const double rounded = round_to_integer(scaled);
    fraction = static_cast<float>(scaled - rounded);
    to_exponent = -kRoundShiftBits - static_cast<int32_t>(rounded);
    underflow = -exponent_of(factor);
  }

  // Splits factor * exp(y - lse) = scale * power. y must be at least kSmallestFast.
  RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE void split(float y, float& scale, float& power) const {
    const float shifted = fused_multiply_add(y, kLog2e, kRoundShift);
    const float n = subtract(shifted, kRoundShift);
    const float argument = subtract(fused_multiply_add(y, kLog2e, -n), fraction);
    const int32_t exponent = static_cast<int32_t>(float_bits(shifted)) + to_exponent;
    const int32_t kept = exponent > underflow ? exponent : underflow;
    scale = bits_float(float_bits(factor) + (static_cast<uint32_t>(kept) << 23));
    power = exp2_approx(fused_multiply_add(y, kLog2eTail, argument));
  }

  RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE float product(float y) const {
    float scale, power;
    split(y, scale, power);
    return multiply_flushed(scale, power);
  }
};

// The gradient of an entropy is -p * (y - E[y]), so that a row's gradient towards y is
//     p * (softmax_factor + entropy_factor * (y - mean)),
// plus the target's share at the target. The factor of one column, in double; y may be -inf.
RL_LOGP_HOST_DEVICE inline double column_factor(
    float y, double softmax_factor, double entropy_factor, double mean) {
  const double finite_y = std::fmax(y, -3.4028234663852886e38f);  // times a softmax of 0
  return fused_multiply_add(entropy_factor, finite_y - mean, softmax_factor);
}

// The same, prepared for many columns: a power of two near the larger factor is taken out of both
// and goes into RowSoftmax.
struct WeightedSoftmax {
  RowSoftmax softmax;
  float mean;   // rounded
  float slope;  // entropy_factor
  float base;   // softmax_factor, with what `mean` was rounded by

  // What goes into RowSoftmax. Without an entropy_factor, all: the bits are those of RowSoftmax.
  static RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE float factor_of(
      float softmax_factor, float entropy_factor) {
    if (entropy_factor == 0) return softmax_factor;
    const float size = larger(absolute(softmax_factor), absolute(entropy_factor));
    return bits_float(float_bits(size) & 0x7f800000u);
  }

  static RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE bool is_fast(
      double lse, float softmax_factor, float entropy_factor, double lse_limit) {
    return RowSoftmax::is_fast(lse, factor_of(softmax_factor, entropy_factor), lse_limit);
  }

  RL_LOGP_HOST_DEVICE WeightedSoftmax(
      double lse, double row_mean, float softmax_factor, float entropy_factor, double lse_limit)
      : softmax(lse, factor_of(softmax_factor, entropy_factor), lse_limit),
        mean(static_cast<float>(row_mean)),
        slope(0.0f),
        base(1.0f) {
    if (entropy_factor == 0) return;
    const float inverse = bits_float(0x7f000000u - float_bits(softmax.factor));
    slope = multiply(entropy_factor, inverse);
    base = fused_multiply_add(
        -slope, static_cast<float>(row_mean - mean), multiply(softmax_factor, inverse));
  }

  // y must be at least kSmallestFast.
  RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE float product(float y) const {
    return multiply(softmax.product(y), fused_multiply_add(slope, subtract(y, mean), base));
  }
};

}  // namespace rl_logp
