// Forward of embedding_bag and embedding on the CPU, and the gradient of the per-sample weights. Bags are shared out to
// threads by the number of their positions; a bag is always summed by one thread, in the order ops.h lays down.
#include "cpu/check.h"
#include "cpu/dot.h"
#include "cpu/kernels.h"
#include "cpu/rows.h"

namespace fastemb::cpu::FE_ISA {
namespace {

template <typename Body>
void for_bags(const Bags& bags, int64_t dim, const Parallel& parallel, const Body& body) {
  const int64_t total = covered(bags) + bags.num_bags;
  const int64_t pieces = pieces_for(parallel, total * dim);
  const auto start = [&](int64_t b) { return bag_begin(bags, b) + b; };
  parallel_ranges(parallel, pieces, 1, [&](int64_t begin, int64_t end) {
    body(split_point(bags.num_bags, total, begin, pieces, start),
         split_point(bags.num_bags, total, end, pieces, start));
  });
}

template <typename T, typename I>
struct Table {
  const T* weight;
  int64_t stride;
  const I* indices;
  int64_t padding_idx;
  int64_t positions;  // covered by bags

  const T* row(int64_t p) const { return weight + static_cast<int64_t>(indices[p]) * stride; }
  const T* row_ahead(int64_t p) const { return row(p + kPrefetchAhead<T> < positions ? p + kPrefetchAhead<T> : p); }
};

template <typename T, typename I>
Table<T, I> table_of(const Bags& bags, const void* weight, int64_t stride) {
  return {static_cast<const T*>(weight), stride, static_cast<const I*>(bags.indices), bags.padding_idx, covered(bags)};
}

// The terms of positions [begin, end), padding left out; returns how many.
template <typename T, typename I>
FE_FUNCTION int64_t list_terms(const BagForward& p, const Table<T, I>& table, int64_t begin, int64_t end,
                               RowList<T>& list) {
  int64_t n = 0;
  for (int64_t i = begin; i < end; ++i) {
    if (static_cast<int64_t>(table.indices[i]) == table.padding_idx) continue;
    list.rows[n] = table.row(i);
    list.rows_ahead[n] = table.row_ahead(i);
    if (p.per_sample_weights != nullptr) {
      list.scales[n] = load_scalar<typename AccOf<T>::type>(p.per_sample_weights, p.per_sample_type, i);
    }
    ++n;
  }
  return n;
}

// The sums of one thread's bags, as O. A bag of one chunk, as almost all are, goes from registers to the output.
template <typename T, typename I, typename O>
struct BagSums {
  using A = typename AccOf<T>::type;

  explicit BagSums(const BagForward& problem)
      : p(problem),
        table(table_of<T, I>(p.bags, p.weight, p.weight_stride)),
        indexed{table.weight, table.stride, table.indices},
        plain(p.per_sample_weights == nullptr && p.bags.padding_idx < 0),
        acc(p.dim),
        part(p.dim) {}

  void sum(int64_t begin, int64_t end, O* out) {
    if (end - begin > kChunk) return long_bag(out, begin, end);
    if (plain && end > begin && end + kPrefetchAhead<T> <= table.positions) {
      return sum_rows<false>(indexed, begin, end, p.dim, sink(out, end - begin));
    }
    const int64_t count = list_terms(p, table, begin, end, list);
    if (count == 0) {
      memset(out, 0, static_cast<size_t>(p.dim) * sizeof(O));
    } else if (p.per_sample_weights != nullptr) {
      sum_rows<true>(list, 0, count, p.dim, sink(out, count));
    } else {
      sum_rows<false>(list, 0, count, p.dim, sink(out, count));
    }
  }

 private:
  Finished<O> sink(O* out, int64_t count) const { return {out, p.mode == Mode::mean ? static_cast<A>(count) : A{0}}; }

  void long_bag(O* out, int64_t begin, int64_t end) {
    ChunkedSum<A> sum{acc.data, part.data, p.dim};
    int64_t count = 0;
    for (int64_t chunk = begin; chunk < end; chunk += kChunk) {
      const int64_t n = list_terms(p, table, chunk, chunk + kChunk < end ? chunk + kChunk : end, list);
      count += n;
      if (p.per_sample_weights != nullptr) {
        sum.template add<true>(list, 0, n);
      } else {
        sum.template add<false>(list, 0, n);
      }
    }
    if (p.mode == Mode::mean && count > 0) {
      for (int64_t d = 0; d < p.dim; ++d) acc.data[d] /= static_cast<A>(count);
    }
    store_row(out, acc.data, p.dim);
  }

