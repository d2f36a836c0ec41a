// What a lane, a warp or a block knows of a row, and how it is brought together and finished.
#pragma once

#include <cooperative_groups.h>

#include <type_traits>

#include "rl_logp/elements.cuh"
#include "rl_logp/kernel_args.h"
#include "rl_logp/row_state.h"
#include "rl_logp/rows.h"
#include "rl_logp/tile_stream.cuh"

namespace rl_logp {

constexpr unsigned kFullWarp = 0xffffffffu;

template <class Kind>
struct PartialRow {
  typename Kind::Sum sum;
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

template <class Kind>
__device__ __forceinline__ void merge(PartialRow<Kind>& row, const PartialRow<Kind>& other) {
  merge(row.sum, other.sum);
  if (is_before(other.largest, row.largest)) row.largest = other.largest;
}

template <class Integer>
__device__ __forceinline__ Integer warp_sum(Integer value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

// The row of all lanes, in all lanes. A function of its own: a row calls it twice, and the second
// call finds its instructions there.
template <class Kind>
__device__ __noinline__ PartialRow<Kind> warp_row(PartialRow<Kind> row) {
  auto& sum = row.sum;
  raise_top(sum, __reduce_max_sync(kFullWarp, sum.top));
  sum.high = warp_sum(sum.high);
  sum.middle = warp_sum(sum.middle);
  sum.low = warp_sum(sum.low);
  if constexpr (Kind::kWeighted) {
    sum.weighted_high = warp_sum(sum.weighted_high);
    sum.weighted_middle = warp_sum(sum.weighted_middle);
    sum.weighted_low = warp_sum(sum.weighted_low);
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

// As group_term, of columns that may be -inf: the first 16 lanes hold them, the other 16 as well.
template <bool kWeighted, class Scale>
__device__ __forceinline__ GroupTerm warp_group_term(float y, const Scale& scale) {
  float argument = scale.argument(y);
  if constexpr (kWeighted) argument = fmaxf(argument, kSmallestArgument);
  const float power = exp2_approx(argument);
  float sum = power;
#pragma unroll
  for (int width = 1; width < kGroup; width *= 2) {  // sum_tree, neighbours first
    sum = add(sum, __shfl_xor_sync(kFullWarp, sum, width));
  }
  GroupTerm term{scale.corrected(sum), scale.exponent};
  if constexpr (kWeighted) {
    const int even = threadIdx.x % kWarpSize & ~1;
    float weight = weight_of_two(
        __shfl_sync(kFullWarp, power, even), __shfl_sync(kFullWarp, argument, even),
        __shfl_sync(kFullWarp, power, even + 1), __shfl_sync(kFullWarp, argument, even + 1));
#pragma unroll
    for (int width = 2; width < kGroup; width *= 2) {
      weight = add(weight, __shfl_xor_sync(kFullWarp, weight, width));
    }
    term.weight = scale.corrected_weight(sum, weight);
  }
  return term;
}

// As largest_term, but for what is in double.
template <class Kind>
__device__ __forceinline__ typename Kind::Term warp_term(float y, float largest) {
  typename Kind::Term term;
  if (absolute(largest) < kFastLimit) {
    set_term(term, warp_group_term<Kind::kWeighted>(y, FastScale(largest)));
  } else if (absolute(largest) < kWideLimit) {
    set_term(term, warp_group_term<Kind::kWeighted>(y, SlowScale(largest)));
  } else {
    term.value = __popc(__ballot_sync(kFullWarp, y == largest) & 0xffffu);
  }
  return term;
}

// The sum of 16 lanes, as sum_halves has it.
__device__ __forceinline__ double half_warp_sum(double value) {
#pragma unroll
  for (int offset = kGroup / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

template <class Kind>
struct FinishedRow {
  RowResult result;
  typename Kind::Term term;
};

// Finishes a row whose parts the lanes of one warp hold. The largest group is read again, for
// double precision: the first 16 lanes hold its columns, the next one holds the rest of the row. A
// function of its own, so that it can be rehearsed.
template <class Element, class Kind, bool kTemperature>
__device__ __noinline__ FinishedRow<Kind> finish_row(
    PartialRow<Kind> row, const Element* logits, int64_t columns, float temperature) {
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
  typename Kind::Term term;
  typename Kind::Sum rest = row.sum;
  if (finite) {
    term = warp_term<Kind>(__shfl_sync(kFullWarp, y, lane % kGroup), largest);
    subtract_term(rest, sum_of<typename Kind::Sum>(term, largest));
  }
  const RelativeRest relative_rest(rest, largest);
  double scaled = lane == at ? 0.0 : 1.0;
  double exponent = multiply(static_cast<double>(y) - largest, kLog2eDouble);
  if (lane == kGroup) {
    scaled = relative_rest.scaled;
    exponent = relative_rest.exponent;
  }
  const double power = exp_base_2(exponent);
  const double share = multiply(scaled, power);
  const double others = half_warp_sum(share);
  const double relative = __shfl_sync(kFullWarp, share, kGroup);
  double below = 0.0;
  if constexpr (Kind::kWeighted) {
    double weighted = weighted_power(share, y, largest);
    if (lane == kGroup) weighted = multiply(relative_rest.weighted(rest), power);
    const double weighted_others = half_warp_sum(weighted);
    if (finite) term.weighted_others = weighted_others;
    below =
        (weighted_others + __shfl_sync(kFullWarp, weighted, kGroup)) / (1.0 + (others + relative));
  }
  if (finite) term.others = others;
  return {{log_sum_exp(rest, largest, others, relative), below}, term};
}

// Runs it on a row of nothing. A cold launch waits for its instructions as long as for its
// data; a warp with nothing else to do brings those of the end while the others are at the start.
template <class Element, class Kind, bool kTemperature>
__device__ __forceinline__ void rehearse_finish() {
  PartialRow<Kind> nothing;
  nothing.sum.top = 0;
  nothing.largest = {0.0f, 0};
  const auto row = finish_row<Element, Kind, kTemperature>(warp_row(nothing), nullptr, 0, 1.0f);
  asm volatile(
      "" ::"d"(row.result.largest), "d"(row.result.log_rest), "d"(row.result.below),
      "d"(row.term.others));
}

__device__ __forceinline__ bool is_skipped(const ForwardArgs& args, int64_t target) {
  return !args.all_rows && is_ignored(target, args.shard.vocab_size);
}

struct Target {
  int64_t column;  // of the vocabulary
  float y;
};

template <class Kind>
__device__ __forceinline__ void write_row(
    const ForwardArgs& args, int64_t row, const Target& target, const PartialRow<Kind>& total,
    const FinishedRow<Kind>& finished) {
  if (args.states != nullptr) {
    using State = std::conditional_t<Kind::kWeighted, WeightedRowState, RowState>;
    State state(total.sum, total.largest, finished.term);
    if (total.largest.largest > -kInfinity) {
      state.group += static_cast<uint32_t>(args.shard.vocab_start / kGroup);
    }
    state.has_target = has_column(args.shard, target.column);
    state.target_y = state.has_target ? target.y : 0.0f;
    static_cast<State*>(args.states)[row] = state;
    return;
  }
  const bool ignored = is_ignored(target.column, args.shard.vocab_size);
  const bool skipped = is_skipped(args, target.column);
  args.lse[row] = skipped ? 0.0 : finished.result.lse();
  args.logp[row] = ignored ? 0.0f : finished.result.logp(target.y);
  if constexpr (Kind::kWeighted) {
    args.entropy[row] = skipped ? 0.0f : finished.result.entropy();
    args.mean[row] = skipped ? 0.0 : finished.result.mean();
  }
}

}  // namespace rl_logp
