// The loop of the forward: what group.h says of a group, step by step, for many groups at once.
// Templates over Simd alone: columns.h says why.
#pragma once

#include <type_traits>

#include "elements.h"
#include "form.h"
#include "term_sum.h"
#include "vector_exp2.h"

namespace rl_logp {

constexpr int kVectors = 16;  // of a block

struct Larger {
  template <class Simd>
  static typename Simd::Floats of(typename Simd::Floats a, typename Simd::Floats b) {
    return Simd::larger(a, b);
  }
};

struct Plus {
  template <class Simd>
  static typename Simd::Floats of(typename Simd::Floats a, typename Simd::Floats b) {
    return Simd::add(a, b);
  }
};

// Blocks whose columns are looked for their maxima, then exponentiated, then added, all at once: a
// block by itself would be one long chain of operations that wait for each other.
template <class Simd, class Kind>
struct Tile {
  static constexpr int kBlocks = 4;
  static constexpr int kBlockColumns = kVectors * Simd::kLanes;
  static constexpr int kColumns = kBlocks * kBlockColumns;
  static constexpr int kPairs = kVectors / 2;

  using Floats = typename Simd::Floats;
  using Ints = typename Simd::Ints;

  // Adds the groups of the first `blocks` blocks of y; the first one has the number `group`.
  //
  // `ahead`: logits that are wanted later, and are asked for one by one, as long as there is
  // something to do meanwhile. The processor itself looks ahead within a page of 4 KiB, and no
  // further. What lies past the end of a row, or of memory, is not harmed.
  template <class Element>
  void add(
      const float* y, int blocks, uint32_t group, TermSum<Simd, Kind>& sum,
      LargestGroup& row_largest, const Element* ahead) {
    for (int block = 0; block < blocks; ++block) look(y + block * kBlockColumns, block);
    for (int block = 0; block < blocks; ++block) {
      const Element* block_ahead = ahead + block * kBlockColumns;
      if constexpr (Kind::kWeighted) {
        weigh(y + block * kBlockColumns, block, block_ahead);
      } else {
        exponentiate(y + block * kBlockColumns, block, block_ahead);
      }
    }
    for (int block = 0; block < blocks; ++block) {
      const uint32_t first = group + static_cast<uint32_t>(block * Simd::kLanes);
      if (is_fast(block)) {
        sum.add(
            Simd::fused_multiply_add(total[block], correction[block], total[block]),
            exponent[block], corrected_weight(block));
        if (Simd::any(Simd::greater_floats(largest[block], Simd::set(row_largest.largest)))) {
          update(first, block, row_largest);
        }
      } else {
        add_rare_groups(y + block * kBlockColumns, first, sum, row_largest);
      }
    }
  }

 private:
  // FastScale, of the block's groups.
  void look(const float* y, int block) {
    largest[block] = Simd::template reduce_pairs<Larger>([&](int k) {
      const float* first = y + Simd::first_of_pair(k) * Simd::kLanes;
      return Simd::template neighbours<Larger>(
          Simd::load(first), Simd::load(first + Simd::kToNext * Simd::kLanes));
    });
    // A group of nothing but -inf has powers of 0, whatever they are relative to.
    finite[block] = Simd::nothing_as_zero(largest[block]);
    const Floats shift = Simd::set(kRoundShift);
    const Floats shifted = Simd::fused_multiply_add(finite[block], Simd::set(kLog2e), shift);
    Simd::store(minus_rounded[block], Simd::subtract(shift, shifted));
    correction[block] = Simd::multiply(finite[block], Simd::set(kTailLn2));
    exponent[block] = Simd::subtract_int(Simd::bits(shifted), Simd::set_int(kRoundShiftBits));
  }

  static constexpr int kPerGroup = kGroup / Simd::kLanes;

  template <class Element>
  void exponentiate(const float* y, int block, const Element* ahead) {
    const auto power = [&](int i) {
      const Floats minus = Simd::set(minus_rounded[block][i / kPerGroup]);
      const Floats of_y = Simd::load(y + i * Simd::kLanes);
      __builtin_prefetch(ahead + i * Simd::kLanes);
      return exp2<Simd>(Simd::fused_multiply_add(of_y, Simd::set(kLog2e), minus));
    };
    total[block] = Simd::template reduce_pairs<Plus>([&](int k) {
      const int first = Simd::first_of_pair(k);
      return Simd::template neighbours<Plus>(power(first), power(first + Simd::kToNext));
    });
  }

