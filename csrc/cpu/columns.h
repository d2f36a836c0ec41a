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

// exp2_fp32 of every lane.
template <class Simd>
inline typename Simd::Floats exp2(typename Simd::Floats x) {
  using Floats = typename Simd::Floats;
  Floats whole, rest;
  Simd::split(x, whole, rest);
  Floats power = Simd::set(kExp2Terms[0]);
#pragma GCC unroll 8
  for (int i = 1; i < 6; ++i) {
    power = Simd::fused_multiply_add(power, rest, Simd::set(kExp2Terms[i]));
  }
  return Simd::scale(Simd::fused_multiply_add(power, rest, Simd::set(1.0f)), whole);
}

// An exact sum to which kLanes terms are added at once. The 32-bit pieces that fall into a bin are
// collected in halves of 16 bits, a lane each, and go to its counter now and then.
template <class Simd>
class TermSum {
  using Floats = typename Simd::Floats;
  using Ints = typename Simd::Ints;
  using Mask = typename Simd::Mask;

 public:
  explicit TermSum(const ExactSum& sum) : sum_(sum) { clear(); }

  // += value * 2^exponent: add_term, lane by lane. A value is positive and normal, or 0.
  void add(Floats value, Ints exponent) {
    const Ints bits = Simd::bits(value);
    const Mask exists = Simd::greater(bits, Simd::set_int(0));
    const Ints one = Simd::set_int(1);
    const Ints mantissa = Simd::where(
        exists, Simd::either(Simd::both(bits, Simd::set_int(0x7fffff)), Simd::set_int(0x800000)));
    const Ints lowest = Simd::add_int(
        Simd::add_int(Simd::template shift_right<23>(bits), Simd::set_int(-150)), exponent);
    const Ints top = Simd::add_int(Simd::template shift_right_signed<5>(lowest), one);
    const Ints shift = Simd::both(lowest, Simd::set_int(31));
    const Ints lower = Simd::shift_left_by(mantissa, shift);
    const Ints upper = Simd::shift_right_by(mantissa, Simd::subtract_int(Simd::set_int(32), shift));
    const Mask raises = Simd::both_masks(exists, Simd::greater(top, Simd::set_int(sum_.top)));
    if (Simd::any(raises) || ++terms_ == kMostTerms) {
      settle();
      raise(top, exists);
    }
    const Ints below = Simd::subtract_int(Simd::set_int(sum_.top), top);
    const Mask first = Simd::equal(below, Simd::set_int(0));
    const Mask second = Simd::equal(below, one);
    const Mask third = Simd::equal(below, Simd::set_int(2));
    const Ints half = Simd::set_int(0xffff);
    const Ints lower_0 = Simd::both(lower, half), lower_1 = Simd::template shift_right<16>(lower);
    const Ints upper_0 = Simd::both(upper, half), upper_1 = Simd::template shift_right<16>(upper);
    high_[0] = Simd::add_where(first, high_[0], upper_0);
    high_[1] = Simd::add_where(first, high_[1], upper_1);
    middle_[0] = Simd::add_where(first, middle_[0], lower_0);
    middle_[1] = Simd::add_where(first, middle_[1], lower_1);
    middle_[0] = Simd::add_where(second, middle_[0], upper_0);
    middle_[1] = Simd::add_where(second, middle_[1], upper_1);
    low_[0] = Simd::add_where(second, low_[0], lower_0);
    low_[1] = Simd::add_where(second, low_[1], lower_1);
    low_[0] = Simd::add_where(third, low_[0], upper_0);
    low_[1] = Simd::add_where(third, low_[1], upper_1);
  }

  // The sum of everything added, which may be changed before the next add().
  ExactSum& settle() {
    sum_.high += total(high_);
    sum_.middle += total(middle_);
    sum_.low += total(low_);
    clear();
    return sum_;
  }

 private:
  static constexpr int kMostTerms = 1 << 15;  // a lane collects two halves a term in 32 bits

