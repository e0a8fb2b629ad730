// Checksums of records: computed, written into headers, or compared with them.
#include <atomic>

#include "common/checksum_math.h"
#include "cpu/kernels.h"
#include "cpu/pieces.h"

namespace fastemb::cpu::FE_ISA {
namespace {

inline constexpr int64_t kLongs = kVectorBytes / 8;

// Sum over the words of one piece, the first of which is word `first` of the payload. Sums modulo 2^64 may be taken in
// any order.
FE_FUNCTION uint64_t sum_words(const char* data, int64_t bytes, int64_t first) {
  const int64_t words = bytes / 8;
  uint64_t total = 0;
  int64_t i = 0;
  if (words >= kLongs) {
    Longs sum = {}, places = {};
    for (int64_t lane = 0; lane < kLongs; ++lane) places[lane] = static_cast<uint64_t>(first + lane + 1) * kGolden;
    for (; i + kLongs <= words; i += kLongs) {
      Longs word;
      memcpy(&word, data + i * 8, sizeof(word));
      sum += mix(word + places);
      places += static_cast<uint64_t>(kLongs) * kGolden;
    }
    for (int64_t lane = 0; lane < kLongs; ++lane) total += sum[lane];
  }
  for (; i < words; ++i) {
    uint64_t word;
    memcpy(&word, data + i * 8, sizeof(word));
    total += record_word(word, first + i);
  }
  if (bytes % 8 != 0) {
    uint64_t word = 0;
    memcpy(&word, data + words * 8, static_cast<size_t>(bytes % 8));
    total += record_word(word, first + words);
  }
  return total;
}

FE_FUNCTION uint64_t sum_payload(const RowPieces& pieces, int64_t row) {
  uint64_t total = 0;
  int64_t first = 0;
  for (int32_t i = 0; i < pieces.count; ++i) {
    total += sum_words(piece(pieces, i, row), pieces.bytes[i], first);
    first += record_words(pieces.bytes[i]);
  }
  return total;
}

FE_FUNCTION char* header(const Checksum& p, int64_t row) {
  return static_cast<char*>(p.headers) + row * p.header_stride;
}

struct Findings {
  std::atomic<int64_t> bad{0};
  std::atomic<int64_t> first{INT64_MAX};

  void add(int64_t count, int64_t k) {
    bad += count;
    int64_t seen = first.load();
    while (k < seen && !first.compare_exchange_weak(seen, k)) {
    }
  }
};

}  // namespace

void checksum(const Checksum& p, const Parallel& parallel) {
  Findings findings;
  const auto run = [&](int64_t begin, int64_t end) {
    int64_t bad = 0, first_bad = INT64_MAX;
    for (int64_t k = begin; k < end; ++k) {
      if (p.at != nullptr && k + kRowsAhead < end) {
        prefetch_row(p.pieces, p.at, k + kRowsAhead);
        if (p.headers != nullptr) __builtin_prefetch(header(p, p.at[k + kRowsAhead]), 1);
      }
      const int64_t row = number(p.at, k);
      char* place = header(p, row);
      RecordHeader there{};
      if (p.mode == ChecksumMode::check) memcpy(&there, place, sizeof(there));
      const int64_t version = p.versions == nullptr ? there.version : p.versions[k];
      const RecordHeader right{mix(record_key(p.seed, p.rows[k], version) + sum_payload(p.pieces, row)), version};
      switch (p.mode) {
        case ChecksumMode::compute: p.output[k] = right.checksum; break;
        case ChecksumMode::seal: memcpy(place, &right, sizeof(right)); break;
        case ChecksumMode::check:
          if (there.checksum != right.checksum || there.version != version) {
            first_bad = bad == 0 ? k : first_bad;
            ++bad;
          }
          break;
      }
    }
    if (bad > 0) findings.add(bad, first_bad);
  };
  for_rows(p.num_rows, p.pieces, parallel, run);
  if (findings.bad > 0) {
    p.found[0] += findings.bad;
    if (findings.first < p.found[1]) p.found[1] = findings.first;
  }
}

}  // namespace fastemb::cpu::FE_ISA
