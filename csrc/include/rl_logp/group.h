// How a group of 16 columns becomes a term of an exact sum, with or without weights.
#pragma once

#include "rl_logp/exact_sum.h"
#include "rl_logp/weighted_sum.h"

namespace rl_logp {

// How a group is scaled whose largest value is within kFastLimit: its columns' powers of two are
// summed by the tree, and the sum, corrected, is worth 2^exponent.
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

  // What a column's power is two to the power of: y * log2(e) - exponent.
  RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE float argument(float y) const {
    return fused_multiply_add(y, kLog2e, -rounded);
  }

  RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE float corrected(float sum) const {
    return fused_multiply_add(sum, correction, sum);
  }

  // Of powers times arguments, where `sum` is that of the powers: both were too small.
  RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE float corrected_weight(float sum, float weight) const {
    return fused_multiply_add(correction, fused_multiply_add(sum, kLog2e, weight), weight);
  }
};

// The same for a largest value beyond kFastLimit and short of kWideLimit, in double.
struct SlowScale {
  double rounded;
  int32_t exponent;

  RL_LOGP_HOST_DEVICE explicit SlowScale(float largest)
      : rounded(round_to_integer(largest * kLog2eDouble)),
        exponent(static_cast<int32_t>(rounded)) {}

  RL_LOGP_HOST_DEVICE float argument(float y) const {
    const double scaled = fused_multiply_add(static_cast<double>(y), kLog2eDouble, -rounded);
    return static_cast<float>(scaled + y * kLog2eDoubleTail);
  }

  RL_LOGP_HOST_DEVICE float corrected(float sum) const { return sum; }

  RL_LOGP_HOST_DEVICE float corrected_weight(float, float weight) const { return weight; }
};

// A group's term: value * 2^exponent is the sum of its columns' exponentials, and weight, in the
// units of `value`, that of its powers times their arguments.
struct GroupTerm {
  float value;
  int32_t exponent;
  float weight = 0.0f;
};

RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE void add_term(ExactSum& sum, const GroupTerm& term) {
  add_term(sum, term.value, term.exponent);
}

RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE void add_term(WeightedSum& sum, const GroupTerm& term) {
  add_term(sum, term.value, term.exponent, term.weight);
}

// An argument of -inf has a power of 0, and so has this one, which can be multiplied by it.
constexpr float kSmallestArgument = -128.0f;

// Two neighbours' powers times their arguments. The arguments are not -inf.
RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE float weight_of_two(
    float power, float argument, float next_power, float next_argument) {
  return fused_multiply_add(next_power, next_argument, multiply(power, argument));
}

// kFinite: no column is -inf.
template <bool kWeighted, bool kFinite, class Scale>
RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE GroupTerm
group_term(const float (&y)[kGroup], const Scale& scale) {
  float power[kGroup];
  [[maybe_unused]] float weight[kGroup / 2];
#pragma unroll
  for (int i = 0; i < kGroup; i += 2) {
    float argument = scale.argument(y[i]), next = scale.argument(y[i + 1]);
    if constexpr (kWeighted && !kFinite) {
      argument = std::fmax(argument, kSmallestArgument);
      next = std::fmax(next, kSmallestArgument);
    }
    power[i] = exp2_approx(argument);
    power[i + 1] = exp2_approx(next);
    if constexpr (kWeighted) weight[i / 2] = weight_of_two(power[i], argument, power[i + 1], next);
  }
  const float sum = sum_tree(power);
  GroupTerm term{scale.corrected(sum), scale.exponent};
  if constexpr (kWeighted) term.weight = scale.corrected_weight(sum, sum_tree(weight));
  return term;
}

// Adds a group whose largest column is within kFastLimit. To a weighted sum, no column may be -inf.
template <class Sum>
RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE void add_group_fast(
    Sum& sum, const float (&y)[kGroup], float largest) {
  add_term(sum, group_term<Sum::kWeighted, true>(y, FastScale(largest)));
}

struct GroupValues {
  float y[kGroup];
};

// The term of a group beyond the fast range: NaN, infinite, wide, or beyond kFastLimit. Rare, and
// so a function of its own: its code and its local array stay out of the loops that call it.
template <class Sum>
RL_LOGP_HOST_DEVICE RL_LOGP_NOINLINE inline Sum slow_term(GroupValues group, float largest) {
  Sum term;
  if (largest != largest) {
    term.top = kNanTop;
  } else if (largest == kInfinity) {
    term.top = kInfTop;
  } else if (largest >= kWideLimit || largest <= -kWideLimit) {
    term.top = wide_top(largest);
    for (int i = 0; i < kGroup; ++i) term.middle += group.y[i] == largest;
  } else {
    add_term(term, group_term<Sum::kWeighted, false>(group.y, SlowScale(largest)));
  }
  return term;
}

// Adds a group of 16 columns, of which `largest` is the largest or NaN if any is NaN. Columns that
// do not exist are -inf: they add exactly nothing.
template <class Sum>
RL_LOGP_HOST_DEVICE RL_LOGP_FORCEINLINE void add_group(
    Sum& sum, const float (&y)[kGroup], float largest) {
  if (absolute(largest) < kFastLimit) {
    add_term(sum, group_term<Sum::kWeighted, false>(y, FastScale(largest)));
  } else if (largest != -kInfinity) {
    GroupValues group;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) group.y[i] = y[i];
    merge(sum, slow_term<Sum>(group, largest));
  }
}

// The term of a group that is divided by a temperature beyond what Divisor's shortcuts allow, or is
// out of the fast range when it is divided.
template <class Sum>
RL_LOGP_HOST_DEVICE RL_LOGP_NOINLINE inline Sum divided_term(GroupValues group, float temperature) {
  for (int i = 0; i < kGroup; ++i) group.y[i] = divide(group.y[i], temperature);
  Sum term;
  add_group(term, group.y, largest_of(group.y));  // NaN where an infinity meets an infinity
  return term;
}

}  // namespace rl_logp
