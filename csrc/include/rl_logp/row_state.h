// What some of a row's columns tell of it, how such parts are brought together, and the row's
// log-sum-exp. Warps, blocks, GPUs and pieces of a vocabulary all meet here.
#pragma once

#include "rl_logp/group.h"

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

// The same where logits are weighted.
struct WeightedLargestTerm : LargestTerm {
  float weight = 0.0f;           // of its term, as GroupTerm's; 0 for a wide group
  double weighted_others = 0.0;  // the sum of exp(y - largest) * (y - largest)
};

RL_LOGP_HOST_DEVICE inline void set_term(LargestTerm& largest, const GroupTerm& term) {
  largest.value = term.value;
  largest.exponent = term.exponent;
}

RL_LOGP_HOST_DEVICE inline void set_term(WeightedLargestTerm& largest, const GroupTerm& term) {
  set_term(static_cast<LargestTerm&>(largest), term);
  largest.weight = term.weight;
}

RL_LOGP_HOST_DEVICE inline GroupTerm term_of(const LargestTerm& largest) {
  return {largest.value, largest.exponent};
}

RL_LOGP_HOST_DEVICE inline GroupTerm term_of(const WeightedLargestTerm& largest) {
  return {largest.value, largest.exponent, largest.weight};
}

// What belongs together where a row is summed, without weights and with them.
struct Unweighted {
  static constexpr bool kWeighted = false;
  using Sum = ExactSum;
  using Term = LargestTerm;
};

struct Weighted {
  static constexpr bool kWeighted = true;
  using Sum = WeightedSum;
  using Term = WeightedLargestTerm;
};

