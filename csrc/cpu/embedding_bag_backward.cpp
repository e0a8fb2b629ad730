// Row gradients on the CPU, and the terms that they are sums of. A dense gradient is written once, the rows that no id
// names as zeros between those that are summed.
#include "cpu/kernels.h"
#include "cpu/segments.h"

namespace fastemb::cpu::FE_ISA {
namespace {

inline constexpr int64_t kStreamBytes = int64_t{16} << 20;  // outputs beyond this do not stay in a cache anyway

enum class Leave { cached, streamed };

// bag_of[p] for every position unless each is a bag of its own, or bag_of is null; bag_count[b] for a mean.
template <typename A>
void describe_bags(const Bags& bags, Mode mode, int32_t* bag_of, A* bag_count, const Parallel& parallel) {
  const bool need_bag_of = bag_of != nullptr && !(bags.offsets == nullptr && bags.bag_length == 1);
  const int64_t total = covered(bags) + bags.num_bags;
  const auto start = [&](int64_t b) { return bag_begin(bags, b) + b; };
  const int64_t pieces = pieces_for(parallel, total);
  parallel_ranges(parallel, pieces, 1, [&](int64_t piece, int64_t piece_end) {
    const int64_t first = split_point(bags.num_bags, total, piece, pieces, start);
    const int64_t last = split_point(bags.num_bags, total, piece_end, pieces, start);
    for (int64_t b = first; b < last; ++b) {
      const int64_t begin = bag_begin(bags, b), end = bag_begin(bags, b + 1);
      int64_t count = end - begin;
      if (need_bag_of) {
        for (int64_t i = begin; i < end; ++i) bag_of[i] = static_cast<int32_t>(b);
      }
      if (mode == Mode::mean) {
        if (bags.padding_idx >= 0) {
          for (int64_t i = begin; i < end; ++i) {
            if (load_index(bags.indices, bags.index_type, i) == bags.padding_idx) --count;
          }
        }
        bag_count[b] = static_cast<A>(count);
      }
    }
  });
}

// The terms of one row's gradient.
template <typename T>
struct Terms {
  using Element = T;
  using A = typename AccOf<T>::type;

  explicit Terms(const BagBackward& problem)
      : p(problem),
        grad(static_cast<const T*>(p.grad_output)),
        bag_count(static_cast<const A*>(p.bag_count)),
        scaled(p.per_sample_weights != nullptr || p.mode == Mode::mean),
        one_per_bag(p.bags.offsets == nullptr && p.bags.bag_length == 1) {}

  int64_t bag(int32_t position) const { return one_per_bag ? position : p.bag_of[position]; }

  A scale(int32_t position, int64_t b) const {
    A s = p.per_sample_weights == nullptr ? A{1} : load_scalar<A>(p.per_sample_weights, p.per_sample_type, position);
    return p.mode == Mode::mean ? s / bag_count[b] : s;
  }

  // Sorted positions [begin, end), at most kChunk of them; `limit` bounds what may be prefetched.
  void list_positions(int64_t begin, int64_t end, int64_t limit, RowList<T>& list) const {
    for (int64_t k = begin; k < end; ++k) {
      const int32_t position = p.groups.order[k];
      const int64_t b = bag(position);
      const int64_t ahead = k + kPrefetchAhead<T> < limit ? k + kPrefetchAhead<T> : k;
      list.rows[k - begin] = grad + b * p.dim;
      list.rows_ahead[k - begin] = grad + bag(p.groups.order[ahead]) * p.dim;
      if (scaled) list.scales[k - begin] = scale(position, b);
    }
  }

  int64_t width() const { return p.dim; }
  bool summed_otherwise() const { return p.mode == Mode::max; }

  // Mode max: the term of column d counts where the occurrence is the bag's winner.
  void sum_chunk(int64_t begin, int64_t end, A* part) const {
    for (int64_t d = 0; d < p.dim; ++d) part[d] = A{};
    for (int64_t k = begin; k < end; ++k) {
      const int32_t position = p.groups.order[k];
      const int64_t b = bag(position);
      const int32_t within = static_cast<int32_t>(position - bag_begin(p.bags, b));
      const int32_t* argmax = p.argmax + b * p.dim;
      const T* row = grad + b * p.dim;
      for (int64_t d = 0; d < p.dim; ++d) part[d] += argmax[d] == within ? to_acc(row[d]) : A{};
    }
  }

