// max_norm on the CPU: each row that the batch names is measured once and scaled in place when its norm is too large.
#include <cmath>

#include "cpu/dot.h"
#include "cpu/kernels.h"

namespace fastemb::cpu::FE_ISA {
namespace {

// |x|^norm_type summed in the lanes of ops.h; only pow is left to the library, and only for unusual norms.
template <typename A>
A norm_of(const A* x, int64_t dim, double norm_type) {
  if (std::isinf(norm_type)) {
    A largest = A{};
    for (int64_t d = 0; d < dim; ++d) {
      const A magnitude = x[d] < 0 ? -x[d] : x[d];
      if (magnitude > largest || magnitude != magnitude) largest = magnitude;
      if (largest != largest) return largest;
    }
    return largest;
  }
  if (norm_type == 2.0) return std::sqrt(dot(x, x, dim));
  Scratch<A> terms(dim);
  for (int64_t d = 0; d < dim; ++d) {
    const A magnitude = x[d] < 0 ? -x[d] : x[d];
    terms.data[d] = norm_type == 1.0 ? magnitude : std::pow(magnitude, static_cast<A>(norm_type));
  }
  const A total = fold_lanes<A>(
      dim, [&](int64_t d) { return load(terms.data + d); },
      [&](int64_t d, int64_t n) { return load_part<A>(terms.data + d, n); });
  return norm_type == 1.0 ? total : std::pow(total, static_cast<A>(1.0 / norm_type));
}

template <typename T>
void renorm_rows(const Renorm& p, const Parallel& parallel) {
  using A = typename AccOf<T>::type;
  const A max_norm = static_cast<A>(p.max_norm);
  const int64_t grain = (int64_t{1} << 14) / (p.dim + 1) + 1;
  parallel_ranges(parallel, *p.groups.num_rows, grain, [&](int64_t begin, int64_t end) {
    Scratch<A> values(p.dim);
    for (int64_t k = begin; k < end; ++k) {
      T* row = static_cast<T*>(p.weight) + p.groups.rows[k] * p.weight_stride;
      for (int64_t d = 0; d < p.dim; ++d) values.data[d] = to_acc(row[d]);
      const A norm = norm_of(values.data, p.dim, p.norm_type);
      if (!(norm > max_norm)) continue;
      const A scale = max_norm / (norm + static_cast<A>(1e-7));
      for (int64_t d = 0; d < p.dim; ++d) row[d] = FromAcc<T>::convert(values.data[d] * scale);
    }
  });
}

}  // namespace

void renorm(const Renorm& p, const Parallel& parallel) {
  with_type(p.weight_type, [&](auto t) { renorm_rows<decltype(t)>(p, parallel); });
}

}  // namespace fastemb::cpu::FE_ISA
