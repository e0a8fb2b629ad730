// Adam, Adagrad and SGD on rows: one kernel, which walks rows and columns, and a class for each, which says what state
// an element has. Row-wise Adagrad, whose columns depend on one another, is in row_rowwise.cuh.
//
// Such a class has
//   Problem, Rule          the struct of ops.h and the rule of common/row_update.h
//   State<V>               the state of V neighbours; load<V>(problem, at), store(problem, at, state)
//   rule(problem)          for all rows
//   has_row_rule(problem)  whether each row has a rule of its own; then row_rule(...) makes it
//   update(...)            one element
//   aligned(problem, v)    whether V neighbours of the state can be read at a time
#pragma once

#include "cuda/row_terms.cuh"

namespace fastemb::cuda {

template <typename T, typename M>
struct AdamStep {
  using A = typename AccOf<T>::type;
  using Problem = RowAdam;

  struct Rule {
    AdamRule<A> adam;
    AdamRounding rounding;
  };

  template <int V>
  struct State {
    Vec<M, V> exp_avg, exp_avg_sq, largest;
  };

  template <int V>
  FE_DEVICE State<V> load(const RowAdam& a, int64_t at) {
    State<V> state;
    state.exp_avg = load_mutable<V>(static_cast<const M*>(a.exp_avg) + at);
    state.exp_avg_sq = load_mutable<V>(static_cast<const M*>(a.exp_avg_sq) + at);
    if (a.max_exp_avg_sq != nullptr) {
      state.largest = load_mutable<V>(static_cast<const M*>(a.max_exp_avg_sq) + at);
    } else {  // whatever is compared with it wins: the same bits as without amsgrad, and no branch
#pragma unroll
      for (int v = 0; v < V; ++v) state.largest.item[v] = narrow<M>(-static_cast<A>(INFINITY));
    }
    return state;
  }

  template <int V>
  FE_DEVICE void store(const RowAdam& a, int64_t at, const State<V>& state) {
    cuda::store<V>(static_cast<M*>(a.exp_avg) + at, state.exp_avg);
    cuda::store<V>(static_cast<M*>(a.exp_avg_sq) + at, state.exp_avg_sq);
    if (a.max_exp_avg_sq != nullptr) cuda::store<V>(static_cast<M*>(a.max_exp_avg_sq) + at, state.largest);
  }

  FE_DEVICE bool decoupled(const RowAdam& a) { return a.decoupled; }

  FE_DEVICE Rule rule(const RowAdam& a) {
    const int64_t step = step_number(a.rows);
    return {AdamRule<A>::make(a, step, 1), AdamRounding::make(a.rows.stochastic, a.rows.seed, step)};
  }

  FE_FUNCTION bool has_row_rule(const RowAdam& a) { return a.row_step != nullptr || a.row_count != nullptr; }

  // One lane reads and writes the row's numbers; the others have them from it. row is -1 for a group without one.
  FE_DEVICE AdamRule<A> row_rule(const RowAdam& a, int64_t step, int64_t row, int32_t lane, int32_t lanes) {
    int64_t t = step, slept = 1;
    if (row >= 0 && lane == 0) {
      if (a.row_count != nullptr) {
        t = static_cast<int64_t>(a.row_count[row]) + 1;
        a.row_count[row] = static_cast<int32_t>(t);
      }
      if (a.row_step != nullptr) {
        slept = step - a.row_step[row];
        a.row_step[row] = static_cast<int32_t>(step);
      }
    }
    return AdamRule<A>::make(a, of_first_lane(t, lanes), of_first_lane(slept, lanes));
  }

  template <int V>
  FE_DEVICE A update(const Rule& rule, A grad, A param, State<V>& state, int v, int64_t column) {
    const A before = widen(state.largest.item[v]);
    A m = widen(state.exp_avg.item[v]), s = widen(state.exp_avg_sq.item[v]), largest = before;
    param = AdamRule<A>::apply(rule.adam, grad, param, m, s, &largest);
    state.exp_avg.item[v] = narrow_moment<M>(m, rule.rounding.first, column);
    state.exp_avg_sq.item[v] = narrow_moment<M>(s, rule.rounding.second, column);
    // What narrow_moment makes of `largest`, without random bits of its own: `before` has nothing to round.
    state.largest.item[v] = narrow<M>(fastemb::larger(before, static_cast<A>(widen(state.exp_avg_sq.item[v]))));
    return param;
  }

  static bool aligned(const RowAdam& a, int v) {
    return aligned_words(a.exp_avg, a.moment_type, v) && aligned_words(a.exp_avg_sq, a.moment_type, v) &&
           aligned_words(a.max_exp_avg_sq, a.moment_type, v);
  }
};

// What the steps with one rule for all rows have in common.
template <typename P, typename R>
struct SharedRule {
  using Problem = P;
  using Rule = R;
  FE_DEVICE bool decoupled(const P&) { return false; }
  FE_DEVICE Rule rule(const P& a) { return Rule::make(a); }
  FE_FUNCTION bool has_row_rule(const P&) { return false; }
};

template <typename T, typename M>
struct AdagradStep : SharedRule<RowAdagrad, AdagradRule<M>> {
  using A = M;

