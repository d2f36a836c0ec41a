// A thread a row: the states are small beside the logits that they stand for.
#include <algorithm>

#include "launch.h"
#include "rl_logp/combine.cuh"

namespace rl_logp {

cudaError_t launch_combine(const CombineArgs& args, cudaStream_t stream) {
  if (args.shape.rows == 0) return cudaSuccess;
  const int64_t blocks = std::min<int64_t>(ceil_div(args.shape.rows, kCombineThreads), 1 << 20);
  const auto kernel = args.weighted ? combine_kernel<WeightedRowState> : combine_kernel<RowState>;
  kernel<<<static_cast<unsigned>(blocks), kCombineThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace rl_logp
