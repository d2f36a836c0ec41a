// How many warps and blocks a row of the forward gets. None of it can reach the bits.
#include <algorithm>

#include "dispatch.h"
#include "rl_logp/forward.cuh"

namespace rl_logp {
namespace {

// Rows of any number: more are taken in turns.
constexpr int64_t kMaxGridRows = 1 << 27;

// More than these, for each multiprocessor, are many.
constexpr int64_t kManyRows = 48;

template <class Traits>
cudaError_t launch_in_clusters(const ForwardArgs& args, int blocks_per_row, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  const int64_t rows = std::min(args.shape.rows, kMaxGridRows);
  config.gridDim = dim3(static_cast<unsigned>(rows * blocks_per_row));
  config.blockDim = dim3(Traits::kThreads);
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(blocks_per_row);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  config.attrs = &cluster;
  config.numAttrs = blocks_per_row > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, forward_kernel<Traits>, args);
}

template <class Traits>
cudaError_t launch(const ForwardArgs& args, int blocks_per_row, cudaStream_t stream) {
  cudaError_t error = launch_in_clusters<Traits>(args, blocks_per_row, stream);
  // A part of a GPU may not hold a cluster that the whole of it does.
  while (error == cudaErrorInvalidClusterSize && blocks_per_row > 1) {
    cudaGetLastError();  // or the next call would find it
    blocks_per_row /= 2;
    error = launch_in_clusters<Traits>(args, blocks_per_row, stream);
  }
  return error;
}

// The largest cluster that leaves each of its warps a tile and each block a multiprocessor of its
// own; a row of one block is cut in two all the same, if the machine holds that many at once.
template <class Traits>
int blocks_per_row(const ForwardArgs& args, const DeviceLimits& limits) {
  const int64_t tiles = ceil_div(args.shard.columns, Traits::kTileColumns);
  const auto fits = [&](int64_t blocks) {
    const int64_t room = blocks == 2 ? 2 * limits.multiprocessors : limits.multiprocessors;
    return args.shape.rows * blocks <= room && blocks * Traits::kWarps <= tiles;
  };
  int blocks = 1;
  while (limits.clusters && blocks < Traits::kMaxBlocks && fits(2 * blocks)) blocks *= 2;
  return blocks;
}

}  // namespace

cudaError_t launch_forward(Dtype dtype, const ForwardArgs& args, cudaStream_t stream) {
  if (args.shape.rows == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t error = current_device_limits(limits);
  if (error != cudaSuccess) return error;
  const auto launch_as = [&](auto element, auto temperature, auto weighted) {
    using Element = decltype(element);
    constexpr bool kTemperature = decltype(temperature)::value;
    using Kind = std::conditional_t<decltype(weighted)::value, Weighted, Unweighted>;
    // As many blocks as can be had without spilling registers.
    constexpr int kBlocks =
        6 - kTemperature - (sizeof(Element) == 4 || Kind::kWeighted) - Kind::kWeighted;
    // While one warp ends a row, its block's others wait: the fewer, the better, where rows are so
    // many that warps never run out of them.
    constexpr int kWarps = kTemperature || Kind::kWeighted ? 1 : 2;
    using Many = ForwardTraits<Element, Kind, kWarps, 4, 1, kTemperature, kBlocks * 4 / kWarps>;
    using Some = ForwardTraits<Element, Kind, 4, 4, 1, kTemperature, kBlocks>;
    using Few = ForwardTraits<Element, Kind, 8, 2, 1, kTemperature, 1, true>;
    const int64_t rows = args.shape.rows, processors = limits.multiprocessors;
    if (rows > kManyRows * processors) return launch<Many>(args, 1, stream);
    if (rows > 2 * processors) return launch<Some>(args, 1, stream);
    return launch<Few>(args, blocks_per_row<Few>(args, limits), stream);
  };
  return dispatch(dtype, args.inputs.temperature != nullptr, args.weighted, launch_as);
}

}  // namespace rl_logp
