// Whoever sums a row, in whatever parts and order: the same bits.
#include "row.h"

namespace {

using namespace rl_logp;
using host_test::PartialRow;
using host_test::Random;
using host_test::Row;
using host_test::sum_groups;
using host_test::operator==;

struct Kind {
  const char* name;
  float (*column)(Random&);
};

float logit(Random& random) { return static_cast<float>(4 * random.normal()); }

float rare(Random& random, double probability, float value) {
  return random.chance(probability) ? value : logit(random);
}

constexpr float kLowest = -0x1.fffffep127f;  // finfo.min

const Kind kKinds[] = {
    {"logits", logit},
    {"logits over hundreds of powers of two",
     [](Random& random) { return static_cast<float>(random.uniform(-4000, 4000)); }},
    {"bins that come and go",
     [](Random& random) { return static_cast<float>(11 * random.below(9)); }},
    {"equal columns", [](Random&) { return 3.25f; }},
    {"mostly masked", [](Random& random) { return rare(random, 0.97, -kInfinity); }},
    {"masked by finfo.min", [](Random& random) { return rare(random, 0.5, kLowest); }},
    {"finfo.min, and little else", [](Random& random) { return rare(random, 0.999, kLowest); }},
    {"around the fast limit",
     [](Random& random) {
       return (random.chance(0.5) ? 1.0f : -1.0f) * static_cast<float>(random.uniform(4090, 4100));
     }},
    {"mid range",
     [](Random& random) { return (random.chance(0.5) ? 1.0f : -1.0f) * random.magnitude(10, 29); }},
    {"close values in the mid range",
     [](Random& random) { return 1e6f + static_cast<float>(random.below(64)) / 16; }},
    {"around the wide limit",
     [](Random& random) { return 0x1p29f + 64 * (static_cast<float>(random.below(5)) - 2); }},
    {"around the negative wide limit",
     [](Random& random) { return -0x1p29f + 64 * (static_cast<float>(random.below(5)) - 2); }},
    {"wide and few",
     [](Random& random) { return 1e38f * (static_cast<float>(random.below(7)) - 3); }},
    {"any finite number",
     [](Random& random) {
       return (random.chance(0.5) ? 1.0f : -1.0f) * random.magnitude(-126, 128);
     }},
    {"zeros of both signs", [](Random& random) { return random.chance(0.5) ? 0.0f : -0.0f; }},
    {"a few +inf", [](Random& random) { return rare(random, 0.01, kInfinity); }},
    {"a few NaN", [](Random& random) { return rare(random, 0.01, kNan); }},
    {"nothing", [](Random&) { return -kInfinity; }},
};

Row row_of(const Kind& kind, Random& random, size_t columns) {
  Row row(columns);
  for (float& y : row) y = kind.column(random);
  return row;
}

// A partial result without what it means nothing in: the largest column where there is a NaN.
template <class Sums>
bool same_state(const PartialRow<Sums>& a, const PartialRow<Sums>& b) {
  if (!(a.sum == b.sum)) return false;
  return a.sum.top == kNanTop ||
         (a.largest.largest == b.largest.largest && a.largest.group == b.largest.group);
}

template <class Value>
void check_bits(
    const char* what, Value actual, Value expected, const char* how, const Kind& kind,
    size_t columns) {
  CHECK(
      host_test::same_bits(actual, expected), "%s %a and %a: %s, %s, %zu columns", what, actual,
      expected, how, kind.name, columns);
}

template <class Sums>
void check_same(
    const char* how, const Kind& kind, const Row& row, const PartialRow<Sums>& actual,
    const PartialRow<Sums>& expected) {
  CHECK(
      same_state(actual, expected), "another state: %s, %s, %zu columns", how, kind.name,
      row.size());
  const RowResult a = result_of(host_test::finish(actual, row, 0));
  const RowResult e = result_of(host_test::finish(expected, row, 0));
  check_bits("lse", a.lse(), e.lse(), how, kind, row.size());
  check_bits("entropy", a.entropy(), e.entropy(), how, kind, row.size());
  check_bits("mean", a.mean(), e.mean(), how, kind, row.size());
  for (size_t column = 0; column < row.size(); column += 1 + row.size() / 7) {
    check_bits("logp", a.logp(row[column]), e.logp(row[column]), how, kind, row.size());
  }
}

// Calls check(kind, row, its state) for rows of every kind and of many lengths.
template <class Sums, class Check>
void for_every_kind(Random& random, int rounds, Check&& check) {
  for (const Kind& kind : kKinds) {
    for (int round = 0; round < rounds; ++round) {
      const size_t columns = 1 + random.below(round % 4 == 0 ? 40 : 1500);
      const Row row = row_of(kind, random, columns);
      check(kind, row, sum_groups<Sums>(row, host_test::in_order(row)));
    }
  }
}

template <class Sums>
void groups_in_any_order() {
  Random random;
  for_every_kind<Sums>(
      random, 60, [&](const Kind& kind, const Row& row, const PartialRow<Sums>& expected) {
        std::vector<uint32_t> groups = host_test::in_order(row);
        for (int i = 0; i < 3; ++i) {
          random.shuffle(groups);
          check_same("shuffled", kind, row, sum_groups<Sums>(row, groups), expected);
        }
        std::reverse(groups.begin(), groups.end());
        check_same("reversed", kind, row, sum_groups<Sums>(row, groups), expected);
      });
}

// Merges random pairs until one is left: every tree, and every order of leaves.
template <class Sums>
PartialRow<Sums> merge_in_any_tree(std::vector<PartialRow<Sums>> parts, Random& random) {
  while (parts.size() > 1) {
    random.shuffle(parts);
    merge(parts[parts.size() - 2], parts.back());
    parts.pop_back();
  }
  return parts[0];
}

template <class Sums>
void parts_merged_in_any_tree() {
  Random random;
  for_every_kind<Sums>(
      random, 60, [&](const Kind& kind, const Row& row, const PartialRow<Sums>& expected) {
        std::vector<uint32_t> groups = host_test::in_order(row);
        for (size_t parts_count : {size_t{2}, size_t{8}, size_t{32}, groups.size()}) {
          // Stripes, as lanes and warps take them; then any groups at all, some parts empty.
          std::vector<PartialRow<Sums>> stripes(parts_count), anyhow(parts_count);
          for (uint32_t group : groups) {
            add_group(stripes[group % parts_count], row, group);
            add_group(anyhow[random.below(parts_count)], row, group);
          }
          check_same("striped", kind, row, merge_in_any_tree(stripes, random), expected);
          check_same("scattered", kind, row, merge_in_any_tree(anyhow, random), expected);
        }
      });
}

template <class Sums>
void shards_of_the_vocabulary() {
  Random random;
  for_every_kind<Sums>(
      random, 60, [&](const Kind& kind, const Row& row, const PartialRow<Sums>& expected) {
        const uint32_t groups = host_test::groups_of(row);
        std::vector<PartialRow<Sums>> shards;
        for (uint32_t start = 0; start < groups;) {  // each starts at a multiple of 16 columns
          const uint32_t end = start + 1 + static_cast<uint32_t>(random.below(groups - start));
          PartialRow<Sums> shard;
          for (uint32_t group = start; group < end; ++group) add_group(shard, row, group);
          shards.push_back(shard);
          start = end;
        }
        check_same("sharded", kind, row, merge_in_any_tree(shards, random), expected);
      });
}

// Each shard reads its own columns only, and makes the state that is sent to the others.
template <class Sums>
void states_of_shards() {
  Random random;
  for_every_kind<Sums>(
      random, 60, [&](const Kind& kind, const Row& row, const PartialRow<Sums>& whole) {
        using State = host_test::StateOf<Sums>;
        const RowResult expected = result_of(host_test::finish(whole, row, 0));
        const size_t target = random.below(row.size());
        std::vector<State> states;
        for (size_t start = 0; start < row.size();) {
          const size_t groups = 1 + random.below(host_test::groups_of(row));
          const size_t end = std::min(row.size(), start + groups * kGroup);
          const Row shard(row.begin() + start, row.begin() + end);
          State state = host_test::state_of<Sums>(shard, static_cast<uint32_t>(start / kGroup));
          state.has_target = start <= target && target < end;
          if (state.has_target) state.target_y = row[target];
          states.push_back(state);
          start = end;
        }
        random.shuffle(states);
        State merged;
        for (const State& state : states) merge(merged, state);
        const RowResult actual = result_of(merged);
        const size_t columns = row.size();
        check_bits("lse", actual.lse(), expected.lse(), "sharded", kind, columns);
        check_bits("entropy", actual.entropy(), expected.entropy(), "sharded", kind, columns);
        check_bits("mean", actual.mean(), expected.mean(), "sharded", kind, columns);
        const float logp = logp_of(merged, actual);
        check_bits("logp", logp, expected.logp(row[target]), "sharded", kind, columns);
        merged.has_target = 2;  // shards that overlap
        CHECK(std::isnan(logp_of(merged, actual)), "a target in two shards: %s", kind.name);
      });
}

template <class Sums>
void columns_of_minus_infinity_at_the_end() {
  Random random;
  for_every_kind<Sums>(
      random, 60, [&](const Kind& kind, const Row& row, const PartialRow<Sums>& expected) {
        Row padded = row;
        padded.resize(row.size() + random.below(100), -kInfinity);
        const PartialRow<Sums> state = sum_groups<Sums>(padded, host_test::in_order(padded));
        check_same("padded", kind, row, state, expected);
        check_same("padded", kind, padded, state, expected);
      });
}

// What is weighted is beside the sum, and nowhere in it.
void weights_do_not_reach_the_sum() {
  Random random;
  for_every_kind<Weighted>(
      random, 60, [&](const Kind& kind, const Row& row, const PartialRow<Weighted>& weighted) {
        const auto plain = sum_groups<Unweighted>(row, host_test::in_order(row));
        CHECK(
            same_state<Unweighted>({weighted.sum, weighted.largest}, plain), "another sum: %s",
            kind.name);
        const RowState state = host_test::finish(weighted, row, 0);  // the first eight words
        const RowState expected = host_test::finish(plain, row, 0);
        CHECK(
            plain.sum.top == kNanTop || std::memcmp(&state, &expected, sizeof state) == 0,
            "another state: %s", kind.name);
        const LogSumExp a = result_of(host_test::finish(weighted, row, 0)), e = result_of(expected);
        check_bits("lse", a.lse(), e.lse(), "weighted", kind, row.size());
        for (float y : row) check_bits("logp", a.logp(y), e.logp(y), "weighted", kind, row.size());
      });
}

// Halves of a group's tree may be summed elsewhere, and come in either order (the warps that finish
// a row sum a group over lanes).
void halves_of_a_group() {
  Random random;
  for (int round = 0; round < 20000; ++round) {
    float whole[kGroup], swapped[kGroup], lanes[kGroup];
    for (int i = 0; i < kGroup; ++i) {
      whole[i] = lanes[i] = random.magnitude(-30, 1);
      swapped[(i + kGroup / 2) % kGroup] = whole[i];
    }
    const float sum = sum_tree(whole);
    CHECK(sum_tree(swapped) == sum, "halves that changed places, round %d", round);
    for (int width = 1; width < kGroup; width *= 2) {
      float before[kGroup];
      std::copy(lanes, lanes + kGroup, before);
      for (int i = 0; i < kGroup; ++i) lanes[i] = add(before[i], before[i ^ width]);
    }
    for (float lane : lanes) CHECK(lane == sum, "%a and %a, round %d", lane, sum, round);
  }
}

// Which columns are a group, and in which order, may show in the last bits. If it never did, the
// tests above would compare nothing.
void columns_have_their_places() {
  Random random;
  int moved = 0;
  for (int round = 0; round < 200; ++round) {
    Row row = row_of(kKinds[0], random, 640), rotated = row;
    std::rotate(rotated.begin(), rotated.begin() + 1, rotated.end());
    const double lse = host_test::log_sum_exp_of(row).lse();
    moved += host_test::log_sum_exp_of(rotated).lse() != lse;
  }
  CHECK(moved > 100, "only %d of 200 rows noticed", moved);
}

}  // namespace

int main(int argc, char** argv) {
  return host_test::run_all(
      argc, argv,
      {{"groups in any order", groups_in_any_order<Unweighted>},
       {"groups in any order, weighted", groups_in_any_order<Weighted>},
       {"parts merged in any tree", parts_merged_in_any_tree<Unweighted>},
       {"parts merged in any tree, weighted", parts_merged_in_any_tree<Weighted>},
       {"shards of the vocabulary", shards_of_the_vocabulary<Unweighted>},
       {"shards of the vocabulary, weighted", shards_of_the_vocabulary<Weighted>},
       {"states of shards", states_of_shards<Unweighted>},
       {"states of shards, weighted", states_of_shards<Weighted>},
       {"columns of -inf at the end", columns_of_minus_infinity_at_the_end<Unweighted>},
       {"columns of -inf at the end, weighted", columns_of_minus_infinity_at_the_end<Weighted>},
       {"weights do not reach the sum", weights_do_not_reach_the_sum},
       {"halves of a group", halves_of_a_group},
       {"columns have their places", columns_have_their_places}});
}
