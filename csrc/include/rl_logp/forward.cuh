// The forward kernel: one read of every row that is not ignored.
//
// A row belongs to one block, or to the blocks of one cluster; a warp takes tiles of 32 groups or
// more. Since the sum is exact, neither the tiling nor the number of warps and blocks can be seen
// in the result.
#pragma once

#include <type_traits>

#include "rl_logp/elements.cuh"
#include "rl_logp/exact_sum.h"
#include "rl_logp/kernel_args.h"
#include "rl_logp/partial_row.cuh"
#include "rl_logp/tile_stream.cuh"

namespace rl_logp {

// Columns from `left` on do not exist: -inf.
template <class Traits>
__device__ __forceinline__ void mask_words(
    uint32_t (&words)[Traits::kWordsPerGroup], int64_t left) {
  using Convert = ElementTraits<typename Traits::Element>;
#pragma unroll
  for (int i = 0; i < Traits::kWordsPerGroup; ++i) {
    if constexpr (Convert::kPerWord == 2) {
      if (left <= 2 * i + 1) words[i] = (words[i] & 0xffffu) | (Convert::kMinusInfinity << 16);
      if (left <= 2 * i) words[i] = Convert::kMinusInfinity * 0x10001u;
    } else {
      if (left <= i) words[i] = Convert::kMinusInfinity;
    }
  }
}

// Whether near_quotient is the rounded quotient of every number of the dtype: bf16 has 128
// significands, and a power of two changes nothing. Asked by a warp, once a row.
template <class Traits>
__device__ __forceinline__ bool is_near_exact(const Divisor& divisor) {
  if constexpr (!Traits::kTemperature || !std::is_same_v<typename Traits::Element, __nv_bfloat16>) {
    return false;
  }
  bool exact = true;
#pragma unroll
  for (int i = 0; i < 128; i += kWarpSize) {
    const float x = bits_float(0x3f800000u | ((i + threadIdx.x % kWarpSize) << 16));
    exact = exact && divisor.near_quotient(x) == divisor.fast_quotient(x);
  }
  return __all_sync(kFullWarp, exact);
}

// Adds the group of 16 columns in `words`, and returns its largest y.
template <class Traits>
__device__ __forceinline__ float add_words(
    ExactSum& sum, const uint32_t (&words)[Traits::kWordsPerGroup], const Divisor& divisor,
    bool near_is_exact) {
  using Convert = ElementTraits<typename Traits::Element>;
  uint32_t largest[Traits::kWordsPerGroup];
#pragma unroll
  for (int i = 0; i < Traits::kWordsPerGroup; ++i) largest[i] = words[i];
#pragma unroll
  for (int width = Traits::kWordsPerGroup / 2; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      largest[i] = Convert::larger_words(largest[i], largest[i + width]);
    }
  }
  float m[2];
  Convert::unpack(largest[0], m);
  if constexpr (Convert::kPerWord == 2) m[0] = larger(m[0], m[1]);
  float y[kGroup];
  if constexpr (Traits::kTemperature) {
    // Division by a positive number keeps the order. What is not finite stays so, or becomes NaN.
    const float largest_y = divisor.fast_quotient(m[0]);
    if (divisor.fast && absolute(largest_y) < kFastLimit) {
#pragma unroll
      for (int i = 0; i < kGroup; i += Convert::kPerWord) {
        Convert::unpack_dividend(words[i / Convert::kPerWord], y + i);
      }
      if (near_is_exact) {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) y[i] = divisor.near_quotient(y[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) y[i] = divisor.fast_quotient(y[i]);
      }
      add_group_fast(sum, y, largest_y);
      return largest_y;
    }
    if (m[0] == -kInfinity) return m[0];
    GroupValues group;
#pragma unroll
    for (int i = 0; i < kGroup; i += Convert::kPerWord) {
      Convert::unpack(words[i / Convert::kPerWord], group.y + i);
    }
    merge(sum, divided_term(group, m[0], divisor.value));
    return divide(m[0], divisor.value);
  }
#pragma unroll
  for (int i = 0; i < kGroup; i += Convert::kPerWord) {
    Convert::unpack(words[i / Convert::kPerWord], y + i);
  }
  add_group(sum, y, m[0]);
  return m[0];
}

