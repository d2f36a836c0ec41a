// How far a row's log-sum-exp and log-probabilities are from those in long double, and what they
// are where a value is infinite, NaN or huge.
#include "row.h"

namespace {

using namespace rl_logp;
using host_test::kExp2Error;
using host_test::kRounding;
using host_test::log_sum_exp_of;
using host_test::Random;
using host_test::Row;
using host_test::same_bits;
using PartialRow = host_test::PartialRow<Unweighted>;

constexpr float kLowest = -0x1.fffffep127f;  // finfo.min
constexpr float kHighest = 0x1.fffffep127f;

// A group's term, relative to it: exp2, the rounding of its arguments (at most twice that of a
// result, since what has a large argument weighs little), four additions, the correction, and what
// the correction leaves of columns that are not the largest.
constexpr long double kTermError = kExp2Error + (2 + 4 + 1 + 1) * kRounding;

// What a sum of `rest` beside the largest column may be off. Bits more than 55 below the largest
// term may be dropped.
long double rest_error(const Row& row, long double rest) {
  return kTermError * rest + host_test::groups_of(row) * 0x1p-55L * (1 + rest);
}

void check_accurate(const Row& row, const char* what) {
  const long double largest = *std::max_element(row.begin(), row.end());
  const long double rest = host_test::exact_rest(row), log_rest = std::log1p(rest);
  const long double error = rest_error(row, rest) / (1 + rest) + 0x1p-51L * log_rest;
  const LogSumExp actual = log_sum_exp_of(row);
  CHECK(actual.largest == largest, "%a for %La: %s", actual.largest, largest, what);
  CHECK(
      std::fabs(actual.log_rest - log_rest) <= error, "%.12g for %.12Lg, of %zu columns: %s",
      actual.log_rest, log_rest, row.size(), what);
  const long double lse = largest + log_rest;
  CHECK(
      std::fabs(actual.lse() - lse) <= error + 0x1p-52L * std::fabs(lse), "%.17g for %.17Lg: %s",
      actual.lse(), lse, what);
  for (size_t column = 0; column < row.size(); column += 1 + row.size() / 50) {
    const long double logp = (row[column] - largest) - log_rest;
    const float value = actual.logp(row[column]);
    CHECK(
        value == logp || std::fabs(value - logp) <= error + kRounding * std::fabs(logp),
        "logp %.9g for %.12Lg: %s", value, logp, what);
    CHECK(value <= 0, "logp %.9g: %s", value, what);
  }
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
    for (float& y : row) y = y == -kInfinity ? kLowest : y;
    check_accurate(row, "masked by finfo.min");
  }
}

// Both sides of the limits between the ranges, and far from 0, where log2(e) must be exact to more
// than fp32.
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
  for (float limit : {kFastLimit, kWideLimit}) {
    for (float sign : {1.0f, -1.0f}) {
      const float inside = sign * std::nextafter(limit, 0.0f);
      const float outside = sign * std::nextafter(limit, kInfinity);
      check_accurate(Row(100, inside), "just inside a limit");
      if (limit == kFastLimit) {
        check_accurate(Row(100, sign * limit), "at a limit");
        check_accurate(Row(100, outside), "just outside a limit");
        Row row(64, inside);
        std::fill(row.begin() + 32, row.end(), outside);
        check_accurate(row, "groups on both sides of a limit");
      }
    }
  }
}

// Rounding errors of many groups cancel; that of a constant would not. In the fast range the
// columns under a group's largest are corrected as the largest is, by a little too much.
void errors_have_no_bias() {
  struct Range {
    double low, high;
    long double limit;
  };
  Random random;
  for (const Range& range :
       {Range{20, 100, 2e-8L}, Range{3000, 4000, 2e-8L}, Range{5000, 20000, 2e-9L},
        Range{0x1.8p28, 0x1.fp28, 2e-9L}}) {
    for (double sign : {1.0, -1.0}) {
      constexpr int kRows = 5000;
      long double sum = 0;
      for (int i = 0; i < kRows; ++i) {
        const Row row = normal_row(random, 128, sign * random.uniform(range.low, range.high), 1);
        sum += log_sum_exp_of(row).log_rest - std::log1p(host_test::exact_rest(row));
      }
      const long double bias = sum / kRows;
      CHECK(
          std::fabs(bias) < range.limit, "%Lg on average from %g to %g", bias, sign * range.low,
          sign * range.high);
    }
  }
}

