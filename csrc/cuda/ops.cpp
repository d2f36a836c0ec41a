// torch.ops.rl_logp on CUDA tensors: from tensors to plain arguments, on the logits' device and its
// current stream. The shapes, dtypes and devices were checked in Python (rl_logp/_checks.py), which
// allocated the outputs as well; what is checked here is what only the kernels care about.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <utility>

#include "launch.h"

namespace {

using rl_logp::RowShape;
using rl_logp::RowStrides;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The leading shape of a call, and each tensor's strides over it. Dimensions are merged where every
// tensor allows it, so that a row's address is one multiplication in the common case.
class Rows {
 public:
  explicit Rows(const Tensor& target) {
    STD_TORCH_CHECK(
        target.dim() <= kMaxDims, "fused_logp: expected at most ", kMaxDims,
        " leading dimensions, got ", target.dim());
    shape_.rows = target.numel();
    dims_ = static_cast<int>(target.dim());
    for (int dim = 0; dim < dims_; ++dim) size_[dim] = target.size(dim);
  }

  // Must be called for every tensor before finish(). A 0-dim tensor serves all rows.
  void add(const Tensor& tensor, RowStrides* strides) {
    STD_TORCH_CHECK(count_ < kMaxTensors, "fused_logp: too many tensors");
    strides_[count_++] = strides;
    for (int dim = 0; dim < kMaxDims; ++dim) {
      const bool exists = dim < dims_ && tensor.dim() > 0 && size_[dim] > 1;
      strides->stride[dim] = exists ? tensor.stride(dim) : 0;
    }
  }

  RowShape finish() {
    int kept = 0;
    for (int dim = 0; dim < dims_; ++dim) {
      if (size_[dim] == 1) continue;
      if (kept > 0 && merges(kept - 1, dim)) {
        size_[kept - 1] *= size_[dim];
        move(dim, kept - 1);
      } else {
        size_[kept] = size_[dim];
        move(dim, kept);
        ++kept;
      }
    }
    shape_.dims = kept > 0 ? kept : 1;
    for (int dim = 0; dim < kMaxDims; ++dim) shape_.size[dim] = dim < kept ? size_[dim] : 1;
    if (kept == 0) {
      for (int i = 0; i < count_; ++i) strides_[i]->stride[0] = 0;
    }
    return shape_;
  }

 private:
  static constexpr int kMaxDims = rl_logp::kMaxLeadingDims;
  static constexpr int kMaxTensors = 8;

  bool merges(int outer, int inner) const {
    for (int i = 0; i < count_; ++i) {
      const int64_t* stride = strides_[i]->stride;
      if (stride[outer] != stride[inner] * size_[inner]) return false;
    }
    return true;
  }

  void move(int from, int to) {
    for (int i = 0; i < count_; ++i) strides_[i]->stride[to] = strides_[i]->stride[from];
  }

  RowShape shape_{};
  int dims_ = 0;
  int64_t size_[kMaxDims] = {};
  RowStrides* strides_[kMaxTensors] = {};
  int count_ = 0;
};

rl_logp::Dtype dtype_of(const Tensor& logits) {
  switch (logits.scalar_type()) {
    case ScalarType::BFloat16: return rl_logp::Dtype::kBFloat16;
    case ScalarType::Half: return rl_logp::Dtype::kFloat16;
    case ScalarType::Float: return rl_logp::Dtype::kFloat32;
    default:
      STD_TORCH_CHECK(false, "fused_logp: expected logits of dtype bfloat16, float16 or float32");
  }
}

// Chunks of a row, and the step to a block's next ones, are counted in 32 bits.
int64_t columns_of(const Tensor& logits) {
  const int64_t columns = logits.size(logits.dim() - 1);
  STD_TORCH_CHECK(
      columns < (int64_t{1} << 33), "fused_logp: expected fewer than 2^33 columns, got ", columns);
  STD_TORCH_CHECK(
      columns == 1 || logits.stride(logits.dim() - 1) == 1,
      "fused_logp: expected logits whose last dimension has stride 1");
  return columns;
}

void set_targets(Rows& rows, const Tensor& target, rl_logp::Targets& targets) {
  targets.target = target.data_ptr();
  targets.is_int64 = target.scalar_type() == ScalarType::Long;
  rows.add(target, &targets.strides);
}

void set_inputs(
    Rows& rows, const Tensor& logits, const Tensor& target,
    const std::optional<Tensor>& temperature, rl_logp::RowInputs& inputs) {
  inputs.logits = logits.data_ptr();
  inputs.temperature = temperature ? static_cast<const float*>(temperature->data_ptr()) : nullptr;
  rows.add(logits, &inputs.logits_strides);
  set_targets(rows, target, inputs.target);
  if (temperature) rows.add(*temperature, &inputs.temperature_strides);
}

cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Rows that lie an odd number of elements apart differ in alignment, and are taken in passes.
int passes_of(const Tensor& logits, const RowShape& shape, const RowStrides& strides) {
  const int64_t per_chunk = rl_logp::kChunkBytes / static_cast<int64_t>(logits.element_size());
  const int64_t stride = strides.stride[shape.dims - 1];
  if (stride % per_chunk == 0 || shape.rows < per_chunk) return 1;
  return static_cast<int>(per_chunk);
}

// Everything of the forward's arguments but where its results go.
rl_logp::ForwardArgs forward_args(
    const Tensor& logits, const Tensor& target, const std::optional<Tensor>& temperature,
    bool all_rows, rl_logp::Shard shard) {
  Rows rows(target);
  rl_logp::ForwardArgs args{};
  set_inputs(rows, logits, target, temperature, args.inputs);
  args.shape = rows.finish();
  args.shard = shard;
  args.all_rows = all_rows;
  args.passes = passes_of(logits, args.shape, args.inputs.logits_strides);
  return args;
}

void forward_out(
    const Tensor& logits, const Tensor& target, const std::optional<Tensor>& temperature,
    bool all_rows, Tensor& logp, Tensor& lse) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  const int64_t columns = columns_of(logits);
  rl_logp::ForwardArgs args =
      forward_args(logits, target, temperature, all_rows, {columns, 0, columns});
  args.logp = static_cast<float*>(logp.data_ptr());
  args.lse = static_cast<double*>(lse.data_ptr());
  STD_CUDA_CHECK(launch_forward(dtype_of(logits), args, current_stream(logits)));
}

