// From what is known at run time to what a kernel is compiled for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "launch.h"

namespace rl_logp {

// Calls launch(Element{}, kTemperature, kWeighted) with the type of the logits and, as
// std::bool_constants, whether there is a temperature, and weights for an entropy.
template <class Launch>
cudaError_t dispatch(Dtype dtype, bool temperature, bool weighted, Launch&& launch) {
  const auto with_temperature = [&](auto element, auto has_temperature) {
    return weighted ? launch(element, has_temperature, std::true_type{})
                    : launch(element, has_temperature, std::false_type{});
  };
  const auto with_element = [&](auto element) {
    return temperature ? with_temperature(element, std::true_type{})
                       : with_temperature(element, std::false_type{});
  };
  switch (dtype) {
    case Dtype::kBFloat16: return with_element(__nv_bfloat16{});
    case Dtype::kFloat16: return with_element(__half{});
    case Dtype::kFloat32: return with_element(float{});
  }
  return cudaErrorInvalidValue;
}

struct DeviceLimits {
  int multiprocessors = 0;
  bool clusters = false;
};

inline cudaError_t current_device_limits(DeviceLimits& limits) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&limits.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  limits.clusters = major >= 9;
  return error;
}

}  // namespace rl_logp
