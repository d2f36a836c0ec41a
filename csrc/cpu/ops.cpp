// torch.ops.rl_logp on CPU tensors, in the fastest form that this processor can run.
#ifdef __x86_64__
#include <cpuid.h>
#endif

#include <atomic>

#include "../glue.h"
#include "launch.h"

namespace {

using namespace rl_logp;

#if defined(__x86_64__) && defined(__GNUC__)
bool runs_avx2() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
  __builtin_cpu_init();  // the library's constructors may come before the compiler's
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool runs_avx512() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq");
}
#else
bool runs_avx2() { return false; }
bool runs_avx512() { return false; }
#endif

// By number, from the least demanding; null where this processor cannot run it.
const Form* form_of(int64_t number) {
  switch (number) {
    case 0: return scalar_form();
    case 1: return runs_avx2() ? avx2_form() : nullptr;
    case 2: return runs_avx512() ? avx512_form() : nullptr;
    default: return nullptr;
  }
}

int64_t fastest_form() {
  int64_t number = kForms - 1;
  while (form_of(number) == nullptr) --number;
  return number;
}

std::atomic<int64_t> current_form{fastest_form()};

const Form& form() { return *form_of(current_form.load()); }

// For tests: takes the form of this number from now on, and returns the one before. A number that
// there is no form of changes nothing, and returns -1.
int64_t set_form(int64_t number) {
  return form_of(number) == nullptr ? -1 : current_form.exchange(number);
}

void forward_out(
    const Tensor& logits, const Tensor& target, const std::optional<Tensor>& temperature,
    bool all_rows, Tensor& logp, Tensor& lse, std::optional<Tensor>& entropy,
    std::optional<Tensor>& mean) {
  const auto args = forward_args(logits, target, temperature, all_rows, logp, lse, entropy, mean);
  run_forward(form(), dtype_of(logits), args);
}

void partial_out(
    const Tensor& logits, const Tensor& target, const std::optional<Tensor>& temperature,
    bool all_rows, int64_t vocab_start, int64_t vocab_size, Tensor& states) {
  const auto args =
      partial_args(logits, target, temperature, all_rows, vocab_start, vocab_size, states);
  run_forward(form(), dtype_of(logits), args);
}

void combine_out(
    const Tensor& states, const Tensor& target, int64_t vocab_size, Tensor& logp, Tensor& lse,
    std::optional<Tensor>& entropy, std::optional<Tensor>& mean) {
  run_combine(combine_args(states, target, vocab_size, logp, lse, entropy, mean));
}

void backward_out(
    const std::optional<Tensor>& grad_logp, const std::optional<Tensor>& grad_lse,
    const Tensor& logits, const Tensor& target, const std::optional<Tensor>& temperature,
    const Tensor& lse, int64_t vocab_start, int64_t vocab_size, Tensor& dlogits,
    const std::optional<Tensor>& grad_entropy, const std::optional<Tensor>& mean) {
  const auto args = backward_args(
      grad_logp, grad_lse, logits, target, temperature, lse, vocab_start, vocab_size, dlogits,
      grad_entropy, mean);
  run_backward(form(), dtype_of(logits), args);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rl_logp, m) { m.def("_cpu_form(int number) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(rl_logp, CompositeExplicitAutograd, m) {
  m.impl("_cpu_form", TORCH_BOX(&set_form));
}

STABLE_TORCH_LIBRARY_IMPL(rl_logp, CPU, m) {
  m.impl("_fused_logp_forward_out", TORCH_BOX(&forward_out));
  m.impl("_fused_logp_backward_out", TORCH_BOX(&backward_out));
  m.impl("_fused_logp_partial_out", TORCH_BOX(&partial_out));
  m.impl("_fused_logp_combine_out", TORCH_BOX(&combine_out));
}
