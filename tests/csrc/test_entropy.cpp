// How far a row's entropy and mean are from those in long double, and what they are where a value
// is infinite, NaN or huge.
#include "row.h"

namespace {

using namespace rl_logp;
using host_test::kExp2Error;
using host_test::kRounding;
using host_test::Random;
using host_test::result_of;
using host_test::Row;
using host_test::same_bits;

constexpr float kLowest = -0x1.fffffep127f;  // finfo.min

// Of a column's power, and of the sums of a group: as in test_log_sum_exp. An error of these
// changes the sum and what is weighted alike.
constexpr long double kTermError = kExp2Error + (2 + 4 + 1 + 1) * kRounding;
// Of a power times its argument: the argument's rounding, two roundings of products, three of sums
// and two of the correction, and what that leaves.
constexpr long double kWeightError = (1 + 2 + 3 + 2 + 1) * kRounding;

// What a row's entropy and mean are, and by how much either may be off, but for its last rounding.
struct Expected {
  long double entropy, mean, error;
};

// With d = y - largest and E[d] their mean, a relative change e of the power of a column whose
// probability is p changes the entropy by e * p * (1 - d + E[d]). The largest column's group has
// errors of double alone.
Expected expected_of(const Row& row) {
  const auto largest = std::max_element(row.begin(), row.end());
  const auto largest_group = static_cast<uint32_t>((largest - row.begin()) / kGroup);
  const auto distance = [&](size_t column) {
    return static_cast<long double>(row[column]) - *largest;
  };
  std::vector<long double> power(row.size());
  long double rest = 0, weighted = 0;
  for (size_t column = 0; column < row.size(); ++column) {
    power[column] = std::exp(distance(column));
    if (power[column] > 0) weighted += power[column] * distance(column);
    if (row.begin() + static_cast<std::ptrdiff_t>(column) != largest) rest += power[column];
  }
  const long double sum = 1 + rest, mean = weighted / sum;
  // What is dropped is more than 55 bits below the largest term, and less than 100 from the top.
  long double error = host_test::groups_of(row) * 0x1p-55L * 100 + 1e-14L * std::fabs(mean);
  for (uint32_t group = 0; group < host_test::groups_of(row); ++group) {
    const bool in_double = group == largest_group;
    const float of_group = largest_of(host_test::group_values(row, group).y);
    for (size_t column = size_t{group} * kGroup;
         column < std::min(row.size(), (size_t{group} + 1) * kGroup); ++column) {
      if (power[column] == 0) continue;
      const long double p = power[column] / sum;
      error += p * (1 + std::fabs(distance(column) - mean)) * (in_double ? 1e-14L : kTermError);
      // Its argument, in nats: at most half a bit more than how far it is below the largest. And a
      // term's weight is rounded to units of its last bit.
      const long double argument = of_group - row[column] + 0.35L;
      if (!in_double) error += p * (kWeightError * argument + kRounding);
    }
  }
  return {std::log1p(rest) - mean, *largest + mean, error};
}

// Returns by how much the entropy is off.
long double check_accurate(const Row& row, const char* what) {
  const Expected expected = expected_of(row);
  const RowResult actual = result_of(row);
  const long double error = std::fabs(actual.entropy() - expected.entropy);
  CHECK(
      error <= expected.error + kRounding * expected.entropy,
      "entropy %.9g for %.12Lg, which may be off by %Lg, of %zu columns: %s", actual.entropy(),
      expected.entropy, expected.error, row.size(), what);
  CHECK(actual.entropy() >= 0, "entropy %.9g: %s", actual.entropy(), what);
  CHECK(
      std::fabs(actual.mean() - expected.mean) <=
          expected.error + 0x1p-52L * std::fabs(expected.mean),
      "mean %.17g for %.17Lg, which may be off by %Lg, of %zu columns: %s", actual.mean(),
      expected.mean, expected.error, row.size(), what);
  return error;
}

Row normal_row(Random& random, size_t columns, double mean, double deviation) {
  Row row(columns);
  for (float& y : row) y = static_cast<float>(mean + deviation * random.normal());
  return row;
}

void logits() {
  Random random;
  for (int round = 0; round < 400; ++round) {
    const size_t columns = 1 + random.below(4000);
    const double deviation = std::exp2(random.uniform(-8, 6));
    Row row = normal_row(random, columns, random.uniform(-60, 60), deviation);
    check_accurate(row, "normal");
    for (float& y : row) y = random.chance(0.9) ? -kInfinity : y;
    row[random.below(columns)] = 0.0f;
    check_accurate(row, "masked by -inf");
  }
}

void every_range() {
  Random random;
  for (double centre :
       {0.0, 100.0, 1000.0, 4000.0, 4095.0, 4096.0, 4097.0, 5000.0, 1e5, 1e6, 0x1p23, 0x1p28,
        0x1p29 - 4096}) {
    for (double sign : {1.0, -1.0}) {
      for (int round = 0; round < 20; ++round) {
        check_accurate(normal_row(random, 1 + random.below(700), sign * centre, 3), "a range");
      }
    }
  }
}

void adversarial_rows() {
  Random random;
  for (int round = 0; round < 300; ++round) {
    const size_t columns = 1 + random.below(3000);
    Row ramp(columns), cliff(columns, 0.0f), two(columns), any(columns);
    for (size_t i = 0; i < columns; ++i) ramp[i] = -0.043f * static_cast<float>(i);
    check_accurate(ramp, "a ramp over bins");
    std::reverse(ramp.begin(), ramp.end());
    check_accurate(ramp, "a ramp that raises the top again and again");
    cliff[random.below(columns)] = static_cast<float>(random.uniform(0, 60));
    check_accurate(cliff, "one column above a plain");
    for (float& y : two) y = random.chance(0.5) ? 0.0f : static_cast<float>(-round);
    check_accurate(two, "two values");
    for (float& y : any) y = (random.chance(0.5) ? 1.0f : -1.0f) * random.magnitude(-126, 29);
    check_accurate(any, "any magnitude");
  }
}

// Rounding errors of many groups cancel; that of a constant would not. In the fast range a group's
// correction is by a little too much, as in the lse (test_log_sum_exp).
void errors_have_no_bias() {
  struct Range {
    double low, high;
    long double limit;
  };
  Random random;
  for (const Range& range :
       {Range{20, 100, 2e-8L}, Range{3000, 4000, 2e-8L}, Range{5000, 20000, 4e-9L},
        Range{0x1.8p28, 0x1.fp28, 4e-9L}}) {
    for (double sign : {1.0, -1.0}) {
      constexpr int kRows = 3000;
      long double entropy = 0, mean = 0;
      for (int i = 0; i < kRows; ++i) {
        const Row row = normal_row(random, 128, sign * random.uniform(range.low, range.high), 1);
        const Expected expected = expected_of(row);
        const RowResult actual = result_of(row);
        entropy += (actual.log_rest - actual.below) - expected.entropy;
        mean += actual.below - (expected.mean - actual.largest);
      }
      CHECK(
          std::fabs(entropy) < kRows * range.limit && std::fabs(mean) < kRows * range.limit,
          "%Lg and %Lg on average from %g to %g", entropy / kRows, mean / kRows, sign * range.low,
          sign * range.high);
    }
  }
}

// A sure row's entropy is next to 0, and must not be only the rounding error of larger numbers.
void a_confident_column() {
  Random random;
  double surest = 0;
  for (int round = 0; round < 2000; ++round) {
    const bool same_group = round % 2 == 0;
    Row row(same_group ? kGroup : 8192, 0.0f);
    row[random.below(row.size())] = static_cast<float>(random.uniform(5, same_group ? 80 : 31));
    const long double error = check_accurate(row, "a confident column");
    const float entropy = result_of(row).entropy();
    CHECK(entropy > 0, "%.9g", entropy);
    if (same_group) CHECK(error <= 2 * kRounding * entropy, "%.9g", entropy);
    surest = std::max(surest, 1.0 / entropy);
  }
  CHECK(surest > 1e28, "no column was surer than 1 - 1 / %g", surest);
}

void equal_columns_have_the_log_of_their_number() {
  Random random;
  for (size_t columns : {1, 2, 3, 15, 16, 17, 100, 1000, 4096, 151936}) {
    for (float y : {0.0f, 1.0f, -3.25f, 100.5f, -4000.0f, 5000.0f, 0x1p28f, 0x1p29f, -3e38f}) {
      const Row row(columns, y);
      const double expected = std::log(static_cast<double>(columns));
      const RowResult actual = result_of(row);
      // The argument is of at most half a bit, and rounded as its square at most.
      const double error = y == 0 || absolute(y) >= kWideLimit ? 1e-15 : 4 * kRounding;
      CHECK(
          std::fabs(actual.entropy() - expected) <= error + kRounding * expected,
          "%.9g for log(%zu) = %.9g, of %g", actual.entropy(), columns, expected, y);
      CHECK(
          std::fabs(actual.mean() - y) <= error + 0x1p-52 * absolute(y), "mean %.17g of %g",
          actual.mean(), y);
      if (columns == 1) CHECK(same_bits(actual.entropy(), 0.0f), "%a, of %g", actual.entropy(), y);
      if (columns == 1) CHECK(actual.mean() == y, "mean %.17g of %g", actual.mean(), y);
    }
  }
}

void a_single_finite_column_has_no_entropy() {
  Random random;
  for (int round = 0; round < 20000; ++round) {
    const float y = (random.chance(0.5) ? 1.0f : -1.0f) * random.magnitude(-149, 128);
    Row row(1 + random.below(100), -kInfinity);
    row[random.below(row.size())] = y;
    const RowResult actual = result_of(row);
    CHECK(same_bits(actual.entropy(), 0.0f), "%a beside %a", actual.entropy(), y);
    CHECK(actual.mean() == y, "mean %a for %a", actual.mean(), y);
  }
}

// 0 * log(0) is 0, and 0 * -inf, and 0 * finfo.min.
void masks_add_nothing() {
  Random random;
  for (int round = 0; round < 2000; ++round) {
    const double centre = round % 4 == 0 ? random.uniform(-1e6, 1e6) : random.uniform(-50, 50);
    Row row = normal_row(random, 1 + random.below(500), centre, 4);
    const size_t kept = random.below(row.size());
    for (size_t i = 0; i < row.size(); ++i) {
      if (i != kept && random.chance(0.7)) row[i] = -kInfinity;
    }
    check_accurate(row, "masked");
    const RowResult by_infinity = result_of(row);
    for (float mask : {kLowest, -1e30f}) {
      Row masked = row;
      for (float& y : masked) y = y == -kInfinity ? mask : y;
      const RowResult actual = result_of(masked);
      CHECK(
          same_bits(actual.entropy(), by_infinity.entropy()) &&
              same_bits(actual.mean(), by_infinity.mean()),
          "entropy %a for %a, mean %a for %a, masked by %g", actual.entropy(),
          by_infinity.entropy(), actual.mean(), by_infinity.mean(), mask);
    }
  }
}

void wide_rows_count_their_largest_columns() {
  Random random;
  for (int round = 0; round < 5000; ++round) {
    const float value = (random.chance(0.5) ? 1.0f : -1.0f) * random.magnitude(29, 128);
    Row row(1 + random.below(300), std::nextafter(value, -kInfinity));
    const size_t count = 1 + random.below(row.size());
    std::fill(row.begin(), row.begin() + static_cast<std::ptrdiff_t>(count), value);
    random.shuffle(row);
    const double log_count = std::log(static_cast<double>(count));
    const RowResult actual = result_of(row);
    CHECK(
        std::fabs(actual.entropy() - log_count) <= 1e-13 + kRounding * log_count,
        "%.9g for log(%zu), of %a", actual.entropy(), count, value);
    CHECK(actual.mean() == value, "mean %a for %a", actual.mean(), value);
  }
}

void nan_and_infinity_reach_the_whole_row() {
  Random random;
  for (size_t columns : {1, 2, 16, 17, 100}) {
    for (size_t column = 0; column < columns; ++column) {
      for (double mean : {0.0, 1e6, 1e30, -1e30}) {
        for (float value : {kInfinity, kNan, -kNan}) {
          Row row = normal_row(random, columns, mean, 3);
          row[column] = value;
          const RowResult actual = result_of(row);
          CHECK(std::isnan(actual.entropy()), "%a: %g at %zu", actual.entropy(), value, column);
          CHECK(std::isnan(actual.mean()), "%a: %g at %zu", actual.mean(), value, column);
        }
      }
    }
    const RowResult actual = result_of(Row(columns, -kInfinity));
    CHECK(std::isnan(actual.entropy()), "%a of %zu -inf", actual.entropy(), columns);
    CHECK(std::isnan(actual.mean()), "%a of %zu -inf", actual.mean(), columns);
  }
}

// 2^26 groups of equal columns, which no memory needs to hold.
void vocabularies_up_to_2_to_the_30() {
  for (float y : {0.0f, 3.25f, -2500.0f, 1e6f, 0x1p29f, kLowest}) {
    const Row group(kGroup, y);
    host_test::PartialRow<Weighted> row;
    host_test::add_group(row, group, 0);
    for (int doubling = 1; doubling <= 26; ++doubling) {
      host_test::merge(row, row);
      const RowResult actual = result_of(host_test::finish(row, group, 0));
      const double expected = (4 + doubling) * std::log(2.0);
      CHECK(
          std::fabs(actual.entropy() - expected) <= 4 * kRounding + kRounding * expected,
          "%.9g for log(2^%d), of %g", actual.entropy(), 4 + doubling, y);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return host_test::run_all(
      argc, argv,
      {{"logits", logits},
       {"every range", every_range},
       {"adversarial rows", adversarial_rows},
       {"errors have no bias", errors_have_no_bias},
       {"a confident column", a_confident_column},
       {"equal columns have the log of their number", equal_columns_have_the_log_of_their_number},
       {"a single finite column has no entropy", a_single_finite_column_has_no_entropy},
       {"masks add nothing", masks_add_nothing},
       {"wide rows count their largest columns", wide_rows_count_their_largest_columns},
       {"NaN and infinity reach the whole row", nan_and_infinity_reach_the_whole_row},
       {"vocabularies up to 2^30", vocabularies_up_to_2_to_the_30}});
}
