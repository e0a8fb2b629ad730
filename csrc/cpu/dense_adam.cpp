// torch's fused Adam, to the bit, with the gradient unscaled in registers.
#include "cpu/kernels.h"
#include "cpu/row_math.h"

namespace fastemb::cpu::FE_ISA {
namespace {

using V = Vec<float>;

// x * y + z, rounded once.
FE_FUNCTION V fused_multiply_add(V x, V y, V z) {
#if defined(__AVX512F__)
  return (V)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__FMA__)
  return (V)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#else
  for (int i = 0; i < kLanes<float>; ++i) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
  return z;
#endif
}

// torch's maximum: where one is a NaN, all bits are set.
FE_FUNCTION V maximum(V x, V y) {
  const IntVec<float> unordered = (x != x) | (y != y);
  return (V)((IntVec<float>)(x > y ? x : y) | unordered);
}

struct Rule {
  V factor, decay, rate1, rate2, beta2, step_size, root_scale, eps;
  bool divide, maximize, decoupled, decayed, follows_gradient;

  FE_FUNCTION Rule make(const DenseAdam& p) {
    const auto all = [](double x) { return broadcast(static_cast<float>(x)); };
    const double bc1 = 1.0 - __builtin_pow(p.beta1, *p.step);
    const double bc2 = 1.0 - __builtin_pow(p.beta2, *p.step);
    const float rate1 = static_cast<float>(1.0 - p.beta1);
    Rule rule;
    rule.factor = broadcast(*p.factor);
    rule.decay = all(p.decoupled ? 1.0 - p.lr * p.weight_decay : p.weight_decay);
    rule.follows_gradient = !(__builtin_fabsf(rate1) < 0.5f);
    rule.rate1 = broadcast(rule.follows_gradient ? rate1 - 1.0f : rate1);
    rule.rate2 = all(1.0 - p.beta2);
    rule.beta2 = all(p.beta2);
    rule.step_size = all(-(p.lr / bc1));
    rule.root_scale = all(__builtin_sqrt(bc2));
    rule.eps = all(p.eps);
    rule.divide = p.divide;
    rule.maximize = p.maximize;
    rule.decoupled = p.decoupled;
    rule.decayed = p.weight_decay != 0.0;
    return rule;
  }

  // Moments are updated in place; largest is null without amsgrad. Returns the new parameter.
  FE_FUNCTION V apply(const Rule& rule, V grad, V param, V& exp_avg, V& exp_avg_sq, V* largest) {
    grad = rule.divide ? grad / rule.factor : grad * rule.factor;
    if (rule.maximize) grad = -grad;
    if (rule.decayed && rule.decoupled) param = param * rule.decay;
    if (rule.decayed && !rule.decoupled) grad = fused_multiply_add(param, rule.decay, grad);
    exp_avg = fused_multiply_add(rule.rate1, grad - exp_avg, rule.follows_gradient ? grad : exp_avg);
    exp_avg_sq = fused_multiply_add(rule.rate2 * grad, grad, exp_avg_sq * rule.beta2);
    V second = exp_avg_sq;
    if (largest != nullptr) second = *largest = maximum(*largest, exp_avg_sq);
    return param + rule.step_size * exp_avg / (square_root(second) / rule.root_scale + rule.eps);
  }
};

}  // namespace

void dense_adam(const DenseAdam& p, const Parallel& parallel) {
  if (p.found_inf != nullptr && *p.found_inf != 0.0f) return;
  const Rule rule = Rule::make(p);
  parallel_ranges(parallel, p.numel / kDenseAdamElements, 1 << 9, [&](int64_t first, int64_t last) {
    for (int64_t i = first * kDenseAdamElements; i < last * kDenseAdamElements; i += kLanes<float>) {
      V m = load(p.exp_avg + i), v = load(p.exp_avg_sq + i), u = {};
      if (p.max_exp_avg_sq != nullptr) u = load(p.max_exp_avg_sq + i);
      V* const largest = p.max_exp_avg_sq == nullptr ? nullptr : &u;
      store(p.param + i, Rule::apply(rule, load(p.grad + i), load(p.param + i), m, v, largest));
      store(p.exp_avg + i, m);
      store(p.exp_avg_sq + i, v);
      if (largest != nullptr) store(p.max_exp_avg_sq + i, u);
    }
  });
}

}  // namespace fastemb::cpu::FE_ISA
