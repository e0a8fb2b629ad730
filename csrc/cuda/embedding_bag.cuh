// The bag forward and the plain gather: kernels and launchers. The backward is in embedding_bag_backward.cuh.
#pragma once

#include "cuda/bags.cuh"

namespace fastemb::cuda {

// Rows that a lane has on the way at once. Divides kChunk.
template <int V>
inline constexpr int kRowsAhead = V == 1 ? 8 : 4;

// The row that position p of a bag names, or -1: nothing to add there.
template <typename I>
FE_DEVICE I row_to_add(const BagForward& a, int64_t p, bool reporter) {
  const I row = load<1>(static_cast<const I*>(a.bags.indices) + p).item[0];
  if (takes_part(a.bags, row)) return row;
  if (reporter && !in_table(a.bags, row)) report(a.error, ErrorReport::bad_index, p, row, a.bags.num_embeddings);
  return -1;
}

// A lane's V columns of a row; nothing is read for row -1.
template <int V, typename T>
FE_DEVICE Vec<T, V> load_row(const T* weight, int64_t stride, int64_t row, int64_t column) {
  return row >= 0 ? load<V>(weight + row * stride + column) : Vec<T, V>{};
}

// sum and mean: output columns [column, column + V) of bag b.
template <typename T, typename I, int V>
FE_DEVICE void pool_bag(const BagForward& a, int64_t b, int64_t column, bool reporter) {
  using A = typename AccOf<T>::type;
  constexpr int kAhead = kRowsAhead<V>;
  const T* weight = static_cast<const T*>(a.weight);
  const BagRange range = checked_bag_range(a.bags, b, a.error, reporter);
  A sum[V] = {};
  int64_t count = 0;
  for (int64_t chunk = range.begin; chunk < range.end; chunk += kChunk) {
    const int64_t chunk_end = chunk + kChunk < range.end ? chunk + kChunk : range.end;
    A part[V] = {};
    for (int64_t p = chunk; p < chunk_end; p += kAhead) {
      I row[kAhead];
      Vec<T, V> x[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) row[u] = p + u < chunk_end ? row_to_add<I>(a, p + u, reporter) : -1;
#pragma unroll
      for (int u = 0; u < kAhead; ++u) x[u] = load_row<V>(weight, a.weight_stride, row[u], column);
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (row[u] < 0) continue;
        ++count;
        if (a.per_sample_weights != nullptr) {
          const A scale = load_as<A>(a.per_sample_weights, a.per_sample_type, p + u);
#pragma unroll
          for (int v = 0; v < V; ++v) part[v] = add_rn(part[v], mul_rn(scale, widen(x[u].item[v])));
        } else {
#pragma unroll
          for (int v = 0; v < V; ++v) part[v] = add_rn(part[v], widen(x[u].item[v]));
        }
      }
    }
#pragma unroll
    for (int v = 0; v < V; ++v) sum[v] = add_rn(sum[v], part[v]);
  }
  if (a.mode == Mode::mean && count > 0) {
#pragma unroll
    for (int v = 0; v < V; ++v) sum[v] = div_rn(sum[v], static_cast<A>(count));
  }
  store_as<V>(a.output, a.output_type, b * a.dim + column, sum);
}

// max: the same columns, and where each winner stood.
template <typename T, typename I, int V>
FE_DEVICE void max_bag(const BagForward& a, int64_t b, int64_t column, bool reporter) {
  using A = typename AccOf<T>::type;
  constexpr int kAhead = kRowsAhead<V>;
  const T* weight = static_cast<const T*>(a.weight);
  const BagRange range = checked_bag_range(a.bags, b, a.error, reporter);
  A best[V] = {};
  Vec<int32_t, V> winner;
#pragma unroll
  for (int v = 0; v < V; ++v) winner.item[v] = -1;
  for (int64_t p = range.begin; p < range.end; p += kAhead) {
    I row[kAhead];
    Vec<T, V> x[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) row[u] = p + u < range.end ? row_to_add<I>(a, p + u, reporter) : -1;
#pragma unroll
    for (int u = 0; u < kAhead; ++u) x[u] = load_row<V>(weight, a.weight_stride, row[u], column);
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (row[u] < 0) continue;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const A y = widen(x[u].item[v]);
        const bool first_nan = y != y && best[v] == best[v];
        if (winner.item[v] < 0 || y > best[v] || first_nan) {
          best[v] = y;
          winner.item[v] = static_cast<int32_t>(p + u - range.begin);
        }
      }
    }
  }
  const int64_t at = b * a.dim + column;
  store_as<V>(a.output, a.output_type, at, best);
  store<V>(a.argmax + at, winner);
}

