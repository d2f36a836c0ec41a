// What a lane, a warp or a block knows of a row, and how it is brought together and finished.
#pragma once

#include <cooperative_groups.h>

#include "rl_logp/elements.cuh"
#include "rl_logp/exact_sum.h"
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

#if __CUDA_ARCH__ >= 900
  __device__ RowBlocks() {
    count = static_cast<int>(cooperative_groups::cluster_group::num_blocks());
    rank = static_cast<int>(cooperative_groups::cluster_group::block_rank());
  }
  __device__ __forceinline__ void sync() const {
    if (count == 1) {
      __syncthreads();
    } else {
      cooperative_groups::cluster_group::sync();
    }
  }
  // The same variable in the shared memory of another of the blocks.
  template <class T>
  __device__ __forceinline__ const T* map(T* address, int of_rank) const {
    return count == 1 ? address
                      : cooperative_groups::cluster_group::map_shared_rank(address, of_rank);
  }
#else
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  template <class T>
  __device__ __forceinline__ const T* map(T* address, int) const {
    return address;
  }
#endif
};

// The row of all lanes, in all lanes.
__device__ __forceinline__ PartialRow warp_row(PartialRow row) {
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

// The term of the group whose columns the first 16 lanes hold, and the other 16 as well.
template <class Scale>
__device__ __forceinline__ void add_warp_term(ExactSum& term, float y, const Scale& scale) {
  float sum = scale.power(y);
#pragma unroll
  for (int width = 1; width < kGroup; width *= 2) {  // sum_tree, neighbours first
    sum = add(sum, __shfl_xor_sync(kFullWarp, sum, width));
  }
  add_term(term, scale.corrected(sum), scale.exponent);
}

__device__ __forceinline__ ExactSum warp_term(float y, float largest) {
  ExactSum term;
  if (absolute(largest) < kFastLimit) {
    add_warp_term(term, y, FastScale(largest));
  } else if (absolute(largest) < kWideLimit) {
    add_warp_term(term, y, SlowScale(largest));
  } else if (absolute(largest) < kInfinity) {
    term.top = wide_top(largest);
    term.middle = __popc(__ballot_sync(kFullWarp, y == largest) & 0xffffu);
  }
  return term;
}

// The log-sum-exp of a row whose parts the lanes of one warp hold, in the first lane. The largest
// group is read again, for double precision: the first 16 lanes hold its columns, the next one
// holds the rest of the row. A function of its own, so that it can be rehearsed.
template <class Element, bool kTemperature>
__device__ __noinline__ LogSumExp
finish_row(PartialRow row, const Element* logits, int64_t vocab_size, float temperature) {
  const int lane = threadIdx.x % kWarpSize;
  const float largest = row.largest.largest;
  const int64_t column = static_cast<int64_t>(row.largest.group) * kGroup + lane;
  float y = -kInfinity;
  if (lane < kGroup && column < vocab_size) {
    y = ElementTraits<Element>::to_float(logits[column]);
    if constexpr (kTemperature) y = divide(y, temperature);
  }
  const int at = __ffs(__ballot_sync(kFullWarp, y == largest)) - 1;
  ExactSum rest = row.sum;
  subtract_term(rest, warp_term(__shfl_sync(kFullWarp, y, lane % kGroup), largest));
  const RelativeRest relative_rest(rest, largest);
  double scaled = lane == at ? 0.0 : 1.0;
  double exponent = (static_cast<double>(y) - largest) * kLog2eDouble;
  if (lane == kGroup) {
    scaled = relative_rest.scaled;
    exponent = relative_rest.exponent;
  }
  const double power = scaled * exp_base_2(exponent);
  double others = power;
#pragma unroll
  for (int offset = kGroup / 2; offset > 0; offset /= 2) {
    others += __shfl_xor_sync(kFullWarp, others, offset);
  }
  return log_sum_exp(rest, largest, others, __shfl_sync(kFullWarp, power, kGroup));
}

// The same, as a function that is in one place, so that it can be rehearsed.
template <class Element, bool kTemperature>
__device__ __noinline__ LogSumExp finish_row_in_one_place(
    PartialRow row, const Element* logits, int64_t vocab_size, float temperature) {
  return finish_row<Element, kTemperature>(row, logits, vocab_size, temperature);
}

// Runs it on a row of nothing. A cold launch waits for its instructions as long as for its
// data; a warp with nothing else to do brings those of the end while the others are at the start.
template <class Element, bool kTemperature>
__device__ __forceinline__ void rehearse_finish() {
  PartialRow nothing;
  nothing.sum.top = 0;
  nothing.largest.largest = 0.0f;
  const auto result = finish_row_in_one_place<Element, kTemperature>(nothing, nullptr, 0, 1.0f);
  asm volatile("" ::"d"(result.largest), "d"(result.log_rest));
}

}  // namespace rl_logp
