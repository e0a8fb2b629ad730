// Row-wise Adagrad: one group of lanes a row goes over it twice, for the dot product of the gradient with itself (in
// the order of dot.cuh) and for the update. A row of up to kDotLanes columns keeps its gradient in registers between.
#pragma once

#include "cuda/dot.cuh"
#include "cuda/row_terms.cuh"

namespace fastemb::cuda {

// Columns [d, d + 8) of the gradient by the rule; 0 behind the end of the row.
template <typename T, bool kVectors, typename A, typename From>
FE_DEVICE void load_lane_gradient(const RowStep& r, const GradientRule<A>& rule, int64_t k, From from, int64_t row,
                                  int64_t d, A (&grad)[kDotLane]) {
  constexpr int V = kVectors ? kVector<T> : 1;
  if constexpr (kVectors) {
    load_gradient(r, k, from, d, grad);
  } else {
#pragma unroll
    for (int i = 0; i < kDotLane; ++i) {
      A one[1] = {};
      if (d + i < r.dim) load_gradient(r, k, from, d + i, one);
      grad[i] = one[0];
    }
  }
#pragma unroll
  for (int i = 0; i < kDotLane; i += V) {
    Stored<T, V> stored = {};
    if (rule.decayed && (kVectors || d + i < r.dim)) stored = load_stored<T, V>(r, row, d + i);
#pragma unroll
    for (int v = 0; v < V; ++v) grad[i + v] = GradientRule<A>::apply(rule, grad[i + v], value_of(r, stored, v));
  }
}

template <typename T, bool kFused, bool kVectors>
__global__ void __launch_bounds__(kBlock, kFused || sizeof(T) == 8 ? 2 : 3)
    rowwise_adagrad_kernel(RowRowwiseAdagrad a, int32_t lanes) {
  using A = typename AccOf<T>::type;
  using Scalars = StepScalars<A, AdagradRule<A>>;
  constexpr int V = kVectors ? kVector<T> : 1;
  const Scalars scalars = once_per_block<Scalars>([&] {
    return Scalars{AdagradRule<A>::make(a), GradientRule<A>::make(a.rows, false), step_number(a.rows),
                   rows_that_count(a.rows)};
  });
  const int64_t dim = a.rows.dim;
  const bool in_registers = dim <= kDotLanes;
  const Place at = place(lanes);
  int64_t row = table_row(a.rows, at.item, scalars.num_rows);
  auto from = gradient_place<kFused>(a.rows, at.item, scalars.num_rows);
  for (int64_t k = at.item; first_of_warp(k, lanes) < scalars.num_rows; k += at.step) {
    const int64_t next_row = table_row(a.rows, k + at.step, scalars.num_rows);
    const auto next_from = gradient_place<kFused>(a.rows, k + at.step, scalars.num_rows);
    A grad[kDotLane] = {};
    DotLanes<A> sum;
    for (int64_t d = at.lane * kDotLane; row >= 0 && d < dim; d += kDotLanes) {
      load_lane_gradient<T, kVectors>(a.rows, scalars.gradient, k, from, row, d, grad);
#pragma unroll
      for (int i = 0; i < kDotLane; ++i) {
        if (kVectors || d + i < dim) sum.part[i] = add_rn(sum.part[i], mul_rn(grad[i], grad[i]));
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
      if (!in_registers) load_lane_gradient<T, kVectors>(a.rows, scalars.gradient, k, from, row, d, grad);
#pragma unroll
      for (int i = 0; i < kDotLane; i += V) {
        if (!kVectors && d + i >= dim) continue;
        const Stored<T, V> stored = load_stored<T, V>(a.rows, row, d + i);
        A value[V];
#pragma unroll
        for (int v = 0; v < V; ++v) value[v] = add_rn(value_of(a.rows, stored, v), -mul_rn(grad[i + v], rate));
        store_value<T>(a.rows, row, d + i, key, value);
      }
    }
    row = next_row;
    from = next_from;
  }
}

inline int launch_row_rowwise_adagrad(const RowRowwiseAdagrad& a, Stream stream) {
  if (a.rows.num_rows == 0 || a.rows.dim == 0) return 0;
  return with_dtype(a.rows.param_type, [&](auto dtype) {
    using T = typename decltype(dtype)::type;
    const int32_t lanes = dot_group(a.rows.dim);
    const bool vector = dot_vectors(a.rows.param, a.rows.param_stride, a.rows.dim, sizeof(T)) &&
                        aligned_step(a.rows, kDotLane) && aligned_terms(a.rows, kDotLane);
    dim3 grid = flat_grid(a.rows.num_rows * lanes);
    if (grid.x > kStepBlocks) grid.x = kStepBlocks;
    return with_gradient(a.rows, stream, [&](auto fused) {
      constexpr bool kFused = decltype(fused)::value;
      auto kernel = vector ? &rowwise_adagrad_kernel<T, kFused, true> : &rowwise_adagrad_kernel<T, kFused, false>;
      return FE_LAUNCH(kernel, grid, kBlock, stream, a, lanes);
    });
  });
}

}  // namespace fastemb::cuda
