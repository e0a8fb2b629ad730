// Grouping of positions by row on the CPU: a stable radix sort of (row, position) records, then the heads of runs. Also
// the check of ids and offsets that precedes every operator.
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
    for_pieces([&](int64_t, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        from[i].row = static_cast<decltype(Record::row)>(key_of<I>(p.bags, i, num_covered));
        from[i].position = static_cast<decltype(Record::position)>(i);
      }
    });
    const int bits = bit_width(static_cast<uint64_t>(p.bags.num_embeddings));
    const int passes = (bits + kMaxDigitBits - 1) / kMaxDigitBits;
    for (int pass = 0; pass < passes; ++pass) {
      const int shift = bits * pass / passes;
      sort_digit(shift, bits * (pass + 1) / passes - shift);
    }
  }

  // One stable counting sort by `bits` bits of the row: counts per piece, prefix sums in (digit, piece) order, scatter.
  void sort_digit(int shift, int bits) {
    const int64_t digits = int64_t{1} << bits;
    const auto digit = [&](const Record& r) {
      return static_cast<int64_t>((r.row >> shift) & static_cast<uint64_t>(digits - 1));
    };
    for_pieces([&](int64_t piece, int64_t begin, int64_t end) {
      int64_t* count = counts + piece * digits;
      memset(count, 0, static_cast<size_t>(digits) * sizeof(int64_t));
      for (int64_t i = begin; i < end; ++i) ++count[digit(from[i])];
    });
    int64_t running = 0;
    for (int64_t d = 0; d < digits; ++d) {
      for (int64_t piece = 0; piece < pieces; ++piece) {
        const int64_t here = counts[piece * digits + d];
        counts[piece * digits + d] = running;
        running += here;
      }
    }
    for_pieces([&](int64_t piece, int64_t begin, int64_t end) {
      int64_t* next = counts + piece * digits;
      for (int64_t i = begin; i < end; ++i) to[next[digit(from[i])]++] = from[i];
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
bool all_in_range(const Bags& bags, int64_t begin, int64_t end) {
  const I* indices = static_cast<const I*>(bags.indices);
  const uint64_t limit = static_cast<uint64_t>(bags.num_embeddings);
  uint64_t bad = 0;
  for (int64_t i = begin; i < end; ++i)
    bad |= static_cast<uint64_t>(static_cast<uint64_t>(int64_t{indices[i]}) >= limit);
  return bad == 0;
}

ErrorReport check_offsets(const Bags& bags) {
  int64_t previous = 0;
  for (int64_t b = 0; b < bags.num_offsets; ++b) {
    const int64_t offset = load_index(bags.offsets, bags.offset_type, b);
    if (offset < previous || offset > bags.num_indices || (b == 0 && offset != 0)) {
      return {ErrorReport::bad_offset, 0, b, offset, bags.num_indices};
    }
    previous = offset;
  }
  return {};
}

}  // namespace

ErrorReport check_bags(const Bags& bags, const Parallel& parallel) {
  if (bags.offsets != nullptr) {
    const ErrorReport report = check_offsets(bags);
    if (report.code != ErrorReport::none) return report;
  }
  const int64_t n = covered(bags);
  const auto in_range = bags.index_type == IndexType::i32 ? all_in_range<int32_t> : all_in_range<int64_t>;
  bool good = true;
  parallel_ranges(parallel, n, kPositionsPerPiece, [&](int64_t begin, int64_t end) {
    if (!in_range(bags, begin, end)) __atomic_store_n(&good, false, __ATOMIC_RELAXED);
  });
  if (good) return {};
  int64_t i = 0;
  while (in_range(bags, i, i + 1)) ++i;
  return {ErrorReport::bad_index, 0, i, load_index(bags.indices, bags.index_type, i), bags.num_embeddings};
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
