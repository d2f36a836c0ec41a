// Index arithmetic: where a row lies, for tensors of any leading strides, and how its columns fall
// into 16-byte chunks. Every offset is 64-bit.
#pragma once

#include <cstdint>

#include "rl_logp/arithmetic.h"

namespace rl_logp {

constexpr int kMaxLeadingDims = 8;
constexpr int kChunkBytes = 16;  // what one thread moves at once
constexpr int kLineBytes = 128;  // what the L2 is asked for at once

// The leading shape, shared by all tensors of a call, dimensions that are one for all of them
// merged.
struct RowShape {
  int32_t dims;
  int64_t rows;  // the product of sizes
  int64_t size[kMaxLeadingDims];
};

// A tensor's strides over the leading shape, in elements.
struct RowStrides {
  int64_t stride[kMaxLeadingDims];
};

RL_LOGP_HOST_DEVICE inline int64_t offset_of(
    const RowShape& shape, int64_t row, const RowStrides& strides) {
  int64_t offset = 0;
#pragma unroll 1
  for (int dim = shape.dims - 1; dim > 0; --dim) {
    offset += row % shape.size[dim] * strides.stride[dim];
    row /= shape.size[dim];
  }
  return offset + row * strides.stride[0];
}

// The order in which blocks take rows, in `passes`: 0, passes, 2 * passes, ..., then 1, passes + 1,
// ... Rows that are an odd number of bytes apart have the same alignment when they are 8 rows
// apart, and blocks that run at the same time then run the same code.
RL_LOGP_HOST_DEVICE inline int64_t row_in_order(int64_t index, int64_t rows, int passes) {
  if (passes == 1) return index;
  const int64_t whole = rows / passes, longer = rows % passes;  // `longer` passes have one row more
  if (index < longer * (whole + 1)) {
    return index % (whole + 1) * passes + index / (whole + 1);
  }
  index -= longer * (whole + 1);
  return index % whole * passes + index / whole + longer;
}

// Elements between the last 16-byte boundary and an address.
template <class Element>
RL_LOGP_HOST_DEVICE inline int misalignment_of(const Element* address) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) % kChunkBytes / sizeof(Element));
}

RL_LOGP_HOST_DEVICE inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A chunk's place in shared memory: threads read `chunks_per_group` consecutive chunks each, and
// the exchange keeps any 8 threads that read together on different banks.
template <int kChunksPerGroup>
RL_LOGP_HOST_DEVICE inline int swizzled(int chunk) {
  static_assert(kChunksPerGroup == 2 || kChunksPerGroup == 4, "a group is 32 or 64 bytes");
  return chunk ^ ((chunk >> 3) & (kChunksPerGroup - 1));
}

}  // namespace rl_logp
