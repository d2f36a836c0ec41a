// Where rows lie, in which order they are taken, and how columns fall into chunks.
#include <algorithm>
#include <climits>

#include "check.h"
#include "rl_logp/kernel_args.h"
#include "rl_logp/rows.h"

namespace {

using namespace rl_logp;
using host_test::Random;

constexpr int64_t kTwo31 = int64_t{1} << 31;

RowShape shape_of(const std::vector<int64_t>& sizes) {
  RowShape shape{};
  shape.dims = static_cast<int32_t>(sizes.size());
  shape.rows = 1;
  std::fill(shape.size, shape.size + kMaxLeadingDims, 1);
  std::copy(sizes.begin(), sizes.end(), shape.size);
  for (int64_t size : sizes) shape.rows *= size;
  return shape;
}

RowStrides strides_of(const std::vector<int64_t>& values) {
  RowStrides strides{};
  std::copy(values.begin(), values.end(), strides.stride);
  return strides;
}

// Every row of many shapes, counted up like an odometer.
void offsets_are_those_of_counting() {
  Random random;
  for (int round = 0; round < 3000; ++round) {
    std::vector<int64_t> sizes(1 + random.below(kMaxLeadingDims)), strides(sizes.size());
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      sizes[dim] = static_cast<int64_t>(1 + random.below(4));
      // 0: an expanded dimension. Any size of stride, past 2^32 too.
      strides[dim] =
          random.chance(0.2) ? 0 : static_cast<int64_t>(random.bits() >> (8 + random.below(56)));
    }
    const RowShape shape = shape_of(sizes);
    const RowStrides row_strides = strides_of(strides);
    std::vector<int64_t> index(sizes.size(), 0);
    for (int64_t row = 0; row < shape.rows; ++row) {
      int64_t expected = 0;
      for (size_t dim = 0; dim < sizes.size(); ++dim) expected += index[dim] * strides[dim];
      const int64_t actual = offset_of(shape, row, row_strides);
      CHECK(
          actual == expected, "%lld for %lld, row %lld of %zu dimensions",
          static_cast<long long>(actual), static_cast<long long>(expected),
          static_cast<long long>(row), sizes.size());
      for (size_t dim = sizes.size(); dim-- > 0 && ++index[dim] == sizes[dim];) index[dim] = 0;
    }
  }
}

// Sizes at which a 32-bit product wraps, with rows as long as vocabularies around 2^31.
void offsets_beyond_32_bits() {
  struct Case {
    std::vector<int64_t> sizes, strides;
    int64_t row, offset;
  };
  const Case cases[] = {
      {{16400}, {131072}, 16399, 16399 * int64_t{131072}},
      {{65536}, {50257}, 65535, 65535 * int64_t{50257}},
      {{3}, {INT_MAX - 1}, 2, 2 * int64_t{INT_MAX - 1}},
      {{3}, {INT_MAX}, 2, 2 * int64_t{INT_MAX}},
      {{3}, {kTwo31}, 2, 2 * kTwo31},
      {{3}, {kTwo31 + 1}, 2, 2 * kTwo31 + 2},
      {{2}, {(int64_t{1} << 34) - 1}, 1, (int64_t{1} << 34) - 1},
      {{kTwo31 + 7}, {1}, kTwo31 + 6, kTwo31 + 6},
      {{2, 3}, {kTwo31 + 1, 5}, 5, kTwo31 + 11},
      {{3, kTwo31}, {kTwo31 + 3, 1}, 2 * kTwo31 + 9, 2 * kTwo31 + 15},
      {{1 << 20, 1 << 20},
       {1 << 22, 2},
       (int64_t{1} << 40) - 1,
       ((int64_t{1} << 20) - 1) * ((1 << 22) + 2)},
  };
  for (const Case& one : cases) {
    const int64_t offset = offset_of(shape_of(one.sizes), one.row, strides_of(one.strides));
    CHECK(
        offset == one.offset, "%lld for %lld, row %lld", static_cast<long long>(offset),
        static_cast<long long>(one.offset), static_cast<long long>(one.row));
  }
}

// Where a row is taken, from what the order means: pass after pass, each in steps.
int64_t index_in_order(int64_t row, int64_t rows, int passes) {
  int64_t index = row / passes;
  for (int64_t pass = 0; pass < row % passes; ++pass) index += ceil_div(rows - pass, passes);
  return index;
}

void every_row_is_taken_once_in_passes() {
  for (int passes : {1, 4, 8}) {
    for (int64_t rows = 0; rows <= 100; ++rows) {
      std::vector<int> taken(static_cast<size_t>(rows), 0);
      for (int64_t index = 0; index < rows; ++index) {
        const int64_t row = row_in_order(index, rows, passes);
        CHECK(
            row >= 0 && row < rows, "row %lld of %lld", static_cast<long long>(row),
            static_cast<long long>(rows));
        CHECK(
            index_in_order(row, rows, passes) == index, "row %lld at %lld of %lld, %d passes",
            static_cast<long long>(row), static_cast<long long>(index),
            static_cast<long long>(rows), passes);
        ++taken[static_cast<size_t>(row)];
      }
      for (int times : taken) CHECK(times == 1, "%d times", times);
    }
    Random random;
    for (int64_t rows :
         {kTwo31 - 1, kTwo31, kTwo31 + 3, (int64_t{1} << 32) + 5, (int64_t{1} << 40) - 1,
          int64_t{1} << 40, (int64_t{1} << 40) + 6}) {
      for (int round = 0; round < 10000; ++round) {
        const int64_t near = static_cast<int64_t>(random.below(100));
        const int64_t rows_tried[] = {
            near, rows - 1 - near, rows / 2 + near,
            static_cast<int64_t>(random.below(static_cast<uint64_t>(rows)))};
        for (int64_t row : rows_tried) {
          const int64_t index = index_in_order(row, rows, passes);
          CHECK(
              row_in_order(index, rows, passes) == row, "row %lld of %lld, %d passes",
              static_cast<long long>(row), static_cast<long long>(rows), passes);
        }
      }
    }
  }
}

