// One form of the CPU kernel: the loops over a row's columns, for processors that have certain
// vectors. The forms have the same bits.
#pragma once

#include <type_traits>

#include "rl_logp/dtype.h"
#include "rl_logp/row_state.h"
#include "rl_logp/rows.h"
#include "rl_logp/softmax.h"

namespace rl_logp {

// What some of a row's columns add to it.
template <class Kind>
struct PartialRow {
  typename Kind::Sum sum;
  LargestGroup largest;
};

// Columns [begin, end) of a row, from `logits` on; begin is a multiple of kGroup.
struct Columns {
  const void* logits;
  int64_t begin, end;
  float temperature;
};

// The loops for one dtype, without and with a temperature.
template <class Kind>
struct Loops {
  using Softmax = std::conditional_t<Kind::kWeighted, WeightedSoftmax, RowSoftmax>;

  void (*sum_columns[2])(const Columns& columns, PartialRow<Kind>& row);
  // Of a row whose softmax is fast; the target's column is like any other.
  void (*write_gradient[2])(const Columns& columns, const Softmax& softmax, void* dlogits);
};

struct Form {
  const char* name;
  Loops<Unweighted> unweighted[3];  // by Dtype
  Loops<Weighted> weighted[3];

  template <class Kind>
  const Loops<Kind>& loops(Dtype dtype) const {
    if constexpr (Kind::kWeighted) {
      return weighted[static_cast<int>(dtype)];
    } else {
      return unweighted[static_cast<int>(dtype)];
    }
  }
};

// From the least demanding to the fastest; null where the compiler, or the processor's kind, has no
// such vectors.
constexpr int kForms = 3;
const Form* scalar_form();
const Form* avx2_form();
const Form* avx512_form();

}  // namespace rl_logp
