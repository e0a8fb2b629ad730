// Rows of several pieces (RowPieces of ops.h): how the threads share out a row. The work on a row is cut into units
// that are numbered through all of its pieces, so that the lanes of narrow pieces are as busy as those of wide ones.
#pragma once

#include <initializer_list>

#include "cuda/primitives.cuh"

#ifndef FASTEMB_RECORD_BLOCKS
#define FASTEMB_RECORD_BLOCKS 65536
#endif

namespace fastemb::cuda {

struct PieceUnits {
  int64_t first[kMaxPieces + 1];  // unit of each piece; behind the last piece, how many there are
  int32_t count;                  // pieces
};

FE_FUNCTION int64_t total_of(const PieceUnits& units) { return units.first[units.count]; }

FE_DEVICE char* piece_of(const RowPieces& pieces, int32_t i, int64_t row) {
  return static_cast<char*>(pieces.data[i]) + row * pieces.strides[i];
}

// Row k of `numbers` where it is one of `limit` rows. What is not is reported by one of its lanes, and -1.
FE_DEVICE int64_t known_row(const int64_t* numbers, int64_t k, int64_t limit, ErrorReport* error, bool reports) {
  const int64_t row = numbers == nullptr ? k : load<1>(numbers + k).item[0];
  if (row >= 0 && row < limit) return row;
  if (reports) report(error, ErrorReport::bad_index, k, row, limit);
  return -1;
}

// visit(piece, unit of that piece) for each unit of a row that one of `lanes` lanes has, in ascending order.
template <typename Visit>
FE_DEVICE void for_units(const PieceUnits& units, int32_t lane, int32_t lanes, const Visit& visit) {
  int32_t i = 0;
  for (int64_t unit = lane; unit < total_of(units); unit += lanes) {
    while (unit >= units.first[i + 1]) ++i;  // pieces without bytes have no unit
    visit(i, unit - units.first[i]);
  }
}

// ---- launch ------------------------------------------------------------------------------------------------------

// units_of(piece) units in each piece.
template <typename UnitsOf>
PieceUnits piece_units(int32_t count, const UnitsOf& units_of) {
  PieceUnits units{};
  units.count = count;
  for (int32_t i = 0; i < count; ++i) units.first[i + 1] = units.first[i] + units_of(i);
  return units;
}

// The widest word, of 16 bytes at most, that divides all of these.
inline int32_t word_of(std::initializer_list<uint64_t> numbers) {
  uint64_t bits = 16;
  for (const uint64_t x : numbers) bits |= x;
  return static_cast<int32_t>(bits & -bits);
}

inline uint64_t address_of(const RowPieces& pieces, int32_t i) { return reinterpret_cast<uintptr_t>(pieces.data[i]); }

// Rows on groups of lanes, `most` of them at most.
struct RecordShape {
  int32_t lanes;
  unsigned blocks;
};

inline RecordShape record_shape(int64_t num_rows, int64_t units, int32_t most) {
  RecordShape shape{1, 0};
  while (shape.lanes < most && shape.lanes < units) shape.lanes *= 2;
  const int64_t blocks = ceil_div(num_rows, kBlock / shape.lanes);
  shape.blocks = static_cast<unsigned>(blocks < FASTEMB_RECORD_BLOCKS ? blocks : FASTEMB_RECORD_BLOCKS);
  return shape;
}

}  // namespace fastemb::cuda
