// torch.ops.rl_logp on CUDA tensors: the kernels' arguments (glue.h), on the logits' device and its
// current stream.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "../glue.h"
#include "launch.h"

namespace {

using namespace rl_logp;
using torch::stable::accelerator::DeviceGuard;

cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Rows that lie an odd number of elements apart differ in alignment, and are taken in passes.
int passes_of(const Tensor& logits, const RowShape& shape, const RowStrides& strides) {
  const int64_t per_chunk = kChunkBytes / static_cast<int64_t>(logits.element_size());
  const int64_t stride = strides.stride[shape.dims - 1];
  if (stride % per_chunk == 0 || shape.rows < per_chunk) return 1;
  return static_cast<int>(per_chunk);
}

void launch(const Tensor& logits, ForwardArgs args) {
  args.passes = passes_of(logits, args.shape, args.inputs.logits_strides);
  STD_CUDA_CHECK(launch_forward(dtype_of(logits), args, current_stream(logits)));
}

void forward_out(
    const Tensor& logits, const Tensor& target, const std::optional<Tensor>& temperature,
    bool all_rows, Tensor& logp, Tensor& lse, std::optional<Tensor>& entropy,
    std::optional<Tensor>& mean) {
  const DeviceGuard guard(logits.get_device_index());
  launch(logits, forward_args(logits, target, temperature, all_rows, logp, lse, entropy, mean));
}

void partial_out(
    const Tensor& logits, const Tensor& target, const std::optional<Tensor>& temperature,
    bool all_rows, int64_t vocab_start, int64_t vocab_size, Tensor& states) {
  const DeviceGuard guard(logits.get_device_index());
  launch(
      logits, partial_args(logits, target, temperature, all_rows, vocab_start, vocab_size, states));
}

void combine_out(
    const Tensor& states, const Tensor& target, int64_t vocab_size, Tensor& logp, Tensor& lse,
    std::optional<Tensor>& entropy, std::optional<Tensor>& mean) {
  const DeviceGuard guard(states.get_device_index());
  const auto args = combine_args(states, target, vocab_size, logp, lse, entropy, mean);
  STD_CUDA_CHECK(launch_combine(args, current_stream(states)));
}

void backward_out(
    const std::optional<Tensor>& grad_logp, const std::optional<Tensor>& grad_lse,
    const Tensor& logits, const Tensor& target, const std::optional<Tensor>& temperature,
    const Tensor& lse, int64_t vocab_start, int64_t vocab_size, Tensor& dlogits,
    const std::optional<Tensor>& grad_entropy, const std::optional<Tensor>& mean) {
  const DeviceGuard guard(logits.get_device_index());
  const auto args = backward_args(
      grad_logp, grad_lse, logits, target, temperature, lse, vocab_start, vocab_size, dlogits,
      grad_entropy, mean);
  STD_CUDA_CHECK(launch_backward(dtype_of(logits), args, current_stream(logits)));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(rl_logp, CUDA, m) {
  m.impl("_fused_logp_forward_out", TORCH_BOX(&forward_out));
  m.impl("_fused_logp_backward_out", TORCH_BOX(&backward_out));
  m.impl("_fused_logp_partial_out", TORCH_BOX(&partial_out));
  m.impl("_fused_logp_combine_out", TORCH_BOX(&combine_out));
}
