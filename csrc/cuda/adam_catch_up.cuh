// Catching up rows that slept, for lazy Adam with the result of dense Adam. A row belongs to one group of lanes, since
// all of it depends on one number, row_step[row].
#pragma once

#include "cuda/row_access.cuh"

#include "common/adam_catch_up.h"  // after square_root

namespace fastemb::cuda {

// ---- neighbours in acc as the "vector of acc" of common/ ---------------------------------------------------------

template <typename A, int V, typename F>
FE_FUNCTION Vec<A, V> each_item(const F& f) {
  Vec<A, V> z;
  for (int v = 0; v < V; ++v) z.item[v] = f(v);
  return z;
}

#define FE_OPERATOR_OF_VECTORS(OP)                                              \
  template <typename A, int V>                                                  \
  FE_FUNCTION Vec<A, V> operator OP(const Vec<A, V>& x, const Vec<A, V>& y) {   \
    return each_item<A, V>([&](int v) -> A { return x.item[v] OP y.item[v]; }); \
  }                                                                             \
  template <typename A, int V>                                                  \
  FE_FUNCTION Vec<A, V> operator OP(const Vec<A, V>& x, A y) {                  \
    return each_item<A, V>([&](int v) -> A { return x.item[v] OP y; });         \
  }                                                                             \
  template <typename A, int V>                                                  \
  FE_FUNCTION Vec<A, V> operator OP(A x, const Vec<A, V>& y) {                  \
    return each_item<A, V>([&](int v) -> A { return x OP y.item[v]; });         \
  }
FE_OPERATOR_OF_VECTORS(+)
FE_OPERATOR_OF_VECTORS(-)
FE_OPERATOR_OF_VECTORS(*)
FE_OPERATOR_OF_VECTORS(/)
#undef FE_OPERATOR_OF_VECTORS

template <typename A, int V>
FE_FUNCTION Vec<A, V> square_root(const Vec<A, V>& x) {
  return each_item<A, V>([&](int v) -> A { return fastemb::square_root(x.item[v]); });
}

template <typename A, int V>
FE_FUNCTION Vec<A, V> larger(const Vec<A, V>& x, const Vec<A, V>& y) {
  return each_item<A, V>([&](int v) -> A { return fastemb::larger(x.item[v], y.item[v]); });
}

// ---- one row -----------------------------------------------------------------------------------------------------

FE_DEVICE bool under_penalty(const RowAdamCatchUp& a) { return a.rows.weight_decay != 0.0 && !a.decoupled; }

// From the end of step `last` to the end of step t; nothing to do unless last < t.
template <typename A>
struct Sleep {
  int64_t last, t;
  AdamCatchUp<A> rule;  // not under an L2 penalty
};

// One lane reads the row's number, writes the new one and makes the powers in double; the others have all from it.
// row is -1 for a group without one.
template <typename A>
FE_DEVICE Sleep<A> sleep_of(const RowAdamCatchUp& a, int64_t t, int64_t row, int32_t lane, int32_t lanes) {
  Sleep<A> sleep = {t, t, {}};
  AdamCatchUp<A>& rule = sleep.rule;
  if (row >= 0 && lane == 0) {
    const int64_t last = a.row_step[row];
    sleep.last = last < 0 ? 0 : last;
    if (sleep.last < t) {
      a.row_step[row] = static_cast<int32_t>(t);
      if (!under_penalty(a)) rule = AdamCatchUp<A>::make(a, sleep.last, t);
    }
  }
  sleep.last = of_first_lane(sleep.last, lanes);
  if (under_penalty(a)) return sleep;
#pragma unroll
  for (A& term : rule.series) term = of_first_lane(term, lanes);
  rule.keep = of_first_lane(rule.keep, lanes);
  rule.fade1 = of_first_lane(rule.fade1, lanes);
  rule.fade2 = of_first_lane(rule.fade2, lanes);
  rule.eps = static_cast<A>(a.eps);
  rule.smallest_root = static_cast<A>(a.smallest_root);
  return sleep;
}

// How far V neighbours have moved: by the series, or step by step where it does not hold.
template <typename A, int V>
FE_DEVICE Vec<A, V> moved(const RowAdamCatchUp& a, const Sleep<A>& sleep, const Vec<A, V>& exp_avg,
                          const Vec<A, V>& exp_avg_sq, const Vec<A, V>& second) {
  const Vec<A, V> root = square_root(second);
  Vec<A, V> way = AdamCatchUp<A>::moved(sleep.rule, exp_avg, root);
  bool small[V], any = false;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    small[v] = !(root.item[v] >= sleep.rule.smallest_root);
    if (small[v] && exp_avg.item[v] == A{0}) way.item[v] = A{0};
    small[v] = small[v] && exp_avg.item[v] != A{0};
    any = any || small[v];
  }
  if (any) {
    const Vec<A, V> slow = AdamCatchUp<A>::replayed(a, sleep.last, sleep.t, exp_avg, exp_avg_sq, root);
#pragma unroll
    for (int v = 0; v < V; ++v) way.item[v] = small[v] ? slow.item[v] : way.item[v];
  }
  return way;
}

template <typename M, typename A, int V>
FE_DEVICE Vec<A, V> load_moment(const void* moment, int64_t at) {
  const Vec<M, V> x = load_mutable<V>(static_cast<const M*>(moment) + at);
  return each_item<A, V>([&](int v) -> A { return widen(x.item[v]); });
}

