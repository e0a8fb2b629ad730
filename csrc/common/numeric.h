// fp16 and bf16 as bits, and their conversions to and from float, shared by every native backend.
// No arithmetic types of CUDA or the compiler: the same integer steps give the same bits everywhere.
#pragma once

#include <cstdint>
#include <cstring>

#include "platform.h"

namespace fastemb {

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

FE_FUNCTION uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof(u));
  return u;
}

FE_FUNCTION float bits_float(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof(x));
  return x;
}

FE_FUNCTION float to_acc(bf16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }

FE_FUNCTION float to_acc(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t rest = x.bits & 0x7fffu;
  // Exponent and fraction moved to float's places; the factor 2^112 mends the exponent's bias and makes subnormals
  // normal, exactly.
  const float scaled = bits_float(rest << 13) * bits_float(0x77800000u);
  // Infinity and NaN keep exponent 255; a signalling NaN becomes quiet, as the hardware's conversion makes it.
  const uint32_t quiet = rest > 0x7c00u ? 0x00400000u : 0u;
  const uint32_t bits = rest >= 0x7c00u ? (0x7f800000u | (rest << 13) | quiet) : float_bits(scaled);
  return bits_float(sign | bits);
}

FE_FUNCTION float to_acc(float x) { return x; }
FE_FUNCTION double to_acc(double x) { return x; }

// Nearest, ties to even.
FE_FUNCTION bf16 to_bf16(float x) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x0040u)};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

FE_FUNCTION f16 to_f16(float x) {
  const uint32_t u = float_bits(x);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t mag = u & 0x7fffffffu;
  uint16_t rest;
  if (mag > 0x7f800000u) {  // NaN: top of the payload, quiet
    rest = static_cast<uint16_t>(0x7e00u | ((mag >> 13) & 0x3ffu));
  } else if (mag >= 0x477ff000u) {  // 65520 and above round to infinity
    rest = 0x7c00u;
  } else if (mag < 0x38800000u) {  // below 2^-14: adding 0.5 leaves a multiple of 2^-24 in the low bits, rounded
    rest = static_cast<uint16_t>(float_bits(bits_float(mag) + 0.5f) - 0x3f000000u);
  } else {
    rest = static_cast<uint16_t>((mag - 0x38000000u + 0xfffu + ((mag >> 13) & 1u)) >> 13);
  }
  return {static_cast<uint16_t>(sign | rest)};
}

// from_acc<T>: one rounding from the accumulator to the storage type. A double accumulator reaches 16 bits through
// round-to-odd in float, so that the two steps round like one.
template <typename T>
struct FromAcc;

FE_FUNCTION float double_to_float_odd(double x) {
  float f = static_cast<float>(x);
  const double back = static_cast<double>(f);
  if (back == x || x != x) return f;
  uint32_t u = float_bits(f);
  if (u & 1u) return f;
  const bool away = (back < 0 ? -back : back) > (x < 0 ? -x : x);
  return bits_float(away ? u - 1u : u + 1u);
}

template <>
struct FromAcc<float> {
  FE_FUNCTION float convert(float x) { return x; }
  FE_FUNCTION float convert(double x) { return static_cast<float>(x); }
};
template <>
struct FromAcc<double> {
  FE_FUNCTION double convert(float x) { return static_cast<double>(x); }
  FE_FUNCTION double convert(double x) { return x; }
};
template <>
struct FromAcc<f16> {
  FE_FUNCTION f16 convert(float x) { return to_f16(x); }
  FE_FUNCTION f16 convert(double x) { return to_f16(double_to_float_odd(x)); }
};
template <>
struct FromAcc<bf16> {
  FE_FUNCTION bf16 convert(float x) { return to_bf16(x); }
  FE_FUNCTION bf16 convert(double x) { return to_bf16(double_to_float_odd(x)); }
};

// The accumulator of a storage type.
template <typename T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};

}  // namespace fastemb
