// exp2_fp32: how far it is off, what it gives at its ends, and that it is exact where 2^x is.
#include <cmath>
#include <limits>

#include "check.h"
#include "rl_logp/exp2.h"

namespace {

using rl_logp::exp2_fp32;
using rl_logp::float_bits;

// The error over 2^-24, half a unit in the last place of the least power of a binade.
double error_of(float x) {
  const double exact = std::exp2(static_cast<double>(x));
  return std::fabs(exp2_fp32(x) / exact - 1) * 16777216.0;
}

void within_two_thirds_of_a_unit_in_the_last_place() {
  double largest = 0, bias = 0;
  int count = 0;
  for (int i = -200'000; i <= 200'000; ++i, ++count) {
    const float x = static_cast<float>(i) * (1.0f / 199'999);
    largest = std::fmax(largest, error_of(x));
    bias += exp2_fp32(x) / std::exp2(static_cast<double>(x)) - 1;
  }
  for (float x = -125.9f; x < 127.0f; x += 0.00137f) largest = std::fmax(largest, error_of(x));
  CHECK(largest < 4.0 / 3, "off by %g * 2^-24", largest);  // 2/3 of 2^-23
  CHECK(std::fabs(bias / count) < 1e-9, "a bias of %g", bias / count);
}

// A half goes to the even integer, as in the instructions that some processors have for it.
void halves_go_to_the_even_integer() {
  for (int n = -125; n < 127; ++n) {
    const float x = static_cast<float>(n) + 0.5f, whole = std::rint(x), rest = x - whole;
    float power = rl_logp::kExp2Terms[0];
    for (int i = 1; i < 6; ++i) power = std::fma(power, rest, rl_logp::kExp2Terms[i]);
    const float expected = std::ldexp(std::fma(power, rest, 1.0f), static_cast<int>(whole));
    CHECK(exp2_fp32(x) == expected, "2^%g is %a, expected %a", x, exp2_fp32(x), expected);
  }
}

void exact_at_integers() {
  for (int n = -126; n <= 127; ++n) {
    const float power = exp2_fp32(static_cast<float>(n));
    CHECK(power == std::ldexp(1.0f, n), "2^%d is %a", n, power);
  }
}

void nothing_below_and_nan_stays() {
  for (float x : {-std::numeric_limits<float>::infinity(), -3e38f, -200.0f, -127.0f}) {
    CHECK(float_bits(exp2_fp32(x)) == 0, "2^%g is %a", x, exp2_fp32(x));
  }
  const float nan = exp2_fp32(std::numeric_limits<float>::quiet_NaN());
  CHECK(std::isnan(nan), "%a", nan);
}

}  // namespace

int main(int argc, char** argv) {
  return host_test::run_all(
      argc, argv,
      {{"within two thirds of a unit in the last place",
        within_two_thirds_of_a_unit_in_the_last_place},
       {"halves go to the even integer", halves_go_to_the_even_integer},
       {"exact at integers", exact_at_integers},
       {"nothing below, and NaN stays", nothing_below_and_nan_stays}});
}
