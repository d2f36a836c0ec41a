#pragma once

namespace rl_logp {

// Of logits that kernels take.
enum class Dtype { kBFloat16, kFloat16, kFloat32 };

}  // namespace rl_logp
