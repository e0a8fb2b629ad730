// The operators of fastemb/_row_ops.py, written once for the CPU and the CUDA library: checked structs from tensors.
// Backend is that of operators.h, with row_adam(problem), row_adam_catch_up(problem), row_adagrad(problem),
// row_rowwise_adagrad(problem) and row_sgd(problem).
#pragma once

#include "torch/row_terms.h"

namespace fastemb {

// Where a step goes: a parameter with its master, and some of its rows.
struct RowTarget {
  const std::string& op;
  Tensor param;
  OptionalTensor master, rows, used_rows;
  Tensor step;
  double weight_decay;
  int64_t seed;

  // RowStep without a gradient. num_rows without `rows`: how many rows of param take part.
  RowStep target(int64_t num_rows) const {
    check_param();
    RowStep p{};
    p.param_type = dtype_of(op, param.scalar_type());
    p.param = writable(op, "param", param);
    p.num_embeddings = param.size(0);
    p.dim = param.size(1);
    p.param_stride = param.size(0) <= 1 ? param.size(1) : param.stride(0);
    p.master = state("master", master, param.numel(), false);
    require(!master.has_value() || p.param_type == DType::f16 || p.param_type == DType::bf16, op,
            "master must be None unless param is float16 or bfloat16");
    p.num_rows = num_rows;
    if (rows.has_value()) {
      require_here("rows", *rows);
      require(rows->scalar_type() == ScalarType::Long && rows->dim() == 1 && rows->is_contiguous(), op,
              "rows must be contiguous int64, 1-D");
      p.rows = static_cast<const int64_t*>(readable(op, "rows", *rows));
      p.num_rows = rows->numel();
    }
    if (used_rows.has_value()) {
      require_here("used_rows", *used_rows);
      require(used_rows->scalar_type() == ScalarType::Int && used_rows->numel() == 1, op,
              "used_rows must be one int32 element");
      p.used_rows = static_cast<const int32_t*>(readable(op, "used_rows", *used_rows));
    }
    p.step = scalar("step", step);
    p.weight_decay = weight_decay;
    p.stochastic = seed >= 0;
    p.seed = static_cast<uint64_t>(seed);
    return p;
  }

  // State of `elements` elements in the accumulation dtype of param (or bfloat16, not beside float64), or null.
  void* state(const char* name, const OptionalTensor& tensor, int64_t elements, bool may_be_bf16) const {
    if (!tensor.has_value()) return nullptr;
    require_here(name, *tensor);
    const ScalarType acc = accumulation_type(dtype_of(op, param.scalar_type()));
    may_be_bf16 = may_be_bf16 && acc == ScalarType::Float;
    const bool typed = tensor->scalar_type() == acc || (may_be_bf16 && tensor->scalar_type() == ScalarType::BFloat16);
    require(typed && tensor->numel() == elements && tensor->is_contiguous(), op,
            std::string(name) + " must be contiguous, " + (acc == ScalarType::Double ? "float64" : "float32") +
                (may_be_bf16 ? " or bfloat16" : "") + ", of " + std::to_string(elements) + " elements");
    return writable(op, name, *tensor);
  }

  int32_t* counter(const char* name, const OptionalTensor& tensor) const {
    if (!tensor.has_value()) return nullptr;
    require_here(name, *tensor);
    require(tensor->scalar_type() == ScalarType::Int && tensor->numel() == param.size(0) && tensor->is_contiguous(), op,
            std::string(name) + " must be contiguous int32, one element for each row of param");
    return static_cast<int32_t*>(writable(op, name, *tensor));
  }

  void require_here(const char* name, const Tensor& tensor) const {
    require(tensor.device() == param.device(), op, std::string(name) + " must be on param's device");
  }

  const float* scalar(const char* name, const Tensor& tensor) const {
    require_here(name, tensor);
    require(tensor.scalar_type() == ScalarType::Float && tensor.numel() == 1, op,
            std::string(name) + " must be one float32 element");
    return static_cast<const float*>(readable(op, name, tensor));
  }

 private:
  void check_param() const {
    require(param.dim() == 2, op, "param must be 2-D, got " + std::to_string(param.dim()) + "-D");
    require(param.size(1) <= 1 || param.stride(1) == 1, op, "the elements of a row of param must be neighbours");
    require(param.size(0) <= 1 || param.size(1) == 0 || param.stride(0) >= param.size(1), op,
            "the rows of param must not overlap");
  }
};

// The arguments that all optimizer steps share, and RowStep made of them.
struct RowArguments : RowTarget {
  Tensor grad;
  OptionalTensor segments, sources, coefficients;
  OptionalTensor inv_scale, found_inf;
  double lr;
  OptionalTensor lr_tensor;
  bool maximize;

