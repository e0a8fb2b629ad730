// Stochastic rounding to fp16 and bf16: a value between two neighbours goes to either with the probability that makes
// the expectation the value. The random bits are a function of (seed, step, row, column), so they depend on no thread,
// block or order, and are the same on every device.
#pragma once

#include "common/mix.h"
#include "common/numeric.h"

namespace fastemb {

// Of a row in a step; once per row.
FE_FUNCTION uint64_t row_key(uint64_t seed, int64_t step, int64_t row) {
  return mix(mix(mix(seed) + static_cast<uint64_t>(step)) + static_cast<uint64_t>(row));
}

FE_FUNCTION uint32_t random_bits(uint64_t key, int64_t column) {
  return static_cast<uint32_t>(mix(key + static_cast<uint64_t>(column) * kGolden) >> 32);
}

// 16 random bits are added below the 16 that stay, and the rest is cut off. What is NaN, infinite, or would round past
// the largest finite value is rounded to nearest.
FE_FUNCTION bf16 round_stochastic(bf16, float x, uint32_t random) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7fffffffu) >= 0x7f7f0000u) return to_bf16(x);
  return {static_cast<uint16_t>((u + (random >> 16)) >> 16)};
}

FE_FUNCTION f16 round_stochastic(f16, float x, uint32_t random) {
  const uint32_t u = float_bits(x);
  const uint32_t mag = u & 0x7fffffffu;
  if (mag >= 0x477fe000u) return to_f16(x);  // 65504 and above
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  if (mag >= 0x38800000u) {  // normal: 13 bits go
    return {static_cast<uint16_t>(sign | ((mag - 0x38000000u + (random >> 19)) >> 13))};
  }
  // Subnormal: in units of 2^-24, exactly; the fraction against 24 random bits.
  const float units = bits_float(mag) * 16777216.0f;
  const uint32_t whole = static_cast<uint32_t>(units);
  const float fraction = units - static_cast<float>(whole);
  const bool up = static_cast<float>(random >> 8) < fraction * 16777216.0f;
  return {static_cast<uint16_t>(sign | (whole + (up ? 1u : 0u)))};
}

FE_FUNCTION float round_stochastic(float, float x, uint32_t) { return x; }
FE_FUNCTION double round_stochastic(double, double x, uint32_t) { return x; }

// Moments of Adam in bf16. Rounded to nearest they would stand still: what a step changes about exp_avg_sq is less than
// half an ulp once it is near its mean. The random bits are a function of (seed, step, column, value), not of the row:
// the same wherever a row lies, in a table or in a cache of some of its rows.
struct MomentRounding {
  uint64_t key;
  bool stochastic;  // else to nearest
};

// The streams of the moments have the keys of rows that no table has. max_exp_avg_sq is rounded by that of exp_avg_sq,
// hence to the largest exp_avg_sq that was stored.
struct AdamRounding {
  MomentRounding first, second;

  FE_FUNCTION AdamRounding make(bool stochastic, uint64_t seed, int64_t step) {
    return {{row_key(seed, step, -1), stochastic}, {row_key(seed, step, -2), stochastic}};
  }
};

FE_FUNCTION uint32_t moment_bits(float x, uint64_t key, int64_t column) {
  return random_bits(key + (static_cast<uint64_t>(float_bits(x)) << 32), column);
}

}  // namespace fastemb
