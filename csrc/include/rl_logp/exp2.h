// 2^x in fp32 from additions, multiplications and fused multiply-adds alone, which every processor
// rounds in the same way: the CPU kernel's vectors of any width take these very steps.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace rl_logp {

// What is smaller has a power of 0.
constexpr float kSmallestExp2 = -127.0f;

// 1.5 * 2^23 + 126: added to x, it leaves the integer nearest to x in the low bits, plus the bias
// of fp32 exponents less one. It is even, so that halves go to the even integer, as they do where
// an instruction rounds.
constexpr float kExp2Shift = 12583038.0f;

// Of 2^x for |x| <= 1/2, from x^6 down to x: off by 2e-9 of the power, before rounding. The
// constant is 1.
constexpr float kExp2Terms[] = {0x1.41fbbcp-13f, 0x1.5f3e52p-10f, 0x1.3b2d4cp-7f,
                                0x1.c6aee8p-5f,  0x1.ebfbdcp-3f,  0x1.62e430p-1f};

// x must be at most 127. NaN stays NaN. Below 2^-126 a result may be subnormal or 0.
inline float exp2_fp32(float x) {
  x = kSmallestExp2 > x ? kSmallestExp2 : x;
  const float shifted = x + kExp2Shift;
  const float rest = x - (shifted - kExp2Shift);
  float power = kExp2Terms[0];
  for (int i = 1; i < 6; ++i) power = std::fma(power, rest, kExp2Terms[i]);
  power = std::fma(power, rest, 1.0f);
  uint32_t bits;
  float scale;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1) << 23;
  std::memcpy(&scale, &bits, sizeof scale);
  return power * scale;
}

}  // namespace rl_logp
