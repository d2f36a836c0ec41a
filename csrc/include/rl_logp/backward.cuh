// The backward kernel: one read of the logits and one write of their gradient.
//
//     dlogits = (dlogp * (onehot(target) - p) + dlse * p - dentropy * p * (y - E[y])) /
//     temperature, p = exp(y - lse)
//
// Every column stands alone once the row's lse is known, so a thread takes whole 16-byte chunks of
// the output, wherever the row begins, and a row is cut into as many blocks as suit the machine.
#pragma once

#include <type_traits>

#include "rl_logp/elements.cuh"
#include "rl_logp/kernel_args.h"
#include "rl_logp/softmax.h"

namespace rl_logp {

template <
    class Element_, int kThreads_, int kUnroll_, bool kTemperature_, bool kWeighted_,
    int kMinBlocks_ = 1>
struct BackwardTraits {
  using Element = Element_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kUnroll = kUnroll_;  // chunks a thread loads at once
  static constexpr bool kTemperature = kTemperature_;
  static constexpr bool kWeighted = kWeighted_;   // there is an upstream gradient of the entropy
  static constexpr int kMinBlocks = kMinBlocks_;  // on a multiprocessor, which caps registers
  static constexpr int kChunk = kChunkBytes / sizeof(Element);  // columns
  static constexpr int64_t kTileColumns = int64_t{kThreads} * kUnroll * kChunk;
};

// Gradients are written once: they should not push other data out of a cache.
__device__ __forceinline__ void store_chunk(void* address, const uint32_t (&words)[4]) {
  __stcs(static_cast<uint4*>(address), make_uint4(words[0], words[1], words[2], words[3]));
}

// The upstream gradients of a row.
struct Upstream {
  float logp;
  double lse;
  float entropy;

  __device__ __forceinline__ bool is_zero() const {
    return logp == 0.0f && lse == 0.0 && entropy == 0.0f;
  }
};

// One row's gradient. The logits and it may be the same memory.
template <class Traits>
struct RowGradient {
  using Element = typename Traits::Element;
  using Convert = ElementTraits<Element>;
  using Softmax = std::conditional_t<Traits::kWeighted, WeightedSoftmax, RowSoftmax>;
  static constexpr int kChunk = Traits::kChunk;
  static constexpr uint32_t kTileChunks = Traits::kThreads * Traits::kUnroll;

  double lse, mean;
  float temperature;
  Upstream upstream;
  float softmax_factor, entropy_factor;  // over the temperature, for the fast arithmetic
  int64_t target_column;  // within this shard; negative or past its end if it is elsewhere
  bool zero;              // no upstream gradient: the logits are not read
  const Element* logits;
  Element* dlogits;
  int64_t columns;

  // This block's part of the row; the blocks of a row take a tile each, and then the next ones.
  __device__ __forceinline__ void write(uint4* stage, uint32_t block, uint32_t blocks) const {
    const int shift = (misalignment_of(logits) - misalignment_of(dlogits)) & (kChunk - 1);
    // Whole chunks, in columns [begin, end), from the start of a 128-byte line. A shifted input
    // chunk lies across two aligned ones, both of which must be within the row.
    constexpr int kLine = kLineBytes / sizeof(Element);
    const int64_t head =
        (kLine - reinterpret_cast<uintptr_t>(dlogits) / sizeof(Element) % kLine) % kLine;
    int64_t begin = head < columns ? head : columns;
    if (shift > begin) begin += kChunk;
    const int64_t margin = shift == 0 ? 0 : kChunk - shift;
    const int64_t inner = columns - margin - begin;
    const uint32_t chunks = inner > 0 ? static_cast<uint32_t>(inner / kChunk) : 0;
    if (!zero && !is_fast()) {
      for (int64_t column = block * Traits::kThreads + threadIdx.x; column < columns;
           column += blocks * Traits::kThreads) {
        write_column(column, Convert::to_float(logits[column]));
      }
      return;
    }
    const int64_t end = begin + static_cast<int64_t>(chunks) * kChunk;
    // The target's column again, by the thread that writes its chunk, which may overwrite it.
    bool writes_target = false;
    float target_logit = 0.0f;
    if (!zero && target_column >= begin && target_column < end) {
      const uint32_t chunk = static_cast<uint32_t>((target_column - begin) / kChunk);
      writes_target =
          chunk / kTileChunks % blocks == block && chunk % Traits::kThreads == threadIdx.x;
      if (writes_target) target_logit = Convert::to_float(logits[target_column]);
    }
    for (uint32_t tile = block * kTileChunks; tile < chunks; tile += blocks * kTileChunks) {
      if (zero) {
        write_zeros(begin, tile, chunks);
      } else {
        with_constant<kChunk>(shift, [&](auto constant) {
          write_tile<decltype(constant)::value>(stage, begin, tile, chunks);
        });
      }
    }
    if (writes_target) write_column(target_column, target_logit);
    if (block == blocks - 1) {  // the ends; the last block has the least else to do
      for (int64_t column = threadIdx.x; column < begin && column < columns;
           column += Traits::kThreads) {
        write_end(column);
      }
      for (int64_t column = end + threadIdx.x; column < columns; column += Traits::kThreads) {
        write_end(column);
      }
    }
  }

