// What the kernels are given: plain structs, filled by the glue and read by the device.
#pragma once

#include "rl_logp/row_state.h"
#include "rl_logp/rows.h"

namespace rl_logp {

struct Targets {
  const void* target;
  RowStrides strides;
  bool is_int64;

  RL_LOGP_HOST_DEVICE int64_t of(const RowShape& shape, int64_t row) const {
    const int64_t offset = offset_of(shape, row, strides);
    return is_int64 ? static_cast<const int64_t*>(target)[offset]
                    : static_cast<const int32_t*>(target)[offset];
  }
};

// A target outside the vocabulary, whichever.
RL_LOGP_HOST_DEVICE inline bool is_ignored(int64_t target, int64_t vocab_size) {
  return target < 0 || target >= vocab_size;
}

// What the forward and the backward read of a row beside its columns.
struct RowInputs {
  const void* logits;
  RowStrides logits_strides;
  Targets target;
  const float* temperature;  // null: 1
  RowStrides temperature_strides;

  RL_LOGP_HOST_DEVICE float temperature_of(const RowShape& shape, int64_t row) const {
    return temperature[offset_of(shape, row, temperature_strides)];
  }
};

// One shard of the vocabulary: [vocab_start, vocab_start + columns) of vocab_size columns.
struct Shard {
  int64_t columns;
  int64_t vocab_start;
  int64_t vocab_size;
};

RL_LOGP_HOST_DEVICE inline bool has_column(const Shard& shard, int64_t target) {
  return !is_ignored(target, shard.vocab_size) && target >= shard.vocab_start &&
         target < shard.vocab_start + shard.columns;
}

struct ForwardArgs {
  RowShape shape;
  Shard shard;
  RowInputs inputs;
  bool all_rows;  // otherwise ignored rows are not read, and their lse is 0
  int passes;     // over the rows, by alignment (row_in_order)
  bool weighted;  // entropy and mean are wanted, or WeightedRowState
  // Contiguous. Where states are given, they are written, and the others are not.
  float* logp;
  double* lse;
  float* entropy;
  double* mean;  // E[y]
  void* states;  // RowState or WeightedRowState
};

// From the states of a row's shards to its logp and lse.
struct CombineArgs {
  RowShape shape;
  bool weighted;
  const void* states;  // RowState or WeightedRowState [shards, rows], contiguous
  int64_t shards;
  int64_t vocab_size;
  Targets target;
  float* logp;  // contiguous, as the others are
  double* lse;
  float* entropy;  // where weighted, as the mean is
  double* mean;
};

struct BackwardArgs {
  RowShape shape;
  Shard shard;
  bool early;  // read a row before its upstream gradient is known: rows are few
  RowInputs inputs;
  const double* lse;
  RowStrides lse_strides;
  const float* grad_logp;  // null: 0
  RowStrides grad_logp_strides;
  const double* grad_lse;  // null: 0
  RowStrides grad_lse_strides;
  const float* grad_entropy;  // null: 0
  RowStrides grad_entropy_strides;
  const double* mean;  // where there is a grad_entropy
  RowStrides mean_strides;
  void* dlogits;
  RowStrides dlogits_strides;
};

}  // namespace rl_logp
