// Looking at gradients before the step, in one pass: finite or not, statistics, sum of squares, unscaling.
#include "cpu/kernels.h"
#include "cpu/row_gradients.h"

namespace fastemb::cpu::FE_ISA {
namespace {

inline constexpr int64_t kSquareLanes = 16;  // partial sums of squares, the same at every level

// Bit patterns of |x|, which are in the order of the values.
template <typename A>
struct Bits;
template <>
struct Bits<float> {
  using Int = int32_t;
  static constexpr Int magnitude = 0x7fffffff, infinity = 0x7f800000;
  static constexpr Int two_14 = (127 - 14) << 23, two_24 = (127 - 24) << 23,
                       two_25 = (127 - 25) << 23;  // negative powers
};
template <>
struct Bits<double> {
  using Int = int64_t;
  static constexpr Int magnitude = 0x7fffffffffffffff, infinity = Int{0x7ff} << 52;
  static constexpr Int two_14 = Int{1023 - 14} << 52, two_24 = Int{1023 - 24} << 52, two_25 = Int{1023 - 25} << 52;
};

FE_FUNCTION Vec<double> half_in_double(Vec<float> x, int half) {
#if defined(__AVX512F__)
  // Masked throughout: GCC 12 warns of what the others leave undefined.
  const __m256 eight =
      half == 0 ? _mm512_maskz_extractf32x8_ps(0xff, (__m512)x, 0) : _mm512_maskz_extractf32x8_ps(0xff, (__m512)x, 1);
  return (Vec<double>)_mm512_maskz_cvtps_pd(0xff, eight);
#elif defined(__AVX2__)
  return (Vec<double>)_mm256_cvtps_pd(half == 0 ? _mm256_castps256_ps128((__m256)x)
                                                : _mm256_extractf128_ps((__m256)x, 1));
#elif defined(__SSE2__)
  return (Vec<double>)_mm_cvtps_pd(half == 0 ? (__m128)x : _mm_movehl_ps((__m128)x, (__m128)x));
#else
  Vec<double> y;
  for (int i = 0; i < kLanes<double>; ++i) y[i] = x[half * kLanes<double> + i];
  return y;
#endif
}

template <typename V>
FE_FUNCTION V larger_bits(V x, V y) {
  return x > y ? x : y;
}

template <typename V>
FE_FUNCTION bool any(V mask) {
  int64_t words[sizeof(V) / sizeof(int64_t)], found = 0;
  memcpy(words, &mask, sizeof(mask));
  for (int64_t word : words) found |= word;
  return found != 0;
}

// What most elements need: whether any is out of the ordinary, and of the others the zeros and the tiny ones.
template <typename A>
struct Glance {
  IntVec<A> least = IntVec<A>{} + Bits<A>::infinity, most = {}, zeros = {}, below_24 = {};

  FE_FUNCTION void add(Glance& own, Vec<A> x, Vec<A> g) {
    const IntVec<A> scaled = (IntVec<A>)x & Bits<A>::magnitude, unscaled = (IntVec<A>)g & Bits<A>::magnitude;
    const IntVec<A> zero = scaled == 0, other = scaled | (zero & Bits<A>::infinity);
    own.zeros -= zero;
    own.least = own.least < other ? own.least : other;
    own.most = larger_bits(own.most, unscaled);
    own.below_24 -= unscaled < Bits<A>::two_24;
  }
  // All are finite, and zero or normal in fp16. (g is not finite wherever x is not.)
  FE_FUNCTION bool ordinary(const Glance& own) {
    return !any((own.least < Bits<A>::two_14) | (own.most >= Bits<A>::infinity));
  }
};

// What one thread has found. Masks of comparisons are -1 where they hold, hence the subtractions.
template <typename A, bool kStats, bool kSquares>
struct Tally {
  using Int = typename Bits<A>::Int;

  IntVec<A> most = {};  // of bits of g, without statistics: g is not finite wherever x is not
  IntVec<A> zeros = {}, up_to_25 = {}, below_14 = {}, below_24 = {}, not_finite = {}, nan = {}, largest = {};
  Vec<double> squares[kSquareLanes / kLanes<double>] = {};
  int64_t count = 0, behind = 0;  // behind the ends of rows, where vectors hold zeros

