// The checksum of a record, word by word; the formula is in ops.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/mix.h"

namespace fastemb {

FE_FUNCTION uint64_t record_key(uint64_t seed, int64_t row, int64_t version) {
  return mix(mix(mix(seed) + static_cast<uint64_t>(row)) + static_cast<uint64_t>(version));
}

FE_FUNCTION uint64_t record_word(uint64_t word, int64_t index) {
  return mix(word + (static_cast<uint64_t>(index) + 1) * kGolden);
}

FE_FUNCTION int64_t record_words(int64_t bytes) { return (bytes + 7) / 8; }

}  // namespace fastemb
