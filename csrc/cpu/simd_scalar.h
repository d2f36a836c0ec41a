// Vectors of one lane: the form that every processor can run, and that says what the others do.
#pragma once

#include "elements.h"

namespace rl_logp {

struct Scalar {
  static constexpr int kLanes = 1;
  using Floats = float;
  using Ints = uint32_t;  // signed where it is said
  using Mask = bool;

  template <class Element>
  static Floats load(const Element* from) {
    return to_float(*from);
  }
  template <class Element>
  static void store(Element* to, Floats x) {
    from_float(x, *to);
  }
  template <class Element>
  static void store_two(Element* to, Floats x, Floats next) {
    store(to, x);
    store(to + kLanes, next);
  }
  static void store_ints(int32_t* to, Ints x) { *to = static_cast<int32_t>(x); }

  static Floats set(float x) { return x; }
  static Floats add(Floats a, Floats b) { return a + b; }
  static Floats subtract(Floats a, Floats b) { return a - b; }
  static Floats multiply(Floats a, Floats b) { return a * b; }
  static Floats divide(Floats a, Floats b) { return a / b; }
  static Floats fused_multiply_add(Floats a, Floats b, Floats c) { return std::fma(a, b, c); }
  static Floats absolute(Floats a) { return std::fabs(a); }
  // The second where either is NaN.
  static Floats larger(Floats a, Floats b) { return a > b ? a : b; }
  // A subnormal number as 0.
  static Floats normal(Floats a) { return (float_bits(a) & 0x7f800000u) == 0 ? 0.0f : a; }
  static Floats nothing_as_zero(Floats a) { return a == -kInfinity ? 0.0f : a; }
  static bool all_below(Floats a, float limit) { return a < limit; }
  static Mask greater_floats(Floats a, Floats b) { return a > b; }

  // exp2_fp32's: into an integer, as shifted there, and what is left; and the power of two of it.
  static void split(Floats x, Floats& whole, Floats& rest) {
    x = larger(set(kSmallestExp2), x);
    whole = add(x, set(kExp2Shift));
    rest = subtract(x, subtract(whole, set(kExp2Shift)));
  }
  static Floats scale(Floats power, Floats whole) {
    return multiply(power, floats(shift_left<23>(add_int(bits(whole), set_int(1)))));
  }
  static Floats scale_exactly(Floats power, Floats whole) { return scale(power, whole); }

  static Ints bits(Floats a) { return float_bits(a); }
  static Floats floats(Ints a) { return bits_float(a); }
  static Ints set_int(int32_t a) { return static_cast<uint32_t>(a); }
  static Ints add_int(Ints a, Ints b) { return a + b; }
  static Ints subtract_int(Ints a, Ints b) { return a - b; }
  static Ints multiply_int(Ints a, Ints b) { return a * b; }
  static Ints nearest(Floats a) { return static_cast<uint32_t>(nearest_integer(a)); }
  static Ints both(Ints a, Ints b) { return a & b; }
  static Ints either(Ints a, Ints b) { return a | b; }
  template <int kBits>
  static Ints shift_left(Ints a) {
    return a << kBits;
  }
  template <int kBits>
  static Ints shift_right(Ints a) {
    return a >> kBits;
  }
  template <int kBits>
  static Ints shift_right_signed(Ints a) {
    return static_cast<uint32_t>(static_cast<int32_t>(a) >> kBits);
  }
  static Ints shift_left_by(Ints a, Ints count) { return a << count; }  // by at most 31
  static Ints shift_right_by(Ints a, Ints count) { return count > 31 ? 0 : a >> count; }
  static Ints shift_right_signed_by(Ints a, Ints count) {
    return static_cast<uint32_t>(static_cast<int32_t>(a) >> (count > 31 ? 31 : count));
  }
  static Ints larger_int(Ints a, Ints b) { return greater(a, b) ? a : b; }

  static Mask greater(Ints a, Ints b) { return static_cast<int32_t>(a) > static_cast<int32_t>(b); }
  static Mask equal(Ints a, Ints b) { return a == b; }
  static Mask both_masks(Mask a, Mask b) { return a && b; }
  static bool any(Mask mask) { return mask; }
  static Ints where(Mask mask, Ints a) { return mask ? a : 0; }
  static Ints select(Mask mask, Ints a, Ints b) { return mask ? a : b; }
  static Ints add_where(Mask mask, Ints a, Ints b) { return a + where(mask, b); }

  // The columns of a group are taken in pairs of neighbours: first_of_pair(k), which is the even
  // one, and the one that is kToNext further.
  static constexpr int kToNext = 1;
  static constexpr int first_of_pair(int k) { return 2 * k; }
  static Floats even(Floats a, Floats) { return a; }
  static Floats odd(Floats, Floats b) { return b; }
  static Floats of_each(float a, float) { return a; }

  template <class Operation>
  static Floats neighbours(Floats a, Floats b) {
    return Operation::template of<Scalar>(a, b);
  }

  // The group brought together in sum_tree's order, where neighbours already are: pair(k) has those
  // of pair k.
  template <class Operation, class Pair>
  static Floats reduce_pairs(const Pair& pair) {
    constexpr int kPairs = kGroup / 2;
    float x[kPairs];
    for (int k = 0; k < kPairs; ++k) x[k] = pair(k);
    for (int width = 1; width < kPairs; width *= 2) {
      for (int i = 0; i < kPairs; i += 2 * width) {
        x[i] = Operation::template of<Scalar>(x[i], x[i + width]);
      }
    }
    return x[0];
  }
};

}  // namespace rl_logp
