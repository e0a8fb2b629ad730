// Sums of rows, the inner loop of forward and backward: part[d] = sum over a list of rows of scale_i * row_i[d], in
// list order, one rounded multiply and one rounded add per term.
#pragma once

#include "cpu/vec.h"

namespace fastemb::cpu::FE_ISA {

inline constexpr int kMaxVectors = 8;  // vector accumulators held in registers

// Terms are prefetched kPrefetchAhead rows ahead of their turn: far ahead into L2, which measured best with AVX-512 on
// Intel, whose L1 has few fill buffers. With AVX2 on AMD, rows of FP32 come a twentieth faster by way of L1, up to
// twice as fast from tables that L2 holds, where 8 KB are under way; those of 16 bits come too late then.
#if defined(__AVX512F__)
template <typename T>
inline constexpr bool kTermsIntoL1 = false;
#else
template <typename T>
inline constexpr bool kTermsIntoL1 = sizeof(T) >= sizeof(float);
#endif
template <typename T>
inline constexpr int64_t kPrefetchAhead = kTermsIntoL1<T> ? 32 : 128;

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
  FE_FUNCTION const T* ahead(const IndexedRows& from, int64_t i) { return row(from, i + kPrefetchAhead<T>); }
  FE_FUNCTION A scale(const IndexedRows&, int64_t) { return A{1}; }
};

// Into L2: the addresses are random, and L1 is too small for whole rows, or for the arrays of a step.
FE_FUNCTION void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }

template <typename T>
FE_FUNCTION void prefetch_term(const T* at) {
  __builtin_prefetch(at, 0, kTermsIntoL1<T> ? 3 : 2);
}

FE_FUNCTION void prefetch_row(const void* row, int64_t bytes) {
  constexpr int64_t kMost = 1024;  // what follows, the hardware foresees
  for (int64_t byte = 0; byte < bytes && byte < kMost; byte += 64) prefetch(static_cast<const char*>(row) + byte);
}

// Where a finished row goes. put(sink, d, v) takes the sums of columns d .. d + lanes, put_part the first n of them.

template <typename A>
struct Cached {
  A* out;

  FE_FUNCTION void put(const Cached& to, int64_t d, Vec<A> sum) { store(to.out + d, sum); }
  FE_FUNCTION void put_part(const Cached& to, int64_t n, Vec<A> sum) { store_part(to.out, sum, n); }
};

// Past the caches: a large output that is written once would otherwise first be read. Needs rows that start and end on
// a vector, and a fence before others read.
template <typename A>
struct Streamed {
  A* out;

  FE_FUNCTION void put(const Streamed& to, int64_t d, Vec<A> sum) { stream(to.out + d, sum); }
  FE_FUNCTION void put_part(const Streamed& to, int64_t n, Vec<A> sum) { store_part(to.out, sum, n); }
};

// Divided (a mean) and rounded to T.
template <typename T>
struct Finished {
  using A = typename AccOf<T>::type;
  T* out;
  A divisor;  // 0: none

  FE_FUNCTION void put(const Finished& to, int64_t d, Vec<A> sum) { store(to.out + d, divided(to, sum)); }
  FE_FUNCTION void put_part(const Finished& to, int64_t n, Vec<A> sum) { store_part(to.out, divided(to, sum), n); }
  FE_FUNCTION Vec<A> divided(const Finished& to, Vec<A> sum) { return to.divisor == A{0} ? sum : sum / to.divisor; }
};

// N vectors of columns from `first`; the last of them at `last`, so that the row's end is met by overlapping the
// neighbour (both compute the same sums). Columns are counted from `first`, not from the row's start: a distance that
// is known is part of an instruction, any other takes a register, of which the loop has none to spare.
template <int N, bool kScaled, typename Rows, typename Sink>
FE_FUNCTION void sum_columns(const Rows& rows, int64_t begin, int64_t end, int64_t first, int64_t last,
                             const Sink& sink) {
  using A = typename Rows::A;
  constexpr int L = kLanes<A>;
  constexpr int kVectorsPerLine = 64 / static_cast<int>(L * sizeof(typename Rows::Element));
  Vec<A> sums[N] = {};
  for (int64_t i = begin; i < end; ++i) {
    const auto* row = Rows::row(rows, i) + first;
    const auto* ahead = Rows::ahead(rows, i) + first;
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      if (v % kVectorsPerLine == 0) prefetch_term(ahead + v * L);
      Vec<A> x = load(row + (v == N - 1 ? last - first : v * L));
      if constexpr (kScaled) x = broadcast(Rows::scale(rows, i)) * x;
      sums[v] += x;
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v) Sink::put(sink, v == N - 1 ? last : first + v * L, sums[v]);
}

