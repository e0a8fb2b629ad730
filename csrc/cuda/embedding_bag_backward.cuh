// Gradients of the bag: of the table's rows and of the per-sample weights. Kernels and launchers.
//
// Row gradients are sums over the positions that name the row, which group_indices has sorted next to each other
// (a segment): segments.cuh says how.
#pragma once

#include "cuda/bags.cuh"
#include "cuda/dot.cuh"
#include "cuda/segments.cuh"

namespace fastemb::cuda {

// ---- which bag a position is in, how many positions a bag has ----------------------------------------------------

// The bag of position p, or -1: the last bag that begins at or before p, if it also reaches p.
FE_DEVICE int32_t find_bag(const Bags& bags, int64_t p) {
  int64_t low = 0;
  int64_t high = bags.num_bags;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (load_integer(bags.offsets, bags.offset_type, middle) <= p) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == 0) return -1;
  const BagRange range = bag_range(bags, low - 1);
  return range.begin <= p && p < range.end ? static_cast<int32_t>(low - 1) : -1;
}

// bag_of[p] for bags with offsets.
__global__ void __launch_bounds__(kBlock) find_bags(Bags bags, int32_t* bag_of) {
  for (int64_t p = flat_thread(); p < bags.num_indices; p += flat_threads()) bag_of[p] = find_bag(bags, p);
}

// The same without a search where bags have one length. Positions fit 31 bits.
FE_DEVICE int32_t bag_at(const Bags& bags, const int32_t* bag_of, int32_t p) {
  if (bags.offsets != nullptr) return load<1>(bag_of + p).item[0];
  return bags.bag_length == 1 ? p : p / static_cast<int32_t>(bags.bag_length);
}

// count[b] = positions of bag b that take part. One warp a bag.
template <typename A>
__global__ void __launch_bounds__(kBlock) count_bags(Bags bags, A* count) {
  const Place at = place(kWarp);
  for (int64_t b = at.item; b < bags.num_bags; b += at.step) {
    const BagRange range = bag_range(bags, b);
    int64_t n = 0;
    for (int64_t p = range.begin + at.lane; p < range.end; p += kWarp) {
      n += takes_part(bags, load_integer(bags.indices, bags.index_type, p)) ? 1 : 0;
    }
    n = warp_sum(n);
    if (at.lane == 0) count[b] = static_cast<A>(n);
  }
}

// What the backward passes ask about bags, written where they need it: bag_of for bags with offsets, count for mean.
template <typename A>
int describe_bags(const Bags& bags, Mode mode, int32_t* bag_of, A* count, Stream stream) {
  if (bags.offsets != nullptr) {
    if (int error = FE_LAUNCH(find_bags, flat_grid(bags.num_indices), kBlock, stream, bags, bag_of)) return error;
  }
  if (mode == Mode::mean && bags.num_bags > 0) {
    if (int error = FE_LAUNCH(count_bags<A>, flat_grid(bags.num_bags * kWarp), kBlock, stream, bags, count)) {
      return error;
    }
  }
  return 0;
}

// ---- row gradients -----------------------------------------------------------------------------------------------

// Gradient rows that a lane has on the way at once. Divides kChunk. Winners of 16-bit vectors take twice the registers
// of the gradients themselves.
template <bool kMax, int V>
inline constexpr int kGradsAhead = V == 1 ? 8 : (kMax && V == 8 ? 2 : 4);

// What the position's row of grad_output is multiplied by.
template <typename A, typename Problem>
FE_DEVICE A term_scale(const Problem& a, int64_t position, int64_t bag) {
  A scale = 1;
  if (a.per_sample_weights != nullptr) scale = load_as<A>(a.per_sample_weights, a.per_sample_type, position);
  if (a.mode == Mode::mean) scale = div_rn(scale, load<1>(static_cast<const A*>(a.bag_count) + bag).item[0]);
  return scale;
}

