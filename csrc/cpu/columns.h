// The loops over a row's columns, for any vectors: what exact_sum.h and softmax.h say of a group
// and of a column, step by step, for many groups at once.
//
// Simd has kLanes fp32 numbers in a Floats. 16 Floats are a block: kLanes groups. This header is
// compiled for the processor that Simd needs, and holds templates over Simd alone: anything else in
// it could be linked into code for another processor.
#pragma once

#include <type_traits>

#include "elements.h"
#include "form.h"

namespace rl_logp {

constexpr int kVectors = 16;  // of a block

// exp2_fp32 of every lane. Powers below 2^-126 may differ from form to form, unless kExact.
template <class Simd, bool kExact = false>
inline typename Simd::Floats exp2(typename Simd::Floats x) {
  using Floats = typename Simd::Floats;
  Floats whole, rest;
  Simd::split(x, whole, rest);
  Floats power = Simd::set(kExp2Terms[0]);
#pragma GCC unroll 8
  for (int i = 1; i < 6; ++i) {
    power = Simd::fused_multiply_add(power, rest, Simd::set(kExp2Terms[i]));
  }
  power = Simd::fused_multiply_add(power, rest, Simd::set(1.0f));
  return kExact ? Simd::scale_exactly(power, whole) : Simd::scale(power, whole);
}

// The 32-bit pieces of many terms, summed lane by lane. In halves of 16 bits, so that kMostTerms of
// them fit into a lane's 32; the upper half of an upper piece may have a sign.
//
// A sum for each bin that is kept: sum(i) is of bin top - i. kApart: these are of upper pieces, and
// sum(3) and sum(4) of the lower ones in bins top - 1 and top - 2.
template <class Simd, bool kApart>
class PieceSums {
  using Ints = typename Simd::Ints;
  using Mask = typename Simd::Mask;

 public:
  static constexpr int kMostTerms = 1 << 15;

  PieceSums() { clear(); }

  void clear() {
    for (auto& halves : sums_) halves[0] = halves[1] = Simd::set_int(0);
  }

  // upper_bin[i]: the lanes whose term has its upper piece in bin top - i.
  void add(const Mask (&upper_bin)[3], Ints upper, Ints lower) {
    const Ints half = Simd::set_int(0xffff);
    const Ints lower_0 = Simd::both(lower, half), lower_1 = Simd::template shift_right<16>(lower);
    const Ints upper_0 = Simd::both(upper, half);
    const Ints upper_1 = Simd::template shift_right_signed<16>(upper);
    constexpr int kLower = kApart ? 3 : 1;
#pragma GCC unroll 3
    for (int i = 0; i < 3; ++i) {
      add_where(upper_bin[i], sums_[i], upper_0, upper_1);
      if (i < 2) add_where(upper_bin[i], sums_[kLower + i], lower_0, lower_1);
    }
  }

  int64_t sum(int i) const {
    int32_t halves[2][Simd::kLanes];
    for (int half = 0; half < 2; ++half) Simd::store_ints(halves[half], sums_[i][half]);
    int64_t sum = 0;
    for (int lane = 0; lane < Simd::kLanes; ++lane) {
      sum += halves[0][lane] + int64_t{halves[1][lane]} * 65536;
    }
    return sum;
  }

 private:
  static void add_where(Mask lanes, Ints (&halves)[2], Ints of_low, Ints of_high) {
    halves[0] = Simd::add_where(lanes, halves[0], of_low);
    halves[1] = Simd::add_where(lanes, halves[1], of_high);
  }

  Ints sums_[kApart ? 5 : 3][2];
};

// An exact sum to which kLanes terms are added at once. Their pieces are collected lane by lane,
// and go to the counters now and then.
template <class Simd, class Kind>
class TermSum {
  using Floats = typename Simd::Floats;
  using Ints = typename Simd::Ints;
  using Mask = typename Simd::Mask;

 public:
  explicit TermSum(const typename Kind::Sum& sum) : sum_(sum) {}

