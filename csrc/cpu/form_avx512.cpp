#include "form.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#include "elements.h"

// What is included above is shared with code for any processor, and is compiled for any. What
// follows is compiled for Avx512, and is told apart from other forms' by the vectors' type.
#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq")
#endif

#include "columns.h"
#include "simd_avx512.h"

namespace rl_logp {

static constexpr Form kForm = form_of<Avx512>("avx512");

}  // namespace rl_logp

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif

namespace rl_logp {

const Form* avx512_form() {
#if defined(__x86_64__) && defined(__GNUC__)
  return &kForm;
#else
  return nullptr;
#endif
}

}  // namespace rl_logp
