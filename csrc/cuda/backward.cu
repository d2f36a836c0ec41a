// How many columns a block of the backward gets. None of it can reach the bits.
#include <algorithm>

#include "dispatch.h"
#include "rl_logp/backward.cuh"

namespace rl_logp {
namespace {

constexpr int64_t kMaxGridX = 0x7fffffff, kMaxGridY = 65535;

template <class Traits>
int64_t tiles_per_row(const BackwardArgs& args) {
  return std::max<int64_t>(1, ceil_div(args.shard.columns, Traits::kTileColumns));
}

template <class Traits>
cudaError_t launch(const BackwardArgs& args, cudaStream_t stream) {
  const dim3 grid(
      static_cast<unsigned>(std::min(tiles_per_row<Traits>(args), kMaxGridX)),
      static_cast<unsigned>(std::min(args.shape.rows, kMaxGridY)));
  backward_kernel<Traits><<<grid, Traits::kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_backward(Dtype dtype, const BackwardArgs& args, cudaStream_t stream) {
  if (args.shape.rows == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t error = current_device_limits(limits);
  if (error != cudaSuccess) return error;
  const auto launch_as = [&](auto element, auto temperature, auto weighted) {
    using Element = decltype(element);
    constexpr bool kTemperature = decltype(temperature)::value;
    constexpr bool kWeighted = decltype(weighted)::value;
    using Many = BackwardTraits<Element, 64, 8, kTemperature, kWeighted, 12>;
    using Few = BackwardTraits<Element, 64, 2, kTemperature, kWeighted>;
    const int64_t blocks = args.shape.rows * tiles_per_row<Many>(args);
    BackwardArgs launched = args;
    // Few blocks are short of time, not of bandwidth.
    launched.early = blocks <= 4 * limits.multiprocessors;
    return blocks > 4 * limits.multiprocessors ? launch<Many>(launched, stream)
                                               : launch<Few>(launched, stream);
  };
  const bool weighted = args.grad_entropy != nullptr;
  return dispatch(dtype, args.inputs.temperature != nullptr, weighted, launch_as);
}

}  // namespace rl_logp
