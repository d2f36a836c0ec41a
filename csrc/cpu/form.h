// One form of the CPU kernel: the loops over a row's columns, for processors that have certain
// vectors. The forms have the same bits.
#pragma once

#include "rl_logp/dtype.h"
#include "rl_logp/row_state.h"
#include "rl_logp/rows.h"
#include "rl_logp/softmax.h"

namespace rl_logp {

// What some of a row's columns add to it.
struct PartialRow {
  ExactSum sum;
  LargestGroup largest;
};

// Columns [begin, end) of a row, from `logits` on; begin is a multiple of kGroup.
struct Columns {
  const void* logits;
  int64_t begin, end;
  float temperature;
};

using SumColumns = void (*)(const Columns& columns, PartialRow& row);
using WriteGradient = void (*)(const Columns& columns, const RowSoftmax& softmax, void* dlogits);

// For each dtype, without and with a temperature.
struct Form {
  const char* name;
  SumColumns sum_columns[3][2];
  // Of a row that is fast (RowSoftmax); the target's column is like any other.
  WriteGradient write_gradient[3][2];
};

// From the least demanding to the fastest; null where the compiler, or the processor's kind, has no
// such vectors.
constexpr int kForms = 3;
const Form* scalar_form();
const Form* avx2_form();
const Form* avx512_form();

}  // namespace rl_logp
