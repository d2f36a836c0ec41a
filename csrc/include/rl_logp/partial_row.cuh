// What a lane, a warp or a block knows of a row, and how it is brought together and finished.
#pragma once

#include <cooperative_groups.h>

#include "rl_logp/elements.cuh"
#include "rl_logp/kernel_args.h"
#include "rl_logp/row_state.h"
#include "rl_logp/rows.h"
#include "rl_logp/tile_stream.cuh"

namespace rl_logp {

constexpr unsigned kFullWarp = 0xffffffffu;

struct PartialRow {
  ExactSum sum;
  LargestGroup largest;
};

// The blocks that share a row: one, or those of a cluster.
struct RowBlocks {
  int count = 1, rank = 0;
  uint32_t row = blockIdx.x, rows = gridDim.x;  // the first row, and how many are taken at once

#if __CUDA_ARCH__ >= 900
  __device__ RowBlocks() {
    count = static_cast<int>(cooperative_groups::cluster_group::num_blocks());
    rank = static_cast<int>(cooperative_groups::cluster_group::block_rank());
    const int log2_count = __ffs(count) - 1;  // a power of two
    row = blockIdx.x >> log2_count;
    rows = gridDim.x >> log2_count;
  }
  __device__ __forceinline__ void sync() const {
    if (count == 1) {
      __syncthreads();
    } else {
      cooperative_groups::cluster_group::sync();
    }
  }
  // wait() returns when all threads have called arrive().
  __device__ __forceinline__ void arrive() const {
    if (count != 1) cooperative_groups::cluster_group::barrier_arrive();
  }
  __device__ __forceinline__ void wait() const {
    if (count == 1) {
      __syncthreads();
    } else {
      cooperative_groups::cluster_group::barrier_wait();
    }
  }
  // The same variable in the shared memory of another of the blocks.
  template <class T>
  __device__ __forceinline__ T* map(T* address, int of_rank) const {
    return count == 1 ? address
                      : cooperative_groups::cluster_group::map_shared_rank(address, of_rank);
  }
#else
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  __device__ __forceinline__ void arrive() const {}
  __device__ __forceinline__ void wait() const { __syncthreads(); }
  template <class T>
  __device__ __forceinline__ T* map(T* address, int) const {
    return address;
  }
#endif
};

__device__ __forceinline__ void merge(PartialRow& row, const PartialRow& other) {
  merge(row.sum, other.sum);
  if (is_before(other.largest, row.largest)) row.largest = other.largest;
}

// The row of all lanes, in all lanes. A function of its own: a row calls it twice, and the second
// call finds its instructions there.
__device__ __noinline__ PartialRow warp_row(PartialRow row) {
  ExactSum& sum = row.sum;
  raise_top(sum, __reduce_max_sync(kFullWarp, sum.top));
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    sum.high += __shfl_xor_sync(kFullWarp, sum.high, offset);
    sum.middle += __shfl_xor_sync(kFullWarp, sum.middle, offset);
    sum.low += __shfl_xor_sync(kFullWarp, sum.low, offset);
  }
  // A float that is at least -inf, as an integer of the same order.
  const int32_t bits = static_cast<int32_t>(float_bits(row.largest.largest));
  const int32_t key = bits >= 0 ? bits : static_cast<int32_t>(0x80000000u - bits);
  const int32_t largest = __reduce_max_sync(kFullWarp, key);
  row.largest.largest = bits_float(largest >= 0 ? largest : 0x80000000u - largest);
  row.largest.group =
      __reduce_min_sync(kFullWarp, key == largest ? row.largest.group : 0xffffffffu);
  return row;
}

// As largest_term: the first 16 lanes hold the group's columns, and the other 16 as well.
template <class Scale>
__device__ __forceinline__ void set_term(LargestTerm& term, float y, const Scale& scale) {
  float sum = scale.power(y);
#pragma unroll
  for (int width = 1; width < kGroup; width *= 2) {  // sum_tree, neighbours first
    sum = add(sum, __shfl_xor_sync(kFullWarp, sum, width));
  }
  term.value = scale.corrected(sum);
  term.exponent = scale.exponent;
}

