// The loop of the backward: what softmax.h says of a column, for many columns at once. Templates
// over Simd alone: columns.h says why.
#pragma once

#include <type_traits>

#include "elements.h"
#include "form.h"
#include "vector_exp2.h"

namespace rl_logp {

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

}  // namespace rl_logp
