// The operator of fastemb/_dense_ops.py for the CPU library: a checked struct from tensors. Rules and words are those
// of fastemb/_dense_reference.py.
#pragma once

#include "torch/grad_operators.h"

namespace fastemb {

template <class Backend>
struct DenseOperators {
  static void dense_adam_(Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, OptionalTensor max_exp_avg_sq,
                          Tensor step, Tensor factor, bool divide, OptionalTensor found_inf, double lr, double beta1,
                          double beta2, double eps, double weight_decay, bool decoupled, bool maximize) {
    const std::string op = "dense_adam_";
    const int64_t numel = param.numel();
    require(numel % kDenseAdamElements == 0, op,
            "the number of elements must be a multiple of " + std::to_string(kDenseAdamElements));
    const GradPlaces places{op, param, 1, std::nullopt, std::nullopt, std::nullopt, std::nullopt, "param's device"};
    const auto memory = [&](const char* name, const OptionalTensor& tensor) {
      return places.places<float>(name, tensor, ScalarType::Float, "float32", numel);
    };
    DenseAdam problem{};
    problem.param = memory("param", param);
    problem.grad = places.places<const float>("grad", grad, ScalarType::Float, "float32", numel);
    problem.exp_avg = memory("exp_avg", exp_avg);
    problem.exp_avg_sq = memory("exp_avg_sq", exp_avg_sq);
    problem.max_exp_avg_sq = memory("max_exp_avg_sq", max_exp_avg_sq);
    problem.numel = numel;
    problem.step = places.number("step", step);
    problem.factor = places.number("factor", factor);
    problem.found_inf = places.number("found_inf", found_inf);
    problem.divide = divide;
    problem.lr = lr;
    problem.beta1 = beta1;
    problem.beta2 = beta2;
    problem.eps = eps;
    problem.weight_decay = weight_decay;
    problem.decoupled = decoupled;
    problem.maximize = maximize;
    const std::string no_table;
    Backend backend(op, param, no_table);
    backend.dense_adam(problem);
  }
};

// Registers the operator: FE_REGISTER_DENSE_OPERATORS(CPU, CpuBackend).
#define FE_REGISTER_DENSE_OPERATORS(KEY, BACKEND)        \
  STABLE_TORCH_LIBRARY_IMPL(fastemb, KEY, m) {           \
    using Ops = fastemb::DenseOperators<BACKEND>;        \
    m.impl("dense_adam_", TORCH_BOX(&Ops::dense_adam_)); \
  }

}  // namespace fastemb
