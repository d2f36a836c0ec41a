// Rows: what is done once for each of them, and how they are dealt out to threads.
#include "launch.h"

#include <cstring>
#include <vector>

#include "elements.h"
#include "threads.h"

namespace rl_logp {
namespace {

constexpr int64_t kElementBytes[] = {2, 2, 4};

// Calls function(Element{}) with the type of the logits.
template <class Function>
auto with_element(Dtype dtype, Function&& function) {
  switch (dtype) {
    case Dtype::kBFloat16: return function(BFloat16{});
    case Dtype::kFloat16: return function(Float16{});
    default: return function(float{});
  }
}

// One row's logits.
struct Row {
  Dtype dtype;
  const char* logits;
  bool divides;
  float temperature;

  Row(Dtype row_dtype, const RowInputs& inputs, const RowShape& shape, int64_t row)
      : dtype(row_dtype),
        logits(
            static_cast<const char*>(inputs.logits) +
            offset_of(shape, row, inputs.logits_strides) * kElementBytes[static_cast<int>(dtype)]),
        divides(inputs.temperature != nullptr),
        temperature(divides ? inputs.temperature_of(shape, row) : 1.0f) {}

  float y(int64_t column) const {
    const float x = with_element(dtype, [&](auto element) {
      return to_float(reinterpret_cast<const decltype(element)*>(logits)[column]);
    });
    return divides ? divide(x, temperature) : x;
  }
};

bool is_skipped(const ForwardArgs& args, int64_t target) {
  return !args.all_rows && is_ignored(target, args.shard.vocab_size);
}

template <class State>
State state_of(
    const ForwardArgs& args, const Row& row, const PartialRow<typename State::Kind>& part,
    int64_t target) {
  using Kind = typename State::Kind;
  LargestGroup largest = part.largest;
  typename Kind::Term term;
  if (absolute(largest.largest) < kInfinity) {
    float y[kGroup];
    const int64_t first = static_cast<int64_t>(largest.group) * kGroup;
    for (int i = 0; i < kGroup; ++i) {
      y[i] = first + i < args.shard.columns ? row.y(first + i) : -kInfinity;
    }
    largest.largest += 0.0f;  // -0 counts as 0
    term = largest_term<Kind>(y, largest.largest);
  }
  if (largest.largest > -kInfinity) {
    largest.group += static_cast<uint32_t>(args.shard.vocab_start / kGroup);
  }
  State state(part.sum, largest, term);
  if (has_column(args.shard, target)) {
    state.has_target = 1;
    state.target_y = row.y(target - args.shard.vocab_start);
  }
  return state;
}

template <class State>
void finish(
    const ForwardArgs& args, int64_t index, const Row& row,
    const PartialRow<typename State::Kind>& part) {
  const int64_t target = args.inputs.target.of(args.shape, index);
  const auto state = state_of<State>(args, row, part, target);
  if (args.states != nullptr) {
    static_cast<State*>(args.states)[index] = state;
    return;
  }
  const RowResult result = result_of(state);
  const bool skipped = is_skipped(args, target);
  args.lse[index] = skipped ? 0.0 : result.lse();
  args.logp[index] = is_ignored(target, args.shard.vocab_size) ? 0.0f : result.logp(state.target_y);
  if constexpr (State::Kind::kWeighted) {
    args.entropy[index] = skipped ? 0.0f : result.entropy();
    args.mean[index] = skipped ? 0.0 : result.mean();
  }
}

bool is_fast(const RowSoftmax& softmax) { return softmax.fast; }
bool is_fast(const WeightedSoftmax& weighted) { return weighted.softmax.fast; }

// A row's gradient, in columns that any thread may write.
struct RowGradient {
  Row row;
  int64_t columns;
  bool zero;
  double softmax_factor, entropy_factor, target_factor;
  double lse, mean;
  int64_t target_column;  // within this shard; negative or past its end if it is elsewhere
  char* dlogits;

