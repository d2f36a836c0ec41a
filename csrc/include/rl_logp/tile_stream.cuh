// A warp's asynchronous copies of a row, tile after tile, into shared memory that no other warp
// touches: warps never wait for each other.
#pragma once

#include "rl_logp/elements.cuh"
#include "rl_logp/rows.h"

namespace rl_logp {

constexpr int kWarpSize = 32;

template <
    class Element_, class Kind_, int kWarps_, int kStages_, int kGroupsPerLane_, bool kTemperature_,
    int kMinBlocks_ = 1, bool kFewRows_ = false>
struct ForwardTraits {
  using Element = Element_;
  using Kind = Kind_;  // Unweighted, or Weighted for an entropy
  static constexpr int kWarps = kWarps_;
  static constexpr int kStages = kStages_;                // tiles in flight a warp
  static constexpr int kGroupsPerLane = kGroupsPerLane_;  // of a tile
  static constexpr bool kTemperature = kTemperature_;
  static constexpr int kMinBlocks = kMinBlocks_;  // on a multiprocessor, which caps registers
  // Few rows are short of time, not of bandwidth: they are cut over several blocks and read before
  // it is known whether they are ignored, while a warp of its own rehearses their end.
  static constexpr bool kFewRows = kFewRows_;
  static constexpr int kMaxBlocks = kFewRows ? 8 : 1;  // of a row: a portable cluster size
  static constexpr int kThreads = (kWarps + kFewRows) * kWarpSize;
  static constexpr int kElementsPerChunk = kChunkBytes / sizeof(Element);
  static constexpr int kChunksPerGroup = kGroup / kElementsPerChunk;
  static constexpr int kWordsPerGroup = kChunksPerGroup * kChunkBytes / 4;
  static constexpr int kTileColumns = kWarpSize * kGroup * kGroupsPerLane;
  static constexpr int kTileChunks = kTileColumns / kElementsPerChunk;
  static constexpr int kStageChunks = kTileChunks + kLineBytes / kChunkBytes;
};

// One warp's stream of tiles: first, first + step, ... of a row, copied ahead into shared memory.
// Copies start at a multiple of 128 bytes, at or before a tile's start, so that a warp's 512 bytes
// are four requests to the L2 and not five. kShift: by how many elements a group starts after a
// multiple of 16 bytes.
template <class Traits, int kShift>
class TileStream {
  using Element = typename Traits::Element;
  static constexpr int kStageBytes = Traits::kStageChunks * kChunkBytes;
  static constexpr int kTileBytes = Traits::kTileChunks * kChunkBytes;
  static constexpr int kSweepBytes = kWarpSize * kChunkBytes;  // one chunk from each lane
  static constexpr int kSweeps = Traits::kTileChunks / kWarpSize;

 public:
  __device__ __forceinline__
  TileStream(uint4* stages, const Element* row, int64_t vocab_size, int first, int step)
      : stages_(reinterpret_cast<const char*>(stages)), next_(first), step_(step), stage_(0) {
    const int lane = threadIdx.x % kWarpSize;
    const char* start = reinterpret_cast<const char*>(row - kShift);
    const int before = static_cast<int>(reinterpret_cast<uintptr_t>(start) % kLineBytes);
    const int64_t bytes = before + (vocab_size + kShift) * static_cast<int64_t>(sizeof(Element));
    row_end_ = start - before + bytes;
    // A tile's copy reaches `extra_` chunks beyond kSweeps sweeps.
    extra_ = before / kChunkBytes + (kShift != 0);
    whole_tiles_ = static_cast<int>((bytes - extra_ * kChunkBytes) / kTileBytes);
    tiles_ = static_cast<int>(ceil_div(vocab_size, Traits::kTileColumns));
    source_ = start - before + static_cast<int64_t>(first) * kTileBytes + lane * kChunkBytes;
    write_ = static_cast<uint32_t>(__cvta_generic_to_shared(stages)) + place(lane);
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      read_[i] = place(before / kChunkBytes + lane * Traits::kChunksPerGroup + i);
    }
  }