template <typename T, typename I, bool kMax, int V>
__global__ void __launch_bounds__(kBlock, V == 8 && !kMax ? 2 : 3)
    bag_forward_kernel(BagForward a, int32_t lanes, int64_t tiles) {
  const Place at = place(lanes);
  for (int64_t tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
    const int64_t column = (tile * lanes + at.lane) * V;
    if (column >= a.dim) continue;
    for (int64_t b = at.item; b < a.bags.num_bags; b += at.step) {
      if constexpr (kMax) {
        max_bag<T, I, V>(a, b, column, column == 0);
      } else {
        pool_bag<T, I, V>(a, b, column, column == 0);
      }
    }
  }
}

// May V elements at a time be read from rows and written to the output?
template <typename T>
bool vector_rows(const void* weight, int64_t stride, int64_t dim, const void* output) {
  return dim % kVector<T> == 0 && stride % kVector<T> == 0 && aligned(weight, 16) && aligned(output, 16);
}

inline int launch_bag_forward(const BagForward& a, Stream stream) {
  if (a.bags.num_bags == 0 || a.dim == 0) return 0;
  return with_dtype(a.weight_type, [&](auto dtype) {
    using T = typename decltype(dtype)::type;
    const bool vector =
        vector_rows<T>(a.weight, a.weight_stride, a.dim, a.output) && (a.mode != Mode::max || aligned(a.argmax, 16));
    return with_index(a.bags.index_type, [&](auto index) {
      return with_vector<T>(vector, [&](auto width) {
        using I = typename decltype(index)::type;
        constexpr int V = decltype(width)::value;
        const RowShape shape = row_shape(a.bags.num_bags, a.dim, V);
        auto kernel = a.mode == Mode::max ? &bag_forward_kernel<T, I, true, V> : &bag_forward_kernel<T, I, false, V>;
        return FE_LAUNCH(kernel, shape.grid, kBlock, stream, a, shape.lanes, shape.tiles);
      });
    });
  });
}

// output[n] = weight[indices[n]]. A group moves kRowsAhead neighbouring rows at a time.
template <typename T, typename I, int V>
__global__ void __launch_bounds__(kBlock, 3) gather_kernel(Gather a, int32_t lanes, int64_t tiles) {
  using A = typename AccOf<T>::type;
  constexpr int kAhead = kRowsAhead<V>;
  const Place at = place(lanes);
  const T* weight = static_cast<const T*>(a.weight);
  for (int64_t tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
    const int64_t column = (tile * lanes + at.lane) * V;
    if (column >= a.dim) continue;
    for (int64_t item = at.item; item * kAhead < a.bags.num_indices; item += at.step) {
      const int64_t first = item * kAhead;
      int64_t row[kAhead];
      Vec<T, V> x[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        row[u] = first + u < a.bags.num_indices ? load_integer<I>(a.bags.indices, first + u) : 0;
        if (column == 0 && first + u < a.bags.num_indices && !in_table(a.bags, row[u])) {
          report(a.error, ErrorReport::bad_index, first + u, row[u], a.bags.num_embeddings);
        }
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        x[u] = load_row<V>(weight, a.weight_stride, in_table(a.bags, row[u]) ? row[u] : -1, column);
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (first + u >= a.bags.num_indices) continue;
        const int64_t to = (first + u) * a.dim + column;
        if (a.output_type == kDType<T>) {
          store<V>(static_cast<T*>(a.output) + to, x[u]);
        } else {
          A y[V];
#pragma unroll
          for (int v = 0; v < V; ++v) y[v] = widen(x[u].item[v]);
          store_as<V>(a.output, a.output_type, to, y);
        }
      }
    }
  }
}

inline int launch_gather(const Gather& a, Stream stream) {
  if (a.bags.num_indices == 0 || a.dim == 0) return 0;
  return with_dtype(a.weight_type, [&](auto dtype) {
    using T = typename decltype(dtype)::type;
    const bool vector = vector_rows<T>(a.weight, a.weight_stride, a.dim, a.output);
    return with_index(a.bags.index_type, [&](auto index) {
      return with_vector<T>(vector, [&](auto width) {
        using I = typename decltype(index)::type;
        constexpr int V = decltype(width)::value;
        const RowShape shape = row_shape(ceil_div(a.bags.num_indices, kRowsAhead<V>), a.dim, V);
        return FE_LAUNCH((gather_kernel<T, I, V>), shape.grid, kBlock, stream, a, shape.lanes, shape.tiles);
      });
    });
  });
}

}  // namespace fastemb::cuda
