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

// Line by line, each after a prefetch of the one that is due kRowsAhead rows later.
void stream_rows(const RowCopy& p, int64_t begin, int64_t end) {
  const int64_t bytes = p.to.bytes[0];
  for (int64_t k = begin; k < end; ++k) {
    char* to = piece(p.to, 0, number(p.to_rows, k));
    const char* from = piece(p.from, 0, number(p.from_rows, k));
    const char* ahead = k + kRowsAhead < end ? piece(p.from, 0, number(p.from_rows, k + kRowsAhead)) : from;
    for (int64_t line = 0; line < bytes; line += kLine) {
      __builtin_prefetch(ahead + line);
      for (int64_t b = line; b < line + kLine; b += kVectorBytes) {
        stream(reinterpret_cast<float*>(to + b), load(reinterpret_cast<const float*>(from + b)));
      }
    }
  }
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
