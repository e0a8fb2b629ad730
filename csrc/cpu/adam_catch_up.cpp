// Catching up rows that slept, for lazy Adam with the result of dense Adam.
#include "cpu/kernels.h"
#include "cpu/row_pieces.h"

#include "common/adam_catch_up.h"  // after the vectors' square_root

namespace fastemb::cpu::FE_ISA {
namespace {

// One whole row: from the end of step `last` to the end of step t.
template <typename A, typename M>
struct Sleeper {
  const RowAdamCatchUp& p;
  int64_t last, t;
  AdamCatchUp<A> rule;
  const AdamRounding& rounding;
  M* exp_avg;
  M* exp_avg_sq;
  M* largest;

  template <typename Access>
  Vec<A> wake(const Access& access, int64_t d, Vec<A> param) const {
    Vec<A> m = access.load(exp_avg + d), v = access.load(exp_avg_sq + d), u = {};
    if (largest != nullptr) u = access.load(largest + d);
    if (p.rows.weight_decay != 0.0 && !p.decoupled) {
      param = AdamCatchUp<A>::penalised(p, last, t, param, m, v, largest == nullptr ? nullptr : &u);
      if (largest != nullptr) access.store(largest + d, rounded_moment(M{}, u, rounding.second, d));
    } else {
      param = param * rule.keep - moved(m, v, u);
      m = m * rule.fade1;
      v = v * rule.fade2;
    }
    access.store(exp_avg + d, rounded_moment(M{}, m, rounding.first, d));
    access.store(exp_avg_sq + d, rounded_moment(M{}, v, rounding.second, d));
    return param;
  }

 private:
  Vec<A> moved(Vec<A> m, Vec<A> v, Vec<A> u) const {
    const Vec<A> root = square_root(largest == nullptr ? v : u);
    Vec<A> result = AdamCatchUp<A>::moved(rule, m, root);
    const auto small = ~(root >= rule.smallest_root);
    bool any = false;
    for (int i = 0; i < kLanes<A>; ++i) any |= small[i] != 0 && m[i] != A{0};
    const Vec<A> slow = any ? AdamCatchUp<A>::replayed(p, last, t, m, v, root) : Vec<A>{};
    for (int i = 0; i < kLanes<A>; ++i) {
      if (small[i] != 0) result[i] = m[i] == A{0} ? A{0} : slow[i];
    }
    return result;
  }
};

template <typename T, Store kStore, typename M>
void catch_up(const RowAdamCatchUp& p, const Parallel& parallel) {
  using A = typename AccOf<T>::type;
  const RowStep& step = p.rows;
  const GradientRule<A> no_gradient{};
  const int64_t t = step_number(step);
  const auto rounding = AdamRounding::make(step.stochastic, step.seed, t);
  for_pieces<A>(step, true, parallel, [&](const Piece& at, Buffers<A>& buffers) {
    const int64_t last = p.row_step[at.row] < 0 ? 0 : p.row_step[at.row];
    if (last >= t) return;
    p.row_step[at.row] = static_cast<int32_t>(t);
    const Sleeper<A, M> sleeper{p,
                                last,
                                t,
                                AdamCatchUp<A>::make(p, last, t),
                                rounding,
                                state_of<M>(step, p.exp_avg, at),
                                state_of<M>(step, p.exp_avg_sq, at),
                                state_of<M>(step, p.max_exp_avg_sq, at)};
    step_piece<T, kStore, A>(
        step, no_gradient, at, Gradient<A>{buffers.sum.data},
        [&](auto access, int64_t d, Vec<A>, Vec<A> param) { return sleeper.wake(access, d, param); });
  });
}

}  // namespace

void row_adam_catch_up(const RowAdamCatchUp& p, const Parallel& parallel) {
  with_store(p.rows, [&](auto type, auto store) {
    using T = decltype(type);
    if (p.moment_type == DType::bf16) {
      if constexpr (sizeof(T) <= 4) catch_up<T, decltype(store)::value, bf16>(p, parallel);
    } else {
      catch_up<T, decltype(store)::value, typename AccOf<T>::type>(p, parallel);
    }
  });
}

}  // namespace fastemb::cpu::FE_ISA
