// The dtypes of logits on a CPU: to fp32 and back, one at a time. The vectors' conversions have the
// same bits.
#pragma once

#include "rl_logp/arithmetic.h"

namespace rl_logp {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }

// The exponent is moved by a multiplication, which is exact and takes subnormal numbers along.
inline float to_float(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  if (magnitude >= 0x7c00u << 13) return bits_float(sign | 0x7f800000u | (magnitude << 3 >> 3));
  return bits_float(sign | float_bits(bits_float(magnitude) * 0x1p112f));
}

inline void from_float(float x, float& element) { element = x; }

inline void from_float(float x, BFloat16& element) {
  const uint32_t bits = float_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  element.bits = static_cast<uint16_t>(x != x ? bits >> 16 | 0x40u : rounded);
}

inline void from_float(float x, Float16& element) {
  const uint32_t bits = float_bits(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // rounds to 2^16 or more
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 1/2 rounds to a multiple of 2^-24, whose number the low bits then hold.
    half = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude + 0xfffu + (magnitude >> 13 & 1) - 0x38000000u) >> 13;
  }
  element.bits = static_cast<uint16_t>(sign | half);
}

}  // namespace rl_logp