  template <int V>
  struct State {
    Vec<A, V> sum;
  };

  template <int V>
  FE_DEVICE State<V> load(const RowAdagrad& a, int64_t at) {
    return {load_mutable<V>(static_cast<const A*>(a.sum) + at)};
  }

  template <int V>
  FE_DEVICE void store(const RowAdagrad& a, int64_t at, const State<V>& state) {
    cuda::store<V>(static_cast<A*>(a.sum) + at, state.sum);
  }

  template <int V>
  FE_DEVICE A update(const AdagradRule<A>& rule, A grad, A param, State<V>& state, int v, int64_t) {
    return AdagradRule<A>::apply(rule, grad, param, state.sum.item[v]);
  }

  static bool aligned(const RowAdagrad& a, int v) { return aligned_words(a.sum, acc_type(a.rows), v); }
};

template <typename T, typename M>
struct SgdStep : SharedRule<RowSgd, SgdRule<M>> {
  using A = M;

  template <int V>
  struct State {
    Vec<A, V> buffer;
  };

  // Without momentum the rule of a first step holds: the buffer becomes g, and g the buffer.
  FE_DEVICE SgdRule<A> rule(const RowSgd& a) {
    SgdRule<A> rule = SgdRule<A>::make(a);
    if (a.momentum_buffer == nullptr) {
      rule.first = true;
      rule.nesterov = false;
    }
    return rule;
  }

  template <int V>
  FE_DEVICE State<V> load(const RowSgd& a, int64_t at) {
    return a.momentum_buffer == nullptr ? State<V>{}
                                        : State<V>{load_mutable<V>(static_cast<const A*>(a.momentum_buffer) + at)};
  }

  template <int V>
  FE_DEVICE void store(const RowSgd& a, int64_t at, const State<V>& state) {
    if (a.momentum_buffer != nullptr) cuda::store<V>(static_cast<A*>(a.momentum_buffer) + at, state.buffer);
  }

  template <int V>
  FE_DEVICE A update(const SgdRule<A>& rule, A grad, A param, State<V>& state, int v, int64_t) {
    return SgdRule<A>::apply(rule, grad, param, &state.buffer.item[v]);
  }

  static bool aligned(const RowSgd& a, int v) { return aligned_words(a.momentum_buffer, acc_type(a.rows), v); }
};

// ---- kernel ------------------------------------------------------------------------------------------------------

// Columns [column, column + V) of table row `row`, whose gradient, number k, is at `from`.
template <typename T, typename Step, int V, typename A, typename Rule, typename From>
FE_DEVICE void step_columns(const typename Step::Problem& a, const Rule& rule, const GradientRule<A>& gradient,
                            int64_t k, From from, int64_t row, int64_t column, uint64_t key) {
  const int64_t at = row * a.rows.dim + column;
  A grad[V], value[V];
  // A sum needs the registers that the state would wait in.
  if constexpr (std::is_same_v<From, Terms>) load_gradient(a.rows, k, from, column, grad);
  auto state = Step::template load<V>(a, at);
  const Stored<T, V> stored = load_stored<T, V>(a.rows, row, column);
  if constexpr (std::is_same_v<From, OwnRow>) load_gradient(a.rows, k, from, column, grad);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const A old = value_of(a.rows, stored, v);
    value[v] = Step::update(rule, GradientRule<A>::apply(gradient, grad[v], old), old, state, v, column + v);
  }
  Step::store(a, at, state);
  store_value<T>(a.rows, row, column, key, value);
}

