// Vectors of AVX-512 (F, BW and DQ): a group of 16 columns each.
#pragma once

#include <immintrin.h>

#include "elements.h"

namespace rl_logp {

struct Avx512 {
  static constexpr int kLanes = 16;
  using Floats = __m512;
  using Ints = __m512i;
  using Mask = __mmask16;

  static Floats load(const float* from) { return _mm512_loadu_ps(from); }
  static Floats load(const BFloat16* from) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  static Floats load(const Float16* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
  static void store(BFloat16* to, Floats x) {
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(shift_right<16>(rounded(x))));
  }
  static void store(Float16* to, Floats x) {
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(to),
        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  template <class Element>
  static void store_two(Element* to, Floats x, Floats next) {
    store(to, x);
    store(to + kLanes, next);
  }
  static void store_two(BFloat16* to, Floats x, Floats next) {
    const Ints odd_halves = _mm512_set_epi16(
        63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21, 19,
        17, 15, 13, 11, 9, 7, 5, 3, 1);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(rounded(x), odd_halves, rounded(next)));
  }
  static void store_ints(int32_t* to, Ints x) { _mm512_storeu_si512(to, x); }

  static Floats set(float x) { return _mm512_set1_ps(x); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static Floats fused_multiply_add(Floats a, Floats b, Floats c) {
    return _mm512_fmadd_ps(a, b, c);
  }
  static Floats absolute(Floats a) { return _mm512_abs_ps(a); }
  static Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  static Floats normal(Floats a) {  // a subnormal number as 0
    return _mm512_maskz_mov_ps(_mm512_test_epi32_mask(bits(a), set_int(0x7f800000)), a);
  }
  static Floats nothing_as_zero(Floats a) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, set(-kInfinity), _CMP_NEQ_UQ), a);
  }
  static bool all_below(Floats a, float limit) {
    return _mm512_cmp_ps_mask(a, set(limit), _CMP_LT_OQ) == 0xffff;
  }
  static Mask greater_floats(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }

  // Into an integer and what is left, and back to a power of two. A power below 2^-126 may differ
  // from other forms': beside the largest of its group it is nothing.
  static void split(Floats x, Floats& whole, Floats& rest) {
    whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static Floats scale(Floats power, Floats whole) { return _mm512_scalef_ps(power, whole); }
  // The same in all forms, to the last one: 0 where `whole` is below -126.
  static Floats scale_exactly(Floats power, Floats whole) {
    const Mask kept = _mm512_cmp_ps_mask(whole, set(-126.0f), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(kept, power, whole);
  }

  static Ints bits(Floats a) { return _mm512_castps_si512(a); }
  static Floats floats(Ints a) { return _mm512_castsi512_ps(a); }
  static Ints set_int(int32_t a) { return _mm512_set1_epi32(a); }
  static Ints add_int(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static Ints subtract_int(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
  static Ints multiply_int(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
  static Ints nearest(Floats a) { return _mm512_cvtps_epi32(a); }
  static Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
  static Ints either(Ints a, Ints b) { return _mm512_or_si512(a, b); }
  template <int kBits>
  static Ints shift_left(Ints a) {
    return _mm512_slli_epi32(a, kBits);
  }
  template <int kBits>
  static Ints shift_right(Ints a) {
    return _mm512_srli_epi32(a, kBits);
  }
  template <int kBits>
  static Ints shift_right_signed(Ints a) {
    return _mm512_srai_epi32(a, kBits);
  }
  static Ints shift_left_by(Ints a, Ints count) { return _mm512_sllv_epi32(a, count); }
  static Ints shift_right_by(Ints a, Ints count) { return _mm512_srlv_epi32(a, count); }
  static Ints shift_right_signed_by(Ints a, Ints count) { return _mm512_srav_epi32(a, count); }
  static Ints larger_int(Ints a, Ints b) { return _mm512_max_epi32(a, b); }

  static Mask greater(Ints a, Ints b) { return _mm512_cmpgt_epi32_mask(a, b); }
  static Mask equal(Ints a, Ints b) { return _mm512_cmpeq_epi32_mask(a, b); }
  static Mask both_masks(Mask a, Mask b) { return a & b; }
  static bool any(Mask mask) { return mask != 0; }
  static Ints where(Mask mask, Ints a) { return _mm512_maskz_mov_epi32(mask, a); }
  static Ints select(Mask mask, Ints a, Ints b) { return _mm512_mask_mov_epi32(b, mask, a); }
  static Ints add_where(Mask mask, Ints a, Ints b) { return _mm512_mask_add_epi32(a, mask, a, b); }

  // The vectors of a block are taken in pairs: first_of_pair(k) and the one that is kToNext
  // further, which is of another group. Their even columns and their odd ones are neighbours, lane
  // by lane, and of_each has, in the same places, a number for each of the two groups.
  static constexpr int kToNext = 1;
  static constexpr int first_of_pair(int k) { return 2 * k; }
  static Floats even(Floats a, Floats b) { return _mm512_shuffle_ps(a, b, 0x88); }
  static Floats odd(Floats a, Floats b) { return _mm512_shuffle_ps(a, b, 0xdd); }
  static Floats of_each(float a, float b) { return _mm512_mask_mov_ps(set(a), 0xcccc, set(b)); }

  template <class Operation>
  static Floats neighbours(Floats a, Floats b) {
    return Operation::template of<Avx512>(even(a, b), odd(a, b));
  }

  // Lane i of the result is group i brought together in sum_tree's order, where neighbours already
  // are: pair(k) has those of pair k.
  template <class Operation, class Pair>
  static Floats reduce_pairs(const Pair& pair) {
    return fourths<Operation>(
        fourths<Operation>(two_pairs<Operation>(pair, 0), two_pairs<Operation>(pair, 2)),
        fourths<Operation>(two_pairs<Operation>(pair, 4), two_pairs<Operation>(pair, 6)));
  }

 private:
  // To bf16, in the upper halves.
  static Ints rounded(Floats x) {
    const Ints word = bits(x);
    const Ints odd = both(shift_right<16>(word), set_int(1));
    const Ints sum = add_int(add_int(word, set_int(0x7fff)), odd);
    const Mask nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(sum, nan, word, set_int(0x400000));
  }
  // Each fourth of the result holds a fourth of the columns of four groups.
  template <class Operation, class Pair>
  static Floats two_pairs(const Pair& pair, int first) {
    return neighbours<Operation>(pair(first), pair(first + 1));
  }
  template <class Operation>
  static Floats fourths(Floats a, Floats b) {
    return Operation::template of<Avx512>(
        _mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
};

}  // namespace rl_logp
