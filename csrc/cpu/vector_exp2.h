// exp2.h's exp2 for any vectors. Templates over Simd alone: columns.h says why.
#pragma once

#include "rl_logp/exp2.h"

namespace rl_logp {

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

}  // namespace rl_logp
