// The softmax of the backward, against long double.
#include <vector>

#include "check.h"
#include "rl_logp/softmax.h"

namespace {

using namespace rl_logp;
using host_test::kExp2Error;
using host_test::kRounding;
using host_test::Random;
using host_test::same_bits;

constexpr float kSmallestNormal = 0x1p-126f;
// exp2, the product, and the argument: at most 1, rounded as it is split, less the fraction
// (rounded when the row was prepared) and with the tail; a relative error is ln(2) times that.
constexpr long double kProductError = kExp2Error + kRounding * (1 + 0.7L * 3);

float random_sign(Random& random) { return random.chance(0.5) ? 1.0f : -1.0f; }

long double exact_product(float y, double lse, float factor) {
  return factor * std::exp(static_cast<long double>(y) - lse);
}

// A column as the kernels write it, in any row.
float product_of_any(const RowSoftmax& softmax, float y) {
  if (softmax.fast) return softmax.product(std::fmax(y, kSmallestFast));
  return gradient_of_any(y, softmax.lse, softmax.factor, 0.0);
}

float at_target(const RowSoftmax& softmax, float y, float target_factor) {
  return gradient_of_any(y, softmax.lse, softmax.factor, target_factor);
}

// |actual - exact| <= error * |exact|, where what is below 2^-125 may be 0 (a power of two makes
// the factor subnormal, and exp2 up to 2 comes after it), and 0 has the factor's sign.
void check_product(
    float actual, long double exact, long double error, float y, double lse, float factor) {
  const long double size = std::fabs(exact);
  const bool close = std::fabs(actual - exact) <= error * size;
  const bool flushed = actual == 0 && size < 2 * kSmallestNormal;
  CHECK(close || flushed, "%a for %La: factor %a, y %a, lse %a", actual, exact, factor, y, lse);
  CHECK(
      std::signbit(actual) == std::signbit(factor), "%a: factor %a, y %a, lse %a", actual, factor,
      y, lse);
}

void fast_products() {
  Random random;
  for (int round = 0; round < 20000; ++round) {
    const double spread = std::exp2(random.uniform(0, 20));
    const double lse = random.uniform(-spread, spread);
    const float factor = random_sign(random) * random.magnitude(-126, 122);
    const RowSoftmax softmax(lse, factor, kFastLse);
    CHECK(softmax.fast, "lse %a, factor %a", lse, factor);
    for (int i = 0; i < 20; ++i) {
      const double below = random.chance(0.5) ? random.uniform(0, 20) : random.uniform(0, 200);
      const float y = static_cast<float>(lse - below);
      const float actual = softmax.product(y);
      check_product(actual, exact_product(y, lse, factor), kProductError, y, lse, factor);
      CHECK(same_bits(product_of_any(softmax, y), actual), "y %a", y);
    }
  }
}

void the_ends_of_the_fast_range() {
  Random random;
  const float kFactors[] = {kSmallestNormal, 0x1.fffffep-126f, 1.0f, 0x1.fffffep122f};
  for (double lse : {std::nextafter(-kFastLse, 0.0), std::nextafter(kFastLse, 0.0), 0.0}) {
    for (float factor : kFactors) {
      for (float signed_factor : {factor, -factor}) {
        const RowSoftmax softmax(lse, signed_factor, kFastLse);
        CHECK(softmax.fast, "lse %a, factor %a", lse, signed_factor);
        for (int i = 0; i < 2000; ++i) {
          const float y = static_cast<float>(lse - random.uniform(0, 250));
          check_product(
              softmax.product(y), exact_product(y, lse, signed_factor), kProductError, y, lse,
              signed_factor);
        }
        for (float y : {kSmallestFast, -kInfinity, -0x1.fffffep127f}) {
          CHECK(same_bits(product_of_any(softmax, y), signed_factor > 0 ? 0.0f : -0.0f), "y %a", y);
        }
      }
    }
  }
  for (double lse :
       {kFastLse, -kFastLse, static_cast<double>(kInfinity), -1e300, static_cast<double>(kNan)}) {
    CHECK(!RowSoftmax(lse, 1.0f, kFastLse).fast, "lse %a", lse);
  }
  for (float factor : {0.0f, -0.0f, 0x1.fffffcp-127f, 0x1p123f, kInfinity, kNan}) {
    CHECK(!RowSoftmax(0.0, factor, kFastLse).fast, "factor %a", factor);
  }
}

// Columns far below lse, and factors that make their products subnormal: exactly 0, never less than
// nothing and never a number that wrapped around.
void underflow_to_exactly_zero() {
  Random random;
  for (int round = 0; round < 200000; ++round) {
    const float factor = random_sign(random) * random.magnitude(-126, 122);
    const double lse = random.uniform(-1000, 1000);
    const RowSoftmax softmax(lse, factor, kFastLse);
    // From where factor * exp(y - lse) is 2^-126 to far below.
    const double edge = (126 + std::log2(std::fabs(factor))) * 0.6931471805599453;
    const float y = static_cast<float>(lse - edge - random.uniform(-0.5, 0.5));
    check_product(softmax.product(y), exact_product(y, lse, factor), kProductError, y, lse, factor);
    const float far = static_cast<float>(lse - edge - 0.01 - std::exp2(random.uniform(-3, 20)));
    CHECK(
        softmax.product(far) == 0, "%a: factor %a, y %a, lse %a", softmax.product(far), factor, far,
        lse);
  }
}

// A large lse, or a factor near the ends of fp32: in double, and rounded once.
void slow_rows() {
  Random random;
  for (int round = 0; round < 100000; ++round) {
    const bool large = random.chance(0.5);
    const double lse =
        random_sign(random) * (large ? random.uniform(kFastLse, 0x1p29) : random.uniform(0, 100));
    const float size = large                ? random.magnitude(-20, 20)
                       : random.chance(0.5) ? random.magnitude(123, 128)
                                            : random.magnitude(-149, -126);
    const float factor = random_sign(random) * size;
    const RowSoftmax softmax(lse, factor, kFastLse);
    CHECK(!softmax.fast, "lse %a, factor %a", lse, factor);
    const float y = static_cast<float>(lse - random.uniform(0, 80));
    const long double log_p = std::fmin(static_cast<long double>(y) - lse, 0.0L);
    const long double exact = factor * std::exp(log_p);
    const long double error = kRounding * (1 + 0x1p-20L);
    const float actual = product_of_any(softmax, y);
    CHECK(
        std::fabs(actual - exact) <= error * std::fabs(exact) + 0x1p-150L,
        "%a for %La: factor %a, y %a, lse %a", actual, exact, factor, y, lse);
    CHECK(product_of_any(softmax, -kInfinity) == 0, "factor %a, lse %a", factor, lse);
  }
}

void wide_rows() {
  Random random;
  for (int round = 0; round < 100000; ++round) {
    const float value = random_sign(random) * random.magnitude(29, 128);
    const double count = static_cast<double>(1 + random.below(200000));
    const double lse = wide_lse(value, std::log(count));
    CHECK(wide_lse_value(lse) == value, "%a for %a", wide_lse_value(lse), value);
    CHECK(
        std::fabs(wide_lse_log_count(lse) - std::log(count)) <= 0x1p-24, "%a, %.0f", value, count);
    CHECK(std::fabs(lse) >= kWideLse, "lse %a", lse);
    const float factor = random_sign(random) * random.magnitude(-20, 20);
    const RowSoftmax softmax(lse, factor, kFastLse);
    const float p = product_of_any(softmax, value);
    const long double error = kExp2Error + kRounding * (1 + 1 + std::log(count));
    CHECK(
        std::fabs(p - factor / count) <= error * std::fabs(factor / count),
        "%a for %a / %.0f, value %a", p, factor, count, value);
    CHECK(
        product_of_any(softmax, std::nextafter(value, -kInfinity)) <= 0x1p-40f * std::fabs(factor),
        "below %a", value);
    CHECK(product_of_any(softmax, -kInfinity) == 0, "-inf below %a", value);
    const float actual = at_target(softmax, value, -factor);
    const long double exact = factor / count - factor;
    CHECK(
        std::fabs(actual - exact) <=
            kRounding * (1 + 1) * std::fabs(exact) + kRounding * std::fabs(factor) / count,
        "%a for %La", actual, exact);
  }
  // The log of a count of 2^34 still fits, and 0.
  for (double log_count : {0.0, std::log(0x1p34)}) {
    for (float value : {0x1p29f, -0x1p29f, -0x1.fffffep127f, 0x1.fffffep127f}) {
      const double lse = wide_lse(value, log_count);
      CHECK(wide_lse_value(lse) == value, "%a for %a", wide_lse_value(lse), value);
      CHECK(std::fabs(wide_lse_log_count(lse) - log_count) <= 0x1p-24, "%a", value);
    }
  }
}

void the_target() {
  Random random;
  for (int round = 0; round < 200000; ++round) {
    const double lse = random.uniform(-200, 200);
    const double below =
        random.chance(0.5) ? std::exp2(random.uniform(-30, 3)) : random.uniform(0, 90);
    const float y = static_cast<float>(lse - below);
    const float factor = random_sign(random) * random.magnitude(-40, 40);
    const float target_factor = random.chance(0.7) ? -factor : random_sign(random) * factor * 0.3f;
    const RowSoftmax softmax(lse, factor, kFastLse);
    const long double log_p = std::fmin(static_cast<long double>(y) - lse, 0.0L);
    // factor * (p - 1) has no cancellation when p - 1 comes from expm1.
    const long double exact =
        factor * std::expm1(log_p) + (static_cast<long double>(target_factor) + factor);
    const float actual = at_target(softmax, y, target_factor);
    CHECK(
        std::fabs(actual - exact) <= kRounding * std::fabs(exact) + 0x1p-51L * std::fabs(factor),
        "%a for %La: y %a, lse %a, factor %a and %a", actual, exact, y, lse, factor, target_factor);
  }
  // A masked target: the one-hot alone. A certain one: exactly nothing.
  const RowSoftmax softmax(3.0, -2.0f, kFastLse);
  CHECK(at_target(softmax, -kInfinity, 2.0f) == 2.0f, "%a", at_target(softmax, -kInfinity, 2.0f));
  CHECK(at_target(softmax, 3.0f, 2.0f) == 0.0f, "%a", at_target(softmax, 3.0f, 2.0f));
  // lse is rounded, and y may be above it by that much.
  CHECK(at_target(RowSoftmax(std::nextafter(3.0, 0.0), -2.0f, kFastLse), 3.0f, 2.0f) == 0.0f, "3");
}

void rows_without_a_finite_lse() {
  for (double lse :
       {static_cast<double>(kNan), static_cast<double>(kInfinity),
        -static_cast<double>(kInfinity)}) {
    for (float factor : {1.0f, -3.0f, 0.0f, kInfinity}) {
      const RowSoftmax softmax(lse, factor, kFastLse);
      for (float y : {0.0f, 1e30f, kInfinity, -kInfinity, kNan}) {
        CHECK(std::isnan(product_of_any(softmax, y)), "lse %a, factor %a, y %a", lse, factor, y);
        CHECK(
            std::isnan(at_target(softmax, y, -factor)), "lse %a, factor %a, y %a", lse, factor, y);
        CHECK(std::isnan(log_softmax(y, lse)), "lse %a, y %a", lse, y);
      }
    }
  }
}

void factors_that_are_not_finite() {
  CHECK(product_of_any(RowSoftmax(0.0, kInfinity, kFastLse), 0.0f) == kInfinity, "inf * 1");
  CHECK(product_of_any(RowSoftmax(0.0, -kInfinity, kFastLse), -1.0f) == -kInfinity, "-inf * p");
  CHECK(std::isnan(product_of_any(RowSoftmax(0.0, kInfinity, kFastLse), -kInfinity)), "inf * 0");
  CHECK(std::isnan(product_of_any(RowSoftmax(0.0, kNan, kFastLse), 0.0f)), "NaN * 1");
  CHECK(product_of_any(RowSoftmax(0.0, 0.0f, kFastLse), 0.0f) == 0, "0 * 1");
}

// One column's share of an entropy's gradient and the softmax's, of factors as they are given.
struct Weighing {
  double lse, mean;
  float softmax_factor, entropy_factor;

