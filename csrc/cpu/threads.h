// Work for torch's threads, in pieces that any of them may take: no result depends on who did.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <atomic>

#include "rl_logp/rows.h"

namespace rl_logp {

// IEEE arithmetic while it lives: torch.set_flush_denormal changes it for the thread that calls it
// alone, and a row's bits may not depend on the thread.
class IeeeArithmetic {
#ifdef __SSE__
 public:
  IeeeArithmetic() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~IeeeArithmetic() { _mm_setcsr(saved_); }
  IeeeArithmetic(const IeeeArithmetic&) = delete;
  IeeeArithmetic& operator=(const IeeeArithmetic&) = delete;

 private:
  unsigned saved_;
#endif
};

// How the columns of all rows are cut: `rows_each` whole rows a piece, or one row in
// `pieces_each`.
struct Pieces {
  int64_t rows_each = 1, pieces_each = 1, columns_each = 0;
  int64_t count = 0;

  Pieces(int64_t rows, int64_t columns, int64_t threads) : columns_each(columns) {
    constexpr int64_t kLeast = 16384;    // columns: some microseconds
    const int64_t wanted = 8 * threads;  // pieces may take different times
    if (threads > 1 && rows < wanted && columns > 0) {
      const int64_t most = std::max<int64_t>(columns / kLeast, 1);
      pieces_each = std::min(ceil_div(wanted, std::max<int64_t>(rows, 1)), most);
      columns_each = ceil_div(ceil_div(columns, pieces_each), kGroup * kGroup) * kGroup * kGroup;
      pieces_each = ceil_div(columns, columns_each);
    }
    if (pieces_each == 1) rows_each = std::max<int64_t>(kLeast / std::max<int64_t>(columns, 1), 1);
    count = ceil_div(rows, rows_each) * pieces_each;
  }
};

inline int64_t thread_count() { return torch::stable::get_num_threads(); }

// task(i) for each i of [0, count).
template <class Task>
void run_tasks(int64_t count, const Task& task) {
  const int64_t threads = std::min(thread_count(), count);
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t, int64_t) {
    [[maybe_unused]] const IeeeArithmetic arithmetic;
    for (int64_t i = next++; i < count; i = next++) task(i);
  };
  if (threads > 1) {
    torch::stable::parallel_for(0, threads, 1, work);
  } else {
    work(0, 1);
  }
}

}  // namespace rl_logp
