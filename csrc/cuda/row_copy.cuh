// Rows gathered, scattered, or both, between tables of records and arrays. A unit is a word: the widest that the piece
// has on both sides. A wide row has all threads of a block, narrow rows share its warps.
#pragma once

#include "cuda/pieces.cuh"

namespace fastemb::cuda {

struct CopyUnits {
  PieceUnits units;
  int32_t word[kMaxPieces];  // bytes of a unit
};

template <int kBytes>
FE_DEVICE void copy_bytes(char* to, const char* from) {
  store<kBytes>(reinterpret_cast<uint8_t*>(to), load<kBytes>(reinterpret_cast<const uint8_t*>(from)));
}

FE_DEVICE void copy_word(char* to, const char* from, int32_t bytes) {
  switch (bytes) {
    case 16: return copy_bytes<16>(to, from);
    case 8: return copy_bytes<8>(to, from);
    case 4: return copy_bytes<4>(to, from);
    case 2: return copy_bytes<2>(to, from);
    default: return copy_bytes<1>(to, from);
  }
}

__global__ void __launch_bounds__(kBlock) row_copy_kernel(RowCopy p, CopyUnits copy, int32_t lanes) {
  const Place at = place(lanes);
  for (int64_t k = at.item; k < p.num_rows; k += at.step) {
    const int64_t to = known_row(p.to_rows, k, p.to.rows, p.error, at.lane == 0);
    const int64_t from = known_row(p.from_rows, k, p.from.rows, p.error, at.lane == 0);
    if (to < 0 || from < 0) continue;
    for_units(copy.units, at.lane, lanes, [&](int32_t i, int64_t unit) {
      const int64_t offset = unit * copy.word[i];
      copy_word(piece_of(p.to, i, to) + offset, piece_of(p.from, i, from) + offset, copy.word[i]);
    });
  }
}

// ---- launch ------------------------------------------------------------------------------------------------------

inline int launch_row_copy(const RowCopy& p, Stream stream) {
  if (p.num_rows == 0) return 0;
  CopyUnits copy{};
  for (int32_t i = 0; i < p.to.count; ++i) {
    copy.word[i] = word_of({address_of(p.to, i), address_of(p.from, i), static_cast<uint64_t>(p.to.strides[i]),
                            static_cast<uint64_t>(p.from.strides[i]), static_cast<uint64_t>(p.to.bytes[i])});
  }
  copy.units = piece_units(p.to.count, [&](int32_t i) { return p.to.bytes[i] / copy.word[i]; });
  const RecordShape shape = record_shape(p.num_rows, total_of(copy.units), kBlock);
  auto kernel = &row_copy_kernel;
  return FE_LAUNCH(kernel, dim3(shape.blocks), kBlock, stream, p, copy, shape.lanes);
}

}  // namespace fastemb::cuda