  const BagBackward& p;
  const T* grad;
  const A* bag_count;
  bool scaled;
  bool one_per_bag;
};

template <typename A>
A* target_row(const BagBackward& p, int64_t segment) {
  const int64_t row = p.dense ? p.groups.rows[segment] : segment;
  return static_cast<A*>(p.grad_rows) + row * p.dim;
}

template <typename A>
void finish(const BagBackward& p, int64_t segment, A* row) {
  if (!p.scale_grad_by_freq) return;
  const A occurrences = static_cast<A>(p.groups.segments[segment + 1] - p.groups.segments[segment]);
  for (int64_t d = 0; d < p.dim; ++d) row[d] /= occurrences;
}

// Zeros between the rows of a dense gradient.
template <typename A>
void zero_rows(const BagBackward& p, int64_t begin, int64_t end, Leave leave) {
  A* out = static_cast<A*>(p.grad_rows);
  const int64_t first = begin * p.dim, last = end * p.dim;
  if (leave == Leave::cached) {
    memset(out + first, 0, static_cast<size_t>(last - first) * sizeof(A));
  } else {
    for (int64_t i = first; i < last; i += kLanes<A>) stream(out + i, Vec<A>{});
  }
}

template <typename A>
Leave way_out(const BagBackward& p, int64_t num_rows) {
  const int64_t rows = p.dense ? p.bags.num_embeddings : num_rows;
  const bool whole_vectors = p.dim % kLanes<A> == 0 && reinterpret_cast<uintptr_t>(p.grad_rows) % kVectorBytes == 0;
  const bool large = rows * p.dim * static_cast<int64_t>(sizeof(A)) > kStreamBytes;
  return whole_vectors && large && !p.scale_grad_by_freq && p.mode != Mode::max ? Leave::streamed : Leave::cached;
}

// Segments [first, last) but the long ones.
template <typename T>
struct SegmentRange {
  using A = typename AccOf<T>::type;

  SegmentRange(const Terms<T>& terms_in, int64_t positions_in, Leave leave_in)
      : terms(terms_in), p(terms_in.p), positions(positions_in), leave(leave_in), part(p.dim) {}

  void sum(int64_t first, int64_t last) {
    const int32_t* segments = p.groups.segments;
    for (int64_t k = first; k < last;) {
      const int64_t length = segments[k + 1] - segments[k];
      if (length > kLong) {
        ++k;
      } else if (length > kChunk || p.mode == Mode::max) {
        A* row = target_row<A>(p, k);
        sum_segment(terms, segments[k], segments[k + 1], positions, list, part.data, row);
        finish(p, k, row);
        ++k;
      } else {
        k = sum_short(k, last);
      }
    }
  }

 private:
  // As many whole segments as one list holds: their rows are looked up together, so that the loads overlap.
  int64_t sum_short(int64_t first, int64_t last) {
    const int32_t* segments = p.groups.segments;
    const int64_t begin = segments[first];
    int64_t end = first + 1;
    while (end < last && segments[end + 1] - begin <= kChunk) ++end;
    terms.list_positions(begin, segments[end], positions, list);
    if (terms.scaled) {
      leave == Leave::streamed ? sum_listed<true, Streamed<A>>(first, end) : sum_listed<true, Cached<A>>(first, end);
    } else {
      leave == Leave::streamed ? sum_listed<false, Streamed<A>>(first, end) : sum_listed<false, Cached<A>>(first, end);
    }
    return end;
  }

  template <bool kScaled, typename Sink>
  void sum_listed(int64_t first, int64_t last) {
    const int32_t* segments = p.groups.segments;
    const int64_t begin = segments[first];
    for (int64_t k = first; k < last; ++k) {
      A* row = target_row<A>(p, k);
      sum_rows<kScaled>(list, segments[k] - begin, segments[k + 1] - begin, p.dim, Sink{row});
      finish(p, k, row);
    }
  }

