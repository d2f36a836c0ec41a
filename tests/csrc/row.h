// A row as one thread sums it: what the forward kernel's warps, blocks and GPUs do in parts.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "check.h"
#include "rl_logp/exact_sum.h"

namespace host_test {

using Row = std::vector<float>;

struct PartialRow {
  rl_logp::ExactSum sum;
  rl_logp::LargestGroup largest;
};

inline bool operator==(const rl_logp::ExactSum& a, const rl_logp::ExactSum& b) {
  return a.top == b.top && a.high == b.high && a.middle == b.middle && a.low == b.low;
}

inline void merge(PartialRow& row, const PartialRow& other) {
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

inline void add_group(PartialRow& partial, const Row& row, uint32_t group) {
  const rl_logp::GroupValues values = group_values(row, group);
  const float largest = rl_logp::largest_of(values.y);
  rl_logp::add_group(partial.sum, values.y, largest);
  const rl_logp::LargestGroup candidate{largest, group};
  if (rl_logp::is_before(candidate, partial.largest)) partial.largest = candidate;
}

inline PartialRow sum_groups(const Row& row, const std::vector<uint32_t>& groups) {
  PartialRow partial;
  for (uint32_t group : groups) add_group(partial, row, group);
  return partial;
}

inline std::vector<uint32_t> in_order(const Row& row) {
  std::vector<uint32_t> groups(groups_of(row));
  std::iota(groups.begin(), groups.end(), 0u);
  return groups;
}

// As finish_row (partial_row.cuh) does it with one warp.
inline rl_logp::LogSumExp finish(const PartialRow& partial, const Row& row) {
  using namespace rl_logp;
  const float largest = partial.largest.largest + 0.0f;  // -0 counts as 0
  const GroupValues values = group_values(row, partial.largest.group);
  ExactSum term;
  if (absolute(largest) < kInfinity) rl_logp::add_group(term, values.y, largest);
  ExactSum rest = partial.sum;
  subtract_term(rest, term);
  double powers[kGroup];
  bool found = false;
  for (int i = 0; i < kGroup; ++i) {
    const bool excluded = !found && values.y[i] == largest;
    found = found || excluded;
    const double exponent = (static_cast<double>(values.y[i]) - largest) * kLog2eDouble;
    powers[i] = (excluded ? 0.0 : 1.0) * exp_base_2(exponent);
  }
  for (int width = kGroup / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) powers[i] += powers[i + width];
  }
  const RelativeRest relative(rest, largest);
  return log_sum_exp(rest, largest, powers[0], relative.scaled * exp_base_2(relative.exponent));
}

inline rl_logp::LogSumExp log_sum_exp_of(const Row& row) {
  return finish(sum_groups(row, in_order(row)), row);
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
