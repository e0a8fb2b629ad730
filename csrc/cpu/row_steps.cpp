// Optimizer steps of rows on the CPU. A row, or a piece of a wide one, is updated by one thread; nothing that one
// element computes depends on another (the row-wise sum excepted, which is a dot of ops.h).
#include "cpu/dot.h"
#include "cpu/kernels.h"
#include "cpu/row_gradients.h"

namespace fastemb::cpu::FE_ISA {
namespace {

// ---- Adam ----

template <typename T, Store kStore, typename M>
void adam(const RowAdam& p, const Parallel& parallel) {
  using A = typename AccOf<T>::type;
  const RowStep& step = p.rows;
  const auto gradient = GradientRule<A>::make(step, p.decoupled);
  const int64_t t = step_number(step);
  const auto common = AdamRule<A>::make(p, t, 1);
  const auto rounding = AdamRounding::make(step.stochastic, step.seed, t);
  const bool per_row = p.row_step != nullptr || p.row_count != nullptr;
  const RowGradients<A> gradients(step, parallel);
  for_pieces<A>(step, per_row, parallel, [&](const Piece& at, Buffers<A>& buffers) {
    AdamRule<A> rule = common;
    if (per_row) {
      int64_t slept = 1, updates = t;
      if (p.row_step != nullptr) {
        slept = t - p.row_step[at.row];
        p.row_step[at.row] = static_cast<int32_t>(t);
      }
      if (p.row_count != nullptr) updates = ++p.row_count[at.row];
      if (slept != 1 || updates != t) rule = AdamRule<A>::make(p, updates, slept);
    }
    M* exp_avg = state_of<M>(step, p.exp_avg, at);
    M* exp_avg_sq = state_of<M>(step, p.exp_avg_sq, at);
    M* largest = state_of<M>(step, p.max_exp_avg_sq, at);
    const Gradient<A> grad = gradients.of(at, buffers);
    step_piece<T, kStore, A>(step, gradient, at, grad, [&](auto access, int64_t d, Vec<A> g, Vec<A> param) {
      prefetch_state(step, exp_avg + d, at);
      prefetch_state(step, exp_avg_sq + d, at);
      if (largest != nullptr) prefetch_state(step, largest + d, at);
      Vec<A> m = access.load(exp_avg + d), v = access.load(exp_avg_sq + d), u = {};
      if (largest != nullptr) u = access.load(largest + d);
      param = AdamRule<A>::apply(rule, g, param, m, v, largest == nullptr ? nullptr : &u);
      const int64_t column = at.column + d;
      access.store(exp_avg + d, rounded_moment(M{}, m, rounding.first, column));
      access.store(exp_avg_sq + d, rounded_moment(M{}, v, rounding.second, column));
      if (largest != nullptr) {
        access.store(largest + d, rounded_moment(M{}, u, rounding.second, column));
      }
      return param;
    });
  });
}

// ---- Adagrad, SGD ----

template <typename T, Store kStore>
void adagrad(const RowAdagrad& p, const Parallel& parallel) {
  using A = typename AccOf<T>::type;
  const RowStep& step = p.rows;
  const auto gradient = GradientRule<A>::make(step, false);
  const auto rule = AdagradRule<A>::make(p);
  const RowGradients<A> gradients(step, parallel);
  for_pieces<A>(step, false, parallel, [&](const Piece& at, Buffers<A>& buffers) {
    A* sums = state_of<A>(step, p.sum, at);
    const Gradient<A> grad = gradients.of(at, buffers);
    step_piece<T, kStore, A>(step, gradient, at, grad, [&](auto access, int64_t d, Vec<A> g, Vec<A> param) {
      prefetch_state(step, sums + d, at);
      Vec<A> sum = access.load(sums + d);
      param = AdagradRule<A>::apply(rule, g, param, sum);
      access.store(sums + d, sum);
      return param;
    });
  });
}

// In blocks: the rates of some rows, then the rows. A rate is the end of a long chain of sums, a root and a division;
// those of a block overlap.
template <typename T, Store kStore>
void rowwise_adagrad(const RowRowwiseAdagrad& p, const Parallel& parallel) {
  using A = typename AccOf<T>::type;
  using Place = Target<T, kStore>;
  constexpr int64_t kBlock = 16;
  const RowStep& step = p.rows;
  if (skipped(step) || step.dim == 0) return;
  const int64_t used = used_rows(step);
  const auto gradient = GradientRule<A>::make(step, false);
  const auto rule = AdagradRule<A>::make(p);
  A* sums = static_cast<A*>(p.sum);

  const RowGradients<A> gradients(step, parallel);

  // Makes the row's gradient at `finished` and updates its sum.
  const auto rate_of = [&](const Piece& at, Buffers<A>& buffers, A* finished) {
    const auto target = Place::make(step, at);
    const Gradient<A> grad = gradients.of(at, buffers);
    const GradientRule<A> finish = gradient;
    const auto finish_at = [&](auto access, int64_t d) {
      prefetch(target.param + at.ahead * step.param_stride + d);
      const Vec<A> param = finish.decayed ? Place::load(target, access, d) : Vec<A>{};
      const Vec<A> g = GradientRule<A>::apply(finish, Gradient<A>::load(grad, access, d), param);
      access.store(finished + d, g);
      return g * g;
    };
    prefetch(sums + at.row + at.ahead);
    sums[at.row] += fold_lanes<A>(
                        at.n, [&](int64_t d) { return finish_at(Whole{}, d); },
                        [&](int64_t d, int64_t n) {
                          finish_at(Part{n}, d);
                          const Vec<A> g = load_part<A>(finished + d, n);
                          return g * g;
                        }) /
                    static_cast<A>(step.dim);
    return AdagradRule<A>::row_rate(rule, sums[at.row]);
  };

  share_out(step, used, 1, kGrain / step.dim + 1, parallel, [&](int64_t begin, int64_t end) {
    Scratch<A> finished(kBlock * step.dim);
    Buffers<A> buffers(step.dim);
    Piece pieces[kBlock];
    A rates[kBlock];
    for (int64_t block = begin; block < end; block += kBlock) {
      const int64_t n = end - block < kBlock ? end - block : kBlock;
      for (int64_t i = 0; i < n; ++i) {
        pieces[i] = row_piece(step, block + i, used);
        if (pieces[i].n > 0) rates[i] = rate_of(pieces[i], buffers, finished.data + i * step.dim);
      }
      for (int64_t i = 0; i < n; ++i) {
        const A rate = rates[i];
        if (pieces[i].n == 0) continue;
        step_piece<T, kStore, A>(step, GradientRule<A>{}, pieces[i], Gradient<A>{finished.data + i * step.dim},
                                 [&](auto, int64_t, Vec<A> g, Vec<A> param) { return param - g * rate; });
      }
    }
  });
}

template <typename T, Store kStore>
void sgd(const RowSgd& p, const Parallel& parallel) {
  using A = typename AccOf<T>::type;
  const RowStep& step = p.rows;
  const auto gradient = GradientRule<A>::make(step, false);
  const auto rule = SgdRule<A>::make(p);
  const RowGradients<A> gradients(step, parallel);
  for_pieces<A>(step, false, parallel, [&](const Piece& at, Buffers<A>& buffers) {
    A* buffer = state_of<A>(step, p.momentum_buffer, at);
    const Gradient<A> grad = gradients.of(at, buffers);
    step_piece<T, kStore, A>(step, gradient, at, grad, [&](auto access, int64_t d, Vec<A> g, Vec<A> param) {
      if (buffer == nullptr) return SgdRule<A>::apply(rule, g, param, (Vec<A>*)nullptr);
      prefetch_state(step, buffer + d, at);
      Vec<A> b = access.load(buffer + d);
      param = SgdRule<A>::apply(rule, g, param, &b);
      access.store(buffer + d, b);
      return param;
    });
  });
}

}  // namespace

void row_adam(const RowAdam& p, const Parallel& parallel) {
  with_store(p.rows, [&](auto type, auto store) {
    using T = decltype(type);
    if (p.moment_type == DType::bf16) {
      if constexpr (sizeof(T) <= 4) adam<T, decltype(store)::value, bf16>(p, parallel);
    } else {
      adam<T, decltype(store)::value, typename AccOf<T>::type>(p, parallel);
    }
  });
}

void row_adagrad(const RowAdagrad& p, const Parallel& parallel) {
  with_store(p.rows, [&](auto type, auto store) { adagrad<decltype(type), decltype(store)::value>(p, parallel); });
}

void row_rowwise_adagrad(const RowRowwiseAdagrad& p, const Parallel& parallel) {
  with_store(p.rows,
             [&](auto type, auto store) { rowwise_adagrad<decltype(type), decltype(store)::value>(p, parallel); });
}

void row_sgd(const RowSgd& p, const Parallel& parallel) {
  with_store(p.rows, [&](auto type, auto store) { sgd<decltype(type), decltype(store)::value>(p, parallel); });
}

}  // namespace fastemb::cpu::FE_ISA
