// The arithmetic of one optimizer step, shared by the CPU and the CUDA kernels: scalars of a step or a row in double,
// elements in acc. V is acc itself (CUDA, one element at a time) or a vector of it (CPU); both round every operation by
// itself, so both give the same bits. The backend provides square_root(V) and larger(V, V), which returns a NaN when
// either is one.
#pragma once

#include "common/numeric.h"
#include "ops.h"

namespace fastemb {

// base^n, n >= 0, by square and multiply: one order of multiplications everywhere.
FE_FUNCTION double integer_power(double base, int64_t n) {
  double power = 1.0;
  for (; n > 0; n >>= 1) {
    if (n & 1) power *= base;
    base *= base;
  }
  return power;
}

FE_FUNCTION double learning_rate(const RowStep& p) {
  if (p.lr_tensor == nullptr) return p.lr;
  return p.lr_type == DType::f64 ? *static_cast<const double*>(p.lr_tensor)
                                 : static_cast<double>(*static_cast<const float*>(p.lr_tensor));
}

FE_FUNCTION int64_t step_number(const RowStep& p) { return static_cast<int64_t>(*p.step); }

FE_FUNCTION bool skipped(const RowStep& p) { return p.found_inf != nullptr && *p.found_inf != 0.0f; }

// g of RowStep. `param` is p; both may be vectors.
template <typename A>
struct GradientRule {
  A scale = A{1};  // negative to maximize: a product rounds alike on both sides of zero
  A weight_decay = A{};
  bool decayed = false;

  FE_FUNCTION GradientRule make(const RowStep& p, bool decoupled) {
    const A inv_scale = p.inv_scale == nullptr ? A{1} : static_cast<A>(*p.inv_scale);
    return {p.maximize ? -inv_scale : inv_scale, static_cast<A>(p.weight_decay), p.weight_decay != 0.0 && !decoupled};
  }

  template <typename V>
  FE_FUNCTION V apply(const GradientRule& rule, V grad, V param) {
    grad = grad * rule.scale;
    return rule.decayed ? grad + param * rule.weight_decay : grad;
  }
};

// ---- Adam ----

template <typename A>
struct AdamRule {
  A beta1, beta2;
  A rate1, rate2;  // 1 - beta
  A step_size, root_scale, eps, keep;
  bool scale_root, decay;

  // t: the update's number for the bias correction; slept: steps since the row's last update.
  FE_FUNCTION AdamRule make(const RowAdam& p, int64_t t, int64_t slept) {
    const double lr = learning_rate(p.rows);
    const double bc1 = 1.0 - integer_power(p.beta1, t);
    const double root2 = square_root(1.0 - integer_power(p.beta2, t));
    const bool decay = p.decoupled && p.rows.weight_decay != 0.0;
    AdamRule rule;
    rule.beta1 = static_cast<A>(p.beta1);
    rule.beta2 = static_cast<A>(p.beta2);
    rule.rate1 = static_cast<A>(1.0 - p.beta1);
    rule.rate2 = static_cast<A>(1.0 - p.beta2);
    rule.step_size = static_cast<A>(p.corrected_denominator ? lr / bc1 : lr * root2 / bc1);
    rule.root_scale = static_cast<A>(root2);
    rule.eps = static_cast<A>(p.eps);
    rule.keep = static_cast<A>(decay ? integer_power(1.0 - lr * p.rows.weight_decay, slept) : 1.0);
    rule.scale_root = p.corrected_denominator;
    rule.decay = decay;
    return rule;
  }

  // Moments are updated in place; largest is null without amsgrad. Returns the new parameter.
  //
  // Not m + (g - m) * rate: the difference loses a g that is far smaller than m, and is NaN where v is infinite.
  // v * beta2 + (g * rate2) * g overflows where torch's dense kernels do, with g * g it would do so earlier.
  template <typename V>
  FE_FUNCTION V apply(const AdamRule& rule, V grad, V param, V& exp_avg, V& exp_avg_sq, V* largest) {
    exp_avg = exp_avg * rule.beta1 + grad * rule.rate1;
    exp_avg_sq = exp_avg_sq * rule.beta2 + grad * rule.rate2 * grad;
    V second = exp_avg_sq;
    if (largest != nullptr) second = *largest = larger(*largest, exp_avg_sq);
    V root = square_root(second);
    if (rule.scale_root) root = root / rule.root_scale;
    const V update = exp_avg / (root + rule.eps) * rule.step_size;
    return (rule.decay ? param * rule.keep : param) - update;
  }
};

// ---- Adagrad ----

template <typename A>
struct AdagradRule {
  A rate, eps;

  template <typename Problem>
  FE_FUNCTION AdagradRule make(const Problem& p) {
    const double steps_before = static_cast<double>(step_number(p.rows) - 1);
    return {static_cast<A>(learning_rate(p.rows) / (1.0 + steps_before * p.lr_decay)), static_cast<A>(p.eps)};
  }

  template <typename V>
  FE_FUNCTION V apply(const AdagradRule& rule, V grad, V param, V& sum) {
    sum = sum + grad * grad;
    return param - grad / (square_root(sum) + rule.eps) * rule.rate;
  }

  // Row-wise: the multiplier of the whole row, from its new sum.
  FE_FUNCTION A row_rate(const AdagradRule& rule, A sum) { return rule.rate / (square_root(sum) + rule.eps); }
};

// ---- SGD ----

template <typename A>
struct SgdRule {
  A lr, momentum, keep;
  bool first, nesterov;

  FE_FUNCTION SgdRule make(const RowSgd& p) {
    return {static_cast<A>(learning_rate(p.rows)), static_cast<A>(p.momentum), static_cast<A>(1.0 - p.dampening),
            step_number(p.rows) == 1, p.nesterov};
  }

  // buffer is null without momentum.
  template <typename V>
  FE_FUNCTION V apply(const SgdRule& rule, V grad, V param, V* buffer) {
    if (buffer != nullptr) {
      *buffer = rule.first ? grad : *buffer * rule.momentum + grad * rule.keep;
      grad = rule.nesterov ? grad + *buffer * rule.momentum : *buffer;
    }
    return param - grad * rule.lr;
  }
};

}  // namespace fastemb
