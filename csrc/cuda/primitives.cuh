// What the kernels are made of: rounded arithmetic, vector loads and stores, exchanges across lanes, error reports.
// The only file that names intrinsics.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/numeric.h"
#include "common/platform.h"
#include "ops.h"

#ifndef FASTEMB_BLOCK_THREADS
#define FASTEMB_BLOCK_THREADS 256
#endif

namespace fastemb::cuda {

inline constexpr int kWarp = 32;
inline constexpr int kBlock = FASTEMB_BLOCK_THREADS;
inline constexpr int kWarps = kBlock / kWarp;
inline constexpr int64_t kMaxGridY = 65535;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

// ---- arithmetic: each operation rounded by itself, whatever the compiler's contraction setting --------------------

FE_DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
FE_DEVICE double add_rn(double a, double b) { return __dadd_rn(a, b); }
FE_DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
FE_DEVICE double mul_rn(double a, double b) { return __dmul_rn(a, b); }
FE_DEVICE float div_rn(float a, float b) { return __fdiv_rn(a, b); }
FE_DEVICE double div_rn(double a, double b) { return __ddiv_rn(a, b); }
FE_DEVICE float sqrt_rn(float a) { return __fsqrt_rn(a); }
FE_DEVICE double sqrt_rn(double a) { return __dsqrt_rn(a); }
FE_DEVICE double fma_rn(double a, double b, double c) { return fma(a, b, c); }
FE_DEVICE float magnitude(float a) { return fabsf(a); }
FE_DEVICE double magnitude(double a) { return fabs(a); }
FE_DEVICE float power(float a, float b) { return powf(a, b); }
FE_DEVICE double power(double a, double b) { return pow(a, b); }

// Widening is exact, so the hardware's conversion gives the bits of numeric.h (a NaN stays some NaN) in one step.
FE_DEVICE float widen(f16 x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  return to_acc(x);
#endif
}
FE_DEVICE float widen(bf16 x) { return to_acc(x); }
FE_DEVICE float widen(float x) { return x; }
FE_DEVICE double widen(double x) { return x; }

// FromAcc<T> by the hardware's conversion, without a branch: the same bits but for the payload of a NaN.
template <typename T, typename A>
FE_DEVICE T narrow(A x) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, f16> && std::is_same_v<A, float>) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
  }
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, bf16> && std::is_same_v<A, float>) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
  }
#endif
#endif
  return FromAcc<T>::convert(x);
}

// ---- loads and stores --------------------------------------------------------------------------------------------

// V neighbours of a row. V is 1, or what fills 16 bytes.
template <typename T, int V>
struct Vec {
  T item[V];
};

template <typename T>
inline constexpr DType kDType = DType::f32;
template <>
inline constexpr DType kDType<f16> = DType::f16;
template <>
inline constexpr DType kDType<bf16> = DType::bf16;
template <>
inline constexpr DType kDType<double> = DType::f64;

template <typename T>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(T));

