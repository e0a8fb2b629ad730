// What dense Adam does to an element in steps whose gradient is zero, without doing them one by one.
//
// With m and v as the row's last update left them, r = m / sqrt(v), e = eps / sqrt(v) and j = 1, 2, ... steps later
//   p -= a_j * m * beta1^j / (sqrt(v * beta2^j) / q_j + eps)
//      = r * a_j * q_j * (beta1 / sqrt(beta2))^j / (1 + e * q_j * beta2^(-j/2))
// The denominator is expanded in powers of e; what multiplies r * (-e)^n then depends on the row's last step alone and
// stands in AdamHistory::series[n]. Where e is too large for four terms, and under an L2 penalty, whose gradient is
// never zero, the steps are replayed.
#pragma once

#include "common/row_update.h"

namespace fastemb {

template <typename A>
struct AdamCatchUp {
  A series[4];
  A keep, fade1, fade2, eps, smallest_root;

  // For a row that is current at the end of step `last`.
  FE_FUNCTION AdamCatchUp make(const RowAdamCatchUp& p, int64_t last, int64_t t) {
    const AdamHistory& since = p.history[last % p.capacity];
    AdamCatchUp result;
    for (int n = 0; n < 4; ++n) result.series[n] = static_cast<A>(since.series[n]);
    result.keep = static_cast<A>(since.keep);
    result.fade1 = static_cast<A>(integer_power(p.beta1, t - last));
    result.fade2 = static_cast<A>(integer_power(p.beta2, t - last));
    result.eps = static_cast<A>(p.eps);
    result.smallest_root = static_cast<A>(p.smallest_root);
    return result;
  }

  // How far the parameter has moved, for root = sqrt(v or its maximum) >= smallest_root.
  template <typename V>
  FE_FUNCTION V moved(const AdamCatchUp& rule, V exp_avg, V root) {
    const V e = rule.eps / root;
    const V sum = rule.series[0] - e * (rule.series[1] - e * (rule.series[2] - e * rule.series[3]));
    return exp_avg / root * sum;
  }

  // The same step by step, where exp_avg is not 0 (else nothing moves). `fixed_root` under amsgrad, else 0.
  template <typename V>
  FE_FUNCTION V replayed(const RowAdamCatchUp& p, int64_t last, int64_t t, V exp_avg, V exp_avg_sq, V fixed_root) {
    const A beta1 = static_cast<A>(p.beta1), beta2 = static_cast<A>(p.beta2), eps = static_cast<A>(p.eps);
    const int64_t end = t - last > p.horizon ? last + p.horizon : t;
    V sum = {};
    for_steps(p, last, end, [&](const AdamHistory& step) {
      exp_avg = exp_avg * beta1;
      exp_avg_sq = exp_avg_sq * beta2;
      const V root = p.max_exp_avg_sq == nullptr ? square_root(exp_avg_sq) : fixed_root;
      sum = sum * static_cast<A>(step.decay) +
            exp_avg / (root / static_cast<A>(step.root) + eps) * static_cast<A>(step.rate);
    });
    return sum * static_cast<A>(p.history[end % p.capacity].keep);
  }

  // Under an L2 penalty: the whole of dense Adam, with weight_decay * p as gradient. Returns the new parameter.
  template <typename V>
  FE_FUNCTION V penalised(const RowAdamCatchUp& p, int64_t last, int64_t t, V param, V& exp_avg, V& exp_avg_sq,
                          V* largest) {
    AdamRule<A> rule{};
    rule.beta1 = static_cast<A>(p.beta1);
    rule.beta2 = static_cast<A>(p.beta2);
    rule.rate1 = static_cast<A>(1.0 - p.beta1);
    rule.rate2 = static_cast<A>(1.0 - p.beta2);
    rule.eps = static_cast<A>(p.eps);
    rule.scale_root = true;
    const A weight_decay = static_cast<A>(p.rows.weight_decay);
    for_steps(p, last, t, [&](const AdamHistory& step) {
      rule.step_size = static_cast<A>(step.rate);
      rule.root_scale = static_cast<A>(step.root);
      param = AdamRule<A>::apply(rule, param * weight_decay, param, exp_avg, exp_avg_sq, largest);
    });
    return param;
  }

 private:
  // f(step) for each step in (last, end].
  template <typename F>
  FE_FUNCTION void for_steps(const RowAdamCatchUp& p, int64_t last, int64_t end, const F& f) {
    int64_t at = last % p.capacity;
    for (int64_t s = last; s < end; ++s) {
      at = at + 1 == p.capacity ? 0 : at + 1;
      f(p.history[at]);
    }
  }
};

}  // namespace fastemb
