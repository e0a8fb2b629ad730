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

template <typename T>
inline constexpr DType kDType = __is_same(T, f16)     ? DType::f16
                                : __is_same(T, bf16)  ? DType::bf16
                                : __is_same(T, float) ? DType::f32
                                                      : DType::f64;

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

typedef uint64_t Longs __attribute__((vector_size(kVectorBytes)));
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
FE_FUNCTION Words zero_extended(Halves h) {
#if defined(__AVX512F__)
  return (Words)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)h);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, Words);
#endif
}

FE_FUNCTION Vec<float> widened(bf16, Halves h) { return (Vec<float>)(zero_extended(h) << 16); }

FE_FUNCTION Vec<float> widened(f16, Halves h) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, (__m256i)h);
#elif defined(__F16C__)
  return (Vec<float>)_mm256_cvtph_ps((__m128i)h);
#else
  Vec<float> v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = to_acc(f16{h[i]});
  return v;
#endif
}

// to_bf16 and to_f16 of a vector.
FE_FUNCTION Halves rounded(bf16, Vec<float> x) {
  const Words u = (Words)x, cut = u >> 16;
  const Words nearest = (u + 0x7fffu + (cut & 1u)) >> 16;
  const Words bits = x == x ? nearest : cut | 0x0040u;
#if defined(__AVX512F__)
  return (Halves)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)bits);
#elif defined(__AVX2__)
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)bits, (__m256i)bits), 0xd8);
  return (Halves)_mm256_castsi256_si128(packed);
#else
  return __builtin_convertvector(bits, Halves);
#endif
}

FE_FUNCTION Halves rounded(f16, Vec<float> x) {
#if defined(__AVX512F__)
  return (Halves)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  return (Halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  Halves h;
  for (int i = 0; i < kLanes<float>; ++i) h[i] = to_f16(x[i]).bits;
  return h;
#endif
}

// Whether x rounds to `half`, which is given widened; if it is a NaN, it does not matter.
FE_FUNCTION IntVec<float> rounds_to(f16, Vec<float> x, Vec<float> half) {
  return (IntVec<float>)widened(f16{}, rounded(f16{}, x)) == (IntVec<float>)half;
}

// Without rounding x, which takes twice as long: as numbers of 32 bits, bf16 neighbours are 2^16 apart, and of the two
// halfway points only an even `half` attracts.
FE_FUNCTION IntVec<float> rounds_to(bf16, Vec<float> x, Vec<float> half) {
  const Words odd = ((Words)half >> 16) & 1u;
  const Words above_least = (Words)x - (Words)half + 0x8000u - odd;
  return (IntVec<float>)(above_least <= 0x10000u - 2u * odd) & (x == x);
}

template <typename T>
FE_FUNCTION Vec<float> load_halves(const T* p) {
  Halves h;
  memcpy(&h, p, sizeof(h));
  return widened(T{}, h);
}

// Two vectors' worth of bf16, as the even and the odd columns: a shift and a mask, where widening neighbours costs a
// shuffle more per vector.
struct EvenOdd {
  Vec<float> even, odd;
};

FE_FUNCTION EvenOdd load_even_odd(const bf16* p) {
  Words pairs;
  memcpy(&pairs, p, sizeof(pairs));
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the even column must be the low half");
  return {(Vec<float>)(pairs << 16), (Vec<float>)(pairs & 0xffff0000u)};
}

// Columns in their order again: the first and the second vector of the two.
FE_FUNCTION Vec<float> interleaved(const EvenOdd& x, int64_t second) {
  IntVec<float> pick = {};
  for (int i = 0; i < kLanes<float>; ++i) {
    pick[i] = static_cast<int32_t>(second * kLanes<float> + i) / 2 + (i % 2) * kLanes<float>;
  }
  return __builtin_shuffle(x.even, x.odd, pick);
}

FE_FUNCTION Vec<float> load(const bf16* p) { return load_halves(p); }
FE_FUNCTION Vec<float> load(const f16* p) { return load_halves(p); }

FE_FUNCTION void store(float* p, Vec<float> v) { memcpy(p, &v, sizeof(v)); }
FE_FUNCTION void store(double* p, Vec<double> v) { memcpy(p, &v, sizeof(v)); }

// Past the caches, to memory that is not read again soon; needs an address that a vector divides, and a fence before
// others read.
FE_FUNCTION void stream(float* p, Vec<float> v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, (__m256)v);
#elif defined(__SSE2__)
  _mm_stream_ps(p, (__m128)v);
#else
  store(p, v);
#endif
}

FE_FUNCTION void stream(double* p, Vec<double> v) {
#if defined(__AVX512F__)
  _mm512_stream_pd(p, (__m512d)v);
#elif defined(__AVX2__)
  _mm256_stream_pd(p, (__m256d)v);
#elif defined(__SSE2__)
  _mm_stream_pd(p, (__m128d)v);
#else
  store(p, v);
#endif
}

FE_FUNCTION void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <typename T>
FE_FUNCTION void store(T* p, Vec<float> v) {
  const Halves h = rounded(T{}, v);
  memcpy(p, &h, sizeof(h));
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
    return widened(T{}, (Halves)halves);
  }
#else
  T buffer[kLanes<A>] = {};
  memcpy(buffer, p, static_cast<size_t>(n) * sizeof(T));
  return load(buffer);
#endif
}

// The first n < lanes elements, rounded to T.
template <typename T, typename V>
FE_FUNCTION void store_part(T* p, V v, int64_t n) {
#if defined(__AVX512F__)
  const uint32_t mask = (1u << n) - 1;
  if constexpr (__is_same(T, float)) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>(mask), (__m512)v);
  } else if constexpr (__is_same(T, double)) {
    _mm512_mask_storeu_pd(p, static_cast<__mmask8>(mask), (__m512d)v);
  } else {
    _mm256_mask_storeu_epi16(p, static_cast<__mmask16>(mask), (__m256i)rounded(T{}, v));
  }
#else
  T buffer[sizeof(V) / sizeof(typename AccOf<T>::type)];
  store(buffer, v);
  memcpy(p, buffer, static_cast<size_t>(n) * sizeof(T));
#endif
}

template <typename A>
FE_FUNCTION Vec<A> broadcast(A x) {
  return x - Vec<A>{};  // a sum would make +0 of -0
}

// acc[0..n) rounded to T at out.
template <typename T, typename A>
FE_FUNCTION void store_row(T* out, const A* acc, int64_t n) {
  int64_t i = 0;
  if constexpr (__is_same(typename AccOf<T>::type, A)) {
    for (; i + kLanes<A> <= n; i += kLanes<A>) store(out + i, load(acc + i));
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
  explicit Scratch(int64_t n) {
    // On cache lines: a vector that crosses two of them costs twice.
    const size_t bytes = (static_cast<size_t>(n) * sizeof(E) + 64) / 64 * 64;
    data = static_cast<E*>(aligned_alloc(64, bytes));
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
