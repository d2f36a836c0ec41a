// What the kernels are given: plain structs, filled by the glue and read by the device.
#pragma once

#include "rl_logp/rows.h"

namespace rl_logp {

// What the forward and the backward read of a row beside its columns.
struct RowInputs {
  const void* logits;
  RowStrides logits_strides;
  const void* target;
  RowStrides target_strides;
  bool target_is_int64;
  const float* temperature;  // null: 1
  RowStrides temperature_strides;

  RL_LOGP_HOST_DEVICE int64_t target_of(const RowShape& shape, int64_t row) const {
    const int64_t offset = offset_of(shape, row, target_strides);
    return target_is_int64 ? static_cast<const int64_t*>(target)[offset]
                           : static_cast<const int32_t*>(target)[offset];
  }

  RL_LOGP_HOST_DEVICE float temperature_of(const RowShape& shape, int64_t row) const {
    return temperature[offset_of(shape, row, temperature_strides)];
  }
};

struct ForwardArgs {
  RowShape shape;
  int64_t vocab_size;
  RowInputs inputs;
  bool all_rows;  // otherwise ignored rows are not read, and their lse is 0
  bool early;     // read a row before it is known whether it is ignored: rows are few
  int passes;     // over the rows, by alignment (row_in_order)
  float* logp;    // contiguous, as lse is
  double* lse;
};

struct BackwardArgs {
  RowShape shape;
  bool early;       // read a row before its upstream gradient is known: rows are few
  int64_t columns;  // of this shard: [vocab_start, vocab_start + columns)
  int64_t vocab_start;
  int64_t vocab_size;
  RowInputs inputs;
  const double* lse;
  RowStrides lse_strides;
  const float* grad_logp;  // null: 0
  RowStrides grad_logp_strides;
  const double* grad_lse;  // null: 0
  RowStrides grad_lse_strides;
  void* dlogits;
  RowStrides dlogits_strides;
};

}  // namespace rl_logp
