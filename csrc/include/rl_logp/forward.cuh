// The forward kernel: one read of every row that is not ignored.
//
// A row belongs to one block, or to the blocks of one cluster; a warp takes tiles of 32 groups or
// more. Since the sum is exact, neither the tiling nor the number of warps and blocks can be seen
// in the result.
#pragma once

#include <type_traits>

#include "rl_logp/elements.cuh"
#include "rl_logp/group.h"
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

// The largest column of a group, or NaN if any is.
template <class Traits>
__device__ __forceinline__ float largest_of_words(const uint32_t (&words)[Traits::kWordsPerGroup]) {
  using Convert = ElementTraits<typename Traits::Element>;
  uint32_t largest[Traits::kWordsPerGroup];
#pragma unroll
  for (int i = 0; i < Traits::kWordsPerGroup; ++i) largest[i] = words[i];
#pragma unroll
  for (int width = 1; width < Traits::kWordsPerGroup; width *= 2) {
#pragma unroll
    for (int i = 0; i < Traits::kWordsPerGroup; i += 2 * width) {
      largest[i] = Convert::larger_words(largest[i], largest[i + width]);
    }
  }
  float m[2];
  Convert::unpack(largest[0], m);
  return Convert::kPerWord == 2 ? larger(m[0], m[1]) : m[0];
}

template <class Traits>
__device__ __forceinline__ void unpack_words(
    const uint32_t (&words)[Traits::kWordsPerGroup], float (&x)[kGroup]) {
  using Convert = ElementTraits<typename Traits::Element>;
#pragma unroll
  for (int i = 0; i < kGroup; i += Convert::kPerWord) {
    Convert::unpack(words[i / Convert::kPerWord], x + i);
  }
}

// Adds the group of 16 columns in `words`, and returns its largest y.
template <class Traits>
__device__ __forceinline__ float add_words(
    ExactSum& sum, const uint32_t (&words)[Traits::kWordsPerGroup]) {
  float y[kGroup];
  unpack_words<Traits>(words, y);
  const float largest = largest_of_words<Traits>(words);
  add_group(sum, y, largest);
  return largest;
}

template <class Traits>
__device__ __forceinline__ float add_words(
    WeightedSum& sum, const uint32_t (&words)[Traits::kWordsPerGroup]) {
  using Convert = ElementTraits<typename Traits::Element>;
  const float largest = largest_of_words<Traits>(words);
  if (absolute(largest) < kFastLimit) {
    uint32_t finite[Traits::kWordsPerGroup];  // times a power of 0, which -inf can't be
#pragma unroll
    for (int i = 0; i < Traits::kWordsPerGroup; ++i) finite[i] = Convert::clamped_word(words[i]);
    float y[kGroup];
    unpack_words<Traits>(finite, y);
    add_group_fast(sum, y, largest);
  } else if (largest != -kInfinity) {
    GroupValues group;
    unpack_words<Traits>(words, group.y);
    merge(sum, slow_term<WeightedSum>(group, largest));
  }
  return largest;
}

// The same of columns that are divided by a temperature first.
template <class Traits>
__device__ __forceinline__ float add_divided_words(
    typename Traits::Kind::Sum& sum, const uint32_t (&words)[Traits::kWordsPerGroup],
    const Divisor& divisor, bool near_is_exact) {
  using Convert = ElementTraits<typename Traits::Element>;
  const float largest = largest_of_words<Traits>(words);
  // Division by a positive number keeps the order. What is not finite stays so, or becomes NaN.
  const float largest_y = divisor.fast_quotient(largest);
  if (divisor.fast && absolute(largest_y) < kFastLimit) {
    float y[kGroup];
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
    // Groups are compared by it, and with the columns that are read again (finish_row).
    return divisor.is_rounded(largest, largest_y) ? largest_y
                                                  : divide_rarely(largest, divisor.value);
  }
  if (divisor.fast && largest == -kInfinity) return largest;
  GroupValues group;
  unpack_words<Traits>(words, group.y);
  merge(sum, divided_term<typename Traits::Kind::Sum>(group, divisor.value));
  return divide_rarely(largest, divisor.value);
}

// 0 where it is not one of these columns.
template <class Element>
__device__ __forceinline__ float logit_of(const Shard& shard, const Element* row, int64_t target) {
  if (!has_column(shard, target)) return 0.0f;
  return ElementTraits<Element>::to_float(row[target - shard.vocab_start]);
}

