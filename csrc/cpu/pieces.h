// Rows of several pieces (RowPieces of ops.h): where they are, and threads over them.
#pragma once

#include "cpu/vec.h"

namespace fastemb::cpu::FE_ISA {

inline constexpr int64_t kRowsAhead = 4;              // that are fetched from memory before their turn
inline constexpr int64_t kBytesPerThread = 64 << 10;  // less is not worth a thread

FE_FUNCTION int64_t number(const int64_t* numbers, int64_t k) { return numbers == nullptr ? k : numbers[k]; }

FE_FUNCTION char* piece(const RowPieces& pieces, int32_t i, int64_t row) {
  return static_cast<char*>(pieces.data[i]) + row * pieces.strides[i];
}

// Rows that follow one another are left to the hardware.
template <bool kToWrite = false>
FE_FUNCTION void prefetch_row(const RowPieces& pieces, const int64_t* rows, int64_t k) {
  if (rows == nullptr) return;
  for (int32_t i = 0; i < pieces.count; ++i) {
    const char* begin = piece(pieces, i, rows[k]);
    for (int64_t b = 0; b < pieces.bytes[i]; b += 64) __builtin_prefetch(begin + b, kToWrite);
  }
}

FE_FUNCTION int64_t row_bytes(const RowPieces& pieces) {
  int64_t bytes = 0;
  for (int32_t i = 0; i < pieces.count; ++i) bytes += pieces.bytes[i];
  return bytes;
}

// body(begin, end) over the rows.
template <typename Body>
FE_FUNCTION void for_rows(int64_t num_rows, const RowPieces& pieces, const Parallel& parallel, const Body& body) {
  const int64_t bytes = row_bytes(pieces);
  const int64_t grain = bytes >= kBytesPerThread ? 1 : kBytesPerThread / (bytes + 1) + 1;
  const auto run = [](int64_t begin, int64_t end, void* context) { (*static_cast<const Body*>(context))(begin, end); };
  parallel.run(0, num_rows, grain, run, const_cast<Body*>(&body));
}

}  // namespace fastemb::cpu::FE_ISA