template <typename M, typename A, int V>
FE_DEVICE void store_moment(void* moment, int64_t at, const Vec<A, V>& x, const MomentRounding& how, int64_t column) {
  Vec<M, V> rounded;
#pragma unroll
  for (int v = 0; v < V; ++v) rounded.item[v] = narrow_moment<M>(x.item[v], how, column + v);
  store<V>(static_cast<M*>(moment) + at, rounded);
}

// Columns [column, column + V) of the row.
template <typename T, typename M, int V, typename A>
FE_DEVICE void wake(const RowAdamCatchUp& a, const Sleep<A>& sleep, int64_t row, int64_t column, uint64_t key,
                    const AdamRounding& rounding) {
  const int64_t at = row * a.rows.dim + column;
  const bool amsgrad = a.max_exp_avg_sq != nullptr;
  const Stored<T, V> stored = load_stored<T, V>(a.rows, row, column);
  Vec<A, V> first = load_moment<M, A, V>(a.exp_avg, at), second = load_moment<M, A, V>(a.exp_avg_sq, at);
  Vec<A, V> largest = amsgrad ? load_moment<M, A, V>(a.max_exp_avg_sq, at) : Vec<A, V>{};
  Vec<A, V> param = each_item<A, V>([&](int v) -> A { return value_of(a.rows, stored, v); });
  if (under_penalty(a)) {
    if (amsgrad) {  // not one call with a pointer or null: that would keep `largest` in memory
      param = AdamCatchUp<A>::penalised(a, sleep.last, sleep.t, param, first, second, &largest);
      store_moment<M>(a.max_exp_avg_sq, at, largest, rounding.second, column);
    } else {
      Vec<A, V>* none = nullptr;
      param = AdamCatchUp<A>::penalised(a, sleep.last, sleep.t, param, first, second, none);
    }
  } else {
    if (!amsgrad) largest = second;
    param = param * sleep.rule.keep - moved(a, sleep, first, second, largest);
    first = first * sleep.rule.fade1;
    second = second * sleep.rule.fade2;
  }
  store_moment<M>(a.exp_avg, at, first, rounding.first, column);
  store_moment<M>(a.exp_avg_sq, at, second, rounding.second, column);
  store_value<T>(a.rows, row, column, key, param.item);
}

// ---- kernel ------------------------------------------------------------------------------------------------------

// M: the type of the moments.
template <typename T, typename M, int V>
__global__ void __launch_bounds__(kBlock, V > 1 || sizeof(T) == 8 ? 2 : 3)
    adam_catch_up_kernel(RowAdamCatchUp a, int32_t lanes, int64_t tiles) {
  using A = typename AccOf<T>::type;
  const int64_t num_rows = rows_that_count(a.rows), t = step_number(a.rows);
  const auto rounding = AdamRounding::make(a.rows.stochastic, a.rows.seed, t);
  const Place at = place(lanes);
  int64_t row = table_row(a.rows, at.item, num_rows);
  for (int64_t k = at.item; first_of_warp(k, lanes) < num_rows; k += at.step) {
    const int64_t next_row = table_row(a.rows, k + at.step, num_rows);  // under way while this row is worked on
    const Sleep<A> sleep = sleep_of<A>(a, t, row, at.lane, lanes);
    if (sleep.last < t) {
      const uint64_t key = stochastic_key(a.rows, t, row);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t column = (tile * lanes + at.lane) * V;
        if (column < a.rows.dim) wake<T, M, V>(a, sleep, row, column, key, rounding);
      }
    }
    row = next_row;
  }
}

template <typename T, typename M>
int launch_adam_catch_up(const RowAdamCatchUp& a, Stream stream) {
  using Wider = std::conditional_t<(sizeof(T) > sizeof(M)), T, M>;  // 16 bytes of it a lane; more would spill
  constexpr int kWide = kVector<Wider>;
  const RowStep& r = a.rows;
  const bool vector = r.dim % kWide == 0 && r.param_stride % kWide == 0 && aligned_step(r, kWide) &&
                      aligned_words(a.exp_avg, a.moment_type, kWide) &&
                      aligned_words(a.exp_avg_sq, a.moment_type, kWide) &&
                      aligned_words(a.max_exp_avg_sq, a.moment_type, kWide);
  return with_vector<Wider>(vector, [&](auto width) {
    constexpr int V = decltype(width)::value;
    const RowShape shape = row_shape(r.num_rows, r.dim, V, kStepBlocks);
    auto kernel = &adam_catch_up_kernel<T, M, V>;
    return FE_LAUNCH(kernel, dim3(shape.grid.x), kBlock, stream, a, shape.lanes, shape.tiles);
  });
}

inline int launch_row_adam_catch_up(const RowAdamCatchUp& a, Stream stream) {
  if (a.rows.num_rows == 0 || a.rows.dim == 0) return 0;
  return with_dtype(a.rows.param_type, [&](auto dtype) {
    using T = typename decltype(dtype)::type;
    using A = typename AccOf<T>::type;
    if constexpr (std::is_same_v<A, float>) {  // the adapter refuses bf16 moments beside double
      if (a.moment_type == DType::bf16) return launch_adam_catch_up<T, bf16>(a, stream);
    }
    return launch_adam_catch_up<T, A>(a, stream);
  });
}

}  // namespace fastemb::cuda
