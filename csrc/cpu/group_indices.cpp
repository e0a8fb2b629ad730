// Grouping of positions by row on the CPU: a stable radix sort of (row, position) records, then the heads of runs. Also
// the checks of all ids and offsets.
#include "cpu/check.h"
#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace fastemb::cpu::FE_ISA {
namespace {

inline constexpr int64_t kPositionsPerPiece = 1 << 14;
inline constexpr int kMaxDigitBits = 11;

// 8 bytes while rows fit 32 bits, which they do for every table of less than 2^32 rows.
struct NarrowRecord {
  uint32_t row;
  uint32_t position;
};
struct WideRecord {
  uint64_t row;
  uint64_t position;
};

int bit_width(uint64_t x) { return x == 0 ? 0 : 64 - __builtin_clzll(x); }

int64_t sort_pieces(const Bags& bags, const Parallel& parallel) {
  const int64_t most = bags.num_indices / kPositionsPerPiece + 1;
  return most < parallel.threads ? most : parallel.threads;
}

int64_t record_bytes(const Bags& bags) {
  return static_cast<uint64_t>(bags.num_embeddings) < (uint64_t{1} << 32) ? sizeof(NarrowRecord) : sizeof(WideRecord);
}

// Row of position i, or num_embeddings (which sorts last) when the position takes no part.
template <typename I>
FE_FUNCTION uint64_t key_of(const Bags& bags, int64_t i, int64_t num_covered) {
  const int64_t row = static_cast<const I*>(bags.indices)[i];
  const bool absent = row == bags.padding_idx || row < 0 || row >= bags.num_embeddings || i >= num_covered;
  return static_cast<uint64_t>(absent ? bags.num_embeddings : row);
}

template <typename Record, typename I>
struct Grouping {
  const GroupIndices& p;
  const Parallel& parallel;
  int64_t n, pieces, num_covered;
  Record *from, *to;
  int64_t* counts;  // [pieces][1 << kMaxDigitBits]

  Grouping(const GroupIndices& problem, const Parallel& threads)
      : p(problem),
        parallel(threads),
        n(p.bags.num_indices),
        pieces(sort_pieces(p.bags, threads)),
        num_covered(covered(p.bags)),
        from(static_cast<Record*>(p.scratch)),
        to(from + n),
        counts(reinterpret_cast<int64_t*>(to + n)) {}

  int64_t piece_begin(int64_t piece) const { return n / pieces * piece + (piece < n % pieces ? piece : n % pieces); }

  template <typename Body>
  void for_pieces(const Body& body) {
    parallel_ranges(parallel, pieces, 1, [&](int64_t first, int64_t last) {
      for (int64_t piece = first; piece < last; ++piece) body(piece, piece_begin(piece), piece_begin(piece + 1));
    });
  }

  void sort() {
    const int bits = bit_width(static_cast<uint64_t>(p.bags.num_embeddings));
    const int passes = bits == 0 ? 1 : (bits + kMaxDigitBits - 1) / kMaxDigitBits;
    const auto digit_of_pass = [&](int pass) {
      const int shift = bits * pass / passes;
      return Digit{shift, bits * (pass + 1) / passes - shift};
    };
    Digit digit = digit_of_pass(0);
    for_pieces([&](int64_t piece, int64_t begin, int64_t end) {
      int64_t* count = cleared_counts(piece, digit);
      for (int64_t i = begin; i < end; ++i) {
        from[i].row = static_cast<decltype(Record::row)>(key_of<I>(p.bags, i, num_covered));
        from[i].position = static_cast<decltype(Record::position)>(i);
        ++count[digit.of(from[i])];
      }
    });
    scatter(digit);
    for (int pass = 1; pass < passes; ++pass) {
      digit = digit_of_pass(pass);
      for_pieces([&](int64_t piece, int64_t begin, int64_t end) {
        int64_t* count = cleared_counts(piece, digit);
        for (int64_t i = begin; i < end; ++i) ++count[digit.of(from[i])];
      });
      scatter(digit);
    }
  }

  // Some bits of the row.
  struct Digit {
    int shift, bits;

    int64_t values() const { return int64_t{1} << bits; }
    int64_t of(const Record& r) const {
      return static_cast<int64_t>((r.row >> shift) & static_cast<uint64_t>(values() - 1));
    }
  };

  int64_t* cleared_counts(int64_t piece, const Digit& digit) {
    int64_t* count = counts + piece * digit.values();
    memset(count, 0, static_cast<size_t>(digit.values()) * sizeof(int64_t));
    return count;
  }

