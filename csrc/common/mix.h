// Mixing of 64-bit words: of the seeds of stochastic rounding, and of checksums.
#pragma once

#include <cstdint>

#include "platform.h"

namespace fastemb {

inline constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;  // odd, 2^64 divided by the golden ratio

// A bijection of 64 bits in which every input bit reaches every output bit: xor-shifts and odd multipliers. Of a word
// without a sign, or of a vector of such.
template <typename Word>
FE_FUNCTION Word mix(Word x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace fastemb