 private:
  __device__ __forceinline__ Softmax softmax() const {
    if constexpr (Traits::kWeighted) {
      return WeightedSoftmax(lse, mean, softmax_factor, entropy_factor, Convert::kFastLse);
    } else {
      return RowSoftmax(lse, softmax_factor, Convert::kFastLse);
    }
  }

  __device__ __forceinline__ bool is_fast() const {
    bool fast = !Traits::kTemperature || Divisor::is_fast(temperature);
    if constexpr (Traits::kWeighted) {
      fast =
          fast && WeightedSoftmax::is_fast(lse, softmax_factor, entropy_factor, Convert::kFastLse);
    } else {
      fast = fast && RowSoftmax::is_fast(lse, softmax_factor, Convert::kFastLse);
    }
    return fast;
  }

  __device__ __forceinline__ void write_end(int64_t column) const {
    write_column(column, zero ? 0.0f : Convert::to_float(logits[column]));
  }

  __device__ __forceinline__ void write_column(int64_t column, float x) const {
    float d = 0.0f;
    if (!zero) {
      const bool is_target = column == target_column;
      if (is_target || !is_fast()) {
        const float y = Traits::kTemperature ? divide(x, temperature) : x;
        const double divisor = temperature;
        double factor = (upstream.lse - upstream.logp) / divisor;
        if constexpr (Traits::kWeighted) {
          factor = column_factor(y, factor, -upstream.entropy / divisor, mean);
        }
        d = gradient_of_any(y, lse, factor, is_target ? upstream.logp / divisor : 0.0);
      } else if constexpr (Traits::kTemperature) {
        // As in a tile: which columns are the ends of a row depends on where it lies.
        d = softmax().product(fast_y(Divisor(temperature), fmaxf(x, kSmallestDividend)));
      } else {
        d = softmax().product(fmaxf(x, kSmallestFast));
      }
    }
    dlogits[column] = Convert::from_float(d);
  }

  __device__ __forceinline__ void write_zeros(int64_t begin, uint32_t tile, uint32_t chunks) const {
#pragma unroll
    for (int i = 0; i < Traits::kUnroll; ++i) {
      const uint32_t chunk = tile + i * Traits::kThreads + threadIdx.x;
      if (chunk < chunks) {
        store_chunk(dlogits + begin + static_cast<int64_t>(chunk) * kChunk, {0, 0, 0, 0});
      }
    }
  }

  // kShift: elements by which the input of an output chunk lies past a multiple of 16 bytes.
  //
  // A thread copies its chunks to shared memory, and takes them from there one after another: as
  // many bytes are under way as registers could not hold, and the loop is short.
  template <int kShift>
  __device__ __forceinline__ void write_tile(
      uint4* stage, int64_t begin, uint32_t tile, uint32_t chunks) const {
    // An input chunk across two aligned ones takes two places.
    constexpr int kPieces = kShift != 0 ? 2 : 1;
    constexpr int kBatch = Traits::kUnroll / kPieces;
    static_assert(kBatch * kPieces == Traits::kUnroll, "an even number of chunks");
#pragma unroll 1
    for (int batch = 0; batch < Traits::kUnroll; batch += kBatch) {
      const uint32_t first = tile + batch * Traits::kThreads + threadIdx.x;
      const Element* source = logits + begin + static_cast<int64_t>(first) * kChunk - kShift;
      const uint32_t place = static_cast<uint32_t>(__cvta_generic_to_shared(stage + threadIdx.x));
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i * Traits::kThreads < chunks) {
#pragma unroll
          for (int piece = 0; piece < kPieces; ++piece) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                             place + (i * kPieces + piece) * Traits::kThreads * kChunkBytes),
                         "l"(source + (i * Traits::kThreads + piece) * kChunk)
                         : "memory");
          }
        }
      }
      // What is computed once a row is computed while the copies are under way.
      const Softmax row_softmax = softmax();
      Divisor divisor;
      if constexpr (Traits::kTemperature) divisor = Divisor(temperature);
      asm volatile("cp.async.wait_all;" ::: "memory");
      Element* destination = dlogits + begin + static_cast<int64_t>(first) * kChunk;
      const uint4* read = stage + threadIdx.x;
