// The bridge between the glue, which knows torch, and the kernels, which do not.
#pragma once

#include <cuda_runtime_api.h>

#include "rl_logp/dtype.h"
#include "rl_logp/kernel_args.h"

namespace rl_logp {

// On the current device. The arguments are as the operators document them; rows may be 0.
cudaError_t launch_forward(Dtype dtype, const ForwardArgs& args, cudaStream_t stream);
cudaError_t launch_backward(Dtype dtype, const BackwardArgs& args, cudaStream_t stream);
cudaError_t launch_combine(const CombineArgs& args, cudaStream_t stream);

}  // namespace rl_logp
