// Vectors of AVX2 with FMA and F16C: half a group of 16 columns each.
#pragma once

#include <immintrin.h>

#include "elements.h"

namespace rl_logp {

struct Avx2 {
  static constexpr int kLanes = 8;
  using Floats = __m256;
  using Ints = __m256i;
  using Mask = __m256i;

  static Floats load(const float* from) { return _mm256_loadu_ps(from); }
  static Floats load(const BFloat16* from) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  static Floats load(const Float16* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void store(float* to, Floats x) { _mm256_storeu_ps(to, x); }
  static void store(BFloat16* to, Floats x) {
    const Ints word = bits(x);
    const Ints odd = both(shift_right<16>(word), set_int(1));
    const Ints rounded = add_int(add_int(word, set_int(0x7fff)), odd);
    const Mask nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const Ints result = shift_right<16>(select(nan, either(word, set_int(0x400000)), rounded));
    const __m128i low = _mm256_castsi256_si128(result);
    const __m128i high = _mm256_extracti128_si256(result, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(low, high));
  }
  static void store(Float16* to, Floats x) {
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(to),
        _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  template <class Element>
  static void store_two(Element* to, Floats x, Floats next) {
    store(to, x);
    store(to + kLanes, next);
  }
  static void store_ints(int32_t* to, Ints x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
  }

  static Floats set(float x) { return _mm256_set1_ps(x); }
  static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
  static Floats fused_multiply_add(Floats a, Floats b, Floats c) {
    return _mm256_fmadd_ps(a, b, c);
  }
  static Floats absolute(Floats a) { return floats(both(bits(a), set_int(0x7fffffff))); }
  static Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
  static Floats normal(Floats a) {  // a subnormal number as 0
    const Mask zero = equal(both(bits(a), set_int(0x7f800000)), set_int(0));
    return floats(_mm256_andnot_si256(zero, bits(a)));
  }
  static Floats nothing_as_zero(Floats a) {
    return _mm256_and_ps(_mm256_cmp_ps(a, set(-kInfinity), _CMP_NEQ_UQ), a);
  }
  static bool all_below(Floats a, float limit) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, set(limit), _CMP_LT_OQ)) == 0xff;
  }
  static Mask greater_floats(Floats a, Floats b) {
    return _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_GT_OQ));
  }

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

  static Ints bits(Floats a) { return _mm256_castps_si256(a); }
  static Floats floats(Ints a) { return _mm256_castsi256_ps(a); }
  static Ints set_int(int32_t a) { return _mm256_set1_epi32(a); }
  static Ints add_int(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
  static Ints subtract_int(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
  static Ints multiply_int(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
  static Ints nearest(Floats a) { return _mm256_cvtps_epi32(a); }
  static Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
  static Ints either(Ints a, Ints b) { return _mm256_or_si256(a, b); }
  template <int kBits>
  static Ints shift_left(Ints a) {
    return _mm256_slli_epi32(a, kBits);
  }
  template <int kBits>
  static Ints shift_right(Ints a) {
    return _mm256_srli_epi32(a, kBits);
  }
  template <int kBits>
  static Ints shift_right_signed(Ints a) {
    return _mm256_srai_epi32(a, kBits);
  }
  static Ints shift_left_by(Ints a, Ints count) { return _mm256_sllv_epi32(a, count); }
  static Ints shift_right_by(Ints a, Ints count) { return _mm256_srlv_epi32(a, count); }
  static Ints shift_right_signed_by(Ints a, Ints count) { return _mm256_srav_epi32(a, count); }
  static Ints larger_int(Ints a, Ints b) { return _mm256_max_epi32(a, b); }

  static Mask greater(Ints a, Ints b) { return _mm256_cmpgt_epi32(a, b); }
  static Mask equal(Ints a, Ints b) { return _mm256_cmpeq_epi32(a, b); }
  static Mask both_masks(Mask a, Mask b) { return both(a, b); }
  static bool any(Mask mask) { return _mm256_movemask_ps(floats(mask)) != 0; }
  static Ints where(Mask mask, Ints a) { return both(mask, a); }
  static Ints select(Mask mask, Ints a, Ints b) { return _mm256_blendv_epi8(b, a, mask); }
  static Ints add_where(Mask mask, Ints a, Ints b) { return add_int(a, both(mask, b)); }

  // The vectors of a block are taken in pairs: first_of_pair(k) and the one that is kToNext
  // further, which is the same half of the next group: first all first halves, then all second
  // ones. Their even columns and their odd ones are neighbours, lane by lane, and of_each has, in
  // the same places, a number for each of the two groups.
  static constexpr int kToNext = 2;
  static constexpr int first_of_pair(int k) { return k / 4 + k % 4 * 4; }
  static Floats even(Floats a, Floats b) { return _mm256_shuffle_ps(a, b, 0x88); }
  static Floats odd(Floats a, Floats b) { return _mm256_shuffle_ps(a, b, 0xdd); }
  static Floats of_each(float a, float b) { return _mm256_blend_ps(set(a), set(b), 0xcc); }

  template <class Operation>
  static Floats neighbours(Floats a, Floats b) {
    return Operation::template of<Avx2>(even(a, b), odd(a, b));
  }

  // Lane i of the result is group i brought together in sum_tree's order, where neighbours already
  // are: pair(k) has those of pair k. The halves of the groups are kept apart until the last step.
  template <class Operation, class Pair>
  static Floats reduce_pairs(const Pair& pair) {
    return Operation::template of<Avx2>(half<Operation>(pair, 0), half<Operation>(pair, 4));
  }

 private:
  template <class Operation, class Pair>
  static Floats half(const Pair& pair, int first) {
    return halves<Operation>(
        two_pairs<Operation>(pair, first), two_pairs<Operation>(pair, first + 2));
  }
  template <class Operation>
  static Floats halves(Floats a, Floats b) {
    return Operation::template of<Avx2>(
        _mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }
  template <class Operation, class Pair>
  static Floats two_pairs(const Pair& pair, int first) {
    return neighbours<Operation>(pair(first), pair(first + 1));
  }
};

}  // namespace rl_logp
