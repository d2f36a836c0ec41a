// The loops over a row's columns, for any vectors.
//
// Simd has kLanes fp32 numbers in a Floats. 16 Floats are a block: kLanes groups. This header and
// those that it is made of are compiled for the processor that Simd needs, and hold templates over
// Simd alone: anything else in them could be linked into code for another processor.
#pragma once

#include "form.h"
#include "sum_columns.h"
#include "write_gradient.h"

namespace rl_logp {

template <class Simd, class Kind, class Element>
constexpr Loops<Kind> loops_of() {
  using Softmax = typename Loops<Kind>::Softmax;
  return {
      {sum_columns<Simd, Kind, Element, false>, sum_columns<Simd, Kind, Element, true>},
      {write_gradient<Simd, Softmax, Element, false>,
       write_gradient<Simd, Softmax, Element, true>}};
}

template <class Simd>
constexpr Form form_of(const char* name) {
  return {
      name,
      {loops_of<Simd, Unweighted, BFloat16>(), loops_of<Simd, Unweighted, Float16>(),
       loops_of<Simd, Unweighted, float>()},
      {loops_of<Simd, Weighted, BFloat16>(), loops_of<Simd, Weighted, Float16>(),
       loops_of<Simd, Weighted, float>()}};
}

}  // namespace rl_logp