void adversarial_rows() {
  Random random;
  for (int round = 0; round < 300; ++round) {
    const size_t columns = 1 + random.below(3000);
    Row ramp(columns), cliff(columns, 0.0f), any(columns);
    for (size_t i = 0; i < columns; ++i) ramp[i] = -0.043f * static_cast<float>(i);
    check_accurate(ramp, "a ramp over bins");
    std::reverse(ramp.begin(), ramp.end());
    check_accurate(ramp, "a ramp that raises the top again and again");
    cliff[random.below(columns)] = static_cast<float>(random.uniform(0, 60));
    check_accurate(cliff, "one column above a plain");
    for (float& y : any) y = (random.chance(0.5) ? 1.0f : -1.0f) * random.magnitude(-126, 29);
    check_accurate(any, "any magnitude");
  }
}

// A group is as exact as double, if it has the row's largest column.
void the_largest_columns_group_is_summed_in_double() {
  Random random;
  for (int round = 0; round < 20000; ++round) {
    const double deviation = std::exp2(random.uniform(-8, 4));
    const double mean = round % 2 == 0 ? 0.0 : random.uniform(-0x1p26, 0x1p26);
    const Row row = normal_row(random, 1 + random.below(kGroup), mean, deviation);
    const long double log_rest = std::log1p(host_test::exact_rest(row));
    const double actual = log_sum_exp_of(row).log_rest;
    CHECK(
        std::fabs(actual - log_rest) <= 1e-14L * log_rest, "%.17g for %.17Lg, round %d", actual,
        log_rest, round);
  }
}

// A confident token's logp is next to 0, and must not be only the rounding error of its lse.
void a_confident_column() {
  Random random;
  double surest = 0;
  for (int round = 0; round < 2000; ++round) {
    const bool same_group = round % 2 == 0;
    Row row(same_group ? kGroup : 8192, 0.0f);
    const size_t column = random.below(row.size());
    row[column] = static_cast<float>(random.uniform(5, same_group ? 80 : 31));
    const long double rest = host_test::exact_rest(row);
    const float logp = log_sum_exp_of(row).logp(row[column]);
    const long double error =
        (same_group ? 1e-14L * rest : rest_error(row, rest)) + kRounding * rest;
    CHECK(std::fabs(logp + std::log1p(rest)) <= error, "%.9g for %.12Lg", logp, -std::log1p(rest));
    CHECK(logp < 0, "%.9g for %.12Lg", logp, -std::log1p(rest));
    surest = std::max(surest, 1.0 / -logp);
  }
  CHECK(surest > 1e30, "no column was surer than 1 - 1 / %g", surest);
}

void a_single_finite_column_has_all_the_probability() {
  Random random;
  for (int round = 0; round < 20000; ++round) {
    const float y = (random.chance(0.5) ? 1.0f : -1.0f) * random.magnitude(-149, 128);
    Row row(1 + random.below(100), -kInfinity);
    row[random.below(row.size())] = y;
    const LogSumExp actual = log_sum_exp_of(row);
    CHECK(actual.lse() == y, "%a for %a", actual.lse(), y);
    CHECK(actual.logp(y) == 0, "%a for %a", actual.logp(y), y);
    if (row.size() > 1) CHECK(actual.logp(-kInfinity) == -kInfinity, "masked, beside %a", y);
  }
}

void wide_rows_count_their_largest_columns() {
  Random random;
  for (int round = 0; round < 5000; ++round) {
    const float value = (random.chance(0.5) ? 1.0f : -1.0f) * random.magnitude(29, 128);
    const float below = std::nextafter(value, -kInfinity);
    Row row(1 + random.below(300), below);
    const size_t count = 1 + random.below(row.size());
    std::fill(row.begin(), row.begin() + static_cast<std::ptrdiff_t>(count), value);
    random.shuffle(row);
    const LogSumExp actual = log_sum_exp_of(row);
    const double log_count = std::log(static_cast<double>(count));
    const float logp = actual.logp(value);
    CHECK(
        std::fabs(logp + log_count) <= 1e-13 + kRounding * log_count, "%.9g for -log(%zu), of %a",
        logp, count, value);
    const double gap = static_cast<double>(value) - below;
    CHECK(
        actual.logp(below) == static_cast<float>(-gap - log_count), "%.9g, %g under %a",
        actual.logp(below), gap, value);
    const double lse = actual.lse();
    CHECK(std::fabs(lse) >= kWideLse, "lse %a", lse);
    CHECK(wide_lse_value(lse) == value, "%a for %a", wide_lse_value(lse), value);
    CHECK(
        std::fabs(wide_lse_log_count(lse) - log_count) <= 0x1p-24 + 1e-13, "%.12g for log(%zu)",
        wide_lse_log_count(lse), count);
  }
}

