// What exact_sum.h and weighted_sum.h say of a term, for many terms at once. Templates over Simd
// alone: columns.h says why.
#pragma once

#include "form.h"

namespace rl_logp {

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

}  // namespace rl_logp