  WeightedSoftmax prepared() const {
    return WeightedSoftmax(lse, mean, softmax_factor, entropy_factor, kFastLse);
  }

  long double exact(float y) const {
    const long double from_mean = static_cast<long double>(y) - mean;
    return std::exp(static_cast<long double>(y) - lse) *
           (softmax_factor + entropy_factor * from_mean);
  }

  // Of the whole, that of the softmax and of the last two roundings. Of its parts: of the
  // difference from the mean, and of the base, which holds what the mean was rounded by. And where
  // the softmax is below 2^-125 before it meets the rest, all may be lost.
  long double error(float y) const {
    const long double p = std::exp(static_cast<long double>(y) - lse);
    const long double from_mean = static_cast<long double>(y) - mean;
    const long double parts = std::fabs(softmax_factor) + std::fabs(entropy_factor * from_mean) +
                              2 * kRounding * std::fabs(entropy_factor * mean);
    const float factor = std::fmax(absolute(softmax_factor), absolute(entropy_factor));
    const long double lost = p * factor < 4 * kSmallestNormal ? 1.0L : 0.0L;
    return (kProductError + 2 * kRounding + lost) * std::fabs(exact(y)) + kRounding * p * parts +
           0x1p-149L;
  }
};

void check_weighted(const Weighing& row, float y) {
  const float actual = row.prepared().product(y);
  const long double exact = row.exact(y);
  CHECK(
      std::fabs(actual - exact) <= row.error(y),
      "%a for %La, which may be off by %La: y %a, lse %a, mean %a, factors %a and %a", actual,
      exact, row.error(y), y, row.lse, row.mean, row.softmax_factor, row.entropy_factor);
}

void fast_weighted_products() {
  Random random;
  for (int round = 0; round < 20000; ++round) {
    const double spread = std::exp2(random.uniform(0, 20));
    const double lse = random.uniform(-spread, spread);
    const int size = static_cast<int>(random.below(240)) - 120;
    const Weighing row = {
        lse, lse - random.uniform(0, 12), random_sign(random) * random.magnitude(size, size + 1),
        random_sign(random) * random.magnitude(std::max(size - 12, -126), size + 2)};
    CHECK(row.prepared().softmax.fast, "lse %a, factors %a", lse, row.softmax_factor);
    for (int i = 0; i < 20; ++i) {
      const double below = random.chance(0.5) ? random.uniform(0, 20) : random.uniform(0, 200);
      check_weighted(row, static_cast<float>(lse - below));
    }
    check_weighted(row, static_cast<float>(row.mean));  // where the factor is the softmax's alone
  }
}

void the_ends_of_the_fast_range_of_weighted_products() {
  Random random;
  const float kFactors[] = {0.0f, 0x1p-149f, kSmallestNormal, 1.0f, 0x1.fffffep122f};
  for (double lse : {std::nextafter(-kFastLse, 0.0), std::nextafter(kFastLse, 0.0), 0.0}) {
    for (float softmax_factor : kFactors) {
      for (float entropy_factor : kFactors) {
        if (std::fmax(softmax_factor, entropy_factor) < kSmallestNormal) continue;
        for (float sign : {1.0f, -1.0f}) {
          const Weighing row = {lse, lse - 3, softmax_factor, sign * entropy_factor};
          CHECK(row.prepared().softmax.fast, "lse %a, %a", lse, softmax_factor);
          for (int i = 0; i < 500; ++i) {
            check_weighted(row, static_cast<float>(lse - random.uniform(0, 250)));
          }
          const float masked = row.prepared().product(kSmallestFast);
          CHECK(masked == 0, "%a: lse %a, factor %a", masked, lse, softmax_factor);
        }
      }
    }
  }
  const auto is_fast = [](double lse, float softmax_factor, float entropy_factor) {
    const bool fast = WeightedSoftmax::is_fast(lse, softmax_factor, entropy_factor, kFastLse);
    const WeightedSoftmax prepared(lse, 0.0, softmax_factor, entropy_factor, kFastLse);
    CHECK(prepared.softmax.fast == fast, "lse %a", lse);
    return fast;
  };
  for (double lse :
       {kFastLse, -kFastLse, static_cast<double>(kInfinity), -1e300, static_cast<double>(kNan)}) {
    CHECK(!is_fast(lse, 1.0f, 1.0f), "lse %a", lse);
  }
  for (float factor : {0x1p123f, kInfinity, kNan}) {
    for (float other : {0.0f, 1.0f}) {
      CHECK(!is_fast(0.0, factor, other), "factors %a and %a", factor, other);
      CHECK(!is_fast(0.0, other, factor), "factors %a and %a", other, factor);
    }
  }
  for (float factor : {0.0f, -0.0f, 0x1.fffffcp-127f}) {
    CHECK(!is_fast(0.0, factor, factor), "factors %a", factor);
  }
}

// A row that has no gradient of its entropy has the bits of one that never had an entropy.
void without_an_entropy_factor_the_bits_are_the_softmaxs() {
  Random random;
  for (int round = 0; round < 100000; ++round) {
    const double lse = random.uniform(-1000, 1000);
    const float factor = random_sign(random) * random.magnitude(-126, 122);
    const RowSoftmax softmax(lse, factor, kFastLse);
    const Weighing row = {lse, lse - random.uniform(0, 12), factor, round % 2 == 0 ? 0.0f : -0.0f};
    const float y = static_cast<float>(lse - random.uniform(0, 200));
    const float actual = row.prepared().product(y), expected = softmax.product(y);
    CHECK(
        same_bits(actual, expected), "%a for %a: y %a, lse %a, factor %a", actual, expected, y, lse,
        factor);
  }
}

void a_columns_factor() {
  Random random;
  for (int round = 0; round < 100000; ++round) {
    const float y = random_sign(random) * random.magnitude(-126, 128);
    const double mean = random_sign(random) * random.magnitude(-30, 30);
    const double softmax_factor = random.normal(), entropy_factor = random.normal();
    const double actual = column_factor(y, softmax_factor, entropy_factor, mean);
    const long double distance = static_cast<long double>(y) - mean;
    const long double exact = softmax_factor + entropy_factor * distance;
    CHECK(
        std::fabs(actual - exact) <=
            0x1p-53L * (std::fabs(exact) + std::fabs(entropy_factor * distance)) * (1 + 0x1p-10L),
        "%a for %La", actual, exact);
  }
  // A masked column's factor is finite, and its softmax of 0 makes it 0.
  const double lowest = column_factor(-0x1.fffffep127f, 2.0, -3.0, 5.0);
  CHECK(lowest > 1.02e39 && lowest < 1.03e39, "%a", lowest);
  CHECK(same_bits(column_factor(-kInfinity, 2.0, -3.0, 5.0), lowest), "%a", lowest);
  for (float y : {-kInfinity, -0x1.fffffep127f}) {
    for (double entropy_factor : {1.0, -1.0, 1e38, -1e-40}) {
      const double factor = column_factor(y, 2.0, entropy_factor, 5.0);
      const float gradient = gradient_of_any(y, 5.5, factor, 0.0);
      CHECK(gradient == 0, "%a of %a", gradient, y);
      CHECK(gradient_of_any(y, 5.5, factor, 0.25) == 0.25f, "the target, %a", y);
    }
  }
  // In a wide row a mask is as far away as any, and what has a softmax is the mean itself.
  CHECK(
      gradient_of_any(-kInfinity, 3e38, column_factor(-kInfinity, 1.0, 1.0, 3e38), 0.0) == 0,
      "-inf");
  CHECK(column_factor(3e38f, 2.0, 7.0, static_cast<double>(3e38f)) == 2.0, "a wide mean");
  CHECK(
      std::isnan(column_factor(1.0f, 1.0, 1.0, static_cast<double>(kNan))),
      "a row without a finite mean");
}

}  // namespace

int main(int argc, char** argv) {
  return host_test::run_all(
      argc, argv,
      {{"fast products", fast_products},
       {"the ends of the fast range", the_ends_of_the_fast_range},
       {"underflow to exactly zero", underflow_to_exactly_zero},
       {"slow rows", slow_rows},
       {"wide rows", wide_rows},
       {"the target", the_target},
       {"rows without a finite lse", rows_without_a_finite_lse},
       {"factors that are not finite", factors_that_are_not_finite},
       {"fast weighted products", fast_weighted_products},
       {"the ends of the fast range of weighted products",
        the_ends_of_the_fast_range_of_weighted_products},
       {"without an entropy factor the bits are the softmax's",
        without_an_entropy_factor_the_bits_are_the_softmaxs},
       {"a column's factor", a_columns_factor}});
}