  void clear() {
    terms_ = 0;
    for (int i = 0; i < 2; ++i) high_[i] = middle_[i] = low_[i] = Simd::set_int(0);
  }

  void raise(Ints top, Mask exists) {
    int32_t tops[Simd::kLanes];
    Simd::store_ints(tops, Simd::select(exists, top, Simd::set_int(kEmptyTop)));
    int32_t highest = sum_.top;
    for (int i = 0; i < Simd::kLanes; ++i) highest = tops[i] > highest ? tops[i] : highest;
    if (highest > sum_.top) raise_top(sum_, highest);
  }

  static uint64_t total(const Ints (&halves)[2]) {
    uint64_t sum = 0;
    for (int half = 0; half < 2; ++half) {
      int32_t pieces[Simd::kLanes];
      Simd::store_ints(pieces, halves[half]);
      for (int i = 0; i < Simd::kLanes; ++i) {
        sum += static_cast<uint64_t>(static_cast<uint32_t>(pieces[i])) << (16 * half);
      }
    }
    return sum;
  }

  ExactSum sum_;
  int terms_;
  Ints high_[2], middle_[2], low_[2];
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
template <class Simd>
struct Tile {
  static constexpr int kBlocks = 4;
  static constexpr int kBlockColumns = kVectors * Simd::kLanes;
  static constexpr int kColumns = kBlocks * kBlockColumns;

  using Floats = typename Simd::Floats;
  using Ints = typename Simd::Ints;

