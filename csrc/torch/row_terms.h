// The terms that a row gradient is the sum of, where a step is fused with the backward.
#pragma once

#include "torch/tensors.h"

namespace fastemb {

// Fills the fields of RowStep from `segments` on, if any. Rules and words are those of fastemb/_grad_checks.py.
inline void set_terms(const std::string& op, const Tensor& grad, const OptionalTensor& segments,
                      const OptionalTensor& sources, const OptionalTensor& coefficients, RowStep& p) {
  require(segments.has_value() == sources.has_value() && (segments.has_value() || !coefficients.has_value()), op,
          "segments and sources go together, coefficients only with them");
  if (!segments.has_value()) return;
  require(segments->scalar_type() == ScalarType::Int && segments->numel() >= 1 && segments->is_contiguous(), op,
          "segments must be contiguous int32, one element more than rows");
  p.segments = static_cast<const int32_t*>(readable(op, "segments", *segments));
  require(sources->scalar_type() == ScalarType::Int && sources->is_contiguous(), op,
          "sources must be contiguous int32");
  p.sources = static_cast<const int32_t*>(readable(op, "sources", *sources));
  p.num_terms = sources->numel();
  if (!coefficients.has_value()) return;
  const bool wide = grad.scalar_type() == ScalarType::Double;
  require(
      coefficients->scalar_type() == (wide ? ScalarType::Double : ScalarType::Float) &&
          coefficients->numel() == p.num_terms && coefficients->is_contiguous(),
      op,
      std::string("coefficients must be contiguous, ") + (wide ? "float64" : "float32") + ", one for each of sources");
  p.coefficients = readable(op, "coefficients", *coefficients);
}

// Bytes of RowStep::partials.
inline int64_t partials_bytes(const RowStep& p, bool wide) {
  return p.segments == nullptr ? 0 : bag_backward_partial_rows(p.num_terms) * p.dim * (wide ? 8 : 4);
}

}  // namespace fastemb