template <int kBytes>
struct Word;
template <>
struct Word<1> {
  using type = unsigned char;
};
template <>
struct Word<2> {
  using type = unsigned short;
};
template <>
struct Word<4> {
  using type = unsigned int;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

// The word that V elements move by, and how many of them: one, or several of 16 bytes.
template <typename T, int V>
struct Words {
  static constexpr int kBytes = V * static_cast<int>(sizeof(T)) < 16 ? V * static_cast<int>(sizeof(T)) : 16;
  static constexpr int kCount = V * static_cast<int>(sizeof(T)) / kBytes;
  using type = typename Word<kBytes>::type;
};

// Through the read-only path: for memory that no thread of the kernel writes.
template <int V, typename T>
FE_DEVICE Vec<T, V> load(const T* from) {
  using W = Words<T, V>;
  Vec<T, V> x;
#pragma unroll
  for (int i = 0; i < W::kCount; ++i) {
    const typename W::type word = __ldg(reinterpret_cast<const typename W::type*>(from) + i);
    memcpy(reinterpret_cast<char*>(&x) + i * W::kBytes, &word, W::kBytes);
  }
  return x;
}

// For memory that the same kernel writes.
template <int V, typename T>
FE_DEVICE Vec<T, V> load_mutable(const T* from) {
  using W = Words<T, V>;
  Vec<T, V> x;
#pragma unroll
  for (int i = 0; i < W::kCount; ++i) {
    const typename W::type word = reinterpret_cast<const typename W::type*>(from)[i];
    memcpy(reinterpret_cast<char*>(&x) + i * W::kBytes, &word, W::kBytes);
  }
  return x;
}

template <int V, typename T>
FE_DEVICE void store(T* to, const Vec<T, V>& x) {
  using W = Words<T, V>;
#pragma unroll
  for (int i = 0; i < W::kCount; ++i) {
    typename W::type word;
    memcpy(&word, reinterpret_cast<const char*>(&x) + i * W::kBytes, W::kBytes);
    reinterpret_cast<typename W::type*>(to)[i] = word;
  }
}

template <typename T, int V, typename A>
FE_DEVICE void store_rounded(void* base, int64_t at, const A (&x)[V]) {
  Vec<T, V> y;
#pragma unroll
  for (int v = 0; v < V; ++v) y.item[v] = narrow<T>(x[v]);
  store<V>(static_cast<T*>(base) + at, y);
}

// base[at .. at + V) = x, rounded to `type`.
template <int V, typename A>
FE_DEVICE void store_as(void* base, DType type, int64_t at, const A (&x)[V]) {
  switch (type) {
    case DType::f16: return store_rounded<f16>(base, at, x);
    case DType::bf16: return store_rounded<bf16>(base, at, x);
    case DType::f32: return store_rounded<float>(base, at, x);
    case DType::f64: return store_rounded<double>(base, at, x);
  }
}

// base[at] as the accumulator A.
template <typename A>
FE_DEVICE A load_as(const void* base, DType type, int64_t at) {
  switch (type) {
    case DType::f16: return static_cast<A>(widen(load<1>(static_cast<const f16*>(base) + at).item[0]));
    case DType::bf16: return static_cast<A>(widen(load<1>(static_cast<const bf16*>(base) + at).item[0]));
    case DType::f32: return static_cast<A>(load<1>(static_cast<const float*>(base) + at).item[0]);
    default: return static_cast<A>(load<1>(static_cast<const double*>(base) + at).item[0]);
  }
}

template <typename I>
FE_DEVICE int64_t load_integer(const void* base, int64_t at) {
  return load<1>(static_cast<const I*>(base) + at).item[0];
}

FE_DEVICE int64_t load_integer(const void* base, IndexType type, int64_t at) {
  return type == IndexType::i32 ? load_integer<int32_t>(base, at) : load_integer<int64_t>(base, at);
}

// ---- lanes -------------------------------------------------------------------------------------------------------

FE_DEVICE float exchange(float x, int distance) { return __shfl_xor_sync(kAllLanes, x, distance); }
FE_DEVICE double exchange(double x, int distance) { return __shfl_xor_sync(kAllLanes, x, distance); }
FE_DEVICE int64_t exchange(int64_t x, int distance) {
  return __shfl_xor_sync(kAllLanes, static_cast<long long>(x), distance);
}

// What lane `source` of the warp has; every lane takes part.
FE_DEVICE float broadcast(float x, int source) { return __shfl_sync(kAllLanes, x, source); }
FE_DEVICE double broadcast(double x, int source) { return __shfl_sync(kAllLanes, x, source); }
FE_DEVICE int64_t broadcast(int64_t x, int source) { return __shfl_sync(kAllLanes, static_cast<long long>(x), source); }

// Sum over the lanes of a warp; every lane takes part and receives it.
FE_DEVICE int64_t warp_sum(int64_t x) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x += exchange(x, distance);
  return x;
}

FE_DEVICE int64_t warp_max(int64_t x) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const int64_t other = exchange(x, distance);
    x = other > x ? other : x;
  }
  return x;
}

FE_DEVICE int64_t warp_min(int64_t x) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const int64_t other = exchange(x, distance);
    x = other < x ? other : x;
  }
  return x;
}

// The first item of those that the warp of item k works on together, `lanes` (a power of two) on each. Loops ask for
// it, not for k, so that whole warps go round and every lane takes part in their exchanges.
FE_DEVICE int64_t first_of_warp(int64_t k, int32_t lanes) {
  return lanes < kWarp ? k & -static_cast<int64_t>(kWarp / lanes) : k;
}

