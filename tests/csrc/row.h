// A row as one thread sums it: what the forward kernel's warps, blocks and GPUs do in parts.
#pragma once

#include <algorithm>
#include <numeric>
#include <type_traits>
#include <vector>

#include "check.h"
#include "rl_logp/row_state.h"

namespace host_test {

using Row = std::vector<float>;

// Of a Kind: Unweighted or Weighted (row_state.h).
template <class Kind>
struct PartialRow {
  typename Kind::Sum sum;
  rl_logp::LargestGroup largest;
};

template <class Kind>
using StateOf = std::conditional_t<Kind::kWeighted, rl_logp::WeightedRowState, rl_logp::RowState>;

inline bool operator==(const rl_logp::ExactSum& a, const rl_logp::ExactSum& b) {
  return a.top == b.top && a.high == b.high && a.middle == b.middle && a.low == b.low;
}

inline bool operator==(const rl_logp::WeightedSum& a, const rl_logp::WeightedSum& b) {
  return static_cast<const rl_logp::ExactSum&>(a) == static_cast<const rl_logp::ExactSum&>(b) &&
         a.weighted_high == b.weighted_high && a.weighted_middle == b.weighted_middle &&
         a.weighted_low == b.weighted_low;
}

template <class Kind>
void merge(PartialRow<Kind>& row, const PartialRow<Kind>& other) {
  rl_logp::merge(row.sum, other.sum);
  if (rl_logp::is_before(other.largest, row.largest)) row.largest = other.largest;
}

inline uint32_t groups_of(const Row& row) {
  return static_cast<uint32_t>((row.size() + rl_logp::kGroup - 1) / rl_logp::kGroup);
}

inline rl_logp::GroupValues group_values(const Row& row, uint32_t group) {
  rl_logp::GroupValues values;
  for (int i = 0; i < rl_logp::kGroup; ++i) {
    const size_t column = size_t{group} * rl_logp::kGroup + i;
    values.y[i] = column < row.size() ? row[column] : -rl_logp::kInfinity;
  }
  return values;
}

template <class Kind>
void add_group(PartialRow<Kind>& partial, const Row& row, uint32_t group) {
  const rl_logp::GroupValues values = group_values(row, group);
  const float largest = rl_logp::largest_of(values.y);
  rl_logp::add_group(partial.sum, values.y, largest);
  const rl_logp::LargestGroup candidate{largest, group};
  if (rl_logp::is_before(candidate, partial.largest)) partial.largest = candidate;
}

template <class Kind>
PartialRow<Kind> sum_groups(const Row& row, const std::vector<uint32_t>& groups) {
  PartialRow<Kind> partial;
  for (uint32_t group : groups) add_group(partial, row, group);
  return partial;
}

inline std::vector<uint32_t> in_order(const Row& row) {
  std::vector<uint32_t> groups(groups_of(row));
  std::iota(groups.begin(), groups.end(), 0u);
  return groups;
}

// As finish_row (partial_row.cuh) does it with one warp; `first_group` is the number of the row's
// first group in the vocabulary.
template <class Kind>
StateOf<Kind> finish(const PartialRow<Kind>& partial, const Row& row, uint32_t first_group) {
  const float largest = partial.largest.largest + 0.0f;  // -0 counts as 0
  typename Kind::Term term;
  if (rl_logp::absolute(largest) < rl_logp::kInfinity) {
    term = rl_logp::largest_term<Kind>(group_values(row, partial.largest.group).y, largest);
  }
  return StateOf<Kind>(partial.sum, {largest, partial.largest.group + first_group}, term);
}

template <class Kind>
StateOf<Kind> state_of(const Row& row, uint32_t first_group = 0) {
  return finish(sum_groups<Kind>(row, in_order(row)), row, first_group);
}

inline rl_logp::LogSumExp log_sum_exp_of(const Row& row) {
  return rl_logp::result_of(state_of<rl_logp::Unweighted>(row));
}

// With an entropy.
inline rl_logp::RowResult result_of(const Row& row) {
  return rl_logp::result_of(state_of<rl_logp::Weighted>(row));
}

// One state of each kind a row can be in, in the order in which one outdoes another.
template <class Sum>
std::vector<Sum> state_of_every_kind(Random& random) {
  const float negative = -random.magnitude(29, 128), positive = random.magnitude(29, 128);
  const float values[] = {
      -rl_logp::kInfinity, negative,     static_cast<float>(20 * random.normal()), positive,
      rl_logp::kInfinity,  rl_logp::kNan};
  std::vector<Sum> states;
  for (float value : values) {
    rl_logp::GroupValues group;
    for (float& y : group.y) y = random.chance(0.5) ? value : -rl_logp::kInfinity;
    group.y[random.below(rl_logp::kGroup)] = value;
    Sum state;
    rl_logp::add_group(state, group.y, rl_logp::largest_of(group.y));
    states.push_back(state);
  }
  return states;
}

// The sum of exp(y - largest) over all columns but one that is `largest`, in long double.
inline long double exact_rest(const Row& row) {
  const auto largest = std::max_element(row.begin(), row.end());
  long double sum = 0;
  for (auto y = row.begin(); y != row.end(); ++y) {
    if (y != largest) sum += std::exp(static_cast<long double>(*y) - *largest);
  }
  return sum;
}

}  // namespace host_test
