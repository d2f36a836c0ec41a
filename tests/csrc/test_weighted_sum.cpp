// The counters of a weighted sum: what they hold is the exact sum of the terms' weights, cut off at
// a whole bin and counted from the top, and merging them is a commutative monoid.
#include "row.h"

namespace {

using namespace rl_logp;
using host_test::operator==;
using host_test::Random;
using host_test::state_of_every_kind;
using Wide = __int128;

struct Term {
  float value;
  int32_t exponent;
  float weight;
};

int32_t floor_of(int32_t value, int32_t divisor) {
  return static_cast<int32_t>(std::floor(static_cast<double>(value) / divisor));
}

// A term as integers, in units of 2^lowest: of the sum, and of the weighted one from its own top.
struct Integers {
  int32_t lowest, top;
  int64_t mantissa, weighted;

  explicit Integers(const Term& term) {
    int exponent;
    mantissa = static_cast<int64_t>(std::ldexp(std::frexp(term.value, &exponent), 24));
    lowest = exponent - 24 + term.exponent;
    top = floor_of(lowest, 32) + 1;
    const double weight = std::ldexp(static_cast<double>(term.weight), 24 - exponent);
    weighted = mantissa * (term.exponent - 32 * top) + std::llrint(weight);
  }
};

// value * 2^places, rounded down.
Wide shifted(int64_t value, int64_t places) {
  return places >= 0 ? Wide{value} * (Wide{1} << places) : Wide{value} >> -places;
}

// All terms, in units of the lowest bit that is kept, each rounded down to it as its own weight is
// from its own top, and then counted from that of the sum.
Wide kept_weights(const std::vector<Term>& terms, int32_t top) {
  Wide sum = 0;
  for (const Term& term : terms) {
    const Integers integers(term);
    const int32_t below = top - integers.top;
    if (below > 2) continue;
    const int64_t places = int64_t{integers.lowest} - 32 * (int64_t{top} - 2);
    sum += shifted(integers.weighted, places) - 32 * below * shifted(integers.mantissa, places);
  }
  return sum;
}

Wide weights_of(const WeightedSum& sum) {
  return Wide{sum.weighted_high} * (Wide{1} << 64) + Wide{sum.weighted_middle} * (Wide{1} << 32) +
         sum.weighted_low;
}

void print(const char* name, const WeightedSum& sum) {
  std::printf(
      "%s: top %d, %llx %llx %llx, weighted %lld %lld %lld\n", name, sum.top,
      static_cast<unsigned long long>(sum.high), static_cast<unsigned long long>(sum.middle),
      static_cast<unsigned long long>(sum.low), static_cast<long long>(sum.weighted_high),
      static_cast<long long>(sum.weighted_middle), static_cast<long long>(sum.weighted_low));
}

#define CHECK_SAME(actual, expected, what)   \
  do {                                       \
    const WeightedSum actual_ = actual;      \
    const WeightedSum expected_ = expected;  \
    if (!(actual_ == expected_)) {           \
      print("actual", actual_);              \
      print("expected", expected_);          \
    }                                        \
    CHECK(actual_ == expected_, "%s", what); \
  } while (0)

WeightedSum sum_of(const std::vector<Term>& terms) {
  WeightedSum sum;
  for (const Term& term : terms) add_term(sum, term.value, term.exponent, term.weight);
  return sum;
}

// As a group may have it: |weight| is below 4 * value.
Term random_term(Random& random, int32_t exponent) {
  const float value = random.magnitude(-1, 5);
  return {value, exponent, static_cast<float>(value * random.uniform(-4, 4))};
}

WeightedSum merged(WeightedSum a, const WeightedSum& b) {
  merge(a, b);
  return a;
}

// Any kind, and finite ones of every distance from each other.
WeightedSum random_state(Random& random) {
  if (random.chance(0.4)) return state_of_every_kind<WeightedSum>(random)[random.below(6)];
  std::vector<Term> terms(1 + random.below(5));
  for (Term& term : terms) term = random_term(random, static_cast<int>(random.below(200)) - 100);
  return sum_of(terms);
}

void terms_are_weighted_from_their_top() {
  const auto weighted = [](int32_t top, int64_t high, int64_t middle, int64_t low) {
    WeightedSum sum;
    sum.top = top;
    sum.weighted_high = high, sum.weighted_middle = middle, sum.weighted_low = low;
    return sum;
  };
  // 1, whose z is 0: 0 from the top of 0.
  WeightedSum expected = weighted(0, 0, 0, 0);
  expected.high = 1;
  CHECK_SAME(sum_of({{1.0f, 0, 0.0f}}), expected, "1");
  // 2^23, whose z is 23: 9 below the top of 1, and so -9 * 2^23, whose piece in bin 0 is counted
  // from the multiple of 2^32 below it.
  expected = weighted(1, -1, (int64_t{1} << 32) - 9 * 0x800000, 0);
  expected.middle = 0x800000;
  CHECK_SAME(sum_of({{1.0f, 23, 0.0f}}), expected, "2^23");
  // The same, and half a column a quarter above it in z: 9 * 2^23 less 2^20.
  expected.weighted_middle += 1 << 20;
  CHECK_SAME(sum_of({{1.0f, 23, 0.125f}}), expected, "2^23, with a weight");
  // From a top that is higher by one bin, 2^23 is 32 further below.
  expected = weighted(2, 0, -1, (int64_t{1} << 32) - (9 + 32) * int64_t{0x800000});
  expected.low = 0x800000;
  WeightedSum sum = sum_of({{1.0f, 23, 0.0f}});
  raise_top(sum, 2);
  CHECK_SAME(sum, expected, "2^23 from a higher top");
}

void counters_hold_the_exact_sum_of_random_terms() {
  Random random;
  for (int round = 0; round < 20000; ++round) {
    const int spread = static_cast<int>(1 + random.below(180));
    const int32_t base = static_cast<int32_t>(random.below(1 << 30)) - (1 << 29);
    std::vector<Term> terms(1 + random.below(40));
    int32_t top = INT32_MIN;
    for (Term& term : terms) {
      term = random_term(random, base + static_cast<int32_t>(random.below(spread)));
      top = std::max(top, Integers(term).top);
    }
    const WeightedSum sum = sum_of(terms);
    CHECK(sum.top == top, "top %d for %d, round %d", sum.top, top, round);
    CHECK(weights_of(sum) == kept_weights(terms, top), "another sum in round %d", round);
    ExactSum unweighted;
    for (const Term& term : terms) add_term(unweighted, term.value, term.exponent);
    CHECK(static_cast<const ExactSum&>(sum) == unweighted, "the sum, in round %d", round);
    WeightedSum shuffled;
    random.shuffle(terms);
    for (const Term& term : terms) {
      const WeightedSum one = sum_of({term});
      shuffled = random.chance(0.5) ? merged(shuffled, one) : merged(one, shuffled);
    }
    CHECK_SAME(shuffled, sum, "merged one by one in another order");
  }
}

// What the integers stand for: the sum of exp(y) * (z - 32 * top), where the z of a term is its
// exponent plus weight / value. Half a unit of each term's last bit is rounded; what is below the
// third bin, counted from any top, is dropped.
void weights_are_those_of_logits() {
  Random random;
  for (int round = 0; round < 20000; ++round) {
    std::vector<Term> terms(1 + random.below(40));
    for (Term& term : terms) term = random_term(random, static_cast<int>(random.below(120)));
    const WeightedSum sum = sum_of(terms);
    const long double unit = std::ldexp(1.0L, 32 * (sum.top - 2));
    long double exact = 0, error = 0;
    for (const Term& term : terms) {
      const long double scale = std::ldexp(1.0L, term.exponent);
      const int32_t from_top = term.exponent - 32 * sum.top;
      exact += scale * (static_cast<long double>(term.value) * from_top + term.weight);
      error += scale * term.value * 0x1p-24L + unit * (2 + std::abs(from_top));
    }
    const long double actual = static_cast<long double>(weights_of(sum)) * unit;
    error += 0x1p-60L * std::fabs(exact);
    CHECK(std::fabs(actual - exact) <= error, "%Lg for %Lg, round %d", actual, exact, round);
  }
}

void raising_the_top_counts_anew_what_is_kept() {
  Random random;
  for (int round = 0; round < 20000; ++round) {
    const std::vector<Term> terms = {random_term(random, static_cast<int>(random.below(64)))};
    WeightedSum sum = sum_of(terms);
    const int32_t first = sum.top;
    for (int32_t top = first; top < first + 6; ++top) {
      WeightedSum raised = sum_of(terms), step = sum;
      raise_top(raised, top);
      CHECK(weights_of(raised) == kept_weights(terms, top), "raised to %d, round %d", top, round);
      raise_top(step, top);  // by one bin more each time
      CHECK_SAME(step, raised, "in steps and at once");
      sum = step;
    }
  }
  for (int32_t top : {kWideTop, kWideTop + 1, kInfTop, kNanTop}) {
    WeightedSum sum = sum_of({random_term(random, 3)}), expected;
    raise_top(sum, top);
    expected.top = top;
    CHECK_SAME(sum, expected, "beyond the finite sums");
  }
}

// Terms whose pieces are the largest, at every place in a bin, at either end of what a weight can
// be, and counted from tops that are as far above as one that is kept can be.
void counters_hold_2_to_the_26_terms() {
  Wide largest = 0;
  for (int32_t exponent = 0; exponent < 32; ++exponent) {
    for (float value : {0.5f, 0x1.fffffep-1f, 0x1.fffffep0f, 0x1.fffffep4f}) {
      for (float weight : {-4.0f, 0.0f, 4.0f}) {
        for (int32_t bins = 0; bins < 3; ++bins) {
          WeightedSum sum = sum_of({{value, exponent, weight * value}});
          raise_top(sum, sum.top + bins);
          const Wide once = weights_of(sum);
          for (int doubling = 0; doubling < 26; ++doubling) sum = merged(sum, sum);  // or UBSan
          CHECK(weights_of(sum) == once * (1 << 26), "2^26 terms of %a * 2^%d", value, exponent);
          for (int64_t counter : {sum.weighted_high, sum.weighted_middle, sum.weighted_low}) {
            largest = std::max(largest, counter < 0 ? -Wide{counter} : Wide{counter});
          }
          WeightedSum later = sum_of({{value, exponent, weight * value}});
          for (int doubling = 0; doubling < 26; ++doubling) later = merged(later, later);
          raise_top(later, later.top + bins);
          CHECK_SAME(later, sum, "raised when there were 2^26");
        }
      }
    }
  }
  CHECK(largest > Wide{1} << 62, "at most 2^%g", std::log2(static_cast<double>(largest)));
}

void merging_is_a_commutative_monoid() {
  Random random;
  for (int round = 0; round < 20000; ++round) {
    const WeightedSum a = random_state(random), b = random_state(random), c = random_state(random);
    CHECK_SAME(merged(a, WeightedSum{}), a, "a + nothing");
    CHECK_SAME(merged(WeightedSum{}, a), a, "nothing + a");
    CHECK_SAME(merged(a, b), merged(b, a), "a + b and b + a");
    CHECK_SAME(merged(merged(a, b), c), merged(a, merged(b, c)), "(a + b) + c and a + (b + c)");
  }
}

void what_is_higher_in_kind_wins_whole() {
  Random random;
  for (int round = 0; round < 1000; ++round) {
    const std::vector<WeightedSum> states = state_of_every_kind<WeightedSum>(random);
    for (size_t low = 0; low < states.size(); ++low) {
      for (size_t high = low + 1; high < states.size(); ++high) {
        CHECK_SAME(merged(states[low], states[high]), states[high], "lower + higher");
        CHECK_SAME(merged(states[high], states[low]), states[high], "higher + lower");
      }
      const bool finite = !is_wide_top(states[low].top);
      CHECK(finite || weights_of(states[low]) == 0, "weights where none are kept, kind %zu", low);
    }
  }
}

void a_term_can_be_taken_out_again() {
  Random random;
  for (int round = 0; round < 20000; ++round) {
    const int32_t exponent = static_cast<int32_t>(random.below(100)) - 50;
    const WeightedSum term = sum_of({random_term(random, exponent)});
    std::vector<Term> terms(random.below(6));
    for (Term& other : terms) {  // at most a few bits above: a sum's top may be its term's plus 1
      other = random_term(random, exponent - static_cast<int32_t>(random.below(120)) + 4);
    }
    WeightedSum expected = sum_of(terms), sum = merged(expected, term);
    if (sum.top > expected.top) raise_top(expected, sum.top);
    subtract_term(sum, term);
    CHECK_SAME(sum, expected, "sum - term");
  }
}

// A group's weight is that of its columns: of their powers of two, times what they are powers of.
void groups_are_weighted_by_their_columns() {
  Random random;
  for (int round = 0; round < 20000; ++round) {
    const double spread = std::exp2(random.uniform(-8, 7));
    const double mean = round % 2 == 0 ? random.uniform(-4000, 4000) : random.uniform(-1e6, 1e6);
    GroupValues group;
    for (float& y : group.y) y = static_cast<float>(mean + spread * random.normal());
    const int masked = static_cast<int>(random.below(kGroup));
    for (int i = 0; i < masked; ++i) group.y[random.below(kGroup)] = -kInfinity;
    const float largest = largest_of(group.y);
    if (largest == -kInfinity) continue;
    const GroupTerm term = term_of(largest_term<Weighted>(group.y, largest));
    long double sum = 0, weight = 0, size = 0;
    for (float y : group.y) {
      if (y == -kInfinity) continue;
      const long double z = y / std::log(2.0L) - term.exponent, power = std::exp2(z);
      sum += power;
      weight += power * z;
      size += power * std::fabs(z);
    }
    // Powers are off by 2 ulp and more where the argument is rounded; 9 more roundings of products,
    // sums and the correction, and what the correction leaves of columns below the largest.
    const long double error = (host_test::kExp2Error + 12 * host_test::kRounding) * (sum + size);
    CHECK(std::fabs(term.value - sum) <= error, "%g for %Lg, round %d", term.value, sum, round);
    CHECK(
        std::fabs(term.weight - weight) <= error, "%g for %Lg, round %d", term.weight, weight,
        round);
    CHECK(std::fabs(term.weight) < 4 * term.value, "%g of %g", term.weight, term.value);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return host_test::run_all(
      argc, argv,
      {{"terms are weighted from their top", terms_are_weighted_from_their_top},
       {"counters hold the exact sum of random terms", counters_hold_the_exact_sum_of_random_terms},
       {"weights are those of logits", weights_are_those_of_logits},
       {"raising the top counts anew what is kept", raising_the_top_counts_anew_what_is_kept},
       {"counters hold 2^26 terms", counters_hold_2_to_the_26_terms},
       {"merging is a commutative monoid", merging_is_a_commutative_monoid},
       {"what is higher in kind wins whole", what_is_higher_in_kind_wins_whole},
       {"a term can be taken out again", a_term_can_be_taken_out_again},
       {"groups are weighted by their columns", groups_are_weighted_by_their_columns}});
}
