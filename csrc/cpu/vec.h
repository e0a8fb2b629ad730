// Vectors of the level that is being compiled, through the compiler's vector extension: FE_ISA decides the width, the
// arithmetic is written once. The width never changes a result: every column is summed on its own.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "common/numeric.h"
#include "ops.h"

namespace fastemb::cpu::FE_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

template <typename A>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(A));

template <typename A>
struct VecOf;
template <>
struct VecOf<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
  typedef int32_t ints __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VecOf<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
  typedef int64_t ints __attribute__((vector_size(kVectorBytes)));
};
template <typename A>
using Vec = typename VecOf<A>::type;
template <typename A>
using IntVec = typename VecOf<A>::ints;

typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));

FE_FUNCTION Vec<float> load(const float* p) {
  Vec<float> v;
  memcpy(&v, p, sizeof(v));
  return v;
}

FE_FUNCTION Vec<double> load(const double* p) {
  Vec<double> v;
  memcpy(&v, p, sizeof(v));
  return v;
}

// 16 bits each, widened. By intrinsics where there are any: GCC 12 widens a whole vector in five steps instead of one.
FE_FUNCTION Words load_halves(const void* p) {
#if defined(__AVX512F__)
  return (Words)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(static_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#else
  Halves h;
  memcpy(&h, p, sizeof(h));
  return __builtin_convertvector(h, Words);
#endif
}

FE_FUNCTION Vec<float> load(const bf16* p) { return (Vec<float>)(load_halves(p) << 16); }

FE_FUNCTION Vec<float> load(const f16* p) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vec<float> v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = to_acc(p[i]);
  return v;
#endif
}

template <typename A>
FE_FUNCTION void store(A* p, Vec<A> v) {
  memcpy(p, &v, sizeof(v));
}

// The first n < lanes elements, zeros behind them; nothing behind them is read.
template <typename A, typename T>
FE_FUNCTION Vec<A> load_part(const T* p, int64_t n) {
#if defined(__AVX512F__)
  const uint32_t mask = (1u << n) - 1;
  if constexpr (__is_same(T, float)) {
    return (Vec<A>)_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p);
  } else if constexpr (__is_same(T, double)) {
    return (Vec<A>)_mm512_maskz_loadu_pd(static_cast<__mmask8>(mask), p);
  } else {
    const __m256i halves = _mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), p);
    if constexpr (__is_same(T, f16)) return (Vec<A>)_mm512_maskz_cvtph_ps(0xffff, halves);
    return (Vec<A>)((Words)_mm512_maskz_cvtepu16_epi32(0xffff, halves) << 16);
  }
#else
  T buffer[kLanes<A>] = {};
  memcpy(buffer, p, static_cast<size_t>(n) * sizeof(T));
  return load(buffer);
#endif
}

template <typename A>
FE_FUNCTION void store_part(A* p, Vec<A> v, int64_t n) {
#if defined(__AVX512F__)
  const uint32_t mask = (1u << n) - 1;
  if constexpr (__is_same(A, float)) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>(mask), (__m512)v);
  } else {
    _mm512_mask_storeu_pd(p, static_cast<__mmask8>(mask), (__m512d)v);
  }
#else
  memcpy(p, &v, static_cast<size_t>(n) * sizeof(A));
#endif
}

template <typename A>
FE_FUNCTION Vec<A> broadcast(A x) {
  return Vec<A>{} + x;
}

// to_bf16 of a vector.
FE_FUNCTION void store_bf16(bf16* out, Vec<float> x) {
  const Words u = (Words)x;
  const Words is_nan = (Words)((u & 0x7fffffffu) > 0x7f800000u);
  const Words rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const Words bits = (is_nan & ((u >> 16) | 0x0040u)) | (~is_nan & rounded);
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)bits));
#elif defined(__AVX2__)
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)bits, (__m256i)bits), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(packed));
#else
  for (int i = 0; i < kLanes<float>; ++i) out[i].bits = static_cast<uint16_t>(bits[i]);
#endif
}

