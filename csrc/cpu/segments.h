// Sums over segments: the occurrences of one row among the sorted positions. They are shared out to threads by length;
// a segment much longer than a chunk, a hot id, is split by chunks over all threads, and its partial sums are added in
// chunk order.
#pragma once

#include "cpu/rows.h"

namespace fastemb::cpu::FE_ISA {

inline constexpr int64_t kLong = 8 * kChunk;  // a segment longer than this is worth being split

// Terms says what is summed:
//   list_positions(begin, end, limit, list)   terms [begin, end), at most kChunk of them, of which what stands before
//                                             `limit` may be prefetched
//   scaled, width()                           whether terms have factors; columns
//   summed_otherwise(), sum_chunk(...)        terms that are no list of rows
// Terms [begin, end) to `out`; `part` is scratch, both of width().
template <typename Terms, typename A>
static void sum_segment(const Terms& terms, int64_t begin, int64_t end, int64_t limit,
                        RowList<typename Terms::Element>& list, A* part, A* out) {
  ChunkedSum<A> sum{out, part, terms.width()};
  for (int64_t chunk = begin; chunk < end; chunk += kChunk) {
    const int64_t chunk_end = chunk + kChunk < end ? chunk + kChunk : end;
    if (terms.summed_otherwise()) {
      terms.sum_chunk(chunk, chunk_end, sum.empty ? out : part);
      sum.added_part();
      continue;
    }
    terms.list_positions(chunk, chunk_end, limit, list);
    if (terms.scaled) {
      sum.template add<true>(list, 0, chunk_end - chunk);
    } else {
      sum.template add<false>(list, 0, chunk_end - chunk);
    }
  }
}

// Segments longer than kLong, found by stepping: each of them holds a multiple of kLong in the sorted positions.
struct LongSegments {
  struct Piece {
    int64_t segment;
    int64_t begin, end;  // sorted positions of one chunk
  };

  // `starts` [num_rows + 1]: where segments begin.
  LongSegments(const int32_t* starts, int64_t num_rows) : pieces(bag_backward_partial_rows(starts[num_rows])) {
    const int64_t positions = starts[num_rows];
    for (int64_t at = 0; at < positions; at += kLong) {
      int64_t low = 0, high = num_rows;  // last segment that starts at or before `at`
      while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (starts[middle] <= at)
          low = middle;
        else
          high = middle;
      }
      const int64_t begin = starts[low], end = starts[low + 1];
      if (end - begin <= kLong || (num_pieces > 0 && pieces.data[num_pieces - 1].segment == low)) continue;
      for (int64_t chunk = begin; chunk < end; chunk += kChunk) {
        pieces.data[num_pieces++] = {low, chunk, chunk + kChunk < end ? chunk + kChunk : end};
      }
    }
  }

  Scratch<Piece> pieces;
  int64_t num_pieces = 0;
};

// done(segment, sum) for each long segment, one after the other. `partials` is scratch, bag_backward_partial_rows()
// rows of terms.width() columns; a sum stays where it is in there.
template <typename Terms, typename A, typename Done>
static void sum_long_segments(const Terms& terms, const int32_t* starts, int64_t num_rows, A* partials,
                              const Parallel& parallel, const Done& done) {
  if (starts[num_rows] <= kLong) return;
  const int64_t width = terms.width();
  const LongSegments longs(starts, num_rows);
  parallel_ranges(parallel, longs.num_pieces, 1, [&](int64_t first, int64_t last) {
    RowList<typename Terms::Element> list;
    for (int64_t i = first; i < last; ++i) {
      const auto& piece = longs.pieces.data[i];
      A* part = partials + i * width;
      sum_segment(terms, piece.begin, piece.end, piece.end, list, part, part);
    }
  });
  for (int64_t i = 0; i < longs.num_pieces;) {
    const int64_t segment = longs.pieces.data[i].segment;
    A* sum = partials + i * width;
    for (++i; i < longs.num_pieces && longs.pieces.data[i].segment == segment; ++i) {
      for (int64_t d = 0; d < width; ++d) sum[d] += partials[i * width + d];
    }
    done(segment, sum);
  }
}

}  // namespace fastemb::cpu::FE_ISA