  static RowGradient of(Dtype dtype, const BackwardArgs& args, int64_t index) {
    const RowShape& shape = args.shape;
    const Row row(dtype, args.inputs, shape, index);
    const int64_t target = args.inputs.target.of(shape, index);
    float dlogp = 0.0f;
    double dlse = 0.0, mean = 0.0;
    float dentropy = 0.0f;
    if (args.grad_logp) dlogp = args.grad_logp[offset_of(shape, index, args.grad_logp_strides)];
    if (args.grad_lse) dlse = args.grad_lse[offset_of(shape, index, args.grad_lse_strides)];
    if (args.grad_entropy) {
      dentropy = args.grad_entropy[offset_of(shape, index, args.grad_entropy_strides)];
      mean = args.mean[offset_of(shape, index, args.mean_strides)];
    }
    if (is_ignored(target, args.shard.vocab_size)) dlogp = 0.0f;
    const double temperature = row.temperature;  // 1 where there is none
    return {
        row,
        args.shard.columns,
        dlogp == 0.0f && dlse == 0.0 && dentropy == 0.0f,
        (dlse - dlogp) / temperature,
        -dentropy / temperature,
        dlogp / temperature,
        args.lse[offset_of(shape, index, args.lse_strides)],
        mean,
        is_ignored(target, args.shard.vocab_size) ? -1 : target - args.shard.vocab_start,
        static_cast<char*>(args.dlogits) +
            offset_of(shape, index, args.dlogits_strides) * kElementBytes[static_cast<int>(dtype)]};
  }

  void set(int64_t column, float value) const {
    with_element(row.dtype, [&](auto element) {
      from_float(value, reinterpret_cast<decltype(element)*>(dlogits)[column]);
    });
  }

  // One column's, in double: plus `added`, which is the target's share where it is the target's.
  float gradient_at(float y, double added) const {
    const double factor = entropy_factor == 0
                              ? softmax_factor
                              : column_factor(y, softmax_factor, entropy_factor, mean);
    return gradient_of_any(y, lse, factor, added);
  }

  template <class Kind>
  void write_columns(
      const Form& form, int64_t begin, int64_t end,
      const typename Loops<Kind>::Softmax& softmax) const {
    if (is_fast(softmax)) {
      form.loops<Kind>(row.dtype).write_gradient[row.divides](
          {row.logits, begin, end, row.temperature}, softmax, dlogits);
    } else {
      for (int64_t column = begin; column < end; ++column) {
        set(column, gradient_at(row.y(column), 0.0));
      }
    }
  }