  RowStep problem() const {
    require_here("grad", grad);
    require(grad.dim() == 2 && param.dim() == 2 && grad.size(1) == param.size(1) && grad.is_contiguous(), op,
            "grad must be contiguous, [rows, columns of param]");
    RowStep p = target(grad.size(0));
    p.grad_type = dtype_of(op, grad.scalar_type());
    require((p.grad_type == DType::f64) == (p.param_type == DType::f64), op,
            "grad must be float64 when param is, and only then");
    p.grad = readable(op, "grad", grad);
    if (segments.has_value()) require_here("segments", *segments);
    if (sources.has_value()) require_here("sources", *sources);
    if (coefficients.has_value()) require_here("coefficients", *coefficients);
    set_terms(op, grad, segments, sources, coefficients, p);
    if (segments.has_value()) {
      require(rows.has_value(), op, "rows must be given with segments");
      require(segments->numel() == p.num_rows + 1, op, "segments must be contiguous int32, one element more than rows");
    } else {
      require(p.num_rows == grad.size(0), op, "rows must have one element for each row of grad");
      require(rows.has_value() || p.num_rows <= p.num_embeddings, op, "grad must not have more rows than param");
    }
    p.inv_scale = inv_scale.has_value() ? scalar("inv_scale", *inv_scale) : nullptr;
    p.found_inf = found_inf.has_value() ? scalar("found_inf", *found_inf) : nullptr;
    p.lr = lr;
    if (lr_tensor.has_value()) {
      require_here("lr_tensor", *lr_tensor);
      p.lr_type = dtype_of(op, lr_tensor->scalar_type());
      require(lr_tensor->numel() == 1 && (p.lr_type == DType::f32 || p.lr_type == DType::f64), op,
              "lr_tensor must be one float32 or float64 element");
      p.lr_tensor = readable(op, "lr_tensor", *lr_tensor);
    }
    p.maximize = maximize;
    return p;
  }
};

// _COMMON_TENSORS of fastemb/_row_ops.py as parameters, and RowArguments made of them.
#define FE_STEP_PARAMETERS                                                                                     \
  OptionalTensor rows, OptionalTensor used_rows, Tensor grad, OptionalTensor segments, OptionalTensor sources, \
      OptionalTensor coefficients, Tensor step, OptionalTensor inv_scale, OptionalTensor found_inf, double lr, \
      OptionalTensor lr_tensor, double weight_decay, bool maximize, int64_t seed
#define FE_STEP_ARGUMENTS                                          \
  {{op, param, master, rows, used_rows, step, weight_decay, seed}, \
   grad,                                                           \
   segments,                                                       \
   sources,                                                        \
   coefficients,                                                   \
   inv_scale,                                                      \
   found_inf,                                                      \
   lr,                                                             \
   lr_tensor,                                                      \
   maximize}

template <class Backend>
struct RowOperators {
  static void row_adam_(Tensor param, OptionalTensor master, Tensor exp_avg, Tensor exp_avg_sq,
                        OptionalTensor max_exp_avg_sq, OptionalTensor row_step, OptionalTensor row_count,
                        FE_STEP_PARAMETERS, double beta1, double beta2, double eps, bool decoupled,
                        bool corrected_denominator) {
    const std::string op = "row_adam_";
    const RowArguments arguments FE_STEP_ARGUMENTS;
    RowAdam problem{};
    problem.rows = arguments.problem();
    set_moments(op, arguments, exp_avg, exp_avg_sq, max_exp_avg_sq, problem);
    problem.row_step = arguments.counter("row_step", row_step);
    problem.row_count = arguments.counter("row_count", row_count);
    problem.beta1 = beta1;
    problem.beta2 = beta2;
    problem.eps = eps;
    problem.decoupled = decoupled;
    problem.corrected_denominator = corrected_denominator;
    run(op, param, &Backend::row_adam, problem);
  }

  static void row_adam_catch_up_(Tensor param, OptionalTensor master, Tensor exp_avg, Tensor exp_avg_sq,
                                 OptionalTensor max_exp_avg_sq, Tensor row_step, OptionalTensor rows,
                                 OptionalTensor used_rows, Tensor step, Tensor history, OptionalTensor found_inf,
                                 double weight_decay, int64_t seed, double beta1, double beta2, double eps,
                                 double smallest_root, int64_t horizon, bool decoupled) {
    const std::string op = "row_adam_catch_up_";
    const RowTarget target{op, param, master, rows, used_rows, step, weight_decay, seed};
    RowAdamCatchUp problem{};
    problem.rows = target.target(param.size(0));
    problem.rows.found_inf = found_inf.has_value() ? target.scalar("found_inf", *found_inf) : nullptr;
    set_moments(op, target, exp_avg, exp_avg_sq, max_exp_avg_sq, problem);
    problem.row_step = target.counter("row_step", row_step);
    target.require_here("history", history);
    static_assert(sizeof(AdamHistory) == 8 * sizeof(double));
    require(history.scalar_type() == ScalarType::Double && history.dim() == 2 && history.size(0) > 0 &&
                history.size(1) == 8 && history.is_contiguous(),
            op, "history must be contiguous float64, [capacity, 8]");
    problem.history = static_cast<const AdamHistory*>(readable(op, "history", history));
    problem.capacity = history.size(0);
    require(horizon >= 1, op, "horizon must be at least 1");
    problem.beta1 = beta1;
    problem.beta2 = beta2;
    problem.eps = eps;
    problem.smallest_root = smallest_root;
    problem.horizon = horizon;
    problem.decoupled = decoupled;
    run(op, param, &Backend::row_adam_catch_up, problem);
  }

