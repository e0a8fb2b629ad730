// Gradients of the rows of a step: as they lie in memory, or, in a step that is fused with the backward, summed here
// from the terms of the row. The parameter's row waits in the cache by then: the sum of a few terms takes no longer
// than reading a gradient that was written before.
#pragma once

#include "cpu/row_pieces.h"
#include "cpu/segments.h"

namespace fastemb::cpu::FE_ISA {

// The terms of a fused step; all columns.
template <typename T>
struct SourceTerms {
  using Element = T;
  using A = typename AccOf<T>::type;

  explicit SourceTerms(const RowStep& step) : p(step), scaled(step.coefficients != nullptr) {}

  int64_t width() const { return p.dim; }
  bool summed_otherwise() const { return false; }
  void sum_chunk(int64_t, int64_t, A*) const {}

  void list_positions(int64_t begin, int64_t end, int64_t limit, RowList<T>& list) const {
    const T* grad = static_cast<const T*>(p.grad);
    for (int64_t j = begin; j < end; ++j) {
      const int64_t ahead = j + kPrefetchAhead<T> < limit ? j + kPrefetchAhead<T> : j;
      list.rows[j - begin] = grad + p.sources[j] * p.dim;
      list.rows_ahead[j - begin] = grad + p.sources[ahead] * p.dim;
      if (scaled) list.scales[j - begin] = static_cast<const A*>(p.coefficients)[j];
    }
  }

  // The sum of a few terms, without a list of them where none is needed; whether it is done.
  bool sum_few(int64_t begin, int64_t end, int64_t limit, A* out) const {
    if (scaled || end - begin > kChunk || end + kPrefetchAhead<T> > limit) return false;
    const IndexedRows<T, int32_t> rows{static_cast<const T*>(p.grad), p.dim, p.sources + begin};
    sum_rows<false>(rows, 0, end - begin, p.dim, Cached<A>{out});
    return true;
  }

  const RowStep& p;
  bool scaled;
};

template <typename A>
class RowGradients {
 public:
  // Sums the long segments, by all threads.
  RowGradients(const RowStep& step, const Parallel& parallel)
      : p_(step),
        limit_(step.segments == nullptr || skipped(step) || step.dim == 0 ? 0 : step.segments[used_rows(step)]),
        long_sums_(limit_ / kLong + 1) {
    if (limit_ == 0) return;
    const int64_t used = used_rows(step);
    with_terms([&](auto terms) {
      sum_long_segments(terms, step.segments, used, static_cast<A*>(step.partials), parallel,
                        [&](int64_t segment, A* sum) { long_sums_.data[num_long_++] = {segment, sum}; });
    });
  }

  // The gradient of a piece; `buffers` is the thread's.
  Gradient<A> of(const Piece& at, Buffers<A>& buffers) const {
    if (p_.segments == nullptr) return {p_.grad, p_.grad_type, at.k * p_.dim + at.column};
    return {sum_of(at.k, buffers.sum.data, buffers.part.data)};
  }

  // The sum of row k's terms at `sum`, or where it lies already; `part` is scratch of the same size.
  const A* sum_of(int64_t k, A* sum, A* part) const {
    const int64_t begin = p_.segments[k], end = p_.segments[k + 1];
    if (end - begin > kLong) return long_sum(k);
    with_terms([&](auto terms) {
      if (terms.sum_few(begin, end, limit_, sum)) return;
      RowList<typename decltype(terms)::Element> list;
      sum_segment(terms, begin, end, limit_, list, part, sum);
    });
    return sum;
  }

 private:
  template <typename F>
  void with_terms(const F& f) const {
    if constexpr (sizeof(A) == 8) {
      f(SourceTerms<double>(p_));
    } else {
      switch (p_.grad_type) {
        case DType::f16: return f(SourceTerms<f16>(p_));
        case DType::bf16: return f(SourceTerms<bf16>(p_));
        default: return f(SourceTerms<float>(p_));
      }
    }
  }

  const A* long_sum(int64_t segment) const {
    int64_t low = 0, high = num_long_;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      if (long_sums_.data[middle].segment <= segment)
        low = middle;
      else
        high = middle;
    }
    return long_sums_.data[low].sum;
  }

  struct LongSum {
    int64_t segment;
    const A* sum;
  };

  const RowStep& p_;
  int64_t limit_;  // terms of all rows
  Scratch<LongSum> long_sums_;
  int64_t num_long_ = 0;
};

}  // namespace fastemb::cpu::FE_ISA
