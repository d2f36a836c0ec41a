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

RowState state_of(const ForwardArgs& args, const Row& row, const PartialRow& part, int64_t target) {
  LargestGroup largest = part.largest;
  LargestTerm term;
  if (absolute(largest.largest) < kInfinity) {
    float y[kGroup];
    const int64_t first = static_cast<int64_t>(largest.group) * kGroup;
    for (int i = 0; i < kGroup; ++i) {
      y[i] = first + i < args.shard.columns ? row.y(first + i) : -kInfinity;
    }
    largest.largest += 0.0f;  // -0 counts as 0
    term = largest_term<Unweighted>(y, largest.largest);
  }
  if (largest.largest > -kInfinity) {
    largest.group += static_cast<uint32_t>(args.shard.vocab_start / kGroup);
  }
  RowState state(part.sum, largest, term);
  if (has_column(args.shard, target)) {
    state.has_target = 1;
    state.target_y = row.y(target - args.shard.vocab_start);
  }
  return state;
}

void finish(const ForwardArgs& args, int64_t index, const Row& row, const PartialRow& part) {
  const int64_t target = args.inputs.target.of(args.shape, index);
  const RowState state = state_of(args, row, part, target);
  if (args.states != nullptr) {
    static_cast<RowState*>(args.states)[index] = state;
    return;
  }
  const LogSumExp result = result_of(state);
  args.lse[index] = is_skipped(args, target) ? 0.0 : result.lse();
  args.logp[index] = is_ignored(target, args.shard.vocab_size) ? 0.0f : result.logp(state.target_y);
}

// A row's gradient, in columns that any thread may write.
struct RowGradient {
  Row row;
  int64_t columns;
  bool zero;
  double softmax_factor, target_factor;
  RowSoftmax softmax;
  int64_t target_column;  // within this shard; negative or past its end if it is elsewhere
  char* dlogits;

  static RowGradient of(Dtype dtype, const BackwardArgs& args, int64_t index) {
    const RowShape& shape = args.shape;
    const Row row(dtype, args.inputs, shape, index);
    const int64_t target = args.inputs.target.of(shape, index);
    float dlogp = 0.0f;
    double dlse = 0.0;
    if (args.grad_logp) dlogp = args.grad_logp[offset_of(shape, index, args.grad_logp_strides)];
    if (args.grad_lse) dlse = args.grad_lse[offset_of(shape, index, args.grad_lse_strides)];
    if (is_ignored(target, args.shard.vocab_size)) dlogp = 0.0f;
    const double temperature = row.temperature;  // 1 where there is none
    const double softmax_factor = (dlse - dlogp) / temperature;
    const double lse = args.lse[offset_of(shape, index, args.lse_strides)];
    return {
        row,
        args.shard.columns,
        dlogp == 0.0f && dlse == 0.0,
        softmax_factor,
        dlogp / temperature,
        RowSoftmax(lse, static_cast<float>(softmax_factor), kFastLse),
        is_ignored(target, args.shard.vocab_size) ? -1 : target - args.shard.vocab_start,
        static_cast<char*>(args.dlogits) +
            offset_of(shape, index, args.dlogits_strides) * kElementBytes[static_cast<int>(dtype)]};
  }

  void set(int64_t column, float value) const {
    with_element(row.dtype, [&](auto element) {
      from_float(value, reinterpret_cast<decltype(element)*>(dlogits)[column]);
    });
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
    if (softmax.fast) {
      form.write_gradient[dtype][row.divides](
          {row.logits, begin, end, row.temperature}, softmax, dlogits);
    } else {
      for (int64_t column = begin; column < end; ++column) {
        set(column, gradient_of_any(row.y(column), softmax.lse, softmax_factor, 0.0));
      }
    }
    if (has_target) {
      set(target_column, gradient_of_any(target_y, softmax.lse, softmax_factor, target_factor));
    }
  }
};

}  // namespace

void run_forward(const Form& form, Dtype dtype, const ForwardArgs& args) {
  const RowShape& shape = args.shape;
  const int64_t rows = shape.rows, columns = args.shard.columns;
  const Pieces pieces(rows, columns, thread_count());
  const auto sum = [&](int64_t index, int64_t begin, PartialRow& part) {
    const Row row(dtype, args.inputs, shape, index);
    const int64_t end = std::min(begin + pieces.columns_each, columns);
    if (!is_skipped(args, args.inputs.target.of(shape, index))) {
      form.sum_columns[static_cast<int>(dtype)][row.divides](
          {row.logits, begin, end, row.temperature}, part);
    }
    return row;
  };
  if (pieces.pieces_each == 1) {
    run_tasks(pieces.count, [&](int64_t piece) {
      const int64_t first = piece * pieces.rows_each;
      for (int64_t i = first; i < std::min(first + pieces.rows_each, rows); ++i) {
        PartialRow part;
        finish(args, i, sum(i, 0, part), part);
      }
    });
    return;
  }
  std::vector<PartialRow> parts(static_cast<size_t>(pieces.count));
  run_tasks(pieces.count, [&](int64_t piece) {
    sum(piece / pieces.pieces_each, piece % pieces.pieces_each * pieces.columns_each,
        parts[static_cast<size_t>(piece)]);
  });
  [[maybe_unused]] const IeeeArithmetic arithmetic;
  for (int64_t i = 0; i < rows; ++i) {
    PartialRow total;
    for (int64_t piece = i * pieces.pieces_each; piece < (i + 1) * pieces.pieces_each; ++piece) {
      const PartialRow& part = parts[static_cast<size_t>(piece)];
      merge(total.sum, part.sum);
      if (is_before(part.largest, total.largest)) total.largest = part.largest;
    }
    finish(args, i, Row(dtype, args.inputs, shape, i), total);
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
  constexpr int64_t kRowsEach = 64;
  const int64_t rows = args.shape.rows;
  run_tasks(ceil_div(rows, kRowsEach), [&](int64_t piece) {
    const int64_t first = piece * kRowsEach;
    for (int64_t i = first; i < std::min(first + kRowsEach, rows); ++i) {
      RowState state;
      for (int64_t shard = 0; shard < args.shards; ++shard) {
        merge(state, static_cast<const RowState*>(args.states)[shard * rows + i]);
      }
      const LogSumExp result = result_of(state);
      const bool ignored = is_ignored(args.target.of(args.shape, i), args.vocab_size);
      args.lse[i] = result.lse();
      args.logp[i] = ignored ? 0.0f : logp_of(state, result);
    }
  });
}

}  // namespace rl_logp
