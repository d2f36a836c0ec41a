#include "columns.h"
#include "simd_scalar.h"

namespace rl_logp {

static constexpr Form kForm = form_of<Scalar>("scalar");

const Form* scalar_form() { return &kForm; }

}  // namespace rl_logp