  // A vector, `n` of whose lanes count.
  FE_FUNCTION void add(Tally& t, Vec<A> x, Vec<A> g, int64_t n) {
    const IntVec<A> scaled = (IntVec<A>)x & Bits<A>::magnitude, unscaled = (IntVec<A>)g & Bits<A>::magnitude;
    if constexpr (!kStats) {
      t.most = larger_bits(t.most, unscaled);
    } else {
      const IntVec<A> zero = scaled == 0;
      t.zeros -= zero;
      t.up_to_25 -= scaled <= Bits<A>::two_25;
      t.below_14 -= scaled < Bits<A>::two_14;
      t.below_24 -= (unscaled < Bits<A>::two_24) | zero;  // 0 * infinity is none
      const IntVec<A> finite = unscaled < Bits<A>::infinity;
      t.not_finite -= ~finite;
      t.nan -= unscaled > Bits<A>::infinity;
      t.largest = larger_bits(t.largest, finite & unscaled);
      t.count += n;
      t.behind += kLanes<A> - n;
    }
  }

  // n elements that are ordinary, squares apart.
  FE_FUNCTION void add_ordinary(Tally& t, const Glance<A>& glance, int64_t n) {
    t.zeros += glance.zeros;
    t.up_to_25 += glance.zeros;
    t.below_14 += glance.zeros;
    t.below_24 += glance.below_24;
    t.largest = larger_bits(t.largest, glance.most);
    t.count += n;
  }

  // Vector `v` of a block of kSquareLanes elements.
  FE_FUNCTION void add_square(Tally& t, Vec<A> g, int v) {
    if constexpr (kSquares) {
      constexpr int kHalves = static_cast<int>(sizeof(double) / sizeof(A));
      for (int half = 0; half < kHalves; ++half) {
        Vec<double> wide;
        if constexpr (kHalves == 1) {
          wide = g;
        } else {
          wide = half_in_double(g, half);
        }
        t.squares[v * kHalves + half] += wide * wide;
      }
    }
  }

