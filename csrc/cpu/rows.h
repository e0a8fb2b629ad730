// Sums of rows, the inner loop of forward and backward: part[d] = sum over a list of rows of scale_i * row_i[d], in list
// order, one rounded multiply and one rounded add per term.
#pragma once

#include "cpu/vec.h"

namespace fastemb::cpu::FE_ISA {

inline constexpr int kMaxVectors = 8;          // vector accumulators held in registers
inline constexpr int64_t kPrefetchAhead = 64;  // rows; 50 to 100 ahead gain most, the next few rows nothing
inline constexpr int64_t kPrefetchBytes = 1024;  // of a row; what follows, the hardware foresees

// Up to kChunk rows to be summed. `ahead` names rows that will be wanted kPrefetchAhead rows later.
template <typename T>
struct RowList {
  using A = typename AccOf<T>::type;
  const T* rows[kChunk];
  const T* ahead[kChunk];
  A scales[kChunk];
  int64_t count = 0;
};

FE_FUNCTION void prefetch_row(const void* row, int64_t bytes) {
  // Into L2: the addresses are random, and L1 is too small for this many rows.
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(static_cast<const char*>(row) + byte, 0, 2);
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
template <int N, bool kScaled, Leave kLeave, typename T, typename A>
FE_FUNCTION void sum_columns(const RowList<T>& list, int64_t begin, int64_t end, int64_t first, int64_t last,
                             int64_t prefetch_bytes, A* out) {
  constexpr int L = kLanes<A>;
  Vec<A> sums[N] = {};
  for (int64_t i = begin; i < end; ++i) {
    const T* row = list.rows[i];
    prefetch_row(list.ahead[i], prefetch_bytes);
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      Vec<A> x = load(row + (v == N - 1 ? last : first + v * L));
      if constexpr (kScaled) x = broadcast(list.scales[i]) * x;
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
template <bool kScaled, typename T, typename A>
FE_FUNCTION void sum_narrow(const RowList<T>& list, int64_t begin, int64_t end, int64_t dim, A* out) {
  Vec<A> sum = {};
  for (int64_t i = begin; i < end; ++i) {
    prefetch_row(list.ahead[i], 1);
    Vec<A> x = load_part<A>(list.rows[i], dim);
    if constexpr (kScaled) x = broadcast(list.scales[i]) * x;
    sum += x;
  }
  memcpy(out, &sum, static_cast<size_t>(dim) * sizeof(A));
}

template <bool kScaled, Leave kLeave, typename T, typename A>
FE_FUNCTION void sum_wide(const RowList<T>& list, int64_t begin, int64_t end, int64_t dim, A* out) {
  constexpr int L = kLanes<A>;
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(T));
  const int64_t prefetch_bytes = row_bytes < kPrefetchBytes ? row_bytes : kPrefetchBytes;
  for (int64_t first = 0; first < dim; first += kMaxVectors * L) {
    const int64_t left = (dim - first + L - 1) / L;
    const int64_t n = left < kMaxVectors ? left : kMaxVectors;
    const int64_t last = left <= kMaxVectors ? dim - L : first + (n - 1) * L;
    const int64_t ahead = first == 0 ? prefetch_bytes : 0;
    switch (n) {
#define FE_CASE(N)                                                                     \
  case N:                                                                              \
    sum_columns<N, kScaled, kLeave>(list, begin, end, first, last, ahead, out); \
    break;
      FE_CASE(1) FE_CASE(2) FE_CASE(3) FE_CASE(4) FE_CASE(5) FE_CASE(6) FE_CASE(7) FE_CASE(8)
#undef FE_CASE
    }
  }
}

// out[0..dim) = sum of the list's rows [begin, end).
template <bool kScaled, typename T, typename A>
static void sum_rows(const RowList<T>& list, int64_t begin, int64_t end, int64_t dim, Leave leave, A* out) {
  if (dim < kLanes<A>) {
    sum_narrow<kScaled>(list, begin, end, dim, out);
  } else if (leave == Leave::streamed) {
    sum_wide<kScaled, Leave::streamed>(list, begin, end, dim, out);
  } else {
    sum_wide<kScaled, Leave::cached>(list, begin, end, dim, out);
  }
}

template <typename T, typename A>
FE_FUNCTION void sum_rows(const RowList<T>& list, int64_t begin, int64_t end, bool scaled, int64_t dim, Leave leave,
                          A* out) {
  if (scaled) {
    sum_rows<true>(list, begin, end, dim, leave, out);
  } else {
    sum_rows<false>(list, begin, end, dim, leave, out);
  }
}

// Sums of all chunks of one output row: acc (dim elements) holds the result, part is scratch of the same size.
template <typename A>
struct ChunkedSum {
  A* acc;
  A* part;
  int64_t dim;
  bool empty = true;

  template <typename T>
  void add(const RowList<T>& list, bool scaled) {
    sum_rows(list, 0, list.count, scaled, dim, Leave::cached, empty ? acc : part);
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
