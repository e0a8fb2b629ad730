// Rows whose norm is too large are scaled down in place. One group of lanes a row.
#pragma once

#include "cuda/dot.cuh"

namespace fastemb::cuda {

enum class Norm : int32_t { sum, square, largest, power };

inline Norm norm_of(double norm_type) {
  if (norm_type == 1.0) return Norm::sum;
  if (norm_type == 2.0) return Norm::square;
  return std::isinf(norm_type) ? Norm::largest : Norm::power;
}

template <typename A>
FE_DEVICE A norm_term(A x, Norm norm, A p) {
  const A size = x < 0 ? -x : x;
  switch (norm) {
    case Norm::square: return mul_rn(x, x);
    case Norm::power: return power(size, p);
    default: return size;
  }
}

// A NaN wins over every number, so that it reaches the norm.
template <typename A>
FE_DEVICE A norm_join(A x, A y, Norm norm) {
  if (norm != Norm::largest) return add_rn(x, y);
  return y > x || y != y ? y : x;
}

template <typename A>
FE_DEVICE A norm_root(A x, Norm norm, A inverse_p) {
  switch (norm) {
    case Norm::square: return sqrt_rn(x);
    case Norm::power: return power(x, inverse_p);
    default: return x;
  }
}

template <typename T, bool kVectors>
__global__ void __launch_bounds__(kBlock, 3) renorm_kernel(Renorm a, Norm norm, int32_t lanes) {
  using A = typename AccOf<T>::type;
  constexpr int V = kVectors ? kVector<T> : 1;
  const A p = static_cast<A>(a.norm_type);
  const A inverse_p = static_cast<A>(1.0 / a.norm_type);
  const A max_norm = static_cast<A>(a.max_norm);
  const int64_t num_rows = *a.groups.num_rows;
  const Place at = place(lanes);
  // Whole warps go round together: every lane takes part in the exchanges of the fold.
  const int64_t warp_groups = kWarp / lanes;
  for (int64_t k = at.item; k / warp_groups * warp_groups < num_rows; k += at.step) {
    const bool there = k < num_rows;
    T* row = static_cast<T*>(a.weight) + (there ? a.groups.rows[k] : 0) * a.weight_stride;
    DotLanes<A> sum;
    for (int64_t d = at.lane * kDotLane; there && d < a.dim; d += kDotLanes) {
#pragma unroll
      for (int i = 0; i < kDotLane; i += V) {
        if (!kVectors && d + i >= a.dim) continue;
        const Vec<T, V> x = load_mutable<V>(row + d + i);
#pragma unroll
        for (int v = 0; v < V; ++v) {
          sum.part[i + v] = norm_join(sum.part[i + v], norm_term(widen(x.item[v]), norm, p), norm);
        }
      }
    }
    const A size = norm_root(fold(sum, lanes, [norm](A x, A y) { return norm_join(x, y, norm); }), norm, inverse_p);
    if (!there || !(size > max_norm)) continue;
    const A factor = div_rn(max_norm, add_rn(size, static_cast<A>(1e-7)));
    for (int64_t d = at.lane * kDotLane; d < a.dim; d += kDotLanes) {
#pragma unroll
      for (int i = 0; i < kDotLane; i += V) {
        if (!kVectors && d + i >= a.dim) continue;
        Vec<T, V> x = load_mutable<V>(row + d + i);
#pragma unroll
        for (int v = 0; v < V; ++v) x.item[v] = FromAcc<T>::convert(mul_rn(widen(x.item[v]), factor));
        store<V>(row + d + i, x);
      }
    }
  }
}

inline int launch_renorm(const Renorm& a, Stream stream) {
  if (a.num_groups_capacity == 0 || a.dim == 0) return 0;
  return with_dtype(a.weight_type, [&](auto dtype) {
    using T = typename decltype(dtype)::type;
    const int32_t lanes = dot_group(a.dim);
    dim3 grid = flat_grid(a.num_groups_capacity * lanes);
    if (grid.x > kFillBlocks) grid.x = kFillBlocks;
    auto kernel =
        dot_vectors(a.weight, a.weight_stride, a.dim, sizeof(T)) ? &renorm_kernel<T, true> : &renorm_kernel<T, false>;
    return FE_LAUNCH(kernel, grid, kBlock, stream, a, norm_of(a.norm_type), lanes);
  });
}

}  // namespace fastemb::cuda