// acc[0..n) rounded to T at out.
template <typename T, typename A>
FE_FUNCTION void store_row(T* out, const A* acc, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__)
  if constexpr (__is_same(T, f16) && __is_same(A, float)) {
    for (; i + 8 <= n; i += 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(acc + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
  }
#endif
  if constexpr (__is_same(T, bf16) && __is_same(A, float)) {
    for (; i + kLanes<float> <= n; i += kLanes<float>) store_bf16(out + i, load(acc + i));
  }
  for (; i < n; ++i) out[i] = FromAcc<T>::convert(acc[i]);
}

template <typename A>
FE_FUNCTION void store_row(void* out, DType type, int64_t first, const A* acc, int64_t n) {
  switch (type) {
    case DType::f16: return store_row(static_cast<f16*>(out) + first, acc, n);
    case DType::bf16: return store_row(static_cast<bf16*>(out) + first, acc, n);
    case DType::f32: return store_row(static_cast<float*>(out) + first, acc, n);
    case DType::f64: return store_row(static_cast<double*>(out) + first, acc, n);
  }
}

template <typename A>
FE_FUNCTION A load_scalar(const void* p, DType type, int64_t i) {
  switch (type) {
    case DType::f16: return static_cast<A>(to_acc(static_cast<const f16*>(p)[i]));
    case DType::bf16: return static_cast<A>(to_acc(static_cast<const bf16*>(p)[i]));
    case DType::f32: return static_cast<A>(static_cast<const float*>(p)[i]);
    default: return static_cast<A>(static_cast<const double*>(p)[i]);
  }
}

FE_FUNCTION int64_t load_index(const void* p, IndexType type, int64_t i) {
  return type == IndexType::i32 ? static_cast<const int32_t*>(p)[i] : static_cast<const int64_t*>(p)[i];
}

FE_FUNCTION int64_t bag_begin(const Bags& bags, int64_t b) {
  if (bags.offsets == nullptr) return b * bags.bag_length;
  return b < bags.num_offsets ? load_index(bags.offsets, bags.offset_type, b) : bags.num_indices;
}

// Where the last bag ends: positions behind it take no part.
FE_FUNCTION int64_t covered(const Bags& bags) { return bags.num_bags == 0 ? 0 : bag_begin(bags, bags.num_bags); }

// Scratch of one thread. Not std::unique_ptr: templates of the standard library would be compiled once per level under
// one name, and the linker may keep the copy that the running machine cannot execute.
template <typename E>
struct Scratch {
  explicit Scratch(int64_t n) : data(static_cast<E*>(malloc(static_cast<size_t>(n + 1) * sizeof(E)))) {
    if (data == nullptr) throw std::bad_alloc();
  }
  ~Scratch() { free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  E* data;
};

// Calls f with a value of the table's type.
template <typename F>
FE_FUNCTION void with_type(DType type, F f) {
  switch (type) {
    case DType::f16: return f(f16{});
    case DType::bf16: return f(bf16{});
    case DType::f32: return f(float{});
    case DType::f64: return f(double{});
  }
}

// ranges(begin, end) over [0, n), at least grain a piece.
template <typename F>
FE_FUNCTION void parallel_ranges(const Parallel& parallel, int64_t n, int64_t grain, const F& ranges) {
  if (n <= 0) return;
  auto body = [](int64_t begin, int64_t end, void* context) { (*static_cast<const F*>(context))(begin, end); };
  parallel.run(0, n, grain, body, const_cast<F*>(&ranges));
}

// Pieces of [0, n) of about equal weight: the first item whose running weight reaches the piece's share. start(i) is
// the weight in front of item i, ascending, total = start(n).
template <typename F>
FE_FUNCTION int64_t split_point(int64_t n, int64_t total, int64_t piece, int64_t pieces, const F& start) {
  if (piece >= pieces) return n;
  const int64_t target =
      static_cast<int64_t>(static_cast<double>(total) * static_cast<double>(piece) / static_cast<double>(pieces));
  int64_t low = 0, high = n;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (start(middle) < target)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// One piece per thread, fewer when there is little to do (columns touched in all).
FE_FUNCTION int64_t pieces_for(const Parallel& parallel, int64_t columns) {
  constexpr int64_t kLittle = 1 << 15;
  const int64_t most = columns / kLittle + 1;
  return most < parallel.threads ? most : parallel.threads;
}

}  // namespace fastemb::cpu::FE_ISA