template <class Sum, class Term>
RL_LOGP_HOST_DEVICE inline Sum sum_of(const Term& term, float largest) {
  Sum sum;
  if (absolute(largest) < kWideLimit) {
    add_term(sum, term_of(term));
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

// power * (y - largest), where no power is left of -inf.
RL_LOGP_HOST_DEVICE inline double weighted_power(double power, float y, float largest) {
  return power == 0 ? 0.0 : multiply(power, static_cast<double>(y) - largest);
}

RL_LOGP_HOST_DEVICE inline double sum_halves(double (&values)[kGroup]) {
  for (int width = kGroup / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) values[i] += values[i + width];
  }
  return values[0];
}

// The largest group's term, from its 16 columns; those that do not exist are -inf. Not for an
// infinite `largest`.
template <class Kind>
RL_LOGP_HOST_DEVICE inline typename Kind::Term largest_term(
    const float (&y)[kGroup], float largest) {
  typename Kind::Term term;
  double power[kGroup];
  [[maybe_unused]] double weighted[kGroup];
  bool found = false;
  for (int i = 0; i < kGroup; ++i) {
    const bool first = y[i] == largest && !found;
    found = found || first;
    power[i] = first ? 0.0 : relative_power(y[i], largest);
    if constexpr (Kind::kWeighted) weighted[i] = weighted_power(power[i], y[i], largest);
  }
  term.others = sum_halves(power);
  if constexpr (Kind::kWeighted) term.weighted_others = sum_halves(weighted);
  if (absolute(largest) >= kWideLimit) {
    for (int i = 0; i < kGroup; ++i) term.value += y[i] == largest;
  } else if (absolute(largest) >= kFastLimit) {
    set_term(term, group_term<Kind::kWeighted, false>(y, SlowScale(largest)));
  } else {
    set_term(term, group_term<Kind::kWeighted, false>(y, FastScale(largest)));
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

// With what an entropy needs: by how much the mean of y differs from `largest`.
struct RowResult : LogSumExp {
  double below = 0.0;  // E[y] - largest, at most 0 but for rounding

  RL_LOGP_HOST_DEVICE float entropy() const {  // in nats
    if (!is_finite()) return kNan;
    const double entropy = log_rest - below;
    return static_cast<float>(entropy < 0 ? 0.0 : entropy);
  }

  RL_LOGP_HOST_DEVICE double mean() const {
    return is_finite() ? largest + below : static_cast<double>(kNan);
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

  // The sum of exp(y - largest) * (y - largest) over the rest is this, times 2^exponent.
  RL_LOGP_HOST_DEVICE double weighted(const WeightedSum& rest) const {
    if (is_wide_top(rest.top)) return 0.0;
    const double from_top = (static_cast<double>(rest.weighted_high) * 4294967296.0 +
                             static_cast<double>(rest.weighted_middle)) +
                            static_cast<double>(rest.weighted_low) * 2.3283064365386962891e-10;
    return multiply(fused_multiply_add(exponent + kBinBits, scaled, from_top), kLn2Double);
  }
};

// The part of a row that a shard of the vocabulary holds: what fused_logp_partial writes, eight
// 64-bit words a row. The field at the lower address is the lower half of its word.
struct RowState {
  using Kind = Unweighted;

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

  RL_LOGP_HOST_DEVICE ExactSum sum() const {
    ExactSum sum;
    sum.top = top;
    sum.high = high, sum.middle = middle, sum.low = low;
    return sum;
  }

  RL_LOGP_HOST_DEVICE void set_sum(const ExactSum& sum) {
    top = sum.top;
    high = sum.high, middle = sum.middle, low = sum.low;
  }

  RL_LOGP_HOST_DEVICE LargestTerm largest_term() const {
    LargestTerm of_largest;
    of_largest.value = term, of_largest.exponent = term_exponent, of_largest.others = others;
    return of_largest;
  }

  RL_LOGP_HOST_DEVICE void take_largest(const RowState& other) {
    largest = other.largest;
    group = other.group;
    term = other.term;
    term_exponent = other.term_exponent;
    others = other.others;
  }
};

// The same with what an entropy needs: what fused_logp_entropy_partial writes, 13 words a row, of
// which the first eight are those of fused_logp_partial.
struct WeightedRowState : RowState {
  using Kind = Weighted;

  int64_t weighted_high = 0, weighted_middle = 0, weighted_low = 0;  // words 8 to 10
  double weighted_others = 0.0;  // word 11: WeightedLargestTerm's weighted_others
  float weight = 0.0f;           // word 12: and weight
  uint32_t unused = 0;

  WeightedRowState() = default;

  RL_LOGP_HOST_DEVICE WeightedRowState(
      const WeightedSum& sum, const LargestGroup& group_of_largest,
      const WeightedLargestTerm& largest_term)
      : RowState(sum, group_of_largest, largest_term),
        weighted_high(sum.weighted_high),
        weighted_middle(sum.weighted_middle),
        weighted_low(sum.weighted_low),
        weighted_others(largest_term.weighted_others),
        weight(largest_term.weight) {}

  RL_LOGP_HOST_DEVICE WeightedSum sum() const {
    WeightedSum sum;
    static_cast<ExactSum&>(sum) = RowState::sum();
    sum.weighted_high = weighted_high;
    sum.weighted_middle = weighted_middle;
    sum.weighted_low = weighted_low;
    return sum;
  }

  RL_LOGP_HOST_DEVICE void set_sum(const WeightedSum& sum) {
    RowState::set_sum(sum);
    weighted_high = sum.weighted_high;
    weighted_middle = sum.weighted_middle;
    weighted_low = sum.weighted_low;
  }

  RL_LOGP_HOST_DEVICE WeightedLargestTerm largest_term() const {
    WeightedLargestTerm of_largest;
    static_cast<LargestTerm&>(of_largest) = RowState::largest_term();
    of_largest.weight = weight, of_largest.weighted_others = weighted_others;
    return of_largest;
  }

  RL_LOGP_HOST_DEVICE void take_largest(const WeightedRowState& other) {
    RowState::take_largest(other);
    weighted_others = other.weighted_others;
    weight = other.weight;
  }
};

// The layouts are part of the operators' contract.
static_assert(sizeof(RowState) == 64 && sizeof(WeightedRowState) == 104, "8 and 13 words");

// Brings another shard's part in. Integers are added and floating-point numbers only chosen, so the
// order of shards cannot reach the bits.
template <class State, class = typename State::Kind>
RL_LOGP_HOST_DEVICE inline void merge(State& state, const State& other) {
  auto sum = state.sum();
  merge(sum, other.sum());
  state.set_sum(sum);
  if (is_before({other.largest, other.group}, {state.largest, state.group})) {
    state.take_largest(other);
  }
  if (other.has_target != 0) state.target_y = other.target_y;
  state.has_target += other.has_target;
}

template <class State>
RL_LOGP_HOST_DEVICE inline RowResult result_of(const State& state) {
  using Kind = typename State::Kind;
  auto rest = state.sum();
  double relative = 0.0, below = 0.0;
  if (absolute(state.largest) < kInfinity && !(rest.top >= kInfTop)) {
    subtract_term(rest, sum_of<typename Kind::Sum>(state.largest_term(), state.largest));
    const RelativeRest relative_rest(rest, state.largest);
    const double power = exp_base_2(relative_rest.exponent);
    relative = multiply(relative_rest.scaled, power);
    if constexpr (Kind::kWeighted) {
      const double weighted = multiply(relative_rest.weighted(rest), power);
      below = (state.weighted_others + weighted) / (1.0 + (state.others + relative));
    }
  }
  return {log_sum_exp(rest, state.largest, state.others, relative), below};
}

// logp of a target that exactly one of the shards must have held: NaN otherwise, which no row of
// finite logits gives.
RL_LOGP_HOST_DEVICE inline float logp_of(const RowState& state, const LogSumExp& result) {
  return state.has_target == 1 ? result.logp(state.target_y) : kNan;
}

}  // namespace rl_logp