  void write(const Form& form, int64_t begin, int64_t end) const {
    const int dtype = static_cast<int>(row.dtype);
    if (zero) {  // the logits are not read
      std::memset(
          dlogits + begin * kElementBytes[dtype], 0,
          static_cast<size_t>((end - begin) * kElementBytes[dtype]));
      return;
    }
    // Read before its piece is written: dlogits may be the logits themselves.
    const bool has_target = target_column >= begin && target_column < end;
    const float target_y = has_target ? row.y(target_column) : 0.0f;
    const float factor = static_cast<float>(softmax_factor);
    if (entropy_factor == 0) {
      write_columns<Unweighted>(form, begin, end, RowSoftmax(lse, factor, kFastLse));
    } else {
      const float of_entropy = static_cast<float>(entropy_factor);
      const WeightedSoftmax softmax(lse, mean, factor, of_entropy, kFastLse);
      write_columns<Weighted>(form, begin, end, softmax);
    }
    if (has_target) set(target_column, gradient_at(target_y, target_factor));
  }
};

template <class State>
void run_forward_of(const Form& form, Dtype dtype, const ForwardArgs& args) {
  using Kind = typename State::Kind;
  const RowShape& shape = args.shape;
  const int64_t rows = shape.rows, columns = args.shard.columns;
  const Pieces pieces(rows, columns, thread_count());
  const auto sum = [&](int64_t index, int64_t begin, PartialRow<Kind>& part) {
    const Row row(dtype, args.inputs, shape, index);
    const int64_t end = std::min(begin + pieces.columns_each, columns);
    if (!is_skipped(args, args.inputs.target.of(shape, index))) {
      form.loops<Kind>(dtype).sum_columns[row.divides](
          {row.logits, begin, end, row.temperature}, part);
    }
    return row;
  };
  if (pieces.pieces_each == 1) {
    run_tasks(pieces.count, [&](int64_t piece) {
      const int64_t first = piece * pieces.rows_each;
      for (int64_t i = first; i < std::min(first + pieces.rows_each, rows); ++i) {
        PartialRow<Kind> part;
        finish<State>(args, i, sum(i, 0, part), part);
      }
    });
    return;
  }
  std::vector<PartialRow<Kind>> parts(static_cast<size_t>(pieces.count));
  run_tasks(pieces.count, [&](int64_t piece) {
    sum(piece / pieces.pieces_each, piece % pieces.pieces_each * pieces.columns_each,
        parts[static_cast<size_t>(piece)]);
  });
  [[maybe_unused]] const IeeeArithmetic arithmetic;
  for (int64_t i = 0; i < rows; ++i) {
    PartialRow<Kind> total;
    for (int64_t piece = i * pieces.pieces_each; piece < (i + 1) * pieces.pieces_each; ++piece) {
      const PartialRow<Kind>& part = parts[static_cast<size_t>(piece)];
      merge(total.sum, part.sum);
      if (is_before(part.largest, total.largest)) total.largest = part.largest;
    }
    finish<State>(args, i, Row(dtype, args.inputs, shape, i), total);
  }
}

template <class State>
void run_combine_of(const CombineArgs& args) {
  constexpr int64_t kRowsEach = 64;
  const int64_t rows = args.shape.rows;
  const auto* states = static_cast<const State*>(args.states);
  run_tasks(ceil_div(rows, kRowsEach), [&](int64_t piece) {
    const int64_t first = piece * kRowsEach;
    for (int64_t i = first; i < std::min(first + kRowsEach, rows); ++i) {
      State state;
      for (int64_t shard = 0; shard < args.shards; ++shard) merge(state, states[shard * rows + i]);
      const RowResult result = result_of(state);
      const bool ignored = is_ignored(args.target.of(args.shape, i), args.vocab_size);
      args.lse[i] = result.lse();
      args.logp[i] = ignored ? 0.0f : logp_of(state, result);
      if constexpr (State::Kind::kWeighted) {
        args.entropy[i] = result.entropy();
        args.mean[i] = result.mean();
      }
    }
  });
}

}  // namespace

void run_forward(const Form& form, Dtype dtype, const ForwardArgs& args) {
  if (args.weighted) {
    run_forward_of<WeightedRowState>(form, dtype, args);
  } else {
    run_forward_of<RowState>(form, dtype, args);
  }
}

void run_backward(const Form& form, Dtype dtype, const BackwardArgs& args) {
  const int64_t rows = args.shape.rows, columns = args.shard.columns;
  const Pieces pieces(rows, columns, thread_count());
  run_tasks(pieces.count, [&](int64_t piece) {
    const int64_t first = piece / pieces.pieces_each * pieces.rows_each;
    const int64_t begin = piece % pieces.pieces_each * pieces.columns_each;
    for (int64_t i = first; i < std::min(first + pieces.rows_each, rows); ++i) {
      RowGradient::of(dtype, args, i)
          .write(form, begin, std::min(begin + pieces.columns_each, columns));
    }
  });
}

void run_combine(const CombineArgs& args) {
  if (args.weighted) {
    run_combine_of<WeightedRowState>(args);
  } else {
    run_combine_of<RowState>(args);
  }
}

}  // namespace rl_logp
