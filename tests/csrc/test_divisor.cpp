// Dividing by a temperature without dividing: the bits of an IEEE division.
#include "row.h"

namespace {

using namespace rl_logp;
using host_test::Random;
using host_test::operator==;

// From here the remainder of a quotient is a normal number or exact, and its correction too.
constexpr float kSmallestQuotient = 0x1p-100f;

float random_temperature(Random& random) { return random.magnitude(-20, 20); }

float random_sign(Random& random) { return random.chance(0.5) ? 1.0f : -1.0f; }

void check_quotient(float x, const Divisor& divisor) {
  const float expected = x / divisor.value;
  const float actual = divisor.fast_quotient(x);
  CHECK(actual == expected, "%a for %a = %a / %a", actual, expected, x, divisor.value);
}

// Temperatures and significands at the ends of their ranges, and the like.
std::vector<float> special_temperatures() {
  std::vector<float> temperatures = {std::nextafter(0x1p-20f, 1.0f), std::nextafter(0x1p20f, 1.0f)};
  for (int exponent : {-20, -10, -1, 0, 1, 10, 19}) {
    for (float significand :
         {1.0f, 0x1.000002p0f, 0x1.000004p0f, 0x1.555554p0f, 0x1.555556p0f, 0x1.6a09e6p0f, 1.5f,
          0x1.fffffcp0f, 0x1.fffffep0f}) {
      const float temperature = std::ldexp(significand, exponent);
      if (Divisor::is_fast(temperature)) temperatures.push_back(temperature);
    }
  }
  for (float temperature : {0.1f, 0.3f, 0.6f, 0.7f, 0.9f, 1.1f, 1.3f, 3.0f, 10.0f}) {
    temperatures.push_back(temperature);
  }
  return temperatures;
}

void random_quotients() {
  Random random;
  for (int round = 0; round < 30000; ++round) {
    const Divisor divisor(random_temperature(random));
    CHECK(divisor.fast || divisor.value == 0x1p-20f, "%a", divisor.value);
    for (int i = 0; i < 20; ++i) {
      const float x = random_sign(random) * random.magnitude(-79, 60);
      check_quotient(x, divisor);
    }
    check_quotient(random_sign(random) * kSmallestDividend, divisor);
    check_quotient(0.0f, divisor);
    check_quotient(-0.0f, divisor);
  }
}

void special_temperatures_and_every_significand() {
  Random random;
  for (float temperature : special_temperatures()) {
    const Divisor divisor(temperature);
    for (uint32_t significand = 0; significand < (1u << 23); ++significand) {
      // Some of all, and all of the simplest and the largest.
      if (significand > 2000 && significand < (1u << 23) - 2000) significand += random.below(3000);
      check_quotient(bits_float(0x3f800000u | (significand & 0x7fffffu)), divisor);
    }
  }
  for (float temperature : {0.7f, 0x1.fffffep0f}) {
    const Divisor divisor(temperature);
    for (uint32_t significand = 0; significand < (1u << 23); ++significand) {
      check_quotient(bits_float(0x3f800000u | significand), divisor);
    }
  }
}

// Calls check(x, divisor) for quotients as near as can be to halfway between two fp32 numbers, on
// either side: with X and T the significands as integers and Q the quotient's,
//     X * 2^shift = (Q + 1/2) * T + excess / 2,   excess = +-1.
// For an odd T that is X = excess / 2^(shift + 1) modulo T.
template <class Check>
void for_quotients_near_halfway(Random& random, int temperatures, Check&& check) {
  for (int round = 0; round < temperatures; ++round) {
    const uint64_t t = (1u << 23) | (random.bits() >> 41) | 1;
    const Divisor divisor(
        std::ldexp(static_cast<float>(t), static_cast<int>(random.below(40)) - 43));
    if (!divisor.fast) continue;
    for (int shift : {23, 24}) {
      uint64_t inverse = 1;
      for (int i = 0; i <= shift; ++i) inverse = inverse * ((t + 1) / 2) % t;
      for (uint64_t remainder : {inverse, t - inverse}) {
        for (uint64_t x = remainder; x < (1u << 24); x += t) {
          if (x < (1u << 23) || (x < t) != (shift == 24)) continue;
          const int exponent = static_cast<int>(random.below(60)) - 60;
          check(random_sign(random) * std::ldexp(static_cast<float>(x), exponent), divisor);
        }
      }
    }
  }
}

void quotients_near_halfway() {
  Random random;
  int count = 0;
  for_quotients_near_halfway(random, 200000, [&](float x, const Divisor& divisor) {
    check_quotient(x, divisor);
    const double quotient = static_cast<double>(x) / divisor.value;
    const double rounded = x / divisor.value;
    const double ulp = std::ldexp(1.0, std::ilogb(rounded) - 23);
    CHECK(
        std::fabs(std::fabs(quotient - rounded) / ulp - 0.5) < 0x1p-23, "%a / %a is no such case",
        x, divisor.value);
    ++count;
  });
  CHECK(count > 200000, "%d cases", count);
}

void near_quotient_is_the_quotient_or_its_neighbour() {
  Random random;
  int off = 0;
  const auto check_near = [&](float x, const Divisor& divisor) {
    const float near = divisor.near_quotient(x), quotient = x / divisor.value;
    CHECK(std::nextafter(near, quotient) == quotient, "%a for %a", near, quotient);
    off += near != quotient;
  };
  for (int round = 0; round < 400000; ++round) {
    check_near(
        random_sign(random) * random.magnitude(-79, 60), Divisor(random_temperature(random)));
  }
  CHECK(off < 2, "%d of 400000 quotients off", off);
  for_quotients_near_halfway(random, 100000, check_near);
  CHECK(off > 100, "only %d quotients off: are these the hard cases?", off);
}

// What the forward relies on for bf16: if near_quotient is right for 128 significands, it is for
// every number.
void a_power_of_two_changes_nothing() {
  Random random;
  for (int round = 0; round < 3000; ++round) {
    const Divisor divisor(random_temperature(random));
    for (uint32_t significand = 0; significand < 128; ++significand) {
      const float x = bits_float(0x3f800000u | significand << 16);
      const int exponent = static_cast<int>(random.below(139)) - 79;
      const float scaled = std::ldexp(x, exponent);
      CHECK(
          divisor.near_quotient(scaled) == std::ldexp(divisor.near_quotient(x), exponent),
          "%a / %a", scaled, divisor.value);
      CHECK(
          divisor.fast_quotient(-scaled) == -std::ldexp(divisor.fast_quotient(x), exponent),
          "%a / %a", -scaled, divisor.value);
    }
  }
}

// What is clamped has an exponential of 0 in every group of the fast range, as it would without.
void clamped_dividends_are_nothing() {
  Random random;
  std::vector<float> temperatures = special_temperatures();
  for (int i = 0; i < 1000; ++i) temperatures.push_back(random_temperature(random));
  for (float temperature : temperatures) {
    const Divisor divisor(temperature);
    for (float largest :
         {-std::nextafter(kFastLimit, 0.0f), 0.0f, std::nextafter(kFastLimit, 0.0f)}) {
      const FastScale scale(largest);
      for (float quotient :
           {divisor.near_quotient(kSmallestDividend), divisor.fast_quotient(kSmallestDividend),
            kSmallestDividend / temperature, -kInfinity}) {
        CHECK(
            exp2_approx(scale.argument(quotient)) == 0, "%a of %a / %a",
            exp2_approx(scale.argument(quotient)), kSmallestDividend, temperature);
      }
    }
  }
}

// Quotients that fast_quotient may get wrong: no exponential, and so no state, can tell.
void tiny_quotients_make_no_difference() {
  Random random;
  int off = 0;
  for (int round = 0; round < 200000; ++round) {
    const Divisor divisor(random_temperature(random));
    const float x = random_sign(random) * random.magnitude(-149, -75);
    const float quotient = x / divisor.value;
    if (std::fabs(quotient) >= kSmallestQuotient) continue;
    off += divisor.fast_quotient(x) != quotient;
    const FastScale scale(static_cast<float>(random.uniform(-4095, 4095)));
    for (const FastScale& of : {scale, FastScale(quotient), FastScale(0.0f)}) {
      CHECK(
          exp2_approx(of.argument(divisor.fast_quotient(x))) == exp2_approx(of.argument(quotient)),
          "%a / %a", x, divisor.value);
      CHECK(
          exp2_approx(of.argument(divisor.near_quotient(x))) == exp2_approx(of.argument(quotient)),
          "%a / %a", x, divisor.value);
    }
  }
  CHECK(off > 100, "only %d quotients off: what is this test for?", off);
}

// A shortcut may only be taken where it is right: what is too large to divide so must not look as
// if it were in the fast range.
void what_is_out_of_range_shows() {
  Random random;
  for (int round = 0; round < 100000; ++round) {
    const Divisor divisor(random_temperature(random));
    const float sign = random_sign(random);
    for (float x : {sign * kInfinity, sign * kNan, sign * random.magnitude(60, 128)}) {
      const float quotient = divisor.fast_quotient(x);
      CHECK(!(absolute(quotient) < kFastLimit), "%a for %a / %a", quotient, x, divisor.value);
    }
  }
  for (float temperature :
       {0.0f, 0x1p-149f, 0x1p-126f, 0x1p-20f, 0x1p20f, 3e38f, kInfinity, kNan, -1.0f}) {
    CHECK(!Divisor(temperature).fast, "%a", temperature);
  }
}

// A group divided by the shortcuts, as the forward does it (add_words in forward.cuh).
ExactSum divided_by_shortcuts(const GroupValues& x, const Divisor& divisor) {
  ExactSum sum;
  const float largest_x = largest_of(x.y);
  const float largest = divisor.fast_quotient(largest_x);
  if (divisor.fast && absolute(largest) < kFastLimit) {
    GroupValues y;
    for (int i = 0; i < kGroup; ++i) {
      y.y[i] = divisor.fast_quotient(std::fmax(x.y[i], kSmallestDividend));
    }
    add_group_fast(sum, y.y, largest);
  } else if (largest_x != -kInfinity) {
    merge(sum, divided_term<ExactSum>(x, divisor.value));
  }
  return sum;
}

void groups_have_the_bits_of_their_quotients() {
  Random random;
  for (int round = 0; round < 100000; ++round) {
    const float temperature =
        random.chance(0.8) ? random_temperature(random) : random.magnitude(-149, 128);
    GroupValues x, y;
    const int low = static_cast<int>(random.below(300)) - 149;
    const int high = std::min(128, low + 1 + static_cast<int>(random.below(12)));
    for (int i = 0; i < kGroup; ++i) {
      x.y[i] = random_sign(random) * random.magnitude(std::min(low, 127), high);
      if (random.chance(0.1)) x.y[i] = -kInfinity;
      if (random.chance(0.01)) x.y[i] = -0x1.fffffep127f;
      if (random.chance(0.001)) x.y[i] = random.chance(0.5) ? kInfinity : kNan;
      y.y[i] = x.y[i] / temperature;
    }
    ExactSum expected;
    add_group(expected, y.y, largest_of(y.y));
    CHECK(
        divided_by_shortcuts(x, Divisor(temperature)) == expected,
        "another state in round %d, temperature %a", round, temperature);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return host_test::run_all(
      argc, argv,
      {{"random quotients", random_quotients},
       {"special temperatures and every significand", special_temperatures_and_every_significand},
       {"quotients near halfway", quotients_near_halfway},
       {"near_quotient is the quotient or its neighbour",
        near_quotient_is_the_quotient_or_its_neighbour},
       {"a power of two changes nothing", a_power_of_two_changes_nothing},
       {"clamped dividends are nothing", clamped_dividends_are_nothing},
       {"tiny quotients make no difference", tiny_quotients_make_no_difference},
       {"what is out of range shows", what_is_out_of_range_shows},
       {"groups have the bits of their quotients", groups_have_the_bits_of_their_quotients}});
}