  const BagForward& p;
  const Table<T, I> table;
  const IndexedRows<T, I> indexed;
  const bool plain;
  Scratch<A> acc, part;
  RowList<T> list;
};

// Straight to the output where it has type O; else through a buffer of the accumulator's type O.
template <typename T, typename I, typename O>
void forward_sum(const BagForward& p, const Parallel& parallel) {
  const bool in_place = p.output_type == kDType<O>;
  bool good = true;
  for_bags(p.bags, p.dim, parallel, [&](int64_t first_bag, int64_t last_bag) {
    BagSums<T, I, O> bags(p);
    Scratch<O> buffer(in_place ? 0 : p.dim);
    int64_t end = bag_begin(p.bags, first_bag);
    for (int64_t b = first_bag; b < last_bag; ++b) {
      const int64_t begin = end;
      end = bag_begin(p.bags, b + 1);
      // Here and not in a pass before: the ids are in the nearest cache now.
      if (!ids_in_range<I>(p.bags, begin, end)) return __atomic_store_n(&good, false, __ATOMIC_RELAXED);
      bags.sum(begin, end, in_place ? static_cast<O*>(p.output) + b * p.dim : buffer.data);
      if constexpr (__is_same(O, typename AccOf<T>::type)) {
        if (!in_place) store_row(p.output, p.output_type, b * p.dim, buffer.data, p.dim);
      }
    }
  });
  if (!good) *p.error = first_bad_id<I>(p.bags);
}

template <typename T, typename I>
void forward_sum(const BagForward& p, const Parallel& parallel) {
  if (p.output_type == kDType<T>) {
    forward_sum<T, I, T>(p, parallel);
  } else {
    forward_sum<T, I, typename AccOf<T>::type>(p, parallel);
  }
}

// Columns [first, first + n) of one bag, n <= lanes. A NaN wins over every number and keeps its place.
template <typename T, typename A>
void max_columns(const T* const* rows, const int32_t* within, int64_t count, int64_t first, int64_t n, A* best_out,
                 int32_t* where_out) {
  constexpr int L = kLanes<A>;
  const auto fetch = [&](const T* row) { return n == L ? load(row + first) : load_part<A>(row + first, n); };
  Vec<A> best = fetch(rows[0]);
  IntVec<A> where = IntVec<A>{} + within[0];
  for (int64_t i = 1; i < count; ++i) {
    const Vec<A> x = fetch(rows[i]);
    const IntVec<A> wins = (x > best) | ((x != x) & (best == best));
    best = (Vec<A>)((wins & (IntVec<A>)x) | (~wins & (IntVec<A>)best));
    where = (wins & (IntVec<A>{} + within[i])) | (~wins & where);
  }
  for (int64_t d = 0; d < n; ++d) {
    best_out[first + d] = best[d];
    where_out[first + d] = static_cast<int32_t>(where[d]);
  }
}

template <typename T, typename I>
void forward_max(const BagForward& p, const Parallel& parallel) {
  using A = typename AccOf<T>::type;
  constexpr int64_t L = kLanes<A>;
  if (!ids_in_range<I>(p.bags, 0, covered(p.bags))) {
    *p.error = first_bad_id<I>(p.bags);
    return;
  }
  const auto table = table_of<T, I>(p.bags, p.weight, p.weight_stride);
  for_bags(p.bags, p.dim, parallel, [&](int64_t first_bag, int64_t last_bag) {
    int64_t longest = 0;
    for (int64_t b = first_bag; b < last_bag; ++b) {
      const int64_t length = bag_begin(p.bags, b + 1) - bag_begin(p.bags, b);
      longest = length > longest ? length : longest;
    }
    Scratch<const T*> rows(longest);
    Scratch<int32_t> within(longest);
    Scratch<A> acc(p.dim);
    for (int64_t b = first_bag; b < last_bag; ++b) {
      const int64_t begin = bag_begin(p.bags, b), end = bag_begin(p.bags, b + 1);
      int32_t* argmax = p.argmax + b * p.dim;
      int64_t count = 0;
      for (int64_t i = begin; i < end; ++i) {
        if (static_cast<int64_t>(table.indices[i]) == table.padding_idx) continue;
        rows.data[count] = table.row(i);
        within.data[count++] = static_cast<int32_t>(i - begin);
      }
      if (count == 0) {
        memset(acc.data, 0, static_cast<size_t>(p.dim) * sizeof(A));
        for (int64_t d = 0; d < p.dim; ++d) argmax[d] = -1;
      } else {
        for (int64_t d = 0; d < p.dim; d += L) {
          max_columns(rows.data, within.data, count, d, p.dim - d < L ? p.dim - d : L, acc.data, argmax);
        }
      }
      store_row(p.output, p.output_type, b * p.dim, acc.data, p.dim);
    }
  });
}

template <typename T, typename I>
void gather_rows(const Gather& p, const Parallel& parallel) {
  using A = typename AccOf<T>::type;
  const auto table = table_of<T, I>(p.bags, p.weight, p.weight_stride);
  const int64_t row_bytes = p.dim * static_cast<int64_t>(sizeof(T));
  const int64_t grain = (int64_t{1} << 15) / (p.dim + 1) + 1;
  parallel_ranges(parallel, table.positions, grain, [&](int64_t begin, int64_t end) {
    Scratch<A> acc(p.dim);
    for (int64_t i = begin; i < end; ++i) {
      prefetch_row(table.row_ahead(i), row_bytes);
      const T* row = table.row(i);
      if (p.output_type == kDType<T>) {
        memcpy(static_cast<T*>(p.output) + i * p.dim, row, static_cast<size_t>(row_bytes));
      } else {
        for (int64_t d = 0; d < p.dim; ++d) acc.data[d] = to_acc(row[d]);
        store_row(p.output, p.output_type, i * p.dim, acc.data, p.dim);
      }
    }
  });
}

template <typename T, typename I>
void per_sample(const PerSampleBackward& p, const Parallel& parallel) {
  using A = typename AccOf<T>::type;
  const auto table = table_of<T, I>(p.bags, p.weight, p.weight_stride);
  const int64_t row_bytes = p.dim * static_cast<int64_t>(sizeof(T));
  A* out = static_cast<A*>(p.grad_weights);
  for_bags(p.bags, p.dim, parallel, [&](int64_t first_bag, int64_t last_bag) {
    for (int64_t b = first_bag; b < last_bag; ++b) {
      const int64_t begin = bag_begin(p.bags, b), end = bag_begin(p.bags, b + 1);
      const A* grad = static_cast<const A*>(p.grad_output) + b * p.dim;
      int64_t count = 0;
      for (int64_t i = begin; i < end; ++i) {
        if (static_cast<int64_t>(table.indices[i]) == table.padding_idx) continue;
        prefetch_row(table.row_ahead(i), row_bytes);
        out[i] = dot(grad, table.row(i), p.dim);
        ++count;
      }
      if (p.mode == Mode::mean) {
        for (int64_t i = begin; i < end; ++i) {
          if (static_cast<int64_t>(table.indices[i]) != table.padding_idx) out[i] /= static_cast<A>(count);
        }
      }
    }
  });
}

// Calls f with values of the table's and the indices' types.
template <typename F>
void with_types(DType type, IndexType index, const F& f) {
  with_type(type, [&](auto t) {
    if (index == IndexType::i32)
      f(t, int32_t{});
    else
      f(t, int64_t{});
  });
}

}  // namespace

void bag_forward(const BagForward& p, const Parallel& parallel) {
  with_types(p.weight_type, p.bags.index_type, [&](auto t, auto i) {
    if (p.mode == Mode::max) {
      forward_max<decltype(t), decltype(i)>(p, parallel);
    } else {
      forward_sum<decltype(t), decltype(i)>(p, parallel);
    }
  });
}

void gather(const Gather& p, const Parallel& parallel) {
  with_types(p.weight_type, p.bags.index_type,
             [&](auto t, auto i) { gather_rows<decltype(t), decltype(i)>(p, parallel); });
}

void per_sample_backward(const PerSampleBackward& p, const Parallel& parallel) {
  with_types(p.weight_type, p.bags.index_type,
             [&](auto t, auto i) { per_sample<decltype(t), decltype(i)>(p, parallel); });
}

}  // namespace fastemb::cpu::FE_ISA
