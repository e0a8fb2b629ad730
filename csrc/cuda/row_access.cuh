// What every row step shares on the device: the scalars of the step, and how a lane reads and writes its columns of the
// parameter. The arithmetic itself is in common/row_update.h, here with V = one element.
#pragma once

#include "cuda/primitives.cuh"

#ifndef FASTEMB_STEP_BLOCKS
#define FASTEMB_STEP_BLOCKS 2048
#endif

namespace fastemb {

// What common/row_update.h asks of a backend; for both sides, as its functions are.
FE_FUNCTION float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return cuda::sqrt_rn(x);
#else
  return std::sqrt(x);
#endif
}
FE_FUNCTION double square_root(double x) {
#if defined(__CUDA_ARCH__)
  return cuda::sqrt_rn(x);
#else
  return std::sqrt(x);
#endif
}
FE_FUNCTION float larger(float x, float y) { return x > y || x != x ? x : y; }
FE_FUNCTION double larger(double x, double y) { return x > y || x != x ? x : y; }

}  // namespace fastemb

#include "common/row_update.h"
#include "common/stochastic.h"

namespace fastemb::cuda {

// One step's scalars.
template <typename A, typename Rule>
struct StepScalars {
  Rule rule;
  GradientRule<A> gradient;
  int64_t step;
  int64_t num_rows;  // leading gradient rows that count; none when the step is skipped
};

// What `make` gives, made by one thread of the block for all: powers and divisions in double are slow.
template <typename X, typename Make>
FE_DEVICE X once_per_block(Make make) {
  FE_SHARED(X, shared, 1);
  // Padding is copied with the rest: it gets a value, so that nothing uninitialised is ever read.
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(sizeof(X)); i += kBlock) {
    reinterpret_cast<char*>(shared)[i] = 0;
  }
  block_barrier();
  if (threadIdx.x == 0) shared[0] = make();
  block_barrier();
  return shared[0];
}

FE_DEVICE int64_t rows_that_count(const RowStep& r) {
  if (skipped(r)) return 0;
  if (r.used_rows == nullptr) return r.num_rows;
  const int64_t used = *r.used_rows;
  return used < 0 ? 0 : used < r.num_rows ? used : r.num_rows;
}

// The table row of gradient row k, or -1: nothing to do there.
FE_DEVICE int64_t table_row(const RowStep& r, int64_t k, int64_t num_rows) {
  if (k >= num_rows) return -1;
  const int64_t row = r.rows == nullptr ? k : load<1>(r.rows + k).item[0];
  return row >= 0 && row < r.num_embeddings ? row : -1;
}

// What the first lane of each group of `lanes` <= kWarp lanes has.
template <typename X>
FE_DEVICE X of_first_lane(X x, int32_t lanes) {
  return broadcast(x, static_cast<int32_t>(threadIdx.x) % kWarp & -lanes);
}

template <typename G, int V, typename A>
FE_DEVICE void load_widened(const void* base, int64_t at, A (&x)[V]) {
  const Vec<G, V> y = load<V>(static_cast<const G*>(base) + at);
#pragma unroll
  for (int v = 0; v < V; ++v) x[v] = static_cast<A>(widen(y.item[v]));
}

// A master is of use to 16-bit parameters only; the adapter refuses it for others.
template <typename T>
inline constexpr bool kHasMaster = sizeof(T) == 2;

// V columns of a row as they lie in memory, so that all of a step's loads can be under way before one is waited for.
template <typename T, int V>
struct Stored {
  Vec<T, V> own;
  Vec<typename AccOf<T>::type, V> master;
};

template <typename T, int V>
FE_DEVICE Stored<T, V> load_stored(const RowStep& r, int64_t row, int64_t column) {
  using A = typename AccOf<T>::type;
  Stored<T, V> x = {};
  x.own = load_mutable<V>(static_cast<const T*>(r.param) + row * r.param_stride + column);
  if constexpr (kHasMaster<T>) {
    if (r.master != nullptr) x.master = load_mutable<V>(static_cast<const A*>(r.master) + row * r.dim + column);
  }
  return x;
}

// The value of element v: the master's where it still rounds to the parameter's bits.
template <typename T, int V>
FE_DEVICE typename AccOf<T>::type value_of(const RowStep& r, const Stored<T, V>& x, int v) {
  const auto own = widen(x.own.item[v]);
  if constexpr (kHasMaster<T>) {
    const bool kept = r.master != nullptr && narrow<T>(x.master.item[v]).bits == x.own.item[v].bits;
    return kept ? x.master.item[v] : own;
  } else {
    return own;
  }
}

// Row k of grad, columns [column, column + V). Waits for the loads: it comes last.
template <int V, typename A>
FE_DEVICE void load_row(const RowStep& r, int64_t k, int64_t column, A (&grad)[V]) {
  const int64_t at = k * r.dim + column;
  if constexpr (std::is_same_v<A, double>) {
    load_widened<double>(r.grad, at, grad);
  } else {
    switch (r.grad_type) {
      case DType::f16: return load_widened<f16>(r.grad, at, grad);
      case DType::bf16: return load_widened<bf16>(r.grad, at, grad);
      default: return load_widened<float>(r.grad, at, grad);
    }
  }
}

template <typename T, int V, typename A>
FE_DEVICE void store_value(const RowStep& r, int64_t row, int64_t column, uint64_t key, const A (&value)[V]) {
  Vec<T, V> rounded;
#pragma unroll
  for (int v = 0; v < V; ++v) rounded.item[v] = narrow<T>(value[v]);
  if constexpr (kHasMaster<T>) {
    if (r.master != nullptr) {
      Vec<A, V> master;
#pragma unroll
      for (int v = 0; v < V; ++v) master.item[v] = value[v];
      store<V>(static_cast<A*>(r.master) + row * r.dim + column, master);
    } else if (r.stochastic) {
#pragma unroll
      for (int v = 0; v < V; ++v) rounded.item[v] = round_stochastic(T{}, value[v], random_bits(key, column + v));
    }
  }
  store<V>(static_cast<T*>(r.param) + row * r.param_stride + column, rounded);
}

// A moment of Adam as it is stored; `column` is its own.
template <typename M, typename A>
FE_DEVICE M narrow_moment(A x, const MomentRounding& how, int64_t column) {
  if constexpr (std::is_same_v<M, bf16>) {
    if (how.stochastic) return round_stochastic(M{}, x, moment_bits(x, how.key, column));
  }
  return narrow<M>(x);
}

// The key of store_value.
FE_DEVICE uint64_t stochastic_key(const RowStep& r, int64_t step, int64_t row) {
  return r.stochastic ? row_key(r.seed, step, row) : 0;
}

// ---- launch ------------------------------------------------------------------------------------------------------

// Blocks of a launch at most: each makes the step's scalars first, so few that live long rather than many.
inline constexpr int64_t kStepBlocks = FASTEMB_STEP_BLOCKS;

inline int64_t element_bytes(DType type) { return type == DType::f64 ? 8 : type == DType::f32 ? 4 : 2; }

// May V elements of `type` at a time be read at `base`, if the first can?
inline bool aligned_words(const void* base, DType type, int v) {
  const int64_t bytes = v * element_bytes(type);
  return aligned(base, bytes < 16 ? bytes : 16);
}

inline DType acc_type(const RowStep& r) { return r.param_type == DType::f64 ? DType::f64 : DType::f32; }

inline bool aligned_step(const RowStep& r, int v) {
  return aligned_words(r.param, r.param_type, v) && aligned_words(r.master, acc_type(r), v) &&
         aligned_words(r.grad, r.grad_type, v);
}

}  // namespace fastemb::cuda