  // The same with weights: neighbours are brought side by side before anything else.
  template <class Element>
  void weigh(const float* y, int block, const Element* ahead) {
    Floats sums[kPairs], weights[kPairs];
#pragma GCC unroll 8
    for (int k = 0; k < kPairs; ++k) {
      const int first = Simd::first_of_pair(k), second = first + Simd::kToNext;
      const Floats minus = Simd::of_each(
          minus_rounded[block][first / kPerGroup], minus_rounded[block][second / kPerGroup]);
      const auto argument_of = [&](Floats of_y) {
        return Simd::larger(
            Simd::set(kSmallestArgument), Simd::fused_multiply_add(of_y, Simd::set(kLog2e), minus));
      };
      const Floats a = Simd::load(y + first * Simd::kLanes);
      const Floats b = Simd::load(y + second * Simd::kLanes);
      __builtin_prefetch(ahead + first * Simd::kLanes);
      __builtin_prefetch(ahead + second * Simd::kLanes);
      const Floats argument = argument_of(Simd::even(a, b)), next = argument_of(Simd::odd(a, b));
      const Floats power = exp2<Simd, true>(argument), next_power = exp2<Simd, true>(next);
      sums[k] = Simd::add(power, next_power);
      weights[k] =  // weight_of_two
          Simd::fused_multiply_add(next_power, next, Simd::multiply(power, argument));
    }
    total[block] = Simd::template reduce_pairs<Plus>([&](int k) { return sums[k]; });
    weight[block] = Simd::template reduce_pairs<Plus>([&](int k) { return weights[k]; });
  }

  // FastScale's.
  Floats corrected_weight(int block) const {
    if constexpr (Kind::kWeighted) {
      return Simd::fused_multiply_add(
          correction[block],
          Simd::fused_multiply_add(total[block], Simd::set(kLog2e), weight[block]), weight[block]);
    } else {
      return Simd::set(0.0f);
    }
  }

  // Otherwise a group is beyond the fast range, or there is a NaN, which `largest` may have missed.
  bool is_fast(int block) const {
    return Simd::all_below(Simd::absolute(finite[block]), kFastLimit) &&
           Simd::all_below(total[block], kInfinity);
  }

  [[gnu::noinline]] void update(uint32_t group, int block, LargestGroup& row_largest) const {
    float of_group[Simd::kLanes];
    Simd::store(of_group, largest[block]);
    for (int i = 0; i < Simd::kLanes; ++i) {
      if (of_group[i] > row_largest.largest) row_largest = {of_group[i], group + i};
    }
  }

  [[gnu::noinline]] static void add_rare_groups(
      const float* y, uint32_t group, TermSum<Simd, Kind>& sum, LargestGroup& row_largest) {
    typename Kind::Sum& settled = sum.settle();
    for (int i = 0; i < Simd::kLanes; ++i) {
      float values[kGroup];
      for (int j = 0; j < kGroup; ++j) values[j] = y[i * kGroup + j];
      const float of_group = largest_of(values);
      add_group(settled, values, of_group);
      if (of_group > row_largest.largest) row_largest = {of_group, group + i};
    }
  }

  Floats largest[kBlocks], finite[kBlocks], correction[kBlocks], total[kBlocks];
  Floats weight[Kind::kWeighted ? kBlocks : 1];
  Ints exponent[kBlocks];
  float minus_rounded[kBlocks][Simd::kLanes];
};

template <class Simd, class Kind, class Element, bool kTemperature>
void sum_columns(const Columns& columns, PartialRow<Kind>& row) {
  const auto* logits = static_cast<const Element*>(columns.logits);
  const auto temperature = Simd::set(columns.temperature);
  TermSum<Simd, Kind> sum(row.sum);
  LargestGroup largest = row.largest;
  Tile<Simd, Kind> tile;
  constexpr int kColumns = tile.kColumns;
  float buffer[kColumns];
  for (int64_t column = columns.begin; column < columns.end; column += kColumns) {
    const auto group = static_cast<uint32_t>(column / kGroup);
    const int64_t left = columns.end - column;
    const Element* ahead = logits + column + kColumns;
    if (left >= kColumns) {
      const float* y = buffer;
      if constexpr (std::is_same_v<Element, float> && !kTemperature) {
        y = logits + column;
      } else {
#pragma GCC unroll 4
        for (int i = 0; i < kColumns; i += Simd::kLanes) {
          auto x = Simd::load(logits + column + i);
          if constexpr (kTemperature) x = Simd::divide(x, temperature);
          Simd::store(buffer + i, x);
        }
      }
      tile.add(y, tile.kBlocks, group, sum, largest, ahead);
    } else {
      constexpr int kBlockColumns = tile.kBlockColumns;
      const auto blocks = static_cast<int>(ceil_div(left, kBlockColumns));
      for (int i = 0; i < blocks * kBlockColumns; ++i) {
        buffer[i] = -kInfinity;
        if (i >= left) continue;
        buffer[i] = to_float(logits[column + i]);
        if constexpr (kTemperature) buffer[i] = divide(buffer[i], columns.temperature);
      }
      tile.add(buffer, blocks, group, sum, largest, ahead);
    }
  }
  row.sum = sum.settle();
  row.largest = largest;
}

}  // namespace rl_logp