// The same for N pairs of whole vectors of bf16.
template <int N, bool kScaled, typename Rows, typename Sink>
FE_FUNCTION void sum_column_pairs(const Rows& rows, int64_t begin, int64_t end, int64_t first, const Sink& sink) {
  constexpr int L = kLanes<float>;
  constexpr int kPairsPerLine = 64 / static_cast<int>(2 * L * sizeof(bf16));
  EvenOdd sums[N] = {};
  for (int64_t i = begin; i < end; ++i) {
    const bf16* row = Rows::row(rows, i) + first;
    const bf16* ahead = Rows::ahead(rows, i) + first;
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      if (v % kPairsPerLine == 0) prefetch_term(ahead + v * 2 * L);
      EvenOdd x = load_even_odd(row + v * 2 * L);
      if constexpr (kScaled) {
        const Vec<float> scale = broadcast(Rows::scale(rows, i));
        x = {scale * x.even, scale * x.odd};
      }
      sums[v].even += x.even;
      sums[v].odd += x.odd;
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < N; ++v) {
    Sink::put(sink, first + v * 2 * L, interleaved(sums[v], 0));
    Sink::put(sink, first + v * 2 * L + L, interleaved(sums[v], 1));
  }
}

// dim < one vector.
template <bool kScaled, typename Rows, typename Sink>
FE_FUNCTION void sum_narrow(const Rows& rows, int64_t begin, int64_t end, int64_t dim, const Sink& sink) {
  using A = typename Rows::A;
  Vec<A> sum = {};
  for (int64_t i = begin; i < end; ++i) {
    prefetch_term(Rows::ahead(rows, i));
    Vec<A> x = load_part<A>(Rows::row(rows, i), dim);
    if constexpr (kScaled) x = broadcast(Rows::scale(rows, i)) * x;
    sum += x;
  }
  Sink::put_part(sink, dim, sum);
}

template <bool kScaled, typename Rows, typename Sink>
FE_FUNCTION void sum_wide(const Rows& rows, int64_t begin, int64_t end, int64_t dim, const Sink& sink) {
  constexpr int L = kLanes<typename Rows::A>;
  for (int64_t first = 0; first < dim; first += kMaxVectors * L) {
    if constexpr (__is_same(typename Rows::Element, bf16)) {
      static_assert(kMaxVectors == 8);
      const int64_t columns = dim - first;
      if (columns >= 8 * L) {
        sum_column_pairs<4, kScaled>(rows, begin, end, first, sink);
        continue;
      }
      if (columns == 4 * L) return sum_column_pairs<2, kScaled>(rows, begin, end, first, sink);
      if (columns == 2 * L) return sum_column_pairs<1, kScaled>(rows, begin, end, first, sink);
    }
    const int64_t left = (dim - first + L - 1) / L;
    const int64_t n = left < kMaxVectors ? left : kMaxVectors;
    const int64_t last = left <= kMaxVectors ? dim - L : first + (n - 1) * L;
    switch (n) {
#define FE_CASE(N) \
  case N: sum_columns<N, kScaled>(rows, begin, end, first, last, sink); break;
      FE_CASE(1) FE_CASE(2) FE_CASE(3) FE_CASE(4) FE_CASE(5) FE_CASE(6) FE_CASE(7) FE_CASE(8)
#undef FE_CASE
    }
  }
}

// The sum of terms [begin, end).
template <bool kScaled, typename Rows, typename Sink>
static void sum_rows(const Rows& rows, int64_t begin, int64_t end, int64_t dim, const Sink& sink) {
  if (dim < kLanes<typename Rows::A>) {
    sum_narrow<kScaled>(rows, begin, end, dim, sink);
  } else {
    sum_wide<kScaled>(rows, begin, end, dim, sink);
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
    sum_rows<kScaled>(rows, begin, end, dim, Cached<A>{empty ? acc : part});
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
