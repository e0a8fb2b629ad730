// Row-wise Adagrad: one group of lanes a row goes over it twice, for the dot product of the gradient with itself (in
// the order of dot.cuh) and for the update.
#pragma once

#include "cuda/dot.cuh"
#include "cuda/row_access.cuh"

namespace fastemb::cuda {

// Columns [column, column + V): the gradient by the rule, and the value, which is 0 unless asked for.
template <typename T, int V, typename A>
FE_DEVICE void load_columns(const RowStep& r, const GradientRule<A>& rule, bool with_value, int64_t k, int64_t row,
                            int64_t column, A (&grad)[V], A (&value)[V]) {
  Stored<T, V> stored = {};
  if (with_value) stored = load_stored<T, V>(r, row, column);
  load_gradient(r, k, column, grad);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    value[v] = with_value ? value_of(r, stored, v) : A(0);
    grad[v] = GradientRule<A>::apply(rule, grad[v], value[v]);
  }
}

template <typename T, bool kVectors>
__global__ void __launch_bounds__(kBlock, kVectors ? 3 : 2) rowwise_adagrad_kernel(RowRowwiseAdagrad a, int32_t lanes) {
  using A = typename AccOf<T>::type;
  using Scalars = StepScalars<A, AdagradRule<A>>;
  constexpr int V = kVectors ? kVector<T> : 1;
  const Scalars scalars = once_per_block<Scalars>([&] {
    return Scalars{AdagradRule<A>::make(a), GradientRule<A>::make(a.rows, false), step_number(a.rows),
                   rows_that_count(a.rows)};
  });
  const int64_t dim = a.rows.dim;
  const Place at = place(lanes);
  int64_t row = table_row(a.rows, at.item, scalars.num_rows);
  for (int64_t k = at.item; first_of_warp(k, lanes) < scalars.num_rows; k += at.step) {
    const int64_t next_row = table_row(a.rows, k + at.step, scalars.num_rows);
    DotLanes<A> sum;
    for (int64_t d = at.lane * kDotLane; row >= 0 && d < dim; d += kDotLanes) {
#pragma unroll
      for (int i = 0; i < kDotLane; i += V) {
        if (!kVectors && d + i >= dim) continue;
        A grad[V], value[V];
        load_columns<T>(a.rows, scalars.gradient, scalars.gradient.decayed, k, row, d + i, grad, value);
#pragma unroll
        for (int v = 0; v < V; ++v) sum.part[i + v] = add_rn(sum.part[i + v], mul_rn(grad[v], grad[v]));
      }
    }
    const A square = fold(sum, lanes, [](A x, A y) { return add_rn(x, y); });
    A rate = 0;
    if (row >= 0 && at.lane == 0) {
      A* total = static_cast<A*>(a.sum) + row;
      *total = add_rn(*total, div_rn(square, static_cast<A>(dim)));
      rate = AdagradRule<A>::row_rate(scalars.rule, *total);
    }
    rate = of_first_lane(rate, lanes);
    const uint64_t key = stochastic_key(a.rows, scalars.step, row);
    for (int64_t d = at.lane * kDotLane; row >= 0 && d < dim; d += kDotLanes) {
#pragma unroll
      for (int i = 0; i < kDotLane; i += V) {
        if (!kVectors && d + i >= dim) continue;
        A grad[V], value[V];
        load_columns<T>(a.rows, scalars.gradient, true, k, row, d + i, grad, value);
#pragma unroll
        for (int v = 0; v < V; ++v) value[v] = add_rn(value[v], -mul_rn(grad[v], rate));
        store_value<T>(a.rows, row, d + i, key, value);
      }
    }
    row = next_row;
  }
}

inline int launch_row_rowwise_adagrad(const RowRowwiseAdagrad& a, Stream stream) {
  if (a.rows.num_rows == 0 || a.rows.dim == 0) return 0;
  return with_dtype(a.rows.param_type, [&](auto dtype) {
    using T = typename decltype(dtype)::type;
    const int32_t lanes = dot_group(a.rows.dim);
    const bool vector =
        dot_vectors(a.rows.param, a.rows.param_stride, a.rows.dim, sizeof(T)) && aligned_step(a.rows, kVector<T>);
    dim3 grid = flat_grid(a.rows.num_rows * lanes);
    if (grid.x > kStepBlocks) grid.x = kStepBlocks;
    auto kernel = vector ? &rowwise_adagrad_kernel<T, true> : &rowwise_adagrad_kernel<T, false>;
    return FE_LAUNCH(kernel, grid, kBlock, stream, a, lanes);
  });
}

}  // namespace fastemb::cuda