  // += value * 2^exponent: add_term, lane by lane. A value is positive and normal, or 0. Without
  // weights, `weight` is not looked at.
  void add(Floats value, Ints exponent, Floats weight) {
    const Ints bits = Simd::bits(value);
    const Mask exists = Simd::greater(bits, Simd::set_int(0));
    const Ints one = Simd::set_int(1);
    const Ints mantissa = Simd::where(
        exists, Simd::either(Simd::both(bits, Simd::set_int(0x7fffff)), Simd::set_int(0x800000)));
    const Ints lowest = Simd::add_int(
        Simd::add_int(Simd::template shift_right<23>(bits), Simd::set_int(-150)), exponent);
    const Ints top = Simd::add_int(Simd::template shift_right_signed<5>(lowest), one);
    const Ints shift = Simd::both(lowest, Simd::set_int(31));
    const Ints shift_back = Simd::subtract_int(Simd::set_int(32), shift);
    const Mask raises = Simd::both_masks(exists, Simd::greater(top, Simd::set_int(sum_.top)));
    if (Simd::any(raises) || ++terms_ == pieces_.kMostTerms) {
      settle();
      raise(top, exists);
    }
    const Ints below = Simd::subtract_int(Simd::set_int(sum_.top), top);
    const Mask bin[] = {
        Simd::equal(below, Simd::set_int(0)), Simd::equal(below, one),
        Simd::equal(below, Simd::set_int(2))};
    pieces_.add(
        bin, Simd::shift_right_by(mantissa, shift_back), Simd::shift_left_by(mantissa, shift));
    if constexpr (Kind::kWeighted) {
      const Ints unit = Simd::template shift_left<23>(
          Simd::subtract_int(Simd::add_int(exponent, Simd::set_int(127)), lowest));
      const Ints from_top = Simd::subtract_int(exponent, Simd::template shift_left<5>(top));
      const Ints whole = Simd::add_int(
          Simd::multiply_int(from_top, mantissa),
          Simd::nearest(Simd::multiply(weight, Simd::floats(unit))));
      weighted_.add(
          bin, Simd::shift_right_signed_by(whole, shift_back), Simd::shift_left_by(whole, shift));
    }
  }

  // The sum of everything added, which may be changed before the next add().
  typename Kind::Sum& settle() {
    sum_.high += pieces(0);
    if constexpr (Kind::kWeighted) {
      sum_.middle += pieces(1) + pieces(3);
      sum_.low += pieces(2) + pieces(4);
      sum_.weighted_high += weighted_.sum(0);
      sum_.weighted_middle += from_above(weighted_.sum(1), pieces(1), 1);
      sum_.weighted_low += from_above(from_above(weighted_.sum(2), pieces(4), 1), pieces(2), 2);
      weighted_.clear();
    } else {
      sum_.middle += pieces(1);
      sum_.low += pieces(2);
    }
    pieces_.clear();
    terms_ = 0;
    return sum_;
  }

 private:
  void raise(Ints top, Mask exists) {
    int32_t tops[Simd::kLanes];
    Simd::store_ints(tops, Simd::select(exists, top, Simd::set_int(kEmptyTop)));
    int32_t highest = sum_.top;
    for (int i = 0; i < Simd::kLanes; ++i) highest = tops[i] > highest ? tops[i] : highest;
    if (highest > sum_.top) raise_top(sum_, highest);
  }

  uint64_t pieces(int i) const { return static_cast<uint64_t>(pieces_.sum(i)); }

  struct Nothing {};