  const Terms<T>& terms;
  const BagBackward& p;
  int64_t positions;
  Leave leave;
  Scratch<A> part;
  RowList<T> list;
};

template <typename T>
void backward(const BagBackward& p, const Parallel& parallel) {
  using A = typename AccOf<T>::type;
  describe_bags<A>(p.bags, p.mode, p.bag_of, static_cast<A*>(p.bag_count), parallel);
  const int64_t num_rows = *p.groups.num_rows;
  const int64_t positions = p.groups.segments[num_rows];
  const Terms<T> terms(p);
  const Leave leave = way_out<A>(p, num_rows);

  // A dense gradient also costs the rows in front of each segment's row.
  const auto start = [&](int64_t k) {
    const int64_t zeros = !p.dense ? 0 : k < num_rows ? p.groups.rows[k] : p.bags.num_embeddings;
    return p.groups.segments[k] + zeros;
  };
  const int64_t total = start(num_rows);
  const int64_t pieces = pieces_for(parallel, total * p.dim);
  parallel_ranges(parallel, pieces, 1, [&](int64_t piece, int64_t piece_end) {
    const int64_t first = split_point(num_rows, total, piece, pieces, start);
    const int64_t last = piece_end == pieces ? num_rows : split_point(num_rows, total, piece_end, pieces, start);
    if (p.dense) {
      int64_t next = first == 0 ? 0 : p.groups.rows[first - 1] + 1;
      for (int64_t k = first; k < last; ++k) {
        zero_rows<A>(p, next, p.groups.rows[k], leave);
        next = p.groups.rows[k] + 1;
      }
      if (piece_end == pieces) zero_rows<A>(p, next, p.bags.num_embeddings, leave);
    }
    SegmentRange<T>(terms, positions, leave).sum(first, last);
    if (leave == Leave::streamed) stream_fence();
  });
  sum_long_segments(terms, p.groups.segments, num_rows, static_cast<A*>(p.partials), parallel,
                    [&](int64_t segment, A* sum) {
                      A* row = target_row<A>(p, segment);
                      memcpy(row, sum, static_cast<size_t>(p.dim) * sizeof(A));
                      finish(p, segment, row);
                    });
}

// The bag of a position where all have one length, without a division for each.
struct BagOfPosition {
  explicit BagOfPosition(int64_t length_in) : length(length_in), inverse(1.0 / static_cast<double>(length_in)) {}

  int32_t operator()(int32_t position) const {
    const int32_t near = static_cast<int32_t>(static_cast<double>(position) * inverse);  // off by one at most
    return near - (near * length > position) + ((near + 1) * length <= position);
  }

  int64_t length;
  double inverse;
};

template <typename A>
void list_terms(const BagTerms& p, const Parallel& parallel) {
  const Bags& bags = p.bags;
  const bool one_length = bags.offsets == nullptr;
  if (!one_length || p.mode == Mode::mean) {
    describe_bags<A>(bags, p.mode, one_length ? nullptr : p.bag_of, static_cast<A*>(p.bag_count), parallel);
  }
  const int64_t positions = covered(bags);
  const BagOfPosition bag_of(one_length && bags.bag_length > 0 ? bags.bag_length : 1);
  const A* bag_count = static_cast<const A*>(p.bag_count);
  A* coefficients = static_cast<A*>(p.coefficients);
  parallel_ranges(parallel, bags.num_indices, int64_t{1} << 14, [&](int64_t first, int64_t last) {
    if (one_length) {
      for (int64_t j = first; j < last; ++j) p.sources[j] = bag_of(p.order[j]);
    } else {
      for (int64_t j = first; j < last; ++j) p.sources[j] = p.order[j] < positions ? p.bag_of[p.order[j]] : -1;
    }
    if (coefficients == nullptr) return;
    for (int64_t j = first; j < last; ++j) {
      const int32_t source = p.sources[j];
      A factor{1};
      if (p.per_sample_weights != nullptr) {
        factor = load_scalar<A>(p.per_sample_weights, p.per_sample_type, p.order[j]);
      }
      if (p.mode == Mode::mean && source >= 0) factor /= bag_count[source];
      coefficients[j] = factor;
    }
  });
}

}  // namespace

void bag_terms(const BagTerms& p, const Parallel& parallel) {
  if (p.acc_type == DType::f64) {
    list_terms<double>(p, parallel);
  } else {
    list_terms<float>(p, parallel);
  }
}

void bag_backward(const BagBackward& p, const Parallel& parallel) {
  with_type(p.grad_type, [&](auto t) { backward<decltype(t)>(p, parallel); });
}

}  // namespace fastemb::cpu::FE_ISA
