// The gradient of a row step: a row of `grad`, or, in a step fused with the backward, the sum of a segment of terms.
//
// A lane sums its own columns while it has the row's state under way, so the row gradient exists in registers only.
// Segments of more than kChunk terms would leave one group of lanes with all the work: a kernel of its own sums their
// chunks first (segments.cuh), and the step adds up those.
#pragma once

#include "cuda/row_access.cuh"
#include "cuda/segments.cuh"

namespace fastemb::cuda {

// Where row k's gradient is: in row k of `grad`, or in terms [begin, end).
struct OwnRow {};
struct Terms {
  int32_t begin, end;
};

template <bool kFused>
FE_DEVICE std::conditional_t<kFused, Terms, OwnRow> gradient_place(const RowStep& r, int64_t k, int64_t num_rows) {
  if constexpr (kFused) {
    if (k >= num_rows) return {0, 0};
    return {load<1>(r.segments + k).item[0], load<1>(r.segments + k + 1).item[0]};
  } else {
    return {};
  }
}

template <int V, typename A>
FE_DEVICE void load_gradient(const RowStep& r, int64_t k, OwnRow, int64_t column, A (&grad)[V]) {
  load_row(r, k, column, grad);
}

// Terms that a lane has on the way at once, as its registers allow.
template <typename A, int V>
inline constexpr int kTermsAhead = V * sizeof(A) <= 32 ? 4 : 2;

// Rows `source` of grad, where it is not negative. All of them are under way before one is widened.
template <typename G, int V, typename A, int kAhead>
FE_DEVICE void load_sources(const RowStep& r, const int32_t (&source)[kAhead], int64_t column, A (&x)[kAhead][V]) {
  Vec<G, V> g[kAhead] = {};
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
    if (source[u] >= 0) g[u] = load<V>(static_cast<const G*>(r.grad) + source[u] * r.dim + column);
  }
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
#pragma unroll
    for (int v = 0; v < V; ++v) x[u][v] = static_cast<A>(widen(g[u].item[v]));
  }
}

// part += terms [begin, end), at most kChunk of them, in order. Those of no source are left out.
template <int V, typename A>
FE_DEVICE void sum_terms(const RowStep& r, int64_t begin, int64_t end, int64_t column, A (&part)[V]) {
  constexpr int kAhead = kTermsAhead<A, V>;
  for (int64_t i = begin; i < end; i += kAhead) {
    int32_t source[kAhead];
    A scale[kAhead];
    A x[kAhead][V];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) source[u] = i + u < end ? load<1>(r.sources + i + u).item[0] : -1;
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const bool given = r.coefficients != nullptr && i + u < end;
      scale[u] = given ? load<1>(static_cast<const A*>(r.coefficients) + i + u).item[0] : A(1);
    }
    if constexpr (std::is_same_v<A, double>) {
      load_sources<double>(r, source, column, x);
    } else {
      switch (r.grad_type) {
        case DType::f16: load_sources<f16>(r, source, column, x); break;
        case DType::bf16: load_sources<bf16>(r, source, column, x); break;
        default: load_sources<float>(r, source, column, x);
      }
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (source[u] < 0) continue;
#pragma unroll
      for (int v = 0; v < V; ++v) part[v] = add_rn(part[v], mul_rn(scale[u], x[u][v]));
    }
  }
}

template <int V, typename A>
FE_DEVICE void load_gradient(const RowStep& r, int64_t, Terms terms, int64_t column, A (&grad)[V]) {
#pragma unroll
  for (int v = 0; v < V; ++v) grad[v] = A(0);
  if (terms.end - terms.begin <= kChunk) {  // one chunk, never -0: adding it to the accumulator's 0 changes nothing
    sum_terms(r, terms.begin, terms.end, column, grad);
  } else {
    sum_partials<kTermsAhead<A, V>>(static_cast<const A*>(r.partials), r.dim, terms.begin, terms.end, column, grad);
  }
}

// ---- launch ------------------------------------------------------------------------------------------------------

// May V columns of the gradient be read at a time, whichever row they are of?
inline bool aligned_terms(const RowStep& r, int v) {
  return r.segments == nullptr ||
         (r.dim % v == 0 && aligned_words(r.grad, r.grad_type, v) && aligned_words(r.partials, acc_type(r), v));
}

// Writes the partial sums of long segments that load_gradient reads. In term_chunks.cuh, which one file of a library
// includes.
int launch_term_chunks(const RowStep& r, Stream stream);

// body(whether the step is fused), behind what a fused step needs.
template <typename Body>
int with_gradient(const RowStep& r, Stream stream, Body body) {
  if (r.segments == nullptr) return body(std::false_type{});
  if (int error = launch_term_chunks(r, stream)) return error;
  return body(std::true_type{});
}

}  // namespace fastemb::cuda
