// The bridge between the glue and the forms of the kernel.
#pragma once

#include "form.h"
#include "rl_logp/kernel_args.h"

namespace rl_logp {

// The arguments are as the operators document them; rows may be 0.
void run_forward(const Form& form, Dtype dtype, const ForwardArgs& args);
void run_backward(const Form& form, Dtype dtype, const BackwardArgs& args);
void run_combine(const CombineArgs& args);

}  // namespace rl_logp
