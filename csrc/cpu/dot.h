// The dot product of ops.h: kDotLanes partial sums, folded in halves.
#pragma once

#include "cpu/vec.h"

namespace fastemb::cpu::FE_ISA {

// The lanes of one vector, folded in halves.
template <typename A>
FE_FUNCTION A fold_vector(Vec<A> x) {
  constexpr int L = kLanes<A>;
#pragma GCC unroll 4
  for (int h = L / 2; h >= 1; h /= 2) {
    IntVec<A> upper = {};
    for (int i = 0; i < L; ++i) upper[i] = i + h < L ? i + h : i;
    x += __builtin_shuffle(x, upper);
  }
  return x[0];
}

// The same of N vectors, one column to a lane, without a detour through memory: what the lanes of vector kFirst hold
// when halves of kStep vectors are folded next.
template <typename A, int N, int kFirst, int kStep, typename Term>
FE_FUNCTION Vec<A> fold_vectors(const Term& term) {
  if constexpr (kStep >= N) {
    return Vec<A>{} + term(kFirst * kLanes<A>);
  } else if constexpr (kFirst + kStep >= N) {
    return fold_vectors<A, N, kFirst, 2 * kStep>(term);
  } else {
    return fold_vectors<A, N, kFirst, 2 * kStep>(term) + fold_vectors<A, N, kFirst + kStep, 2 * kStep>(term);
  }
}

// term(d) is the vector of products at columns d .. d + lanes, term_part(d, n) the same with zeros behind n columns;
// each is called once. Lanes that no column reaches stay +0; adding them changes nothing, since a partial sum that
// starts at +0 is never -0.
template <typename A, typename Term, typename TermPart>
FE_FUNCTION A fold_lanes(int64_t dim, const Term& term, const TermPart& term_part) {
  constexpr int64_t L = kLanes<A>;
  static_assert(16 * L <= kDotLanes);  // a column to each lane
  if (dim == 4 * L) return fold_vector<A>(fold_vectors<A, 4, 0, 1>(term));
  if (dim == 8 * L) return fold_vector<A>(fold_vectors<A, 8, 0, 1>(term));
  if (dim == 16 * L) return fold_vector<A>(fold_vectors<A, 16, 0, 1>(term));
  A lanes[kDotLanes];
  const int64_t used = dim < kDotLanes ? (dim + L - 1) / L * L : kDotLanes;
  for (int64_t j = 0; j < used; j += L) {
    Vec<A> sum = {};
    for (int64_t d = j; d < dim; d += kDotLanes) sum += d + L <= dim ? term(d) : term_part(d, dim - d);
    store(lanes + j, sum);
  }
  if (used == 0) return A{};
  // Halves beyond `used` hold only +0: start with the first fold that has something to add.
  int64_t h = kDotLanes / 2;
  while (h >= used) h /= 2;
  for (int64_t j = used; j < 2 * h; ++j) lanes[j] = A{};
  for (; h >= L; h /= 2) {
    for (int64_t j = 0; j < h; j += L) store(lanes + j, load(lanes + j) + load(lanes + j + h));
  }
  return fold_vector<A>(load(lanes));
}

template <typename T, typename A>
FE_FUNCTION A dot(const A* x, const T* y, int64_t dim) {
  return fold_lanes<A>(
      dim, [&](int64_t d) { return load(x + d) * load(y + d); },
      [&](int64_t d, int64_t n) { return load_part<A>(x + d, n) * load_part<A>(y + d, n); });
}

}  // namespace fastemb::cpu::FE_ISA