  typename Kind::Sum sum_;
  int terms_ = 0;
  PieceSums<Simd, Kind::kWeighted> pieces_;
  std::conditional_t<Kind::kWeighted, PieceSums<Simd, false>, Nothing> weighted_;
};

struct Larger {
  template <class Simd>
  static typename Simd::Floats of(typename Simd::Floats a, typename Simd::Floats b) {
    return Simd::larger(a, b);
  }
};

struct Sum {
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
    total[block] = Simd::template reduce_pairs<Sum>([&](int k) {
      const int first = Simd::first_of_pair(k);
      return Simd::template neighbours<Sum>(power(first), power(first + Simd::kToNext));
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
    total[block] = Simd::template reduce_pairs<Sum>([&](int k) { return sums[k]; });
    weight[block] = Simd::template reduce_pairs<Sum>([&](int k) { return weights[k]; });
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

// RowSoftmax::product of every lane, but that a subnormal product is kept. y must be at least
// kSmallestFast.
template <class Simd, class Softmax>
struct VectorSoftmax {
  using Floats = typename Simd::Floats;
  using Ints = typename Simd::Ints;

  explicit VectorSoftmax(const RowSoftmax& softmax)
      : fraction(Simd::set(softmax.fraction)),
        to_exponent(Simd::set_int(softmax.to_exponent)),
        underflow(Simd::set_int(softmax.underflow)),
        factor(Simd::bits(Simd::set(softmax.factor))) {}

  Floats product(Floats y) const {
    const Floats shift = Simd::set(kRoundShift);
    const Floats shifted = Simd::fused_multiply_add(y, Simd::set(kLog2e), shift);
    const Floats minus_n = Simd::subtract(shift, shifted);
    const Floats argument =
        Simd::subtract(Simd::fused_multiply_add(y, Simd::set(kLog2e), minus_n), fraction);
    const Ints exponent =
        Simd::larger_int(Simd::add_int(Simd::bits(shifted), to_exponent), underflow);
    const Floats scale =
        Simd::floats(Simd::add_int(factor, Simd::template shift_left<23>(exponent)));
    const Floats power = exp2<Simd>(Simd::fused_multiply_add(y, Simd::set(kLog2eTail), argument));
    return Simd::multiply(Simd::normal(scale), power);
  }

  Floats fraction;
  Ints to_exponent, underflow, factor;
};

// Likewise WeightedSoftmax::product.
template <class Simd>
struct VectorSoftmax<Simd, WeightedSoftmax> {
  using Floats = typename Simd::Floats;

  explicit VectorSoftmax(const WeightedSoftmax& weighted)
      : softmax(weighted.softmax),
        mean(Simd::set(weighted.mean)),
        slope(Simd::set(weighted.slope)),
        base(Simd::set(weighted.base)) {}

  Floats product(Floats y) const {
    return Simd::multiply(
        softmax.product(y), Simd::fused_multiply_add(slope, Simd::subtract(y, mean), base));
  }

  VectorSoftmax<Simd, RowSoftmax> softmax;
  Floats mean, slope, base;
};

template <bool kTemperature, class Simd, class Softmax>
inline typename Simd::Floats gradient_of(
    const VectorSoftmax<Simd, Softmax>& softmax, typename Simd::Floats x,
    typename Simd::Floats temperature) {
  if constexpr (kTemperature) x = Simd::divide(x, temperature);
  return softmax.product(Simd::larger(Simd::set(kSmallestFast), x));
}

template <class Simd, class Softmax, class Element, bool kTemperature>
void write_gradient(const Columns& columns, const Softmax& row_softmax, void* row_dlogits) {
  const auto* logits = static_cast<const Element*>(columns.logits);
  auto* dlogits = static_cast<Element*>(row_dlogits);
  const auto temperature = Simd::set(columns.temperature);
  const VectorSoftmax<Simd, Softmax> softmax(row_softmax);
  constexpr int kUnroll = 4;
  int64_t column = columns.begin;
  for (; column + kUnroll * Simd::kLanes <= columns.end; column += kUnroll * Simd::kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < kUnroll; i += 2) {
      const int64_t at = column + i * Simd::kLanes;
      const auto x = Simd::load(logits + at), next = Simd::load(logits + at + Simd::kLanes);
      Simd::store_two(
          dlogits + at, gradient_of<kTemperature>(softmax, x, temperature),
          gradient_of<kTemperature>(softmax, next, temperature));
    }
  }
  for (; column < columns.end; column += Simd::kLanes) {
    float rest[Simd::kLanes];
    for (int i = 0; i < Simd::kLanes; ++i) {
      rest[i] = column + i < columns.end ? to_float(logits[column + i]) : 0.0f;
    }
    Simd::store(rest, gradient_of<kTemperature>(softmax, Simd::load(rest), temperature));
    for (int i = 0; i < Simd::kLanes && column + i < columns.end; ++i) {
      from_float(rest[i], dlogits[column + i]);
    }
  }
}

template <class Simd, class Kind, class Element>
constexpr Loops<Kind> loops_of() {
  using Softmax = typename Loops<Kind>::Softmax;
  return {
      {sum_columns<Simd, Kind, Element, false>, sum_columns<Simd, Kind, Element, true>},
      {write_gradient<Simd, Softmax, Element, false>,
       write_gradient<Simd, Softmax, Element, true>}};
}

template <class Simd>
constexpr Form form_of(const char* name) {
  return {
      name,
      {loops_of<Simd, Unweighted, BFloat16>(), loops_of<Simd, Unweighted, Float16>(),
       loops_of<Simd, Unweighted, float>()},
      {loops_of<Simd, Weighted, BFloat16>(), loops_of<Simd, Weighted, Float16>(),
       loops_of<Simd, Weighted, float>()}};
}

}  // namespace rl_logp