  // The sum of squares so far, which starts anew.
  double take_square_sum() {
    double lanes[kSquareLanes];
    memcpy(lanes, squares, sizeof(lanes));
    for (int64_t half = kSquareLanes / 2; half > 0; half /= 2) {
      for (int64_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    }
    for (Vec<double>& square : squares) square = Vec<double>{};
    return lanes[0];
  }

  bool found() const { return kStats ? sum(not_finite) != 0 : largest_of(most) >= Bits<A>::infinity; }

  void add_to(int64_t* stats) const {
    const int64_t zero = sum(zeros) - behind, flushed = sum(up_to_25) - behind;
    stats[kCount] += count;
    stats[kZeros] += zero;
    stats[kTiny] += sum(below_24) - behind - zero;
    stats[kFlushed] += flushed - zero;
    stats[kSubnormal] += sum(below_14) - behind - flushed;
    stats[kInfinite] += sum(not_finite) - sum(nan);
    stats[kNan] += sum(nan);
    A value;
    const Int bits = largest_of(largest);
    memcpy(&value, &bits, sizeof(value));
    const float rounded_value = static_cast<float>(value);
    int32_t rounded_bits;
    memcpy(&rounded_bits, &rounded_value, sizeof(rounded_bits));
    if (rounded_bits > stats[kLargest]) stats[kLargest] = rounded_bits;
  }

 private:
  static int64_t sum(IntVec<A> lanes) {
    int64_t total = 0;
    for (int i = 0; i < kLanes<A>; ++i) total += lanes[i];
    return total;
  }
  static Int largest_of(IntVec<A> lanes) {
    Int most_bits = 0;
    for (int i = 0; i < kLanes<A>; ++i) most_bits = lanes[i] > most_bits ? lanes[i] : most_bits;
    return most_bits;
  }
};

// visit(value, v, n, at) for the vectors of n elements: vector v of its block of kSquareLanes, which begins anew here.
template <typename T, typename Visit>
FE_FUNCTION void for_blocks(const T* x, int64_t n, const Visit& visit) {
  using A = typename AccOf<T>::type;
  constexpr int L = kLanes<A>;
  int64_t d = 0;
  for (; d + kSquareLanes <= n; d += kSquareLanes) {
#pragma GCC unroll 8
    for (int v = 0; v < kSquareLanes / L; ++v) visit(load(x + d + v * L), v, int64_t{L}, d + v * L);
  }
  for (int v = 0; d < n; ++v, d += L) {
    const int64_t left = n - d < L ? n - d : L;
    visit(left == L ? load(x + d) : load_part<A>(x + d, left), v, left, d);
  }
}

// factor * x, and 0 behind the first n lanes, where a factor that is not finite would make NaN of the zeros.
template <typename A>
FE_FUNCTION Vec<A> times(Vec<A> x, A factor, int64_t n) {
  Vec<A> product = x * factor;
  if (n < kLanes<A> && factor - factor != A{0}) {
    for (int64_t i = n; i < kLanes<A>; ++i) product[i] = A{0};
  }
  return product;
}

template <typename T, typename V>
FE_FUNCTION void store_first(T* at, V value, int64_t n) {
  if (n == kLanes<typename AccOf<T>::type>) {
    store(at, value);
  } else {
    store_part(at, value, n);
  }
}

// visit(x, g, v, n, at) for the vectors of n elements, as for_blocks. g, their product with inv_scale, goes to
// `unscaled` unless that is null.
template <typename T, typename Visit>
FE_FUNCTION void unscale_blocks(const T* x, T* unscaled, int64_t n, typename AccOf<T>::type inv_scale,
                                const Visit& visit) {
  if (unscaled == nullptr) {
    for_blocks(x, n, [&](auto value, int v, int64_t lanes, int64_t at) {
      visit(value, times(value, inv_scale, lanes), v, lanes, at);
    });
  } else {
    for_blocks(x, n, [&](auto value, int v, int64_t lanes, int64_t at) {
      const auto g = times(value, inv_scale, lanes);
      visit(value, g, v, lanes, at);
      store_first(unscaled + at, g, lanes);
    });
  }
}

inline constexpr int64_t kGlance = 1024;  // elements that the first cache still has when they are looked at again

// n elements at x; the product with inv_scale goes to `unscaled` unless that is null.
template <typename T, bool kStats, bool kSquares>
void look(const T* x, T* unscaled, int64_t n, typename AccOf<T>::type inv_scale,
          Tally<typename AccOf<T>::type, kStats, kSquares>& counts) {
  using A = typename AccOf<T>::type;
  using Counts = Tally<A, kStats, kSquares>;
  Counts own = counts;  // in registers: stores to `unscaled` could be stores to `counts`
  if constexpr (kStats) {
    alignas(kVectorBytes) T before[kGlance];  // `unscaled` may be x
    for (int64_t length; n >= kSquareLanes; n -= length, x += length) {
      length = n < kGlance ? n / kSquareLanes * kSquareLanes : kGlance;
      Glance<A> glance;
      unscale_blocks(x, unscaled, length, inv_scale, [&](auto value, auto g, int v, int64_t, int64_t at) {
        Glance<A>::add(glance, value, g);
        Counts::add_square(own, g, v);
        if (unscaled != nullptr) store(before + at, value);
      });
      if (Glance<A>::ordinary(glance)) {
        Counts::add_ordinary(own, glance, length);
      } else {
        unscale_blocks(unscaled == nullptr ? x : before, static_cast<T*>(nullptr), length, inv_scale,
                       [&](auto value, auto g, int, int64_t lanes, int64_t) { Counts::add(own, value, g, lanes); });
      }
      if (unscaled != nullptr) unscaled += length;
    }
  }
  unscale_blocks(x, unscaled, n, inv_scale, [&](auto value, auto g, int v, int64_t lanes, int64_t) {
    Counts::add(own, value, g, lanes);
    Counts::add_square(own, g, v);
  });
  counts = own;
}

// f(tally) with an empty tally of what is asked for.
template <typename A, typename F>
void with_tally(bool stats, bool squares, const F& f) {
  if (stats && squares) return f(Tally<A, true, true>{});
  if (stats) return f(Tally<A, true, false>{});
  if (squares) return f(Tally<A, false, true>{});
  return f(Tally<A, false, false>{});
}

// check(chunk, tally) for all `chunks`, shared out to threads in pieces that begin at split(piece). Then what was found
// goes to its places.
template <typename A, typename Problem, typename Split, typename Check>
void run_chunks(const Problem& p, int64_t chunks, int64_t pieces, const Parallel& parallel, const Split& split,
                const Check& check) {
  with_tally<A>(p.stats != nullptr, p.square_sum != nullptr, [&](auto empty) {
    using Counts = decltype(empty);
    Scratch<Counts> tallies(pieces);
    parallel_ranges(parallel, pieces, 1, [&](int64_t first_piece, int64_t last_piece) {
      for (int64_t piece = first_piece; piece < last_piece; ++piece) {
        Counts tally = empty;
        const int64_t last = split(piece + 1);
        for (int64_t chunk = split(piece); chunk < last; ++chunk) {
          check(chunk, tally);
          if (p.square_sum != nullptr) p.scratch[chunk] = tally.take_square_sum();
        }
        tallies.data[piece] = tally;
      }
    });
    for (int64_t piece = 0; piece < pieces; ++piece) {
      if (p.found_inf != nullptr && tallies.data[piece].found()) *p.found_inf = 1.0f;
      if (p.stats != nullptr) tallies.data[piece].add_to(p.stats);
    }
    if (p.square_sum == nullptr) return;
    double total = 0.0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) total += p.scratch[chunk];
    *p.square_sum = total;
  });
}

template <typename A>
A inverse_scale(const float* inv_scale) {
  return inv_scale == nullptr ? A{1} : static_cast<A>(*inv_scale);
}

template <typename T>
void check_flat(const GradCheck& p, const Parallel& parallel) {
  using A = typename AccOf<T>::type;
  T* grad = static_cast<T*>(p.grad);
  const A inv_scale = inverse_scale<A>(p.inv_scale);
  const int64_t chunks = (p.numel + kSquareChunk - 1) / kSquareChunk;
  const int64_t pieces = pieces_for(parallel, p.numel);
  run_chunks<A>(
      p, chunks, pieces, parallel, [&](int64_t piece) { return chunks * piece / pieces; },
      [&](int64_t chunk, auto& tally) {
        T* at = grad + chunk * kSquareChunk;
        const int64_t left = p.numel - chunk * kSquareChunk;
        look(at, p.unscale ? at : nullptr, left < kSquareChunk ? left : kSquareChunk, inv_scale, tally);
      });
}

template <typename T>
void check_rows(const RowGradCheck& p, const Parallel& parallel) {
  using A = typename AccOf<T>::type;
  const RowStep& step = p.rows;
  const int64_t used = used_rows(step), dim = step.dim;
  const A inv_scale = inverse_scale<A>(step.inv_scale);
  const int64_t per_chunk = dim == 0 ? used + 1 : (kSquareChunk + dim - 1) / dim;
  const int64_t chunks = dim == 0 ? 0 : (used + per_chunk - 1) / per_chunk;
  const bool whole_blocks = dim % kSquareLanes == 0;  // then rows in a line have the lanes that each would have

  const auto row_range = [&](int64_t chunk, const auto& rows) {
    const int64_t end = (chunk + 1) * per_chunk;
    rows(chunk * per_chunk, end < used ? end : used);
  };
  if (step.segments == nullptr) {
    T* grad = static_cast<T*>(const_cast<void*>(step.grad));
    const int64_t pieces = pieces_for(parallel, used * dim);
    run_chunks<A>(
        p, chunks, pieces, parallel, [&](int64_t piece) { return chunks * piece / pieces; },
        [&](int64_t chunk, auto& tally) {
          row_range(chunk, [&](int64_t first, int64_t last) {
            const int64_t together = whole_blocks ? last - first : 1;
            for (int64_t k = first; k < last; k += together) {
              T* at = grad + k * dim;
              look(at, p.unscale ? at : nullptr, together * dim, inv_scale, tally);
            }
          });
        });
    return;
  }

  const RowGradients<A> gradients(step, parallel);
  const auto work = [&](int64_t chunk) {
    const int64_t row = chunk * per_chunk < used ? chunk * per_chunk : used;
    return step.segments[row] + row;
  };
  const int64_t total = work(chunks), pieces = pieces_for(parallel, total * dim);
  run_chunks<A>(
      p, chunks, pieces, parallel, [&](int64_t piece) { return split_point(chunks, total, piece, pieces, work); },
      [&](int64_t chunk, auto& tally) {
        row_range(chunk, [&](int64_t first, int64_t last) {
          Scratch<A> sums((last - first) * dim), part(dim);
          for (int64_t k = first; k < last; ++k) {
            A* place = sums.data + (k - first) * dim;
            const A* sum = gradients.sum_of(k, place, part.data);
            if (sum != place) memcpy(place, sum, static_cast<size_t>(dim) * sizeof(A));
          }
          const int64_t together = whole_blocks ? last - first : 1;
          for (int64_t k = 0; k < last - first; k += together) {
            look(sums.data + k * dim, static_cast<A*>(nullptr), together * dim, inv_scale, tally);
          }
        });
      });
}

template <typename T>
FE_FUNCTION auto as_stored(Vec<typename AccOf<T>::type> value) {
  if constexpr (sizeof(T) == 2) {
    return widened(T{}, rounded(T{}, value));
  } else {
    return value;
  }
}

template <typename T>
void pass_boundary(const BoundaryGradient& p, const Parallel& parallel) {
  using A = typename AccOf<T>::type;
  using Counts = Tally<A, true, false>;
  struct Found {
    Counts tally;
    IntVec<A> came, made;  // -1 where a gradient is not finite; where an output is not and its gradient is
  };
  const T* grad = static_cast<const T*>(p.grad);
  T* output = static_cast<T*>(p.output);
  const A inv_scale = inverse_scale<A>(p.inv_scale), ratio = static_cast<A>(*p.ratio);
  const int64_t pieces = pieces_for(parallel, p.numel);
  Scratch<Found> found(pieces);
  parallel_ranges(parallel, pieces, 1, [&](int64_t first_piece, int64_t last_piece) {
    for (int64_t piece = first_piece; piece < last_piece; ++piece) {
      const int64_t first = p.numel * piece / pieces, last = p.numel * (piece + 1) / pieces;
      Found own{};
      for_blocks(grad + first, last - first, [&](auto value, int, int64_t lanes, int64_t at) {
        Counts::add(own.tally, value, times(value, inv_scale, lanes), lanes);
        const auto passed = as_stored<T>(times(value, ratio, lanes));
        const IntVec<A> bad = ((IntVec<A>)value & Bits<A>::magnitude) >= Bits<A>::infinity;
        own.came |= bad;
        own.made |= (((IntVec<A>)passed & Bits<A>::magnitude) >= Bits<A>::infinity) & ~bad;
        store_first(output + first + at, passed, lanes);
      });
      found.data[piece] = own;
    }
  });
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const Found& own = found.data[piece];
    for (int i = 0; i < kLanes<A>; ++i) {
      if (own.came[i] != 0) p.flags[0] = 1.0f;
      if (own.made[i] != 0) p.flags[1] = 1.0f;
    }
    if (p.stats != nullptr) own.tally.add_to(p.stats);
  }
}

}  // namespace

void grad_check(const GradCheck& p, const Parallel& parallel) {
  with_type(p.grad_type, [&](auto type) { check_flat<decltype(type)>(p, parallel); });
}

void row_grad_check(const RowGradCheck& p, const Parallel& parallel) {
  with_type(p.rows.grad_type, [&](auto type) { check_rows<decltype(type)>(p, parallel); });
}

void boundary_gradient(const BoundaryGradient& p, const Parallel& parallel) {
  with_type(p.grad_type, [&](auto type) { pass_boundary<decltype(type)>(p, parallel); });
}

}  // namespace fastemb::cpu::FE_ISA
