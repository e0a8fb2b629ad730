// Rows gathered, scattered, or both, between tables of records and arrays.
#include "cpu/kernels.h"
#include "cpu/pieces.h"

namespace fastemb::cpu::FE_ISA {
namespace {

inline constexpr int64_t kLine = 64;

bool whole_lines(const RowPieces& pieces) {
  return pieces.count == 1 && pieces.bytes[0] % kLine == 0 && pieces.strides[0] % kLine == 0 &&
         reinterpret_cast<uintptr_t>(pieces.data[0]) % kLine == 0;
}

// How many rows are gathered side by side. Their lines come from memory a fifth faster than one row after the other;
// written to random places they would go slower.
inline constexpr int64_t kTogether = 8;

// `kRows` rows from `first` on, line by line, each after a prefetch of the one that is due a group later.
template <int64_t kRows>
FE_FUNCTION void stream_group(const RowCopy& p, int64_t first, int64_t end) {
  char* to[kRows];
  const char *from[kRows], *ahead[kRows];
  for (int64_t i = 0; i < kRows; ++i) {
    const int64_t k = first + i, later = k + kRows < end ? k + kRows : k;
    to[i] = piece(p.to, 0, number(p.to_rows, k));
    from[i] = piece(p.from, 0, number(p.from_rows, k));
    ahead[i] = piece(p.from, 0, number(p.from_rows, later));
  }
  const int64_t bytes = p.to.bytes[0];
  for (int64_t line = 0; line < bytes; line += kLine) {
    for (int64_t i = 0; i < kRows; ++i) {
      __builtin_prefetch(ahead[i] + line);
      for (int64_t b = line; b < line + kLine; b += kVectorBytes) {
        stream(reinterpret_cast<float*>(to[i] + b), load(reinterpret_cast<const float*>(from[i] + b)));
      }
    }
  }
}

void stream_rows(const RowCopy& p, int64_t begin, int64_t end) {
  int64_t k = begin;
  if (p.to_rows == nullptr) {
    for (; k + kTogether <= end; k += kTogether) stream_group<kTogether>(p, k, end);
  }
  for (; k < end; ++k) stream_group<1>(p, k, end);
  stream_fence();
}

void copy_rows(const RowCopy& p, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    if (k + kRowsAhead < end) {
      prefetch_row(p.from, p.from_rows, k + kRowsAhead);
      prefetch_row<true>(p.to, p.to_rows, k + kRowsAhead);
    }
    const int64_t to = number(p.to_rows, k), from = number(p.from_rows, k);
    for (int32_t i = 0; i < p.to.count; ++i) {
      memcpy(piece(p.to, i, to), piece(p.from, i, from), static_cast<size_t>(p.to.bytes[i]));
    }
  }
}

}  // namespace

// Records that are whole lines go past the caches: a line that is written as a whole need not be read before, and it is
// for the device or the host table, not for whoever computes here.
void row_copy(const RowCopy& p, const Parallel& parallel) {
  const bool streamed = whole_lines(p.to);
  for_rows(p.num_rows, p.to, parallel,
           [&](int64_t begin, int64_t end) { streamed ? stream_rows(p, begin, end) : copy_rows(p, begin, end); });
}

}  // namespace fastemb::cpu::FE_ISA