// All threads of the block have come here, and see what the others wrote before.
FE_DEVICE void block_barrier() { __syncthreads(); }

// Whole numbers only: the result does not depend on who comes first.
FE_DEVICE void atomic_add(int64_t* to, int64_t x) {
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(x));
}
FE_DEVICE void atomic_max(int64_t* to, int64_t x) {
  atomicMax(reinterpret_cast<long long*>(to), static_cast<long long>(x));
}
FE_DEVICE void atomic_min(int64_t* to, int64_t x) {
  atomicMin(reinterpret_cast<long long*>(to), static_cast<long long>(x));
}

// ---- errors ------------------------------------------------------------------------------------------------------

// The report lies in host memory. Whoever turns `reserved` from 0 to 1 owns it, and sets `code` when the rest is there.
FE_DEVICE void report(ErrorReport* error, ErrorReport::Code code, int64_t position, int64_t value, int64_t limit) {
  volatile ErrorReport* shown = error;
  if (error == nullptr || shown->reserved != 0) return;
  if (atomicCAS(&error->reserved, 0, 1) != 0) return;
  shown->position = position;
  shown->value = value;
  shown->limit = limit;
  __threadfence_system();
  shown->code = code;
}

// ---- launch shapes -----------------------------------------------------------------------------------------------

FE_FUNCTION constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline bool aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

// `items` rows of `dim` elements over groups of `lanes` neighbouring threads, V elements a lane. A row wider than one
// group is cut into `tiles`, one group each; blockIdx.y strides over them. blockIdx.x strides over the items.
struct RowShape {
  int32_t lanes;
  int64_t tiles;
  dim3 grid;
};

inline int32_t group_lanes(int64_t vectors) {
  int32_t lanes = 1;
  while (lanes < kWarp && lanes < vectors) lanes *= 2;
  return lanes;
}

// `max_blocks` bounds the grid where the number of items is known to the device only.
inline RowShape row_shape(int64_t items, int64_t dim, int v, int64_t max_blocks = 0x7fffffff) {
  const int64_t vectors = ceil_div(dim, v);
  RowShape shape;
  shape.lanes = group_lanes(vectors);
  shape.tiles = ceil_div(vectors, shape.lanes);
  const int64_t blocks = ceil_div(items, kBlock / shape.lanes);
  shape.grid = dim3(static_cast<unsigned>(blocks < max_blocks ? blocks : max_blocks),
                    static_cast<unsigned>(shape.tiles < kMaxGridY ? shape.tiles : kMaxGridY));
  return shape;
}

// Enough blocks to fill any GPU of today; grids over device-known amounts of work stop here.
inline constexpr int64_t kFillBlocks = 4096;

inline dim3 flat_grid(int64_t threads) {
  const int64_t blocks = ceil_div(threads, kBlock);
  return dim3(static_cast<unsigned>(blocks < 0x7fffffff ? blocks : 0x7fffffff));
}

FE_DEVICE int64_t flat_thread() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
FE_DEVICE int64_t flat_threads() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// The calling thread's place in a RowShape.
struct Place {
  int64_t item;
  int64_t step;
  int32_t lane;
};

FE_DEVICE Place place(int32_t lanes) {
  const int64_t groups = static_cast<int64_t>(blockDim.x) / lanes;
  return {static_cast<int64_t>(blockIdx.x) * groups + threadIdx.x / lanes, groups * gridDim.x,
          static_cast<int32_t>(threadIdx.x % lanes)};
}

// ---- run-time type to template argument --------------------------------------------------------------------------

template <typename T>
struct Type {
  using type = T;
};

template <typename Body>
int with_dtype(DType type, Body body) {
  switch (type) {
    case DType::f16: return body(Type<f16>{});
    case DType::bf16: return body(Type<bf16>{});
    case DType::f32: return body(Type<float>{});
    default: return body(Type<double>{});
  }
}

template <typename Body>
int with_index(IndexType type, Body body) {
  return type == IndexType::i32 ? body(Type<int32_t>{}) : body(Type<int64_t>{});
}

// The vector instance or the scalar one.
template <typename T, typename Body>
int with_vector(bool vector, Body body) {
  return vector ? body(std::integral_constant<int, kVector<T>>{}) : body(std::integral_constant<int, 1>{});
}

}  // namespace fastemb::cuda
