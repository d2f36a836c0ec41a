// What some of a row's columns tell of it, how such parts are brought together, and the row's
// log-sum-exp. Warps, blocks, GPUs and pieces of a vocabulary all meet here.
#pragma once

#include "rl_logp/exact_sum.h"

namespace rl_logp {

// The largest column's group, the first of them where several hold the largest value.
struct LargestGroup {
  float largest = -kInfinity;
  uint32_t group = 0xffffffffu;  // the number of its first column in the vocabulary, over kGroup
};

RL_LOGP_HOST_DEVICE inline bool is_before(const LargestGroup& a, const LargestGroup& b) {
  return a.largest > b.largest || (a.largest == b.largest && a.group < b.group);
}

// That group's share of the sum. A term is only as good as fp32, which shows where one column is
// nearly all of the sum: so this group is summed again in double, once a row.
struct LargestTerm {
  float value = 0.0f;    // its term is value * 2^exponent; of a wide group, how many are largest
  int32_t exponent = 0;  // 0 for a wide group
  double others = 0.0;   // the sum of exp(y - largest) over its columns but the first largest one
};

RL_LOGP_HOST_DEVICE inline ExactSum sum_of(const LargestTerm& term, float largest) {
  ExactSum sum;
  if (absolute(largest) < kWideLimit) {
    add_term(sum, term.value, term.exponent);
  } else {
    sum.top = wide_top(largest);
    sum.middle = static_cast<uint64_t>(term.value);
  }
  return sum;
}

// exp(y - largest)
RL_LOGP_HOST_DEVICE inline double relative_power(float y, float largest) {
  return exp_base_2(multiply(static_cast<double>(y) - largest, kLog2eDouble));
}

// The largest group's term, from its 16 columns; those that do not exist are -inf. Not for an
// infinite `largest`.
RL_LOGP_HOST_DEVICE inline LargestTerm largest_term(const float (&y)[kGroup], float largest) {
  LargestTerm term;
  double power[kGroup];
  float e[kGroup];
  bool found = false;
  for (int i = 0; i < kGroup; ++i) {
    const bool first = y[i] == largest && !found;
    found = found || first;
    power[i] = first ? 0.0 : relative_power(y[i], largest);
  }
  for (int width = kGroup / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) power[i] += power[i + width];
  }
  term.others = power[0];
  if (absolute(largest) >= kWideLimit) {
    for (int i = 0; i < kGroup; ++i) term.value += y[i] == largest;
  } else if (absolute(largest) >= kFastLimit) {
    const SlowScale scale(largest);
    for (int i = 0; i < kGroup; ++i) e[i] = scale.power(y[i]);
    term.value = scale.corrected(sum_tree(e));
    term.exponent = scale.exponent;
  } else {
    const FastScale scale(largest);
    for (int i = 0; i < kGroup; ++i) e[i] = scale.power(y[i]);
    term.value = scale.corrected(sum_tree(e));
    term.exponent = scale.exponent;
  }
  return term;
}

// A row's log-sum-exp as largest + log_rest, which is more than their sum can hold. Where `largest`
// is infinite or NaN it is the lse.
struct LogSumExp {
  double largest;
  double log_rest;

  RL_LOGP_HOST_DEVICE bool is_finite() const {
    return absolute(largest) < static_cast<double>(kInfinity);
  }

  RL_LOGP_HOST_DEVICE double lse() const {
    if (!is_finite()) return largest;
    if (absolute(largest) >= kWideLse) return wide_lse(static_cast<float>(largest), log_rest);
    return largest + log_rest;
  }

  RL_LOGP_HOST_DEVICE float logp(float y) const {
    if (!is_finite()) return kNan;
    const double logp = (y - largest) - log_rest;
    return static_cast<float>(logp > 0 ? 0.0 : logp);
  }
};

// `rest` is the sum without the largest group's term, and `relative` is rest * exp(-largest).
RL_LOGP_HOST_DEVICE inline LogSumExp log_sum_exp(
    const ExactSum& rest, float largest, double others, double relative) {
  if (rest.top == kEmptyTop) return {-static_cast<double>(kInfinity), 0.0};
  if (rest.top == kInfTop) return {static_cast<double>(kInfinity), 0.0};
  if (rest.top == kNanTop) return {static_cast<double>(kNan), 0.0};
  return {static_cast<double>(largest), log_1_plus(others + relative)};
}