  // Adds the groups of the first `blocks` blocks of y; the first one has the number `group`.
  //
  // `ahead`: logits that are wanted later, and are asked for one by one, as long as there is
  // something to do meanwhile. The processor itself looks ahead within a page of 4 KiB, and no
  // further. What lies past the end of a row, or of memory, is not harmed.
  template <class Element>
  void add(
      const float* y, int blocks, uint32_t group, TermSum<Simd>& sum, LargestGroup& row_largest,
      const Element* ahead) {
    for (int block = 0; block < blocks; ++block) look(y + block * kBlockColumns, block);
    for (int block = 0; block < blocks; ++block) {
      exponentiate(y + block * kBlockColumns, block, ahead + block * kBlockColumns);
    }
    for (int block = 0; block < blocks; ++block) {
      const uint32_t first = group + static_cast<uint32_t>(block * Simd::kLanes);
      if (is_fast(block)) {
        sum.add(
            Simd::fused_multiply_add(total[block], correction[block], total[block]),
            exponent[block]);
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
    largest[block] = Simd::template reduce_groups<Larger>(
        [&](int i) { return Simd::load(y + i * Simd::kLanes); });
    // A group of nothing but -inf has powers of 0, whatever they are relative to.
    finite[block] = Simd::nothing_as_zero(largest[block]);
    const Floats shift = Simd::set(kRoundShift);
    const Floats shifted = Simd::fused_multiply_add(finite[block], Simd::set(kLog2e), shift);
    Simd::store(minus_rounded[block], Simd::subtract(shift, shifted));
    correction[block] = Simd::multiply(finite[block], Simd::set(kTailLn2));
    exponent[block] = Simd::subtract_int(Simd::bits(shifted), Simd::set_int(kRoundShiftBits));
  }

  template <class Element>
  void exponentiate(const float* y, int block, const Element* ahead) {
    constexpr int kPerGroup = kGroup / Simd::kLanes;
    total[block] = Simd::template reduce_groups<Sum>([&](int i) {
      const Floats minus = Simd::set(minus_rounded[block][i / kPerGroup]);
      const Floats of_y = Simd::load(y + i * Simd::kLanes);
      __builtin_prefetch(ahead + i * Simd::kLanes);
      return exp2<Simd>(Simd::fused_multiply_add(of_y, Simd::set(kLog2e), minus));
    });
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
      const float* y, uint32_t group, TermSum<Simd>& sum, LargestGroup& row_largest) {
    ExactSum& settled = sum.settle();
    for (int i = 0; i < Simd::kLanes; ++i) {
      float values[kGroup];
      for (int j = 0; j < kGroup; ++j) values[j] = y[i * kGroup + j];
      const float of_group = largest_of(values);
      add_group(settled, values, of_group);
      if (of_group > row_largest.largest) row_largest = {of_group, group + i};
    }
  }

  Floats largest[kBlocks], finite[kBlocks], correction[kBlocks], total[kBlocks];
  Ints exponent[kBlocks];
  float minus_rounded[kBlocks][Simd::kLanes];
};

template <class Simd, class Element, bool kTemperature>
void sum_columns(const Columns& columns, PartialRow& row) {
  const auto* logits = static_cast<const Element*>(columns.logits);
  const auto temperature = Simd::set(columns.temperature);
  TermSum<Simd> sum(row.sum);
  LargestGroup largest = row.largest;
  Tile<Simd> tile;
  constexpr int kColumns = Tile<Simd>::kColumns;
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
      tile.add(y, Tile<Simd>::kBlocks, group, sum, largest, ahead);
    } else {
      constexpr int kBlockColumns = Tile<Simd>::kBlockColumns;
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

// RowSoftmax::product of every lane, but that a subnormal product is kept.
template <class Simd>
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
    y = Simd::larger(Simd::set(kSmallestFast), y);
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

template <class Simd, bool kTemperature>
inline typename Simd::Floats gradient_of(
    const VectorSoftmax<Simd>& softmax, typename Simd::Floats x,
    typename Simd::Floats temperature) {
  if constexpr (kTemperature) x = Simd::divide(x, temperature);
  return softmax.product(x);
}

template <class Simd, class Element, bool kTemperature>
void write_gradient(const Columns& columns, const RowSoftmax& row_softmax, void* row_dlogits) {
  const auto* logits = static_cast<const Element*>(columns.logits);
  auto* dlogits = static_cast<Element*>(row_dlogits);
  const auto temperature = Simd::set(columns.temperature);
  const VectorSoftmax<Simd> softmax(row_softmax);
  constexpr int kUnroll = 4;
  int64_t column = columns.begin;
  for (; column + kUnroll * Simd::kLanes <= columns.end; column += kUnroll * Simd::kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < kUnroll; i += 2) {
      const int64_t at = column + i * Simd::kLanes;
      const auto x = Simd::load(logits + at), next = Simd::load(logits + at + Simd::kLanes);
      Simd::store_two(
          dlogits + at, gradient_of<Simd, kTemperature>(softmax, x, temperature),
          gradient_of<Simd, kTemperature>(softmax, next, temperature));
    }
  }
  for (; column < columns.end; column += Simd::kLanes) {
    float rest[Simd::kLanes];
    for (int i = 0; i < Simd::kLanes; ++i) {
      rest[i] = column + i < columns.end ? to_float(logits[column + i]) : 0.0f;
    }
    Simd::store(rest, gradient_of<Simd, kTemperature>(softmax, Simd::load(rest), temperature));
    for (int i = 0; i < Simd::kLanes && column + i < columns.end; ++i) {
      from_float(rest[i], dlogits[column + i]);
    }
  }
}

template <class Simd>
constexpr Form form_of(const char* name) {
  return {
      name,
      {{sum_columns<Simd, BFloat16, false>, sum_columns<Simd, BFloat16, true>},
       {sum_columns<Simd, Float16, false>, sum_columns<Simd, Float16, true>},
       {sum_columns<Simd, float, false>, sum_columns<Simd, float, true>}},
      {{write_gradient<Simd, BFloat16, false>, write_gradient<Simd, BFloat16, true>},
       {write_gradient<Simd, Float16, false>, write_gradient<Simd, Float16, true>},
       {write_gradient<Simd, float, false>, write_gradient<Simd, float, true>}}};
}

}  // namespace rl_logp
