// The counters: what they hold is the exact sum of the terms, cut off at a whole bin, and merging
// them is a commutative monoid.
#include "row.h"

namespace {

using namespace rl_logp;
using host_test::operator==;
using host_test::Random;
using host_test::state_of_every_kind;
using Wide = unsigned __int128;

struct Term {
  float value;
  int32_t exponent;
};

// The position of the last of a term's 24 bits, and the highest of the bins it touches.
int32_t lowest_of(const Term& term) {
  int exponent;
  std::frexp(term.value, &exponent);
  return exponent - 24 + term.exponent;
}

int32_t top_of(const Term& term) {
  return static_cast<int32_t>(std::floor(lowest_of(term) / 32.0)) + 1;
}

// All terms in units of the lowest bit that is kept, each rounded down to it.
Wide kept_sum(const std::vector<Term>& terms, int32_t top) {
  Wide sum = 0;
  for (const Term& term : terms) {
    int exponent;
    const Wide mantissa = static_cast<Wide>(std::ldexp(std::frexp(term.value, &exponent), 24));
    const int64_t shift = int64_t{lowest_of(term)} - 32 * (int64_t{top} - 2);
    if (shift >= 0) sum += mantissa << shift;
    if (shift < 0 && shift > -24) sum += mantissa >> -shift;
  }
  return sum;
}

Wide value_of(const ExactSum& sum) {
  return (static_cast<Wide>(sum.high) << 64) + (static_cast<Wide>(sum.middle) << 32) + sum.low;
}

void print(const char* name, const ExactSum& sum) {
  std::printf(
      "%s: top %d, %llx %llx %llx\n", name, sum.top, static_cast<unsigned long long>(sum.high),
      static_cast<unsigned long long>(sum.middle), static_cast<unsigned long long>(sum.low));
}

#define CHECK_SAME(actual, expected, what)   \
  do {                                       \
    const ExactSum actual_ = actual;         \
    const ExactSum expected_ = expected;     \
    if (!(actual_ == expected_)) {           \
      print("actual", actual_);              \
      print("expected", expected_);          \
    }                                        \
    CHECK(actual_ == expected_, "%s", what); \
  } while (0)

ExactSum sum_of(const std::vector<Term>& terms) {
  ExactSum sum;
  for (const Term& term : terms) add_term(sum, term.value, term.exponent);
  return sum;
}

// Any kind, and finite ones of every distance from each other.
ExactSum random_state(Random& random) {
  if (random.chance(0.4)) return state_of_every_kind<ExactSum>(random)[random.below(6)];
  std::vector<Term> terms(1 + random.below(5));
  for (Term& term : terms) {
    term = {random.magnitude(-1, 5), static_cast<int32_t>(random.below(200)) - 100};
  }
  return sum_of(terms);
}

ExactSum merged(ExactSum a, const ExactSum& b) {
  merge(a, b);
  return a;
}

void terms_land_in_the_bins_of_their_exponents() {
  // 1 = 2^23 * 2^-23: bits -23 to 0, of which only bit 0, the first of bin 0, is set.
  CHECK_SAME(sum_of({{1.0f, 0}}), (ExactSum{0, 1, 0, 0}), "1");
  // 1 - 2^-24 has its last bit at -24, in bin -1, as all the others.
  CHECK_SAME(sum_of({{0x1.fffffep-1f, 0}}), (ExactSum{0, 0, 0xffffff00u, 0}), "1 - 2^-24");
  // 2^23 has its last bit at 0, in bin 0: the top is the bin above, for what may overflow into it.
  CHECK_SAME(sum_of({{0x1p23f, 0}}), (ExactSum{1, 0, 0x800000u, 0}), "2^23");
  // Across two bins.
  CHECK_SAME(sum_of({{0x1.000002p0f, 40}}), (ExactSum{1, 0x100, 0x20000, 0}), "2^40 + 2^17");
  // Two bins apart: what is under the third bin is dropped.
  CHECK_SAME(sum_of({{1.0f, 64}, {0x1.fffffep-1f, 0}}), (ExactSum{2, 1, 0, 0}), "2^64 + 1 - 2^-24");
  CHECK_SAME(sum_of({{1.0f, 64}, {0x1.000002p0f, 0}}), (ExactSum{2, 1, 0, 1}), "2^64 + 1 + 2^-23");
}

void counters_hold_the_exact_sum_of_random_terms() {
  Random random;
  for (int round = 0; round < 20000; ++round) {
    const int spread = static_cast<int>(1 + random.below(180));
    const int32_t base = static_cast<int32_t>(random.below(1 << 30)) - (1 << 29);
    std::vector<Term> terms(1 + random.below(40));
    int32_t top = INT32_MIN;
    for (Term& term : terms) {
      term = {random.magnitude(-1, 5), base + static_cast<int32_t>(random.below(spread))};
      top = std::max(top, top_of(term));
    }
    const ExactSum sum = sum_of(terms);
    CHECK(sum.top == top, "top %d for %d, round %d", sum.top, top, round);
    CHECK(value_of(sum) == kept_sum(terms, top), "another sum in round %d", round);
    ExactSum shuffled;
    random.shuffle(terms);
    for (const Term& term : terms) {
      ExactSum one;
      add_term(one, term.value, term.exponent);
      shuffled = random.chance(0.5) ? merged(shuffled, one) : merged(one, shuffled);
    }
    CHECK_SAME(shuffled, sum, "merged one by one in another order");
  }
}

void at_least_55_bits_are_kept_below_the_largest_term() {
  for (int32_t exponent = -64; exponent <= 64; ++exponent) {
    const ExactSum largest = sum_of({{1.0f, exponent}});
    const int32_t lost = 32 * (largest.top - 2);
    CHECK(exponent - lost >= 55, "only %d bits kept below 2^%d", exponent - lost, exponent);
    // 2^23 + 1, its last bit 55 below the leading bit of the largest term.
    const ExactSum both = sum_of({{1.0f, exponent}, {0x1.000002p0f, exponent - 32}});
    const Wide kept = Wide{0x800001} << (exponent - 55 - lost);
    CHECK(value_of(both) - value_of(largest) == kept, "bits lost below 2^%d", exponent);
  }
}

void raising_the_top_drops_whole_bins() {
  const ExactSum sum{5, 7, 11, 13};
  const auto raised = [&](int32_t top) {
    ExactSum copy = sum;
    raise_top(copy, top);
    return copy;
  };
  CHECK_SAME(raised(5), sum, "by 0 bins");
  CHECK_SAME(raised(6), (ExactSum{6, 0, 7, 11}), "by 1 bin");
  CHECK_SAME(raised(7), (ExactSum{7, 0, 0, 7}), "by 2 bins");
  CHECK_SAME(raised(8), (ExactSum{8, 0, 0, 0}), "by 3 bins");
  CHECK_SAME(raised(9), (ExactSum{9, 0, 0, 0}), "by 4 bins");
  for (int32_t top : {kWideTop, kWideTop + 1, kInfTop, kNanTop}) {
    CHECK_SAME(raised(top), (ExactSum{top, 0, 0, 0}), "beyond the finite sums");
  }
  for (int32_t from : {kEmptyTop, -kWideTop - 1, -kWideTop}) {
    ExactSum copy{from, 0, 5, 0};  // one bin more is another value, not a shift
    raise_top(copy, from + 1);
    CHECK_SAME(copy, (ExactSum{from + 1, 0, 0, 0}), "from below the finite sums");
  }
}

void counters_never_carry() {
  ExactSum sum;
  for (int i = 0; i < 5; ++i) add_term(sum, 0x1.fffffep-1f, 0);
  CHECK_SAME(sum, (ExactSum{0, 0, 5 * uint64_t{0xffffff00u}, 0}), "5 * (1 - 2^-24)");
}

void counters_hold_2_to_the_32_terms() {
  for (int32_t exponent = 0; exponent < 32; ++exponent) {
    ExactSum sum = sum_of({{0x1.fffffep0f, exponent}});
    const Wide once = value_of(sum);
    const ExactSum one = sum;
    for (int doubling = 0; doubling < 32; ++doubling) sum = merged(sum, sum);
    CHECK(value_of(sum) == once << 32, "2^32 terms of exponent %d", exponent);
    CHECK(sum.middle >> 32 == one.middle, "a counter that overflowed, exponent %d", exponent);
  }
}

void merging_is_a_commutative_monoid() {
  Random random;
  for (int round = 0; round < 20000; ++round) {
    const ExactSum a = random_state(random), b = random_state(random), c = random_state(random);
    CHECK_SAME(merged(a, ExactSum{}), a, "a + nothing");
    CHECK_SAME(merged(ExactSum{}, a), a, "nothing + a");
    CHECK_SAME(merged(a, b), merged(b, a), "a + b and b + a");
    CHECK_SAME(merged(merged(a, b), c), merged(a, merged(b, c)), "(a + b) + c and a + (b + c)");
  }
}

void what_is_higher_in_kind_wins_whole() {
  Random random;
  for (int round = 0; round < 1000; ++round) {
    const std::vector<ExactSum> states = state_of_every_kind<ExactSum>(random);
    for (size_t low = 0; low < states.size(); ++low) {
      for (size_t high = low + 1; high < states.size(); ++high) {
        CHECK_SAME(merged(states[low], states[high]), states[high], "lower + higher");
        CHECK_SAME(merged(states[high], states[low]), states[high], "higher + lower");
      }
    }
  }
}

void wide_tops_are_ordered_as_their_values() {
  const float limit = std::nextafter(kWideLimit, 0.0f);
  const float largest = std::nextafter(kInfinity, 0.0f);
  ExactSum state;
  GroupValues group;
  for (float& y : group.y) y = limit;
  add_group(state, group.y, limit);
  CHECK(!is_wide_top(state.top), "top %d of 2^29 - 32", state.top);
  for (float& y : group.y) y = -limit;
  state = {};
  add_group(state, group.y, -limit);
  CHECK(!is_wide_top(state.top), "top %d of -(2^29 - 32)", state.top);
  CHECK(wide_top(kWideLimit) == kWideTop, "%d", wide_top(kWideLimit));
  CHECK(wide_top(-kWideLimit) == -kWideTop, "%d", wide_top(-kWideLimit));
  CHECK(wide_top(largest) < kInfTop, "%d", wide_top(largest));
  CHECK(wide_top(-largest) > kEmptyTop, "%d", wide_top(-largest));
  Random random;
  for (int round = 0; round < 100000; ++round) {
    const float value = random.magnitude(29, 128) * (random.chance(0.5) ? 1.0f : -1.0f);
    const float next = std::nextafter(value, kInfinity);
    const int32_t top = wide_top(value);
    CHECK(is_wide_top(top), "top %d of %a", top, value);
    CHECK(wide_value(top) == value, "%a for %a", wide_value(top), value);
    if (absolute(next) >= kWideLimit && next < kInfinity) {
      CHECK(wide_top(next) > top, "%d after %d, of %a", wide_top(next), top, value);
    }
  }
}

void a_term_can_be_taken_out_again() {
  Random random;
  for (int round = 0; round < 20000; ++round) {
    ExactSum others, term;
    const float value = random.magnitude(-1, 5);
    const int32_t exponent = static_cast<int32_t>(random.below(100)) - 50;
    add_term(term, value, exponent);
    std::vector<Term> terms(random.below(6));
    for (Term& other : terms) {  // at most a few bits above: a sum's top may be its term's plus 1
      other = {random.magnitude(-1, 5), exponent - static_cast<int32_t>(random.below(120)) + 4};
      add_term(others, other.value, other.exponent);
    }
    ExactSum sum = merged(others, term), expected = others;
    if (sum.top > expected.top) raise_top(expected, sum.top);
    subtract_term(sum, term);
    CHECK_SAME(sum, expected, "sum - term");
  }
  for (const float value : {0x1p29f, -0x1p29f, 3e38f, -3e38f}) {  // a wide sum counts columns
    ExactSum sum{wide_top(value), 0, 5, 0};
    subtract_term(sum, ExactSum{wide_top(value), 0, 3, 0});
    CHECK_SAME(sum, (ExactSum{wide_top(value), 0, 2, 0}), "5 columns less 3");
  }
}

}  // namespace

int main(int argc, char** argv) {
  return host_test::run_all(
      argc, argv,
      {{"terms land in the bins of their exponents", terms_land_in_the_bins_of_their_exponents},
       {"counters hold the exact sum of random terms", counters_hold_the_exact_sum_of_random_terms},
       {"at least 55 bits are kept below the largest term",
        at_least_55_bits_are_kept_below_the_largest_term},
       {"raising the top drops whole bins", raising_the_top_drops_whole_bins},
       {"counters never carry", counters_never_carry},
       {"counters hold 2^32 terms", counters_hold_2_to_the_32_terms},
       {"merging is a commutative monoid", merging_is_a_commutative_monoid},
       {"what is higher in kind wins whole", what_is_higher_in_kind_wins_whole},
       {"wide tops are ordered as their values", wide_tops_are_ordered_as_their_values},
       {"a term can be taken out again", a_term_can_be_taken_out_again}});
}
