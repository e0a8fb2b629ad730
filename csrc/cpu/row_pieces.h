// What all steps of rows share: pieces of work, the parameter with its master, gradients in acc.
#pragma once

#include "cpu/rounding.h"
#include "cpu/row_math.h"
#include "cpu/rows.h"

namespace fastemb::cpu::FE_ISA {

inline constexpr int64_t kPiece = 512;      // columns of a wide row that are one piece of work
inline constexpr int64_t kGrain = 1 << 14;  // elements that are worth a thread

// How many rows ahead to prefetch: nearer they come too late, and of wide rows more would leave the cache again.
FE_FUNCTION int64_t rows_ahead(int64_t dim) { return dim <= 128 ? 32 : 16; }

enum class Store { plain, master, stochastic };

// Whole vectors, and the part of one at the end of a row.
struct Whole {
  template <typename T>
  Vec<typename AccOf<T>::type> load(const T* p) const {
    return FE_ISA::load(p);
  }
  template <typename T, typename V>
  void store(T* p, V v) const {
    FE_ISA::store(p, v);
  }
};
struct Part {
  int64_t n;

  template <typename T>
  Vec<typename AccOf<T>::type> load(const T* p) const {
    return load_part<typename AccOf<T>::type>(p, n);
  }
  template <typename T, typename V>
  void store(T* p, V v) const {
    store_part(p, v, n);
  }
};

// for_vectors(n, f): f(Whole, d) for each whole vector of n columns, then f(Part, d).
template <typename A, typename F>
FE_FUNCTION void for_vectors(int64_t n, const F& f) {
  constexpr int64_t L = kLanes<A>;
  int64_t d = 0;
  for (; d + L <= n; d += L) f(Whole{}, d);
  if (d < n) f(Part{n - d}, d);
}

// The gradient of a piece where it lies; its elements become acc as they are read.
template <typename A>
struct Gradient {
  const void* data;
  DType type = kDType<A>;
  int64_t first = 0;  // element of the piece's first column

  template <typename Access>
  FE_FUNCTION Vec<A> load(const Gradient& from, const Access& access, int64_t d) {
    d += from.first;
    if constexpr (sizeof(A) == 4) {
      if (from.type == DType::f16) return access.load(static_cast<const f16*>(from.data) + d);
      if (from.type == DType::bf16) return access.load(static_cast<const bf16*>(from.data) + d);
    }
    return access.load(static_cast<const A*>(from.data) + d);
  }
};

template <typename A>
struct Buffers {
  explicit Buffers(int64_t columns) : sum(columns), part(columns) {}
  Scratch<A> sum, part;
};

// Where a piece lies: columns [column, column + n) of gradient row k, table row `row`. `ahead` rows further in the
// table lies the row that is due rows_ahead() rows later; it is prefetched line by line between the arithmetic, since a
// burst of prefetches stalls where it fills the line buffers.
struct Piece {
  int64_t k, row, column, n, ahead;
};

FE_FUNCTION int64_t used_rows(const RowStep& p) {
  return p.used_rows != nullptr && *p.used_rows < p.num_rows ? *p.used_rows : p.num_rows;
}

FE_FUNCTION bool in_table(const RowStep& p, int64_t row) { return row >= 0 && row < p.num_embeddings; }

// The whole of gradient row k, of `used` rows; n is 0 for a row outside the table.
FE_FUNCTION Piece row_piece(const RowStep& p, int64_t k, int64_t used) {
  const int64_t distance = rows_ahead(p.dim), later = k + distance < used ? k + distance : k;
  if (p.rows == nullptr) return {k, k, 0, p.dim, later - k};
  const int64_t row = p.rows[k], ahead = p.rows[later];
  return {k, row, 0, in_table(p, row) ? p.dim : 0, in_table(p, ahead) ? ahead - row : 0};
}

// body(begin, end) over ranges of the `used` rows, each of `per_row` items, shared out to threads; at least `grain`
// items for each. Rows that have to be summed first count as what they are sums of. `body` is called in one place, so
// that it is inlined.
template <typename Body>
void share_out(const RowStep& p, int64_t used, int64_t per_row, int64_t grain, const Parallel& parallel,
               const Body& body) {
  constexpr int64_t kUpdate = 4;  // terms that take as long as the update of a row
  const bool summed = p.segments != nullptr;
  const auto start = [&](int64_t k) { return p.segments[k] + k * kUpdate; };
  const int64_t total = summed ? start(used) : 0;
  const int64_t pieces = summed ? pieces_for(parallel, total * p.dim) : used * per_row;
  parallel_ranges(parallel, pieces, summed ? 1 : grain, [&](int64_t begin, int64_t end) {
    if (summed) {
      begin = split_point(used, total, begin, pieces, start) * per_row;
      end = split_point(used, total, end, pieces, start) * per_row;
    }
    body(begin, end);
  });
}

// body(piece) for every piece of the rows that count, shared out to threads. Pieces are whole rows when `whole`, and
// where gradients are summed.
template <typename A, typename Body>
void for_pieces(const RowStep& p, bool whole, const Parallel& parallel, const Body& body) {
  if (skipped(p) || p.dim == 0) return;
  const int64_t used = used_rows(p);
  const int64_t width = whole || p.segments != nullptr || p.dim < kPiece ? p.dim : kPiece;
  const int64_t per_row = (p.dim + width - 1) / width;
  share_out(p, used, per_row, kGrain / width + 1, parallel, [&](int64_t begin, int64_t end) {
    Buffers<A> buffers(width);
    for (int64_t i = begin; i < end; ++i) {
      Piece at = row_piece(p, i / per_row, used);
      if (at.n == 0) continue;
      at.column = i % per_row * width;
      at.n = p.dim - at.column < width ? p.dim - at.column : width;
      body(at, buffers);
    }
  });
}

template <typename T>
FE_FUNCTION T* row_of(const RowStep& p, int64_t row) {
  return static_cast<T*>(p.param) + row * p.param_stride;
}

template <typename E>
FE_FUNCTION E* state_of(const RowStep& p, void* state, const Piece& at) {
  return state == nullptr ? nullptr : static_cast<E*>(state) + at.row * p.dim + at.column;
}

template <typename E>
FE_FUNCTION void prefetch_state(const RowStep& p, const E* element, const Piece& at) {
  prefetch(element + at.ahead * p.dim);
}

// The parameter of one piece of a row, which begins at `column`.
template <typename T, Store kStore>
struct Target {
  using A = typename AccOf<T>::type;
  T* param;
  A* master;
  int64_t column;
  uint64_t key;  // stochastic: of the row