// part = sum over sorted positions [begin, end), at most kChunk of them, in order.
template <typename G, bool kMax, int V, typename A>
FE_DEVICE void sum_chunk(const BagBackward& a, int64_t begin, int64_t end, int64_t column, A (&part)[V]) {
  constexpr int kAhead = kGradsAhead<kMax, V>;
  const G* grad = static_cast<const G*>(a.grad_output);
  for (int64_t i = begin; i < end; i += kAhead) {
    int32_t position[kAhead];
    int32_t bag[kAhead];
    Vec<G, V> g[kAhead] = {};
    Vec<int32_t, V> winner[kAhead] = {};
#pragma unroll
    for (int u = 0; u < kAhead; ++u) position[u] = i + u < end ? load<1>(a.groups.order + i + u).item[0] : -1;
#pragma unroll
    for (int u = 0; u < kAhead; ++u) bag[u] = position[u] < 0 ? -1 : bag_at(a.bags, a.bag_of, position[u]);
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (bag[u] < 0) continue;
      g[u] = load<V>(grad + static_cast<int64_t>(bag[u]) * a.dim + column);
      if constexpr (kMax) winner[u] = load<V>(a.argmax + static_cast<int64_t>(bag[u]) * a.dim + column);
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (bag[u] < 0) continue;
      if constexpr (kMax) {
        const int64_t within = position[u] - bag_range(a.bags, bag[u]).begin;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (winner[u].item[v] == within) part[v] = add_rn(part[v], widen(g[u].item[v]));
        }
      } else {
        const A scale = term_scale<A>(a, position[u], bag[u]);
#pragma unroll
        for (int v = 0; v < V; ++v) part[v] = add_rn(part[v], mul_rn(scale, widen(g[u].item[v])));
      }
    }
  }
}

template <int V, typename A>
FE_DEVICE void store_row_gradient(const BagBackward& a, int64_t k, int64_t length, int64_t column, A (&sum)[V]) {
  Vec<A, V> y;
#pragma unroll
  for (int v = 0; v < V; ++v) y.item[v] = a.scale_grad_by_freq ? div_rn(sum[v], static_cast<A>(length)) : sum[v];
  const int64_t row = a.dense ? a.groups.rows[k] : k;
  store<V>(static_cast<A*>(a.grad_rows) + row * a.dim + column, y);
}

// Segments of at most kChunk positions.
template <typename G, bool kMax, int V>
__global__ void __launch_bounds__(kBlock, kMax ? 2 : 3)
    short_segments_kernel(BagBackward a, int32_t lanes, int64_t tiles) {
  using A = typename AccOf<G>::type;
  const Place at = place(lanes);
  const int64_t num_rows = *a.groups.num_rows;
  for (int64_t tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
    const int64_t column = (tile * lanes + at.lane) * V;
    if (column >= a.dim) continue;
    for (int64_t k = at.item; k < num_rows; k += at.step) {
      const int64_t begin = a.groups.segments[k];
      const int64_t length = a.groups.segments[k + 1] - begin;
      if (length > kChunk) continue;
      A part[V] = {};
      sum_chunk<G, kMax, V>(a, begin, begin + length, column, part);
      store_row_gradient<V>(a, k, length, column, part);
    }
  }
}

// Partial sums of the long segments' chunks.
template <typename G, bool kMax, int V>
__global__ void __launch_bounds__(kBlock, 2)
    long_chunks_kernel(BagBackward a, int64_t slots, int32_t lanes, int64_t tiles) {
  using A = typename AccOf<G>::type;
  const Place at = place(lanes);
  const Segments segments = {a.groups.segments, *a.groups.num_rows};
  for (int64_t tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
    const int64_t column = (tile * lanes + at.lane) * V;
    if (column >= a.dim) continue;
    for (int64_t slot = at.item; slot < slots; slot += at.step) {
      const LongChunk chunk = chunk_of_slot(segments, slot);
      if (chunk.first < 0) continue;
      A part[V] = {};
      sum_chunk<G, kMax, V>(a, chunk.begin, end_of_chunk(chunk), column, part);
      Vec<A, V> y;
#pragma unroll
      for (int v = 0; v < V; ++v) y.item[v] = part[v];
      store<V>(static_cast<A*>(a.partials) + slot * a.dim + column, y);
    }
  }
}

