// The exact sum, and beside it the sum of the same terms times their logits, which an entropy needs
// (docs/numerics.md). As order-free as the other: its terms are integers in the same bins.
#pragma once

#include "rl_logp/exact_sum.h"

namespace rl_logp {

// With z = y * log2(e) of a column, the three counters hold the sum of exp(y) * (z - 32 * top), as
// signed integers in the bins of `high`, `middle` and `low`. Measured from the top, a term's factor
// is small wherever the row lies; so when the top moves, what was counted from the old one is
// counted anew, bin by bin. 2^26 terms fit. A wide sum has zeros.
struct WeightedSum : ExactSum {
  static constexpr bool kWeighted = true;
  int64_t weighted_high = 0, weighted_middle = 0, weighted_low = 0;
};

constexpr int32_t kBinBits = 32;

// `weighted` of a bin whose sum is `counter`, counted from a top that is `bins` higher.
RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE int64_t
from_above(int64_t weighted, uint64_t counter, uint32_t bins) {
  return weighted - static_cast<int64_t>(counter * (bins * kBinBits));
}

RL_LOGP_HOST_DEVICE inline void raise_top(WeightedSum& sum, int32_t top) {
  const uint32_t bins = bins_above(sum, top);
  if (bins != 0) {
    sum.weighted_low = bins == 1   ? from_above(sum.weighted_middle, sum.middle, 1)
                       : bins == 2 ? from_above(sum.weighted_high, sum.high, 2)
                                   : 0;
    sum.weighted_middle = bins == 1 ? from_above(sum.weighted_high, sum.high, 1) : 0;
    sum.weighted_high = 0;
  }
  raise_top(static_cast<ExactSum&>(sum), top);
}

// Adds the term value * 2^exponent of columns whose z are `exponent` and a little, which weight /
// value is in the mean. |weight| is below 4 * value.
RL_LOGP_HOST_DEVICE inline void add_term(
    WeightedSum& sum, float value, int32_t exponent, float weight) {
  const TermPieces term(value, exponent);
  // In units of the mantissa's last bit, and from this term's own top: |whole| is below 2^31.
  const float unit = bits_float(static_cast<uint32_t>(127 + exponent - term.lowest) << 23);
  const int32_t from_top = exponent - kBinBits * term.top;
  const int32_t whole =
      from_top * static_cast<int32_t>(term.mantissa) + nearest_integer(multiply(weight, unit));
  const uint64_t shifted = static_cast<uint64_t>(int64_t{whole}) << (term.lowest & 31);
  const int64_t upper = static_cast<int32_t>(shifted >> kBinBits);
  const int64_t lower = static_cast<uint32_t>(shifted);
  if (term.top > sum.top) raise_top(sum, term.top);
  const uint32_t below = static_cast<uint32_t>(sum.top) - static_cast<uint32_t>(term.top);
  if (below == 0) {
    sum.high += term.upper;
    sum.middle += term.lower;
    sum.weighted_high += upper;
    sum.weighted_middle += lower;
  } else if (below == 1) {
    sum.middle += term.upper;
    sum.low += term.lower;
    sum.weighted_middle += from_above(upper, term.upper, 1);
    sum.weighted_low += from_above(lower, term.lower, 1);
  } else if (below == 2) {
    sum.low += term.upper;
    sum.weighted_low += from_above(upper, term.upper, 2);
  }
}

RL_LOGP_HOST_DEVICE inline void merge(WeightedSum& sum, WeightedSum other) {
  if (other.top > sum.top) raise_top(sum, other.top);
  if (sum.top > other.top) raise_top(other, sum.top);
  sum.high += other.high;
  sum.middle += other.middle;
  sum.low += other.low;
  sum.weighted_high += other.weighted_high;
  sum.weighted_middle += other.weighted_middle;
  sum.weighted_low += other.weighted_low;
}

// sum -= term, where the term is part of the sum.
RL_LOGP_HOST_DEVICE inline void subtract_term(WeightedSum& sum, WeightedSum term) {
  if (sum.top > term.top) raise_top(term, sum.top);
  sum.weighted_high -= term.weighted_high;
  sum.weighted_middle -= term.weighted_middle;
  sum.weighted_low -= term.weighted_low;
  subtract_term(static_cast<ExactSum&>(sum), term);
}

}  // namespace rl_logp