  static void row_adagrad_(Tensor param, OptionalTensor master, Tensor sum, FE_STEP_PARAMETERS, double lr_decay,
                           double eps) {
    const std::string op = "row_adagrad_";
    const RowArguments arguments FE_STEP_ARGUMENTS;
    RowAdagrad problem{};
    problem.rows = arguments.problem();
    problem.sum = arguments.state("sum", sum, param.numel(), false);
    problem.lr_decay = lr_decay;
    problem.eps = eps;
    run(op, param, &Backend::row_adagrad, problem);
  }

  static void row_rowwise_adagrad_(Tensor param, OptionalTensor master, Tensor sum, FE_STEP_PARAMETERS, double lr_decay,
                                   double eps) {
    const std::string op = "row_rowwise_adagrad_";
    const RowArguments arguments FE_STEP_ARGUMENTS;
    RowRowwiseAdagrad problem{};
    problem.rows = arguments.problem();
    problem.sum = arguments.state("sum", sum, param.size(0), false);
    problem.lr_decay = lr_decay;
    problem.eps = eps;
    run(op, param, &Backend::row_rowwise_adagrad, problem);
  }

  static void row_sgd_(Tensor param, OptionalTensor master, OptionalTensor momentum_buffer, FE_STEP_PARAMETERS,
                       double momentum, double dampening, bool nesterov) {
    const std::string op = "row_sgd_";
    const RowArguments arguments FE_STEP_ARGUMENTS;
    RowSgd problem{};
    problem.rows = arguments.problem();
    problem.momentum_buffer = arguments.state("momentum_buffer", momentum_buffer, param.numel(), false);
    problem.momentum = momentum;
    problem.dampening = dampening;
    problem.nesterov = nesterov;
    run(op, param, &Backend::row_sgd, problem);
  }

 private:
  template <typename Problem>
  static void set_moments(const std::string& op, const RowTarget& target, const Tensor& exp_avg,
                          const Tensor& exp_avg_sq, const OptionalTensor& max_exp_avg_sq, Problem& problem) {
    problem.exp_avg = target.state("exp_avg", exp_avg, target.param.numel(), true);
    problem.exp_avg_sq = target.state("exp_avg_sq", exp_avg_sq, target.param.numel(), true);
    problem.max_exp_avg_sq = target.state("max_exp_avg_sq", max_exp_avg_sq, target.param.numel(), true);
    problem.moment_type = dtype_of(op, exp_avg.scalar_type());
    require(exp_avg_sq.scalar_type() == exp_avg.scalar_type() &&
                (!max_exp_avg_sq.has_value() || max_exp_avg_sq->scalar_type() == exp_avg.scalar_type()),
            op, "exp_avg, exp_avg_sq and max_exp_avg_sq must have one dtype");
  }

  template <typename Kernel, typename Problem>
  static void run(const std::string& op, const Tensor& param, Kernel kernel, Problem& problem) {
    const std::string no_table;
    Backend backend(op, param, no_table);
    RowStep& rows = problem.rows;
    if (rows.segments != nullptr) rows.partials = backend.scratch(partials_bytes(rows, rows.param_type == DType::f64));
    (backend.*kernel)(problem);
  }
};

#undef FE_STEP_PARAMETERS
#undef FE_STEP_ARGUMENTS

// Registers the row optimizers of one library: FE_REGISTER_ROW_OPERATORS(CPU, CpuBackend).
#define FE_REGISTER_ROW_OPERATORS(KEY, BACKEND)                            \
  STABLE_TORCH_LIBRARY_IMPL(fastemb, KEY, m) {                             \
    using Ops = fastemb::RowOperators<BACKEND>;                            \
    m.impl("row_adam_", TORCH_BOX(&Ops::row_adam_));                       \
    m.impl("row_adam_catch_up_", TORCH_BOX(&Ops::row_adam_catch_up_));     \
    m.impl("row_adagrad_", TORCH_BOX(&Ops::row_adagrad_));                 \
    m.impl("row_rowwise_adagrad_", TORCH_BOX(&Ops::row_rowwise_adagrad_)); \
    m.impl("row_sgd_", TORCH_BOX(&Ops::row_sgd_));                         \
  }

}  // namespace fastemb