// One warp's part of a row's sum. `early`: copies start before `skip`, which waits for the target,
// is known.
template <class Traits, int kShift>
__device__ __forceinline__ PartialRow sum_of_tiles(
    uint4* stages, const typename Traits::Element* row, int64_t vocab_size, int first, int step,
    bool early, bool skip, int64_t label, const Divisor& divisor, float& target_logit) {
  TileStream<Traits, kShift> tiles(stages, row, vocab_size, first, step);
  PartialRow partial;
  if (early) tiles.start();
  if (label >= 0) {  // now, so that it has come when the sum is there
    target_logit = ElementTraits<typename Traits::Element>::to_float(row[label]);
  }
  if (!skip) {
    if (!early) tiles.start();
    const bool near_is_exact = is_near_exact<Traits>(divisor);
    const int whole = static_cast<int>(vocab_size / Traits::kTileColumns);
    const int count = static_cast<int>(ceil_div(vocab_size, Traits::kTileColumns));
    for (int tile = first; tile < count; tile += step) {
      uint32_t words[Traits::kGroupsPerLane][Traits::kWordsPerGroup];
      tiles.take(words);
      if (tile >= whole) {
        const int64_t start =
            static_cast<int64_t>(tile) * Traits::kTileColumns + threadIdx.x % kWarpSize * kGroup;
#pragma unroll
        for (int group = 0; group < Traits::kGroupsPerLane; ++group) {
          mask_words<Traits>(words[group], vocab_size - start - group * kWarpSize * kGroup);
        }
      }
#pragma unroll
      for (int group = 0; group < Traits::kGroupsPerLane; ++group) {
        const float largest = add_words<Traits>(partial.sum, words[group], divisor, near_is_exact);
        if (largest > partial.largest.largest) {  // the first, as tiles are taken in order
          partial.largest.largest = largest;
          partial.largest.group =
              (tile * Traits::kGroupsPerLane + group) * kWarpSize + threadIdx.x % kWarpSize;
        }
      }
    }
  }
  tiles.drain();
  return partial;
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  using Element = typename Traits::Element;
  __shared__ uint4 stages[Traits::kWarps][Traits::kStages * Traits::kStageChunks];
  __shared__ PartialRow partial[Traits::kWarps];
  const RowBlocks blocks;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t grid_rows = gridDim.x / blocks.count;
  for (int64_t index = blockIdx.x / blocks.count; index < args.shape.rows; index += grid_rows) {
    const int64_t row = row_in_order(index, args.shape.rows, args.passes);
    const auto* logits = static_cast<const Element*>(args.inputs.logits) +
                         offset_of(args.shape, row, args.inputs.logits_strides);
    const int64_t target = args.inputs.target_of(args.shape, row);
    const bool ignored = target < 0 || target >= args.vocab_size;
    const bool skip = ignored && !args.all_rows;
    const bool finishes = blocks.rank == 0 && threadIdx.x == 0;
    Divisor divisor;
    if constexpr (Traits::kTemperature) {
      divisor = Divisor(args.inputs.temperature_of(args.shape, row));
    }
    float target_logit = 0.0f;
    if (Traits::kRehearses && warp == Traits::kWarps) {
      rehearse_finish<Element, Traits::kTemperature>();
    } else {
      PartialRow part;
      with_constant<Traits::kElementsPerChunk>(misalignment_of(logits), [&](auto shift) {
        part = sum_of_tiles<Traits, decltype(shift)::value>(
            stages[warp], logits, args.vocab_size, blocks.rank * Traits::kWarps + warp,
            blocks.count * Traits::kWarps, args.early, skip, finishes && !ignored ? target : -1,
            divisor, target_logit);
      });
      part = warp_row(part);
      if (lane == 0) partial[warp] = part;
    }
    blocks.sync();
    if (blocks.rank == 0 && warp == 0) {
      PartialRow total;
#pragma unroll 1
      for (int i = lane; i < blocks.count * Traits::kWarps; i += kWarpSize) {
        const PartialRow other = *blocks.map(&partial[i % Traits::kWarps], i / Traits::kWarps);
        merge(total.sum, other.sum);
        if (is_before(other.largest, total.largest)) total.largest = other.largest;
      }
      total = warp_row(total);
      LogSumExp result;
      if constexpr (Traits::kRehearses) {
        result = finish_row_in_one_place<Element, Traits::kTemperature>(
            total, logits, args.vocab_size, divisor.value);
      } else {
        result = finish_row<Element, Traits::kTemperature>(
            total, logits, args.vocab_size, divisor.value);
      }
      if (lane == 0) {
        const float y = Traits::kTemperature ? divide(target_logit, divisor.value) : target_logit;
        args.lse[row] = skip ? 0.0 : result.lse();
        args.logp[row] = ignored ? 0.0f : result.logp(y);
      }
    }
    blocks.sync();  // the partial sums stay until they are read
  }
}

}  // namespace rl_logp