// One warp's part of a row's sum. Of few rows, copies start before `skip`, which waits for the
// target, is known.
template <class Traits, int kShift>
__device__ __forceinline__ PartialRow<typename Traits::Kind> sum_of_tiles(
    uint4* stages, const typename Traits::Element* row, const Shard& shard, int first, int step,
    bool skip, int64_t target, const Divisor& divisor, float& target_logit) {
  const int64_t columns = shard.columns;
  TileStream<Traits, kShift> tiles(stages, row, columns, first, step);
  PartialRow<typename Traits::Kind> partial;
  if (Traits::kFewRows) {
    tiles.start();
  } else {
    target_logit = logit_of(shard, row, target);  // now, so that it has come when the sum is there
  }
  if (!skip) {
    if (!Traits::kFewRows) tiles.start();
    const bool near_is_exact = is_near_exact<Traits>(divisor);
    const int whole = static_cast<int>(columns / Traits::kTileColumns);
    const int count = static_cast<int>(ceil_div(columns, Traits::kTileColumns));
    for (int tile = first; tile < count; tile += step) {
      uint32_t words[Traits::kGroupsPerLane][Traits::kWordsPerGroup];
      tiles.take(words);
      if (tile >= whole) {
        const int64_t start =
            static_cast<int64_t>(tile) * Traits::kTileColumns + threadIdx.x % kWarpSize * kGroup;
#pragma unroll
        for (int group = 0; group < Traits::kGroupsPerLane; ++group) {
          mask_words<Traits>(words[group], columns - start - group * kWarpSize * kGroup);
        }
      }
#pragma unroll
      for (int group = 0; group < Traits::kGroupsPerLane; ++group) {
        float largest;
        if constexpr (Traits::kTemperature) {
          largest = add_divided_words<Traits>(partial.sum, words[group], divisor, near_is_exact);
        } else {
          largest = add_words<Traits>(partial.sum, words[group]);
        }
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

// Before Hopper the compiler needs more registers, or it spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <class Traits>
constexpr int kBlocksAtOnce = Traits::kMinBlocks > 1 ? Traits::kMinBlocks * 5 / 6 : 1;
#else
template <class Traits>
constexpr int kBlocksAtOnce = Traits::kMinBlocks;
#endif

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, kBlocksAtOnce<Traits>)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  using Element = typename Traits::Element;
  using Kind = typename Traits::Kind;
  __shared__ uint4 stages[Traits::kWarps][Traits::kStages * Traits::kStageChunks];
  // Of all blocks, in the first of them.
  __shared__ PartialRow<Kind> partial[Traits::kMaxBlocks * Traits::kWarps];
  __shared__ Target row_target;
  const RowBlocks blocks;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  for (int64_t index = blocks.row; index < args.shape.rows; index += blocks.rows) {
    blocks.arrive();
    const int64_t row = row_in_order(index, args.shape.rows, args.passes);
    const auto* logits = static_cast<const Element*>(args.inputs.logits) +
                         offset_of(args.shape, row, args.inputs.logits_strides);
    const int64_t target = args.inputs.target.of(args.shape, row);
    Divisor divisor;
    if constexpr (Traits::kTemperature) {
      divisor = Divisor(args.inputs.temperature_of(args.shape, row));
    }
    PartialRow<Kind> part;
    float target_logit = 0.0f;
    if (Traits::kFewRows && warp == Traits::kWarps) {
      rehearse_finish<Element, Kind, Traits::kTemperature>();
      target_logit = logit_of(args.shard, logits, target);
    } else {
      with_constant<Traits::kElementsPerChunk>(misalignment_of(logits), [&](auto shift) {
        part = sum_of_tiles<Traits, decltype(shift)::value>(
            stages[warp], logits, args.shard, blocks.rank * Traits::kWarps + warp,
            blocks.count * Traits::kWarps, is_skipped(args, target), target, divisor, target_logit);
      });
      part = warp_row(part);
    }
    blocks.wait();  // the first block runs, and has read what stands in `partial` from another row
    if (warp < Traits::kWarps && lane == 0) {
      *blocks.map(&partial[blocks.rank * Traits::kWarps + warp], 0) = part;
    }
    if (threadIdx.x == Traits::kThreads - kWarpSize) row_target = {target, target_logit};
    blocks.sync();
    if (blocks.rank == 0 && warp == 0) {
      PartialRow<Kind> total;
#pragma unroll 1
      for (int i = lane; i < blocks.count * Traits::kWarps; i += kWarpSize) {
        merge(total, partial[i]);
      }
      total = warp_row(total);
      const auto finished = finish_row<Element, Kind, Traits::kTemperature>(
          total, logits, args.shard.columns, divisor.value);
      Target finished_target = row_target;
      if constexpr (Traits::kTemperature) {
        finished_target.y = divide(finished_target.y, divisor.value);
      }
      if (lane == 0) write_row(args, row, finished_target, total, finished);
    }
  }
}

}  // namespace rl_logp
