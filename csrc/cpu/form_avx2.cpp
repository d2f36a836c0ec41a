#include "form.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#include "elements.h"

// What is included above is shared with code for any processor, and is compiled for any. What
// follows is compiled for Avx2, and is told apart from other forms' by the vectors' type.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "columns.h"
#include "simd_avx2.h"

namespace rl_logp {

static constexpr Form kForm = form_of<Avx2>("avx2");

}  // namespace rl_logp

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif

namespace rl_logp {

const Form* avx2_form() {
#if defined(__x86_64__) && defined(__GNUC__)
  return &kForm;
#else
  return nullptr;
#endif
}

}  // namespace rl_logp
