// From tensors to the kernels' plain arguments, on any device. The shapes, dtypes and devices were
// checked in Python (rl_logp/_checks.py), which allocated the outputs as well; what is checked here
// is what only the kernels care about.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "rl_logp/dtype.h"
#include "rl_logp/kernel_args.h"

namespace rl_logp {

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
  static constexpr int kMaxDims = kMaxLeadingDims;
  static constexpr int kMaxTensors = 10;

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

inline Dtype dtype_of(const Tensor& logits) {
  switch (logits.scalar_type()) {
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    case ScalarType::Half: return Dtype::kFloat16;
    case ScalarType::Float: return Dtype::kFloat32;
    default:
      STD_TORCH_CHECK(false, "fused_logp: expected logits of dtype bfloat16, float16 or float32");
  }
}

// Chunks of a row, and the step to a block's next ones, are counted in 32 bits.
inline int64_t columns_of(const Tensor& logits) {
  const int64_t columns = logits.size(logits.dim() - 1);
  STD_TORCH_CHECK(
      columns < (int64_t{1} << 33), "fused_logp: expected fewer than 2^33 columns, got ", columns);
  STD_TORCH_CHECK(
      columns == 1 || logits.stride(logits.dim() - 1) == 1,
      "fused_logp: expected logits whose last dimension has stride 1");
  return columns;
}

inline void set_targets(Rows& rows, const Tensor& target, Targets& targets) {
  targets.target = target.data_ptr();
  targets.is_int64 = target.scalar_type() == ScalarType::Long;
  rows.add(target, &targets.strides);
}

inline void set_inputs(
    Rows& rows, const Tensor& logits, const Tensor& target,
    const std::optional<Tensor>& temperature, RowInputs& inputs) {
  inputs.logits = logits.data_ptr();
  inputs.temperature = temperature ? static_cast<const float*>(temperature->data_ptr()) : nullptr;
  rows.add(logits, &inputs.logits_strides);
  set_targets(rows, target, inputs.target);
  if (temperature) rows.add(*temperature, &inputs.temperature_strides);
}

// An entropy and its mean come together, and from weighted states.
inline void check_given(
    bool weighted, const std::optional<Tensor>& entropy, const std::optional<Tensor>& mean) {
  STD_TORCH_CHECK(
      weighted == entropy.has_value() && weighted == mean.has_value(),
      "fused_logp: expected an entropy, a mean and weighted states together, or none of them");
}

// Everything of the forward's arguments but where its results go.
inline ForwardArgs forward_args(
    const Tensor& logits, const Tensor& target, const std::optional<Tensor>& temperature,
    bool all_rows, Shard shard) {
  Rows rows(target);
  ForwardArgs args{};
  set_inputs(rows, logits, target, temperature, args.inputs);
  args.shape = rows.finish();
  args.shard = shard;
  args.all_rows = all_rows;
  return args;
}

inline ForwardArgs forward_args(
    const Tensor& logits, const Tensor& target, const std::optional<Tensor>& temperature,
    bool all_rows, Tensor& logp, Tensor& lse, std::optional<Tensor>& entropy,
    std::optional<Tensor>& mean) {
  const int64_t columns = columns_of(logits);
  ForwardArgs args = forward_args(logits, target, temperature, all_rows, {columns, 0, columns});
  args.logp = static_cast<float*>(logp.data_ptr());
  args.lse = static_cast<double*>(lse.data_ptr());
  args.weighted = entropy.has_value();
  check_given(args.weighted, entropy, mean);
  if (args.weighted) {
    args.entropy = static_cast<float*>(entropy->data_ptr());
    args.mean = static_cast<double*>(mean->data_ptr());
  }
  return args;
}

inline bool are_weighted(const Tensor& states) {
  return states.size(states.dim() - 1) * 8 == int64_t{sizeof(WeightedRowState)};
}

inline ForwardArgs partial_args(
    const Tensor& logits, const Tensor& target, const std::optional<Tensor>& temperature,
    bool all_rows, int64_t vocab_start, int64_t vocab_size, Tensor& states) {
  ForwardArgs args = forward_args(
      logits, target, temperature, all_rows, {columns_of(logits), vocab_start, vocab_size});
  args.weighted = are_weighted(states);
  args.states = states.data_ptr();
  return args;
}

inline CombineArgs combine_args(
    const Tensor& states, const Tensor& target, int64_t vocab_size, Tensor& logp, Tensor& lse,
    std::optional<Tensor>& entropy, std::optional<Tensor>& mean) {
  Rows rows(target);
  CombineArgs args{};
  set_targets(rows, target, args.target);
  args.shape = rows.finish();
  args.states = states.data_ptr();
  args.shards = states.size(0);
  args.vocab_size = vocab_size;
  args.logp = static_cast<float*>(logp.data_ptr());
  args.lse = static_cast<double*>(lse.data_ptr());
  args.weighted = are_weighted(states);
  check_given(args.weighted, entropy, mean);
  if (args.weighted) {
    args.entropy = static_cast<float*>(entropy->data_ptr());
    args.mean = static_cast<double*>(mean->data_ptr());
  }
  return args;
}

inline BackwardArgs backward_args(
    const std::optional<Tensor>& grad_logp, const std::optional<Tensor>& grad_lse,
    const Tensor& logits, const Tensor& target, const std::optional<Tensor>& temperature,
    const Tensor& lse, int64_t vocab_start, int64_t vocab_size, Tensor& dlogits,
    const std::optional<Tensor>& grad_entropy, const std::optional<Tensor>& mean) {
  Rows rows(target);
  BackwardArgs args{};
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
  STD_TORCH_CHECK(
      !grad_entropy || mean,
      "fused_logp: expected a mean with grad_entropy, got grad_entropy alone");
  if (grad_entropy) {
    args.grad_entropy = static_cast<const float*>(grad_entropy->data_ptr());
    rows.add(*grad_entropy, &args.grad_entropy_strides);
    args.mean = static_cast<const double*>(mean->data_ptr());
    rows.add(*mean, &args.mean_strides);
  }
  args.dlogits = dlogits.data_ptr();
  rows.add(dlogits, &args.dlogits_strides);
  args.shape = rows.finish();
  args.shard = {columns_of(logits), vocab_start, vocab_size};
  return args;
}

}  // namespace rl_logp