  FE_FUNCTION Target make(const RowStep& p, const Piece& at) {
    const uint64_t key = kStore == Store::stochastic ? row_key(p.seed, step_number(p), at.row) : 0;
    return {row_of<T>(p, at.row) + at.column, state_of<A>(p, p.master, at), at.column, key};
  }

  template <typename Access>
  FE_FUNCTION Vec<A> load(const Target& at, const Access& access, int64_t d) {
    const Vec<A> own = access.load(at.param + d);
    if constexpr (kStore == Store::master) {
      const Vec<A> kept = access.load(at.master + d);
      return rounds_to(T{}, kept, own) ? kept : own;
    }
    return own;
  }

  template <typename Access>
  FE_FUNCTION void store(const Target& at, const Access& access, int64_t d, Vec<A> value) {
    if constexpr (kStore == Store::master) access.store(at.master + d, value);
    if constexpr (kStore == Store::stochastic) {
      value = rounded_stochastic(T{}, value, random_bits(at.key, at.column + d));
    }
    access.store(at.param + d, value);
  }
};

// One piece: `rule` makes the gradient, update(access, d, grad, param) the new parameter.
template <typename T, Store kStore, typename A, typename Update>
FE_FUNCTION void step_piece(const RowStep& p, const GradientRule<A> rule, const Piece& at, const Gradient<A> grad,
                            const Update& update) {
  using Place = Target<T, kStore>;
  const auto target = Place::make(p, at);
  const int64_t ahead = at.ahead * p.param_stride;
  for_vectors<A>(at.n, [&](auto access, int64_t d) {
    prefetch(target.param + ahead + d);
    if constexpr (kStore == Store::master) prefetch_state(p, target.master + d, at);
    const Vec<A> param = Place::load(target, access, d);
    const Vec<A> g = GradientRule<A>::apply(rule, Gradient<A>::load(grad, access, d), param);
    Place::store(target, access, d, update(access, d, g, param));
  });
}

// f(type, store) for the parameter's type and the way it is stored. fp32 and fp64 have nothing to round.
template <Store kStore>
struct StoreTag {
  static constexpr Store value = kStore;
};

template <typename F>
void with_store(const RowStep& p, const F& f) {
  with_type(p.param_type, [&](auto type) {
    if constexpr (sizeof(type) > 2) {
      f(type, StoreTag<Store::plain>{});
    } else if (p.master != nullptr) {
      f(type, StoreTag<Store::master>{});
    } else if (p.stochastic) {
      f(type, StoreTag<Store::stochastic>{});
    } else {
      f(type, StoreTag<Store::plain>{});
    }
  });
}

}  // namespace fastemb::cpu::FE_ISA