void partial_out(
    const Tensor& logits, const Tensor& target, const std::optional<Tensor>& temperature,
    bool all_rows, int64_t vocab_start, int64_t vocab_size, Tensor& states) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  rl_logp::ForwardArgs args = forward_args(
      logits, target, temperature, all_rows, {columns_of(logits), vocab_start, vocab_size});
  args.states = static_cast<rl_logp::RowState*>(states.data_ptr());
  STD_CUDA_CHECK(launch_forward(dtype_of(logits), args, current_stream(logits)));
}

void combine_out(
    const Tensor& states, const Tensor& target, int64_t vocab_size, Tensor& logp, Tensor& lse) {
  const torch::stable::accelerator::DeviceGuard guard(states.get_device_index());
  Rows rows(target);
  rl_logp::CombineArgs args{};
  set_targets(rows, target, args.target);
  args.shape = rows.finish();
  args.states = static_cast<const rl_logp::RowState*>(states.data_ptr());
  args.shards = states.size(0);
  args.vocab_size = vocab_size;
  args.logp = static_cast<float*>(logp.data_ptr());
  args.lse = static_cast<double*>(lse.data_ptr());
  STD_CUDA_CHECK(launch_combine(args, current_stream(states)));
}

void backward_out(
    const std::optional<Tensor>& grad_logp, const std::optional<Tensor>& grad_lse,
    const Tensor& logits, const Tensor& target, const std::optional<Tensor>& temperature,
    const Tensor& lse, int64_t vocab_start, int64_t vocab_size, Tensor& dlogits) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  Rows rows(target);
  rl_logp::BackwardArgs args{};
  set_inputs(rows, logits, target, temperature, args.inputs);
  args.lse = static_cast<const double*>(lse.data_ptr());
  rows.add(lse, &args.lse_strides);
  if (grad_logp) {
    args.grad_logp = static_cast<const float*>(grad_logp->data_ptr());
    rows.add(*grad_logp, &args.grad_logp_strides);
  }
  if (grad_lse) {
    args.grad_lse = static_cast<const double*>(grad_lse->data_ptr());
    rows.add(*grad_lse, &args.grad_lse_strides);
  }
  args.dlogits = dlogits.data_ptr();
  rows.add(dlogits, &args.dlogits_strides);
  args.shape = rows.finish();
  args.shard = {columns_of(logits), vocab_start, vocab_size};
  STD_CUDA_CHECK(launch_backward(dtype_of(logits), args, current_stream(logits)));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(rl_logp, CUDA, m) {
  m.impl("_fused_logp_forward_out", TORCH_BOX(&forward_out));
  m.impl("_fused_logp_backward_out", TORCH_BOX(&backward_out));
  m.impl("_fused_logp_partial_out", TORCH_BOX(&partial_out));
  m.impl("_fused_logp_combine_out", TORCH_BOX(&combine_out));
}