// Row gradients of the long segments from their partial sums. The group that meets a segment's first chunk does it all.
template <typename A, int V>
__global__ void __launch_bounds__(kBlock, 2)
    long_segments_kernel(BagBackward a, int64_t windows, int32_t lanes, int64_t tiles) {
  const Place at = place(lanes);
  const Segments segments = {a.groups.segments, *a.groups.num_rows};
  for (int64_t tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
    const int64_t column = (tile * lanes + at.lane) * V;
    if (column >= a.dim) continue;
    for (int64_t window = at.item; window < windows; window += at.step) {
      const LongChunk chunk = chunk_of_slot(segments, 2 * window + 1);
      if (chunk.first < 0) continue;
      A sum[V] = {};
      sum_partials<8>(static_cast<const A*>(a.partials), a.dim, chunk.first, chunk.end, column, sum);
      store_row_gradient<V>(a, chunk.segment, chunk.end - chunk.first, column, sum);
    }
  }
}

template <typename G, bool kMax, int V>
int launch_segments(const BagBackward& a, Stream stream) {
  using A = typename AccOf<G>::type;
  const int64_t n = a.bags.num_indices;
  RowShape shape = row_shape(n, a.dim, V, kFillBlocks);
  if (int error =
          FE_LAUNCH((short_segments_kernel<G, kMax, V>), shape.grid, kBlock, stream, a, shape.lanes, shape.tiles)) {
    return error;
  }
  if (n <= kChunk) return 0;
  const int64_t slots = bag_backward_partial_rows(n);
  shape = row_shape(slots, a.dim, V);
  if (int error =
          FE_LAUNCH((long_chunks_kernel<G, kMax, V>), shape.grid, kBlock, stream, a, slots, shape.lanes, shape.tiles)) {
    return error;
  }
  shape = row_shape(slots / 2, a.dim, V);
  return FE_LAUNCH((long_segments_kernel<A, V>), shape.grid, kBlock, stream, a, slots / 2, shape.lanes, shape.tiles);
}

inline int launch_bag_backward(const BagBackward& a, Stream stream) {
  if (a.bags.num_indices == 0 || a.dim == 0) return 0;
  return with_dtype(a.grad_type, [&](auto dtype) {
    using G = typename decltype(dtype)::type;
    using A = typename AccOf<G>::type;
    if (int error = describe_bags(a.bags, a.mode, a.bag_of, static_cast<A*>(a.bag_count), stream)) return error;
    // grad_rows and partials are wider than or as wide as grad_output: a vector of them needs no stricter alignment.
    const bool vector = a.dim % kVector<G> == 0 && aligned(a.grad_output, 16) && aligned(a.grad_rows, 16) &&
                        aligned(a.partials, 16) && (a.mode != Mode::max || aligned(a.argmax, 16));
    return with_vector<G>(vector, [&](auto width) {
      constexpr int V = decltype(width)::value;
      return a.mode == Mode::max ? launch_segments<G, true, V>(a, stream) : launch_segments<G, false, V>(a, stream);
    });
  });
}

// ---- row gradients as a sparse matrix times grad_output ----------------------------------------------------------

// One thread a sorted position. -1 for the bag of a position that no bag covers.
template <typename A>
__global__ void __launch_bounds__(kBlock) bag_terms_kernel(BagTerms a) {
  for (int64_t j = flat_thread(); j < a.bags.num_indices; j += flat_threads()) {
    const int32_t position = load<1>(a.order + j).item[0];
    const bool there = position >= 0 && position < a.bags.num_indices;
    const int32_t bag = there ? bag_at(a.bags, a.bag_of, position) : -1;
    a.sources[j] = bag;
    if (a.coefficients == nullptr) continue;
    static_cast<A*>(a.coefficients)[j] = bag < 0 ? A(0) : term_scale<A>(a, position, bag);
  }
}

