// common/stochastic.h for vectors of columns: the same bits.
#pragma once

#include "common/stochastic.h"
#include "cpu/vec.h"

namespace fastemb::cpu::FE_ISA {

inline constexpr int kHalf = kLanes<float> / 2;

// The upper words of the first and of the second half of the columns.
FE_FUNCTION Words upper_words(Longs first, Longs second) {
  Words pick = {};
  for (uint32_t i = 0; i < kLanes<float>; ++i) pick[i] = 2 * i + 1;
  return __builtin_shuffle((Words)first, (Words)second, pick);
}

// Each of one half of the words, 32 bits further up.
FE_FUNCTION Longs as_upper_words(Words x, uint32_t half) {
  Words pick = {};
  for (uint32_t i = 0; i < kHalf; ++i) pick[2 * i + 1] = kLanes<float> + half * kHalf + i;
  return (Longs)__builtin_shuffle(Words{}, x, pick);
}

// random_bits of a vector of columns; each half has keys of its own.
FE_FUNCTION Words random_bits(Longs first, Longs second, int64_t column) {
  Longs places = {};
  for (uint64_t i = 0; i < kHalf; ++i) places[i] = i * kGolden;
  places += static_cast<uint64_t>(column) * kGolden;
  return upper_words(mix(first + places), mix(second + places + kHalf * kGolden));
}

FE_FUNCTION Words random_bits(uint64_t key, int64_t column) {
  return random_bits(Longs{} + key, Longs{} + key, column);
}

FE_FUNCTION Words moment_bits(Vec<float> x, uint64_t key, int64_t column) {
  return random_bits(as_upper_words((Words)x, 0) + key, as_upper_words((Words)x, 1) + key, column);
}

// round_stochastic, still in acc: what it rounds to nearest is left to the store.
FE_FUNCTION Vec<float> rounded_stochastic(bf16, Vec<float> x, Words random) {
  const Words bits = (Words)x, up = (bits + (random >> 16)) & 0xffff0000u;
  return (Vec<float>)((IntVec<float>)(bits & 0x7fffffffu) < 0x7f7f0000 ? up : bits);
}

FE_FUNCTION Vec<float> rounded_stochastic(f16, Vec<float> x, Words random) {
  const Words sign = (Words)x & 0x80000000u, magnitude = (Words)x & 0x7fffffffu;
  const IntVec<float> subnormal = (IntVec<float>)magnitude < 0x38800000, held = (IntVec<float>)magnitude < 0x477fe000;
  const Words normal = (magnitude + (random >> 19)) & 0xffffe000u;
  const Vec<float> units = (Vec<float>)((Words)subnormal & magnitude) * 16777216.0f;
  const IntVec<float> whole = __builtin_convertvector(units, IntVec<float>);
  const Vec<float> fraction = units - __builtin_convertvector(whole, Vec<float>);
  const Vec<float> drawn = __builtin_convertvector((IntVec<float>)(random >> 8), Vec<float>);
  const IntVec<float> up = drawn < fraction * 16777216.0f;  // -1 where it holds
  const Vec<float> small = __builtin_convertvector(whole - up, Vec<float>) * (1.0f / 16777216.0f);
  return (Vec<float>)(sign | (subnormal ? (Words)small : held ? normal : magnitude));
}

// What a moment of Adam becomes where it is stored as M; `column` is that of the first element.
FE_FUNCTION Vec<float> rounded_moment(bf16, Vec<float> x, const MomentRounding& how, int64_t column) {
  return how.stochastic ? rounded_stochastic(bf16{}, x, moment_bits(x, how.key, column)) : x;
}
FE_FUNCTION Vec<float> rounded_moment(float, Vec<float> x, const MomentRounding&, int64_t) { return x; }
FE_FUNCTION Vec<double> rounded_moment(double, Vec<double> x, const MomentRounding&, int64_t) { return x; }

}  // namespace fastemb::cpu::FE_ISA