  __device__ __forceinline__ void start() {
#pragma unroll 1
    for (int stage = 0; stage < Traits::kStages; ++stage) copy_next(stage * kStageBytes);
  }

  // The columns of this lane's groups, as words, out of the oldest tile; then the copy of another
  // tile takes its place.
  __device__ __forceinline__ void take(
      uint32_t (&words)[Traits::kGroupsPerLane][Traits::kWordsPerGroup]) {
    asm volatile("cp.async.wait_group %0;" ::"n"(Traits::kStages - 1) : "memory");
    __syncwarp();
    constexpr int kGroupStride = kWarpSize * Traits::kChunksPerGroup * kChunkBytes;
#pragma unroll
    for (int group = 0; group < Traits::kGroupsPerLane; ++group) {
      uint32_t all[kReads * 4];
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        const uint4 chunk =
            *reinterpret_cast<const uint4*>(stages_ + stage_ + read_[i] + group * kGroupStride);
        all[4 * i] = chunk.x, all[4 * i + 1] = chunk.y;
        all[4 * i + 2] = chunk.z, all[4 * i + 3] = chunk.w;
      }
      realign<Element, kShift>(all, words[group]);
    }
    __syncwarp();
    copy_next(stage_);
    stage_ = stage_ == (Traits::kStages - 1) * kStageBytes ? 0 : stage_ + kStageBytes;
  }

  __device__ static void drain() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
  }

 private:
  static constexpr int kReads = Traits::kChunksPerGroup + (kShift != 0);

  // A chunk's offset in its stage. 32 chunks further lies 32 * kChunkBytes further.
  static __device__ __forceinline__ int place(int chunk) {
    return swizzled<Traits::kChunksPerGroup>(chunk) * kChunkBytes;
  }

  // Copies a tile, if there is one; always closes a group, so that groups can be counted.
  __device__ __forceinline__ void copy_next(int stage) {
    const uint32_t to = write_ + stage;
    const bool has_extra = static_cast<int>(threadIdx.x % kWarpSize) < extra_;
    if (next_ < whole_tiles_) {
#pragma unroll
      for (int i = 0; i < kSweeps; ++i) copy(to, i);
      if (has_extra) copy(to, kSweeps);
    } else if (next_ < tiles_) {
      // Bytes past the end of the row are not read; some before its start, in its line, are.
#pragma unroll 1
      for (int i = 0; i < kSweeps + has_extra; ++i) {
        const int64_t left = row_end_ - (source_ + i * kSweepBytes);
        if (left >= kChunkBytes) {
          copy(to, i);
        } else {
          copy_elements(to + i * kSweepBytes, source_ + i * kSweepBytes, static_cast<int>(left));
        }
      }
    }
    next_ += step_;
    source_ += static_cast<int64_t>(step_) * kTileBytes;
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  __device__ __forceinline__ void copy(uint32_t to, int sweep) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + sweep * kSweepBytes),
                 "l"(source_ + sweep * kSweepBytes)
                 : "memory");
  }

  // The last chunk of a row whose bytes are fewer than 16; none if they are not positive.
  static __device__ __forceinline__ void copy_elements(uint32_t to, const char* source, int bytes) {
#pragma unroll 1
    for (int i = 0; i < bytes; i += sizeof(Element)) {
      if constexpr (sizeof(Element) == 2) {
        asm volatile("{.reg .b16 t; ld.global.b16 t, [%1]; st.shared.b16 [%0], t;}" ::"r"(to + i),
                     "l"(source + i)
                     : "memory");
      } else {
        asm volatile("{.reg .b32 t; ld.global.b32 t, [%1]; st.shared.b32 [%0], t;}" ::"r"(to + i),
                     "l"(source + i)
                     : "memory");
      }
    }
  }

  const char* stages_;
  uint32_t write_;
  int read_[kReads];
  const char* source_;
  const char* row_end_;
  int next_, step_, whole_tiles_, tiles_, extra_;
  int stage_;  // offset of the oldest tile
};

}  // namespace rl_logp