  // The second half of a stable counting sort: prefix sums of the counts in (digit, piece) order, then every record to
  // its place.
  void scatter(const Digit& digit) {
    int64_t running = 0;
    for (int64_t d = 0; d < digit.values(); ++d) {
      for (int64_t piece = 0; piece < pieces; ++piece) {
        int64_t& count = counts[piece * digit.values() + d];
        const int64_t here = count;
        count = running;
        running += here;
      }
    }
    for_pieces([&](int64_t piece, int64_t begin, int64_t end) {
      int64_t* next = counts + piece * digit.values();
      for (int64_t i = begin; i < end; ++i) to[next[digit.of(from[i])]++] = from[i];
    });
    Record* swap = from;
    from = to;
    to = swap;
  }

  bool is_head(int64_t i) const {
    return static_cast<int64_t>(from[i].row) < p.bags.num_embeddings && (i == 0 || from[i].row != from[i - 1].row);
  }

  void write_groups() {
    const Groups& groups = p.groups;
    for_pieces([&](int64_t piece, int64_t begin, int64_t end) {
      int64_t heads = 0;
      for (int64_t i = begin; i < end; ++i) {
        groups.order[i] = static_cast<int32_t>(from[i].position);
        heads += is_head(i);
      }
      counts[piece] = heads;
    });
    int64_t num_rows = 0;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t heads = counts[piece];
      counts[piece] = num_rows;
      num_rows += heads;
    }
    for_pieces([&](int64_t piece, int64_t begin, int64_t end) {
      int64_t rank = counts[piece];
      for (int64_t i = begin; i < end; ++i) {
        if (!is_head(i)) continue;
        groups.rows[rank] = static_cast<int64_t>(from[i].row);
        groups.segments[rank++] = static_cast<int32_t>(i);
      }
    });
    // Positions that take no part are sorted last: the last segment ends where they begin.
    int64_t low = 0, high = n;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (static_cast<int64_t>(from[middle].row) < p.bags.num_embeddings)
        low = middle + 1;
      else
        high = middle;
    }
    groups.segments[num_rows] = static_cast<int32_t>(low);
    *groups.num_rows = static_cast<int32_t>(num_rows);
  }
};

template <typename Record, typename I>
void group(const GroupIndices& p, const Parallel& parallel) {
  Grouping<Record, I> grouping(p, parallel);
  grouping.sort();
  grouping.write_groups();
}

template <typename Record>
void group(const GroupIndices& p, const Parallel& parallel) {
  if (p.bags.index_type == IndexType::i32) {
    group<Record, int32_t>(p, parallel);
  } else {
    group<Record, int64_t>(p, parallel);
  }
}

template <typename I>
bool ascending(const I* offsets, int64_t count) {
  bool good = true;
  for (int64_t b = 1; b < count; ++b) good &= offsets[b - 1] <= offsets[b];
  return good;
}

template <typename I>
ErrorReport check_indices(const Bags& bags, const Parallel& parallel) {
  bool good = true;
  parallel_ranges(parallel, covered(bags), kPositionsPerPiece, [&](int64_t begin, int64_t end) {
    if (!ids_in_range<I>(bags, begin, end)) __atomic_store_n(&good, false, __ATOMIC_RELAXED);
  });
  return good ? ErrorReport{} : first_bad_id<I>(bags);
}

}  // namespace

ErrorReport check_offsets(const Bags& bags) {
  const int64_t count = bags.num_offsets;
  if (bags.offsets == nullptr || count == 0) return {};
  const bool sorted = bags.offset_type == IndexType::i32 ? ascending(static_cast<const int32_t*>(bags.offsets), count)
                                                         : ascending(static_cast<const int64_t*>(bags.offsets), count);
  const auto offset = [&](int64_t b) { return load_index(bags.offsets, bags.offset_type, b); };
  if (sorted && offset(0) == 0 && offset(count - 1) <= bags.num_indices) return {};
  int64_t b = 0, previous = 0;
  while (offset(b) >= previous && offset(b) <= bags.num_indices && (b > 0 || offset(b) == 0)) previous = offset(b++);
  return {ErrorReport::bad_offset, 0, b, offset(b), bags.num_indices};
}

ErrorReport check_indices(const Bags& bags, const Parallel& parallel) {
  return bags.index_type == IndexType::i32 ? check_indices<int32_t>(bags, parallel)
                                           : check_indices<int64_t>(bags, parallel);
}

void group_indices(const GroupIndices& p, const Parallel& parallel) {
  if (record_bytes(p.bags) == sizeof(NarrowRecord)) {
    group<NarrowRecord>(p, parallel);
  } else {
    group<WideRecord>(p, parallel);
  }
}

int64_t group_indices_scratch_bytes(const Bags& bags, const Parallel& parallel) {
  return 2 * bags.num_indices * record_bytes(bags) +
         sort_pieces(bags, parallel) * (int64_t{1} << kMaxDigitBits) * static_cast<int64_t>(sizeof(int64_t));
}

}  // namespace fastemb::cpu::FE_ISA