// rest * exp(-largest) is scaled * 2^exponent. A wide sum counts columns that are `largest`.
struct RelativeRest {
  double scaled, exponent;

  RL_LOGP_HOST_DEVICE RelativeRest(const ExactSum& rest, float largest)
      : scaled(static_cast<double>(rest.middle)), exponent(0.0) {
    if (is_wide_top(rest.top)) return;
    scaled = (static_cast<double>(rest.high) * 4294967296.0 + scaled) +
             static_cast<double>(rest.low) * 2.3283064365386962891e-10;
    // The exponents cancel before they are rounded.
    const double m = largest;
    exponent = fused_multiply_add(-m, kLog2eDouble, 32.0 * (rest.top - 1));
    exponent = fused_multiply_add(-m, kLog2eDoubleTail, exponent);
  }
};

// The part of a row that a shard of the vocabulary holds: what fused_logp_partial writes, eight
// 64-bit words a row. The field at the lower address is the lower half of its word.
struct RowState {
  int32_t top = kEmptyTop;                 // word 0: of the sum,
  uint32_t group = 0xffffffffu;            //         and the largest column's group
  uint64_t high = 0, middle = 0, low = 0;  // words 1 to 3: the sum's counters
  float largest = -kInfinity;              // word 4: the largest y,
  float target_y = 0.0f;                   //         and that of the target, if it is here
  float term = 0.0f;                       // word 5: LargestTerm's value
  int32_t term_exponent = 0;               //         and exponent
  double others = 0.0;                     // word 6: LargestTerm's others
  uint64_t has_target = 0;                 // word 7: 1 if the target is in this shard

  RowState() = default;

  RL_LOGP_HOST_DEVICE RowState(
      const ExactSum& sum, const LargestGroup& group_of_largest, const LargestTerm& largest_term)
      : top(sum.top),
        group(group_of_largest.group),
        high(sum.high),
        middle(sum.middle),
        low(sum.low),
        largest(group_of_largest.largest),
        term(largest_term.value),
        term_exponent(largest_term.exponent),
        others(largest_term.others) {}

  RL_LOGP_HOST_DEVICE ExactSum sum() const { return {top, high, middle, low}; }
};

static_assert(sizeof(RowState) == 64, "the layout is part of the operators' contract");

// Brings another shard's part in. Integers are added and floating-point numbers only chosen, so the
// order of shards cannot reach the bits.
RL_LOGP_HOST_DEVICE inline void merge(RowState& state, const RowState& other) {
  ExactSum sum = state.sum();
  merge(sum, other.sum());
  state.top = sum.top;
  state.high = sum.high, state.middle = sum.middle, state.low = sum.low;
  if (is_before({other.largest, other.group}, {state.largest, state.group})) {
    state.largest = other.largest;
    state.group = other.group;
    state.term = other.term;
    state.term_exponent = other.term_exponent;
    state.others = other.others;
  }
  if (other.has_target != 0) state.target_y = other.target_y;
  state.has_target += other.has_target;
}

RL_LOGP_HOST_DEVICE inline LogSumExp log_sum_exp(const RowState& state) {
  ExactSum rest = state.sum();
  double relative = 0.0;
  if (absolute(state.largest) < kInfinity && !(rest.top >= kInfTop)) {
    subtract_term(rest, sum_of({state.term, state.term_exponent, state.others}, state.largest));
    const RelativeRest relative_rest(rest, state.largest);
    relative = multiply(relative_rest.scaled, exp_base_2(relative_rest.exponent));
  }
  return log_sum_exp(rest, state.largest, state.others, relative);
}

// logp of a target that exactly one of the shards must have held: NaN otherwise, which no row of
// finite logits gives.
RL_LOGP_HOST_DEVICE inline float logp_of(const RowState& state, const LogSumExp& result) {
  return state.has_target == 1 ? result.logp(state.target_y) : kNan;
}

}  // namespace rl_logp
