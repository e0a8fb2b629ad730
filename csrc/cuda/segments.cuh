// Sums over segments of sorted positions (group_indices), and where the partial sums of long segments lie.
//
// Nothing is added atomically and the host learns no count, so the bits depend on nothing but the input:
//   segments of at most kChunk positions   one group of threads adds them up;
//   longer segments                        one group for each chunk of kChunk positions writes a partial sum, then one
//                                          group for each segment adds its partial sums in order.
//
// Where partial sums lie. Cut the sorted positions into windows of kChunk. Chunks of a segment begin kChunk apart, so a
// segment longer than kChunk begins at most one chunk in each window. In one window
//   - at most one long segment begins its first chunk: the segment reaches beyond the window;
//   - at most one long segment begins a later chunk: such a segment also owns the position at the window's start, as
//     its previous chunk began less than kChunk before.
// So slot 2 * window + (first chunk ? 1 : 0) belongs to one chunk, and the chunk is found from its slot: the segment
// that owns the window's first position (later chunk), or the first position of the next window (first chunk, as the
// segment is longer than kChunk).
#pragma once

#include "cuda/primitives.cuh"

namespace fastemb::cuda {

// Segment k is [bounds[k], bounds[k + 1]); the first begins at 0.
struct Segments {
  const int32_t* bounds;
  int64_t count;
};

// A chunk of a long segment; first < 0 where a slot holds none.
struct LongChunk {
  int64_t segment;
  int64_t first;  // the segment's first sorted position
  int64_t end;    // and its end
  int64_t begin;  // the chunk's first sorted position
};

FE_DEVICE LongChunk chunk_of_slot(const Segments& segments, int64_t slot) {
  const LongChunk none = {0, -1, 0, 0};
  const int64_t window = slot / 2 * kChunk;
  const bool opening = slot % 2 == 1;
  const int64_t owned = opening ? window + kChunk : window;
  if (owned >= segments.bounds[segments.count]) return none;
  // The last segment that begins at or before `owned`. bounds[0] is 0, so there is one.
  int64_t low = 0;
  int64_t high = segments.count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (segments.bounds[middle] <= owned) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int64_t first = segments.bounds[low];
  const int64_t end = segments.bounds[low + 1];
  if (end - first <= kChunk) return none;
  if (opening) return first >= window && first < window + kChunk ? LongChunk{low, first, end, first} : none;
  const int64_t begin = first + ceil_div(window - first, kChunk) * kChunk;
  return first < window && begin < end ? LongChunk{low, first, end, begin} : none;
}

FE_DEVICE int64_t end_of_chunk(const LongChunk& chunk) {
  return chunk.begin + kChunk < chunk.end ? chunk.begin + kChunk : chunk.end;
}

FE_DEVICE int64_t slot_of_chunk(int64_t first, int64_t begin) {
  return 2 * (begin / kChunk) + (begin == first ? 1 : 0);
}

// sum += the partial sums of the long segment [first, end) in order, kAhead of them on the way at once.
template <int kAhead, int V, typename A>
FE_DEVICE void sum_partials(const A* partials, int64_t dim, int64_t first, int64_t end, int64_t column, A (&sum)[V]) {
  for (int64_t begin = first; begin < end; begin += kAhead * kChunk) {
    Vec<A, V> part[kAhead] = {};
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t start = begin + u * kChunk;
      if (start < end) part[u] = load<V>(partials + slot_of_chunk(first, start) * dim + column);
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (begin + u * kChunk >= end) continue;
#pragma unroll
      for (int v = 0; v < V; ++v) sum[v] = add_rn(sum[v], part[u].item[v]);
    }
  }
}

}  // namespace fastemb::cuda
