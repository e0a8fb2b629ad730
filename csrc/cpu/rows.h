// Sums of rows, the inner loop of forward and backward: part[d] = sum over a list of rows of scale_i * row_i[d], in
// list order, one rounded multiply and one rounded add per term.
#pragma once

#include "cpu/vec.h"

namespace fastemb::cpu::FE_ISA {

inline constexpr int kMaxVectors = 8;           // vector accumulators held in registers
inline constexpr int64_t kPrefetchAhead = 128;  // rows; best of 16 to 192, near prefetch into L1 gained nothing

// Where rows come from. row(i) and scale(i) are the i-th term, ahead(i) a row that is wanted kPrefetchAhead terms
// later.

// Up to kChunk rows, looked up beforehand.
template <typename T>
struct RowList {
  using Element = T;
  using A = typename AccOf<T>::type;
  const T* rows[kChunk];
  const T* rows_ahead[kChunk];
  A scales[kChunk];

  FE_FUNCTION const T* row(const RowList& list, int64_t i) { return list.rows[i]; }
  FE_FUNCTION const T* ahead(const RowList& list, int64_t i) { return list.rows_ahead[i]; }
  FE_FUNCTION A scale(const RowList& list, int64_t i) { return list.scales[i]; }
};

// Rows straight from the indices, when nothing is left out, nothing is scaled, and kPrefetchAhead more indices follow.
template <typename T, typename I>
struct IndexedRows {
  using Element = T;
  using A = typename AccOf<T>::type;
  const T* weight;
  int64_t stride;
  const I* indices;

  FE_FUNCTION const T* row(const IndexedRows& from, int64_t i) {
    return from.weight + static_cast<int64_t>(from.indices[i]) * from.stride;
  }
  FE_FUNCTION const T* ahead(const IndexedRows& from, int64_t i) { return row(from, i + kPrefetchAhead); }
  FE_FUNCTION A scale(const IndexedRows&, int64_t) { return A{1}; }
};

// Into L2: the addresses are random, and L1 is too small for this many rows.
FE_FUNCTION void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }

FE_FUNCTION void prefetch_row(const void* row, int64_t bytes) {
  constexpr int64_t kMost = 1024;  // what follows, the hardware foresees
  for (int64_t byte = 0; byte < bytes && byte < kMost; byte += 64) prefetch(static_cast<const char*>(row) + byte);
}

// How a finished row leaves: through the caches, or streamed past them (a large output that is written once would
// otherwise first be read). Streaming needs rows that start and end on a vector, and a fence before others read.
enum class Leave { cached, streamed };

FE_FUNCTION void stream(float* p, Vec<float> v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, (__m256)v);
#elif defined(__SSE2__)
  _mm_stream_ps(p, (__m128)v);
#else
  store(p, v);
#endif
}

FE_FUNCTION void stream(double* p, Vec<double> v) {
#if defined(__AVX512F__)
  _mm512_stream_pd(p, (__m512d)v);
#elif defined(__AVX2__)
  _mm256_stream_pd(p, (__m256d)v);
#elif defined(__SSE2__)
  _mm_stream_pd(p, (__m128d)v);
#else
  store(p, v);
#endif
}

FE_FUNCTION void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// N vectors of columns from `first`; the last of them at `last`, so that the row's end is met by overlapping the
// neighbour (both compute the same sums).
template <int N, bool kScaled, Leave kLeave, typename Rows, typename A>
FE_FUNCTION void sum_columns(const Rows& rows, int64_t begin, int64_t end, int64_t first, int64_t last, A* out) {
  constexpr int L = kLanes<A>;
  constexpr int kVectorsPerLine = 64 / static_cast<int>(L * sizeof(typename Rows::Element));
  Vec<A> sums[N] = {};
  for (int64_t i = begin; i < end; ++i) {
    const auto* row = Rows::row(rows, i);
    const auto* ahead = Rows::ahead(rows, i) + first;
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      if (v % kVectorsPerLine == 0) prefetch(ahead + v * L);
      Vec<A> x = load(row + (v == N - 1 ? last : first + v * L));
      if constexpr (kScaled) x = broadcast(Rows::scale(rows, i)) * x;
      sums[v] += x;
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v) {
    A* at = out + (v == N - 1 ? last : first + v * L);
    if constexpr (kLeave == Leave::streamed) {
      stream(at, sums[v]);
    } else {
      store(at, sums[v]);
    }
  }
}

// dim < one vector.
template <bool kScaled, typename Rows, typename A>
FE_FUNCTION void sum_narrow(const Rows& rows, int64_t begin, int64_t end, int64_t dim, A* out) {
  Vec<A> sum = {};
  for (int64_t i = begin; i < end; ++i) {
    prefetch(Rows::ahead(rows, i));
    Vec<A> x = load_part<A>(Rows::row(rows, i), dim);
    if constexpr (kScaled) x = broadcast(Rows::scale(rows, i)) * x;
    sum += x;
  }
  store_part(out, sum, dim);
}

template <bool kScaled, Leave kLeave, typename Rows, typename A>
FE_FUNCTION void sum_wide(const Rows& rows, int64_t begin, int64_t end, int64_t dim, A* out) {
  constexpr int L = kLanes<A>;
  for (int64_t first = 0; first < dim; first += kMaxVectors * L) {
    const int64_t left = (dim - first + L - 1) / L;
    const int64_t n = left < kMaxVectors ? left : kMaxVectors;
    const int64_t last = left <= kMaxVectors ? dim - L : first + (n - 1) * L;
    switch (n) {
#define FE_CASE(N) \
  case N: sum_columns<N, kScaled, kLeave>(rows, begin, end, first, last, out); break;
      FE_CASE(1) FE_CASE(2) FE_CASE(3) FE_CASE(4) FE_CASE(5) FE_CASE(6) FE_CASE(7) FE_CASE(8)
#undef FE_CASE
    }
  }
}

// out[0..dim) = sum of terms [begin, end).
template <bool kScaled, Leave kLeave, typename Rows, typename A>
static void sum_rows(const Rows& rows, int64_t begin, int64_t end, int64_t dim, A* out) {
  if (dim < kLanes<A>) {
    sum_narrow<kScaled>(rows, begin, end, dim, out);
  } else {
    sum_wide<kScaled, kLeave>(rows, begin, end, dim, out);
  }
}

// Sums of all chunks of one output row: acc (dim elements) holds the result, part is scratch of the same size.
template <typename A>
struct ChunkedSum {
  A* acc;
  A* part;
  int64_t dim;
  bool empty = true;

  template <bool kScaled, typename Rows>
  void add(const Rows& rows, int64_t begin, int64_t end) {
    sum_rows<kScaled, Leave::cached>(rows, begin, end, dim, empty ? acc : part);
    added_part();
  }

  // After a chunk's sum was written to acc (the first) or part.
  void added_part() {
    if (!empty) {
      for (int64_t d = 0; d < dim; ++d) acc[d] += part[d];
    }
    empty = false;
  }
};

}  // namespace fastemb::cpu::FE_ISA
