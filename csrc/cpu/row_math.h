// What common/row_update.h needs of the CPU's numbers and vectors.
#pragma once

#include "cpu/vec.h"

namespace fastemb {

FE_FUNCTION float square_root(float x) { return __builtin_sqrtf(x); }
FE_FUNCTION double square_root(double x) { return __builtin_sqrt(x); }

FE_FUNCTION cpu::FE_ISA::Vec<float> square_root(cpu::FE_ISA::Vec<float> x) {
#if defined(__AVX512F__)
  return (cpu::FE_ISA::Vec<float>)_mm512_maskz_sqrt_ps(0xffff, (__m512)x);
#elif defined(__AVX2__)
  return (cpu::FE_ISA::Vec<float>)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
  return (cpu::FE_ISA::Vec<float>)_mm_sqrt_ps((__m128)x);
#else
  for (int i = 0; i < cpu::FE_ISA::kLanes<float>; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

FE_FUNCTION cpu::FE_ISA::Vec<double> square_root(cpu::FE_ISA::Vec<double> x) {
#if defined(__AVX512F__)
  return (cpu::FE_ISA::Vec<double>)_mm512_maskz_sqrt_pd(0xff, (__m512d)x);
#elif defined(__AVX2__)
  return (cpu::FE_ISA::Vec<double>)_mm256_sqrt_pd((__m256d)x);
#elif defined(__SSE2__)
  return (cpu::FE_ISA::Vec<double>)_mm_sqrt_pd((__m128d)x);
#else
  for (int i = 0; i < cpu::FE_ISA::kLanes<double>; ++i) x[i] = __builtin_sqrt(x[i]);
  return x;
#endif
}

// A NaN on either side wins.
FE_FUNCTION float larger(float x, float y) { return x > y || x != x ? x : y; }
FE_FUNCTION double larger(double x, double y) { return x > y || x != x ? x : y; }
template <typename A>
FE_FUNCTION auto larger_of(A x, A y) {
  const auto first = (x > y) | (x != x);
  return (A)((first & (decltype(first))x) | (~first & (decltype(first))y));
}
FE_FUNCTION cpu::FE_ISA::Vec<float> larger(cpu::FE_ISA::Vec<float> x, cpu::FE_ISA::Vec<float> y) {
  return larger_of(x, y);
}
FE_FUNCTION cpu::FE_ISA::Vec<double> larger(cpu::FE_ISA::Vec<double> x, cpu::FE_ISA::Vec<double> y) {
  return larger_of(x, y);
}

}  // namespace fastemb

#include "common/row_update.h"