inline int launch_bag_terms(const BagTerms& a, Stream stream) {
  if (a.bags.num_indices == 0) return 0;
  const auto launch = [&](auto dtype) {
    using A = typename decltype(dtype)::type;
    if (int error = describe_bags(a.bags, a.mode, a.bag_of, static_cast<A*>(a.bag_count), stream)) return error;
    return FE_LAUNCH(bag_terms_kernel<A>, flat_grid(a.bags.num_indices), kBlock, stream, a);
  };
  return a.acc_type == DType::f64 ? launch(Type<double>{}) : launch(Type<float>{});
}

// ---- per-sample weights ------------------------------------------------------------------------------------------

// grad_weights[p] = dot(grad_output[bag(p)], weight[indices[p]]). One group of lanes a position.
template <typename T, bool kVectors>
__global__ void __launch_bounds__(kBlock, 2) per_sample_kernel(PerSampleBackward a, int32_t lanes) {
  using A = typename AccOf<T>::type;
  const Place at = place(lanes);
  const T* weight = static_cast<const T*>(a.weight);
  const A* grad = static_cast<const A*>(a.grad_output);
  // Whole warps go round together: every lane takes part in the exchanges of the fold.
  const int64_t warp_groups = kWarp / lanes;
  for (int64_t p = at.item; p / warp_groups * warp_groups < a.bags.num_indices; p += at.step) {
    const bool there = p < a.bags.num_indices;
    const int64_t row = there ? load_integer(a.bags.indices, a.bags.index_type, p) : -1;
    const int64_t bag = there && takes_part(a.bags, row) ? bag_at(a.bags, a.bag_of, static_cast<int32_t>(p)) : -1;
    DotLanes<A> sum;
    if (bag >= 0) {
      const T* x = weight + row * a.weight_stride;
      const A* g = grad + bag * a.dim;
      for (int64_t d = at.lane * kDotLane; d < a.dim; d += kDotLanes) {
        A left[kDotLane];
        A right[kDotLane];
        const int count = load_dot_lane<kVectors>(g, d, a.dim, left);
        load_dot_lane<kVectors>(x, d, a.dim, right);
#pragma unroll
        for (int v = 0; v < kDotLane; ++v) {
          if (v < count) sum.part[v] = add_rn(sum.part[v], mul_rn(left[v], right[v]));
        }
      }
    }
    A dot = fold(sum, lanes, [](A x, A y) { return add_rn(x, y); });
    if (bag >= 0 && at.lane == 0) {
      if (a.mode == Mode::mean) dot = div_rn(dot, load<1>(static_cast<const A*>(a.bag_count) + bag).item[0]);
      static_cast<A*>(a.grad_weights)[p] = dot;
    }
  }
}

inline int launch_per_sample_backward(const PerSampleBackward& a, Stream stream) {
  if (a.bags.num_indices == 0) return 0;
  return with_dtype(a.weight_type, [&](auto dtype) {
    using T = typename decltype(dtype)::type;
    using A = typename AccOf<T>::type;
    if (int error = describe_bags(a.bags, a.mode, a.bag_of, static_cast<A*>(a.bag_count), stream)) return error;
    const bool vectors = dot_vectors(a.weight, a.weight_stride, a.dim, sizeof(T)) && aligned(a.grad_output, 16);
    const int32_t lanes = dot_group(a.dim);
    const dim3 grid = flat_grid(a.bags.num_indices * lanes);
    auto kernel = vectors ? &per_sample_kernel<T, true> : &per_sample_kernel<T, false>;
    return FE_LAUNCH(kernel, grid, kBlock, stream, a, lanes);
  });
}

}  // namespace fastemb::cuda
