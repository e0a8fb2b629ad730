// Checksums of records: computed, written into headers, or compared with them. A unit is two words of 8 bytes, a row
// has a warp at most; sums modulo 2^64 may be taken in any order.
#pragma once

#include "common/checksum_math.h"
#include "cuda/pieces.cuh"

namespace fastemb::cuda {

inline constexpr int64_t kUnitBytes = 16;
inline constexpr int64_t kWordBytes = 8;

struct ChecksumUnits {
  PieceUnits units;
  int64_t first_word[kMaxPieces];  // of the payload
  int32_t step[kMaxPieces];        // bytes that the piece can be read by
};

// `bytes` bytes, 8 at most, as a word filled up with zeros; `step` divides the address.
FE_DEVICE uint64_t load_word(const char* from, int64_t bytes, int32_t step) {
  if (step >= 8 && bytes >= 8) return load<1>(reinterpret_cast<const uint64_t*>(from)).item[0];
  uint64_t word = 0;
  int64_t b = 0;
  if (step >= 4) {
    for (; b + 4 <= bytes && b < 8; b += 4) {
      word |= static_cast<uint64_t>(load<1>(reinterpret_cast<const uint32_t*>(from + b)).item[0]) << (8 * b);
    }
  }
  if (step >= 2) {
    for (; b + 2 <= bytes && b < 8; b += 2) {
      word |= static_cast<uint64_t>(load<1>(reinterpret_cast<const uint16_t*>(from + b)).item[0]) << (8 * b);
    }
  }
  for (; b < bytes && b < 8; ++b) {
    word |= static_cast<uint64_t>(load<1>(reinterpret_cast<const uint8_t*>(from + b)).item[0]) << (8 * b);
  }
  return word;
}

// Up to two words of a piece, the first of which is word `first` of the payload.
FE_DEVICE uint64_t sum_unit(const char* from, int64_t bytes, int32_t step, int64_t first) {
  if (step >= kUnitBytes && bytes >= kUnitBytes) {
    const Vec<uint64_t, 2> words = load<2>(reinterpret_cast<const uint64_t*>(from));
    return record_word(words.item[0], first) + record_word(words.item[1], first + 1);
  }
  const uint64_t word = record_word(load_word(from, bytes, step), first);
  if (bytes <= kWordBytes) return word;
  return word + record_word(load_word(from + kWordBytes, bytes - kWordBytes, step), first + 1);
}

FE_DEVICE uint64_t group_sum(uint64_t x, int32_t lanes) {
  int64_t sum = static_cast<int64_t>(x);
  for (int32_t distance = lanes / 2; distance > 0; distance /= 2) {
    sum = static_cast<int64_t>(static_cast<uint64_t>(sum) + static_cast<uint64_t>(exchange(sum, distance)));
  }
  return static_cast<uint64_t>(sum);
}

// Adds what the threads of the block have found, `bad` headers of which `first` is the first. Every thread takes part.
FE_DEVICE void add_findings(int64_t bad, int64_t first, int64_t* found) {
  FE_SHARED(int64_t, counts, kWarps);
  FE_SHARED(int64_t, firsts, kWarps);
  bad = warp_sum(bad);
  first = warp_min(first);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarp;
  if (threadIdx.x % kWarp == 0) {
    counts[warp] = bad;
    firsts[warp] = first;
  }
  block_barrier();
  if (threadIdx.x != 0) return;
  for (int32_t w = 1; w < kWarps; ++w) {
    bad += counts[w];
    first = firsts[w] < first ? firsts[w] : first;
  }
  if (bad == 0) return;
  atomic_add(found, bad);
  atomic_min(found + 1, first);
}

template <ChecksumMode kMode>
__global__ void __launch_bounds__(kBlock, 5) checksum_kernel(Checksum p, ChecksumUnits sum, int32_t lanes) {
  const Place at = place(lanes);
  int64_t bad = 0, first_bad = INT64_MAX;
  for (int64_t k = at.item; first_of_warp(k, lanes) < p.num_rows; k += at.step) {
    const int64_t row = k < p.num_rows ? known_row(p.at, k, p.pieces.rows, p.error, at.lane == 0) : -1;
    uint64_t total = 0;
    if (row >= 0) {
      for_units(sum.units, at.lane, lanes, [&](int32_t i, int64_t unit) {
        const int64_t offset = unit * kUnitBytes;
        total += sum_unit(piece_of(p.pieces, i, row) + offset, p.pieces.bytes[i] - offset, sum.step[i],
                          sum.first_word[i] + 2 * unit);
      });
    }
    total = group_sum(total, lanes);
    if (at.lane != 0 || k >= p.num_rows) continue;
    if (row < 0) {
      if constexpr (kMode == ChecksumMode::compute) p.output[k] = 0;
      continue;
    }
    int64_t* header = reinterpret_cast<int64_t*>(static_cast<char*>(p.headers) + row * p.header_stride);
    const int64_t version = p.versions != nullptr ? load<1>(p.versions + k).item[0] : header[1];
    const uint64_t checksum = mix(record_key(p.seed, load<1>(p.rows + k).item[0], version) + total);
    if constexpr (kMode == ChecksumMode::compute) {
      p.output[k] = checksum;
    } else if constexpr (kMode == ChecksumMode::seal) {
      header[0] = static_cast<int64_t>(checksum);
      header[1] = version;
    } else if (static_cast<uint64_t>(header[0]) != checksum || header[1] != version) {
      first_bad = bad == 0 ? k : first_bad;  // rows come in ascending order
      ++bad;
    }
  }
  if constexpr (kMode == ChecksumMode::check) add_findings(bad, first_bad, p.found);
}

// ---- launch ------------------------------------------------------------------------------------------------------

inline ChecksumUnits checksum_units(const RowPieces& pieces) {
  ChecksumUnits sum{};
  int64_t words = 0;
  for (int32_t i = 0; i < pieces.count; ++i) {
    sum.first_word[i] = words;
    words += record_words(pieces.bytes[i]);
    sum.step[i] = word_of({address_of(pieces, i), static_cast<uint64_t>(pieces.strides[i])});
  }
  sum.units = piece_units(pieces.count, [&](int32_t i) { return ceil_div(pieces.bytes[i], kUnitBytes); });
  return sum;
}

template <ChecksumMode kMode>
int launch_checksum(const Checksum& p, Stream stream) {
  const ChecksumUnits sum = checksum_units(p.pieces);
  const RecordShape shape = record_shape(p.num_rows, total_of(sum.units), kWarp);
  auto kernel = &checksum_kernel<kMode>;
  return FE_LAUNCH(kernel, dim3(shape.blocks), kBlock, stream, p, sum, shape.lanes);
}

inline int launch_checksum(const Checksum& p, Stream stream) {
  if (p.num_rows == 0) return 0;
  switch (p.mode) {
    case ChecksumMode::compute: return launch_checksum<ChecksumMode::compute>(p, stream);
    case ChecksumMode::seal: return launch_checksum<ChecksumMode::seal>(p, stream);
    default: return launch_checksum<ChecksumMode::check>(p, stream);
  }
}

}  // namespace fastemb::cuda
