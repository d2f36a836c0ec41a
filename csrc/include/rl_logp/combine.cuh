// The combine kernel: a row's log-probability from what the shards of its vocabulary know of it.
#pragma once

#include "rl_logp/kernel_args.h"

namespace rl_logp {

constexpr int kCombineThreads = 128;

template <class State>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ CombineArgs args) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kCombineThreads;
  for (int64_t row = blockIdx.x * int64_t{kCombineThreads} + threadIdx.x; row < args.shape.rows;
       row += stride) {
    State state;
    for (int64_t shard = 0; shard < args.shards; ++shard) {
      merge(state, static_cast<const State*>(args.states)[shard * args.shape.rows + row]);
    }
    const RowResult result = result_of(state);
    const bool ignored = is_ignored(args.target.of(args.shape, row), args.vocab_size);
    args.lse[row] = result.lse();
    args.logp[row] = ignored ? 0.0f : logp_of(state, result);
    if constexpr (State::Kind::kWeighted) {
      args.entropy[row] = result.entropy();
      args.mean[row] = result.mean();
    }
  }
}

}  // namespace rl_logp