__device__ __forceinline__ LargestTerm warp_term(float y, float largest) {
  LargestTerm term;
  if (absolute(largest) < kFastLimit) {
    set_term(term, y, FastScale(largest));
  } else if (absolute(largest) < kWideLimit) {
    set_term(term, y, SlowScale(largest));
  } else {
    term.value = __popc(__ballot_sync(kFullWarp, y == largest) & 0xffffu);
  }
  return term;
}

struct FinishedRow {
  LogSumExp result;
  LargestTerm term;
};

// Finishes a row whose parts the lanes of one warp hold. The largest group is read again, for
// double precision: the first 16 lanes hold its columns, the next one holds the rest of the row. A
// function of its own, so that it can be rehearsed.
template <class Element, bool kTemperature>
__device__ __noinline__ FinishedRow
finish_row(PartialRow row, const Element* logits, int64_t columns, float temperature) {
  const int lane = threadIdx.x % kWarpSize;
  const float largest = row.largest.largest;
  const int64_t column = static_cast<int64_t>(row.largest.group) * kGroup + lane;
  float y = -kInfinity;
  if (lane < kGroup && column < columns) {
    y = ElementTraits<Element>::to_float(logits[column]);
    if constexpr (kTemperature) y = divide(y, temperature);
  }
  const int at = __ffs(__ballot_sync(kFullWarp, y == largest)) - 1;
  const bool finite = absolute(largest) < kInfinity;
  LargestTerm term;
  ExactSum rest = row.sum;
  if (finite) {
    term = warp_term(__shfl_sync(kFullWarp, y, lane % kGroup), largest);
    subtract_term(rest, sum_of(term, largest));
  }
  const RelativeRest relative_rest(rest, largest);
  double scaled = lane == at ? 0.0 : 1.0;
  double exponent = multiply(static_cast<double>(y) - largest, kLog2eDouble);
  if (lane == kGroup) {
    scaled = relative_rest.scaled;
    exponent = relative_rest.exponent;
  }
  const double power = multiply(scaled, exp_base_2(exponent));
  double others = power;
#pragma unroll
  for (int offset = kGroup / 2; offset > 0; offset /= 2) {
    others += __shfl_xor_sync(kFullWarp, others, offset);
  }
  if (finite) term.others = others;
  return {log_sum_exp(rest, largest, others, __shfl_sync(kFullWarp, power, kGroup)), term};
}

// Runs it on a row of nothing. A cold launch waits for its instructions as long as for its
// data; a warp with nothing else to do brings those of the end while the others are at the start.
template <class Element, bool kTemperature>
__device__ __forceinline__ void rehearse_finish() {
  PartialRow nothing;
  nothing.sum.top = 0;
  nothing.largest = {0.0f, 0};
  const auto row = finish_row<Element, kTemperature>(warp_row(nothing), nullptr, 0, 1.0f);
  asm volatile("" ::"d"(row.result.largest), "d"(row.result.log_rest), "d"(row.term.others));
}

__device__ __forceinline__ bool is_skipped(const ForwardArgs& args, int64_t target) {
  return !args.all_rows && is_ignored(target, args.shard.vocab_size);
}

struct Target {
  int64_t column;  // of the vocabulary
  float y;
};

__device__ __forceinline__ void write_row(
    const ForwardArgs& args, int64_t row, const Target& target, const PartialRow& total,
    const FinishedRow& finished) {
  if (args.states != nullptr) {
    RowState state(total.sum, total.largest, finished.term);
    if (total.largest.largest > -kInfinity) {
      state.group += static_cast<uint32_t>(args.shard.vocab_start / kGroup);
    }
    state.has_target = has_column(args.shard, target.column);
    state.target_y = state.has_target ? target.y : 0.0f;
    args.states[row] = state;
    return;
  }
  const bool ignored = is_ignored(target.column, args.shard.vocab_size);
  args.lse[row] = is_skipped(args, target.column) ? 0.0 : finished.result.lse();
  args.logp[row] = ignored ? 0.0f : finished.result.logp(target.y);
}

}  // namespace rl_logp
