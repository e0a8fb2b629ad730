// Partial sums of long segments of terms, for all that reads the gradient of a fused step.
#pragma once

#include "cuda/row_terms.cuh"

namespace fastemb::cuda {

// One group of lanes a chunk. A step that is skipped has no segments.
template <typename A, int V>
__global__ void __launch_bounds__(kBlock, 2)
    term_chunks_kernel(RowStep r, int64_t slots, int32_t lanes, int64_t tiles) {
  const Place at = place(lanes);
  const Segments segments = {r.segments, rows_that_count(r)};
  if (segments.count == 0) return;
  for (int64_t tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
    const int64_t column = (tile * lanes + at.lane) * V;
    if (column >= r.dim) continue;
    for (int64_t slot = at.item; slot < slots; slot += at.step) {
      const LongChunk chunk = chunk_of_slot(segments, slot);
      if (chunk.first < 0) continue;
      A part[V] = {};
      sum_terms(r, chunk.begin, end_of_chunk(chunk), column, part);
      Vec<A, V> y;
#pragma unroll
      for (int v = 0; v < V; ++v) y.item[v] = part[v];
      store<V>(static_cast<A*>(r.partials) + slot * r.dim + column, y);
    }
  }
}

int launch_term_chunks(const RowStep& r, Stream stream) {
  if (r.num_terms <= kChunk || r.dim == 0) return 0;
  return with_dtype(r.grad_type, [&](auto dtype) {
    using G = typename decltype(dtype)::type;
    return with_vector<G>(aligned_terms(r, kVector<G>), [&](auto width) {
      constexpr int V = decltype(width)::value;
      const int64_t slots = bag_backward_partial_rows(r.num_terms);
      const RowShape shape = row_shape(slots, r.dim, V);
      auto kernel = &term_chunks_kernel<typename AccOf<G>::type, V>;
      return FE_LAUNCH(kernel, shape.grid, kBlock, stream, r, slots, shape.lanes, shape.tiles);
    });
  });
}

}  // namespace fastemb::cuda
