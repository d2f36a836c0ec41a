// The combine kernel: a row's log-probability from what the shards of its vocabulary know of it.
#pragma once

#include "rl_logp/kernel_args.h"

namespace rl_logp {

constexpr int kCombineThreads = 128;

__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ CombineArgs args) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kCombineThreads;
  for (int64_t row = blockIdx.x * int64_t{kCombineThreads} + threadIdx.x; row < args.shape.rows;
       row += stride) {
    RowState state;
    for (int64_t shard = 0; shard < args.shards; ++shard) {
      merge(state, args.states[shard * args.shape.rows + row]);
    }
    const LogSumExp result = log_sum_exp(state);
    const bool ignored = is_ignored(args.target.of(args.shape, row), args.vocab_size);
    args.lse[row] = result.lse();
    args.logp[row] = ignored ? 0.0f : logp_of(state, result);
  }
}

}  // namespace rl_logp