// M: the type of Adam's moments, the accumulator of T for the others.
template <typename T, typename M, template <typename, typename> class StepOf, bool kFused, int V>
__global__ void __launch_bounds__(kBlock, V == 8 || sizeof(T) == 8 || (kFused && sizeof(M) == 2) ? 2 : 3)
    row_step_kernel(typename StepOf<T, M>::Problem a, int32_t lanes, int64_t tiles) {
  using Step = StepOf<T, M>;
  using A = typename AccOf<T>::type;
  using Rule = typename Step::Rule;
  using Scalars = StepScalars<A, Rule>;
  const Scalars scalars = once_per_block<Scalars>([&] {
    return Scalars{Step::rule(a), GradientRule<A>::make(a.rows, Step::decoupled(a)), step_number(a.rows),
                   rows_that_count(a.rows)};
  });
  const GradientRule<A> gradient = scalars.gradient;
  Rule rule = scalars.rule;
  const int64_t num_rows = scalars.num_rows, step = scalars.step;
  const Place at = place(lanes);
  int64_t row = table_row(a.rows, at.item, num_rows);
  auto from = gradient_place<kFused>(a.rows, at.item, num_rows);
  for (int64_t k = at.item; first_of_warp(k, lanes) < num_rows; k += at.step) {
    const int64_t next_row = table_row(a.rows, k + at.step, num_rows);  // under way while this row is worked on
    const auto next_from = gradient_place<kFused>(a.rows, k + at.step, num_rows);
    if constexpr (std::is_same_v<typename Step::Problem, RowAdam>) {
      if (Step::has_row_rule(a)) rule.adam = Step::row_rule(a, step, row, at.lane, lanes);
    }
    const uint64_t key = stochastic_key(a.rows, step, row);
    for (int64_t tile = blockIdx.y; row >= 0 && tile < tiles; tile += gridDim.y) {
      int64_t column = (tile * lanes + at.lane) * V;
      if (column + V <= a.rows.dim) {
        step_columns<T, Step, V>(a, rule, gradient, k, from, row, column, key);
      } else if constexpr (V > 1 && !kFused) {  // the end of a single row of any length
        for (; column < a.rows.dim; ++column) step_columns<T, Step, 1>(a, rule, gradient, k, from, row, column, key);
      }
    }
    row = next_row;
    from = next_from;
  }
}

// ---- launch ------------------------------------------------------------------------------------------------------

// Rows keep their lanes' words aligned when dim and stride are whole words; a row that is alone begins aligned anyway.
inline bool whole_words(const RowStep& r, int v) {
  if (r.num_embeddings == 1 && r.num_rows == 1) return r.dim >= v;
  return r.dim % v == 0 && r.param_stride % v == 0;
}

// As row_shape, but a wide row has all threads of a block, several blocks even. With `row_in_a_warp` it has at most a
// warp, which goes over all of its tiles.
inline RowShape step_shape(const RowStep& r, int v, bool row_in_a_warp) {
  const int64_t vectors = ceil_div(r.dim, v);
  RowShape shape;
  shape.lanes = group_lanes(vectors);
  while (!row_in_a_warp && shape.lanes >= kWarp && shape.lanes < kBlock && shape.lanes < vectors) shape.lanes *= 2;
  shape.tiles = ceil_div(vectors, shape.lanes);
  const int64_t across = row_in_a_warp || shape.tiles < 1 ? 1 : shape.tiles < kStepBlocks ? shape.tiles : kStepBlocks;
  const int64_t most = ceil_div(kStepBlocks, across), blocks = ceil_div(r.num_rows, kBlock / shape.lanes);
  shape.grid = dim3(static_cast<unsigned>(blocks < most ? blocks : most), static_cast<unsigned>(across));
  return shape;
}

template <typename T, typename M, template <typename, typename> class StepOf>
int launch_step(const typename StepOf<T, M>::Problem& a, Stream stream) {
  using Step = StepOf<T, M>;
  if (a.rows.num_rows == 0) return 0;
  constexpr int kWide = kVector<T>;
  const bool vector = whole_words(a.rows, kWide) && aligned_step(a.rows, kWide) && aligned_terms(a.rows, kWide) &&
                      Step::aligned(a, kWide);
  return with_gradient(a.rows, stream, [&](auto fused) {
    return with_vector<T>(vector, [&](auto width) {
      constexpr int V = decltype(width)::value;
      const RowShape shape = step_shape(a.rows, V, Step::has_row_rule(a));
      auto kernel = &row_step_kernel<T, M, StepOf, decltype(fused)::value, V>;
      return FE_LAUNCH(kernel, shape.grid, kBlock, stream, a, shape.lanes, shape.tiles);
    });
  });
}

inline int launch_row_adam(const RowAdam& a, Stream stream) {
  return with_dtype(a.rows.param_type, [&](auto dtype) {
    using T = typename decltype(dtype)::type;
    using A = typename AccOf<T>::type;
    if constexpr (std::is_same_v<A, float>) {  // the adapter refuses bf16 moments beside double
      if (a.moment_type == DType::bf16) return launch_step<T, bf16, AdamStep>(a, stream);
    }
    return launch_step<T, A, AdamStep>(a, stream);
  });
}

inline int launch_row_adagrad(const RowAdagrad& a, Stream stream) {
  return with_dtype(a.rows.param_type, [&](auto dtype) {
    using T = typename decltype(dtype)::type;
    return launch_step<T, typename AccOf<T>::type, AdagradStep>(a, stream);
  });
}

inline int launch_row_sgd(const RowSgd& a, Stream stream) {
  return with_dtype(a.rows.param_type, [&](auto dtype) {
    using T = typename decltype(dtype)::type;
    return launch_step<T, typename AccOf<T>::type, SgdStep>(a, stream);
  });
}

}  // namespace fastemb::cuda