#pragma unroll 1
      for (int i = 0; i < kBatch && first + i * Traits::kThreads < chunks; ++i) {
        uint32_t words[4 * kPieces], aligned[4];
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          const uint4 chunk = read[piece * Traits::kThreads];
          words[4 * piece] = chunk.x, words[4 * piece + 1] = chunk.y;
          words[4 * piece + 2] = chunk.z, words[4 * piece + 3] = chunk.w;
        }
        realign<Element, kShift>(words, aligned);
        gradient_of(row_softmax, divisor, aligned);
        store_chunk(destination, aligned);
        read += kPieces * Traits::kThreads;
        destination += Traits::kThreads * kChunk;
      }
    }
  }

  // y of a column that is not the target, in a row whose arithmetic is fast. It may be an ulp off.
  static __device__ __forceinline__ float fast_y(const Divisor& divisor, float dividend) {
    return fmaxf(divisor.near_quotient(dividend), kSmallestFast);
  }

  static __device__ __forceinline__ void gradient_of(
      const Softmax& softmax, const Divisor& divisor, uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float values[Convert::kPerWord];
      if constexpr (Traits::kTemperature) {
        Convert::unpack_dividend(words[i], values);
      } else {
        Convert::unpack(Convert::clamped_word(words[i]), values);
      }
#pragma unroll
      for (int j = 0; j < Convert::kPerWord; ++j) {
        if constexpr (Traits::kTemperature) values[j] = fast_y(divisor, values[j]);
        values[j] = softmax.product(values[j]);
      }
      words[i] = Convert::pack(values);
    }
  }
};

// Asks the L2 for this block's first tile, about. A block's threads are as many as the tile has
// lines.
template <class Traits>
__device__ __forceinline__ void prefetch_tile(
    const typename Traits::Element* logits, int64_t columns) {
  constexpr int kLine = kLineBytes / sizeof(typename Traits::Element);
  for (int64_t line = threadIdx.x; line < Traits::kTileColumns / kLine; line += Traits::kThreads) {
    const int64_t column = blockIdx.x * Traits::kTileColumns + line * kLine;
    if (column < columns) asm volatile("prefetch.global.L2 [%0];" ::"l"(logits + column));
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    backward_kernel(const __grid_constant__ BackwardArgs args) {
  using Element = typename Traits::Element;
  __shared__ uint4 stage[Traits::kUnroll * Traits::kThreads];
  const RowShape& shape = args.shape;
  const RowInputs& inputs = args.inputs;
  // Last row first: it is the one that the forward has read last.
  for (int64_t row = shape.rows - 1 - blockIdx.y; row >= 0; row -= gridDim.y) {
    const auto* logits =
        static_cast<const Element*>(inputs.logits) + offset_of(shape, row, inputs.logits_strides);
    if (args.early) prefetch_tile<Traits>(logits, args.shard.columns);
    const int64_t target = inputs.target.of(shape, row);
    Upstream upstream{0.0f, 0.0, 0.0f};
    if (args.grad_logp) {
      upstream.logp = args.grad_logp[offset_of(shape, row, args.grad_logp_strides)];
    }
    if (args.grad_lse) upstream.lse = args.grad_lse[offset_of(shape, row, args.grad_lse_strides)];
    double mean = 0.0;
    if constexpr (Traits::kWeighted) {
      upstream.entropy = args.grad_entropy[offset_of(shape, row, args.grad_entropy_strides)];
      mean = args.mean[offset_of(shape, row, args.mean_strides)];
    }
    const double lse = args.lse[offset_of(shape, row, args.lse_strides)];
    if (is_ignored(target, args.shard.vocab_size)) upstream.logp = 0.0f;
    float temperature = 1.0f;
    float softmax_factor = static_cast<float>(upstream.lse - upstream.logp);
    float entropy_factor = -upstream.entropy;
    if constexpr (Traits::kTemperature) {
      temperature = inputs.temperature_of(shape, row);
      softmax_factor = divide(softmax_factor, temperature);
      entropy_factor = divide(entropy_factor, temperature);
    }
    const RowGradient<Traits> gradient{
        lse,
        mean,
        temperature,
        upstream,
        softmax_factor,
        entropy_factor,
        target - args.shard.vocab_start,
        upstream.is_zero(),
        logits,
        static_cast<Element*>(args.dlogits) + offset_of(shape, row, args.dlogits_strides),
        args.shard.columns};
    gradient.write(stage, blockIdx.x, gridDim.x);
  }
}

}  // namespace rl_logp