template <class Element>
void check_misalignment() {
  alignas(128) static const Element row[64] = {};
  constexpr int kPerChunk = kChunkBytes / static_cast<int>(sizeof(Element));
  for (int column = 0; column < 64; ++column) {
    const int shift = misalignment_of(row + column);
    CHECK(
        shift == column % kPerChunk, "%d for column %d of elements of %zu bytes", shift, column,
        sizeof(Element));
  }
}

void elements_since_the_last_chunk() {
  check_misalignment<uint16_t>();
  check_misalignment<float>();
}

void pieces_of_a_row() {
  const int64_t columns[] = {
      0,
      1,
      511,
      512,
      513,
      INT_MAX - 1,
      INT_MAX,
      kTwo31,
      kTwo31 + 1,
      2 * kTwo31 + 1,
      (int64_t{1} << 34) - 1};
  for (int64_t count : columns) {
    for (int64_t tile : {int64_t{8}, int64_t{16}, int64_t{512}, int64_t{4096}}) {
      const int64_t tiles = ceil_div(count, tile);
      CHECK(
          tiles * tile >= count && (tiles - 1) * tile < count, "%lld tiles of %lld for %lld",
          static_cast<long long>(tiles), static_cast<long long>(tile),
          static_cast<long long>(count));
    }
  }
}

// 16 bytes of each of 8 threads fill the 32 banks once, if their chunks differ modulo 8.
template <class Chunk>
bool conflict_free(Chunk&& chunk_of) {
  unsigned banks = 0;
  for (int thread = 0; thread < 8; ++thread) banks |= 1u << (chunk_of(thread) % 8);
  return banks == 0xff;
}

template <int kChunksPerGroup>
void check_swizzle() {
  for (int chunk = 0; chunk < 1024; ++chunk) {
    const int place = swizzled<kChunksPerGroup>(chunk);
    CHECK(place / 8 == chunk / 8, "chunk %d at %d, not among its 8", chunk, place);
    CHECK(swizzled<kChunksPerGroup>(place) == chunk, "chunk %d and another at %d", chunk, place);
    // Sweeps and groups of lanes are 32 chunks apart or a multiple, and add that to an address.
    CHECK(swizzled<kChunksPerGroup>(chunk + 32) == place + 32, "chunk %d + 32", chunk);
  }
  for (int start = 0; start < 256; ++start) {  // whatever comes before a row in its line
    CHECK(
        conflict_free([&](int thread) {
          return swizzled<kChunksPerGroup>(start + thread * kChunksPerGroup);
        }),
        "threads that read from chunk %d on, %d a group", start, kChunksPerGroup);
    CHECK(
        start % 8 != 0 ||
            conflict_free([&](int thread) { return swizzled<kChunksPerGroup>(start + thread); }),
        "threads that write from chunk %d on, %d a group", start, kChunksPerGroup);
  }
}

void chunks_change_places_and_threads_never_collide() {
  check_swizzle<2>();
  check_swizzle<4>();
}

void targets_and_temperatures_of_rows() {
  const int64_t wide[] = {-100, 5, (int64_t{1} << 32) + 5, INT64_MAX, INT64_MIN, 7};
  const int32_t narrow[] = {-100, 5, INT32_MAX, INT32_MIN, 0, 7};
  const float temperatures[] = {0.5f, 0.7f};
  const RowShape shape = shape_of({2, 3});
  RowInputs inputs{};
  inputs.temperature = temperatures;
  inputs.temperature_strides = strides_of({1, 0});  // one a sequence
  inputs.target.strides = strides_of({1, 2});       // transposed
  for (int64_t row = 0; row < shape.rows; ++row) {
    const int64_t at = row / 3 + row % 3 * 2;
    inputs.target.target = wide;
    inputs.target.is_int64 = true;
    CHECK(inputs.target.of(shape, row) == wide[at], "int64, row %d", static_cast<int>(row));
    inputs.target.target = narrow;
    inputs.target.is_int64 = false;
    CHECK(inputs.target.of(shape, row) == narrow[at], "int32, row %d", static_cast<int>(row));
    CHECK(
        inputs.temperature_of(shape, row) == temperatures[row / 3], "row %d",
        static_cast<int>(row));
  }
}

}  // namespace

int main(int argc, char** argv) {
  return host_test::run_all(
      argc, argv,
      {{"offsets are those of counting", offsets_are_those_of_counting},
       {"offsets beyond 32 bits", offsets_beyond_32_bits},
       {"every row is taken once, in passes", every_row_is_taken_once_in_passes},
       {"elements since the last chunk", elements_since_the_last_chunk},
       {"pieces of a row", pieces_of_a_row},
       {"chunks change places and threads never collide",
        chunks_change_places_and_threads_never_collide},
       {"targets and temperatures of rows", targets_and_temperatures_of_rows}});
}
