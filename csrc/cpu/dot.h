// The dot product of ops.h: kDotLanes partial sums, folded in halves.
#pragma once

#include "cpu/vec.h"

namespace fastemb::cpu::FE_ISA {

// term(d) is the vector of products at columns d .. d + lanes, term_part(d, n) the same with zeros behind n columns.
// Lanes that no column reaches stay +0; adding them changes nothing, since a partial sum that starts at +0 is never -0.
template <typename A, typename Term, typename TermPart>
FE_FUNCTION A fold_lanes(int64_t dim, const Term& term, const TermPart& term_part) {
  constexpr int64_t L = kLanes<A>;
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
  for (; h >= 1; h /= 2) {
    for (int64_t j = 0; j < h; ++j) lanes[j] += lanes[j + h];
  }
  return lanes[0];
}

template <typename T, typename A>
FE_FUNCTION A dot(const A* x, const T* y, int64_t dim) {
  return fold_lanes<A>(
      dim, [&](int64_t d) { return load(x + d) * load(y + d); },
      [&](int64_t d, int64_t n) { return load_part<A>(x + d, n) * load_part<A>(y + d, n); });
}

}  // namespace fastemb::cpu::FE_ISA