void huge_logits_and_masks() {
  const auto logp = [](const Row& row, size_t column) {
    return log_sum_exp_of(row).logp(row[column]);
  };
  CHECK(logp({3e38f, 0}, 0) == 0 && logp({3e38f, 0}, 1) == -3e38f, "[3e38, 0]");
  CHECK(logp({kHighest, kLowest}, 1) == -kInfinity, "beyond fp32, as in torch");
  CHECK(logp({kLowest, kLowest, kLowest, kLowest}, 2) == -1.38629436f, "[finfo.min] * 4");
  CHECK(logp({0, kLowest}, 0) == 0 && logp({0, kLowest}, 1) == kLowest, "[0, finfo.min]");
  CHECK(logp({0, 0, -kInfinity}, 0) == -0.693147182f, "[0, 0, -inf]");
  CHECK(logp({0, 0, -kInfinity}, 2) == -kInfinity, "[0, 0, -inf]");
  Row tiles(100000, -kInfinity);
  tiles[50000] = 10;
  CHECK(logp(tiles, 50000) == 0 && logp(tiles, 0) == -kInfinity, "10 among -inf");
}

void nan_and_infinity_reach_the_whole_row() {
  Random random;
  for (size_t columns : {1, 2, 15, 16, 17, 100}) {
    for (size_t column = 0; column < columns; ++column) {
      for (double mean : {0.0, 1e6, 1e30, -1e30}) {
        Row row = normal_row(random, columns, mean, 3);
        row[column] = kInfinity;
        LogSumExp actual = log_sum_exp_of(row);
        CHECK(actual.lse() == kInfinity, "%a: +inf at %zu of %zu", actual.lse(), column, columns);
        for (float y : row)
          CHECK(std::isnan(actual.logp(y)), "+inf at %zu of %zu", column, columns);
        for (float nan : {kNan, -kNan}) {  // beside +inf, except where it takes its place
          if (random.chance(0.5)) row[random.below(columns)] = kInfinity;
          row[column] = nan;
          actual = log_sum_exp_of(row);
          CHECK(std::isnan(actual.lse()), "%a: NaN at %zu of %zu", actual.lse(), column, columns);
          for (float y : row)
            CHECK(std::isnan(actual.logp(y)), "NaN at %zu of %zu", column, columns);
        }
      }
    }
    const LogSumExp actual = log_sum_exp_of(Row(columns, -kInfinity));
    CHECK(actual.lse() == -kInfinity, "%a of %zu -inf", actual.lse(), columns);
    CHECK(std::isnan(actual.logp(-kInfinity)), "%zu -inf", columns);
  }
}

// `count` groups of equal columns, which no memory needs to hold.
PartialRow repeated(const Row& group, uint64_t count) {
  PartialRow once, total;
  host_test::add_group(once, group, 0);
  for (; count > 0; count >>= 1) {
    if (count & 1) host_test::merge(total, once);
    host_test::merge(once, once);
  }
  return total;
}

void vocabularies_around_2_to_the_31_and_beyond() {
  for (uint64_t columns :
       {(1ull << 31) - 17, (1ull << 31) - 1, 1ull << 31, (1ull << 31) + 1, (1ull << 32) + 1,
        (1ull << 34) - 1}) {
    for (float y : {0.0f, 3.25f, -2500.0f, 1e6f, 0x1p29f, kHighest, kLowest}) {
      const Row group(kGroup, y);
      PartialRow row = repeated(group, columns / kGroup);
      const Row last(columns % kGroup, y);
      if (!last.empty()) host_test::add_group(row, last, 0);
      const LogSumExp actual = result_of(host_test::finish(row, group, 0));
      const double expected = std::log(static_cast<double>(columns));
      CHECK(
          std::fabs(actual.log_rest - expected) <= kTermError + columns / kGroup * 0x1p-55,
          "%.12g for log(%llu), of %g", actual.log_rest, static_cast<unsigned long long>(columns),
          y);
      CHECK(
          actual.logp(y) >= -expected - 1e-5 && actual.logp(y) <= -expected + 1e-5, "%.9g",
          actual.logp(y));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return host_test::run_all(
      argc, argv,
      {{"logits", logits},
       {"every range", every_range},
       {"errors have no bias", errors_have_no_bias},
       {"adversarial rows", adversarial_rows},
       {"the largest column's group is summed in double",
        the_largest_columns_group_is_summed_in_double},
       {"a confident column", a_confident_column},
       {"a single finite column has all the probability",
        a_single_finite_column_has_all_the_probability},
       {"wide rows count their largest columns", wide_rows_count_their_largest_columns},
       {"huge logits and masks", huge_logits_and_masks},
       {"NaN and infinity reach the whole row", nan_and_infinity_reach_the_whole_row},
       {"vocabularies around 2^31 and beyond", vocabularies_around_2_to_the_31_and_beyond}});
}
