// The operators of fastemb/_grad_ops.py, written once for the CPU and the CUDA library: checked structs from tensors.
// Backend is that of operators.h, with grad_check(problems), row_grad_check(problem), boundary_gradient(problem) and
// scale_update(problem). Rules and words are those of fastemb/_grad_checks.py.
#pragma once

#include <type_traits>
#include <vector>

#include "torch/row_terms.h"

namespace fastemb {

// Where what is found in gradients goes, and other memory beside a gradient.
struct GradPlaces {
  const std::string& op;
  const Tensor& grad;  // one of them
  int64_t count;       // of gradients
  OptionalTensor inv_scale, found_inf, stats, square_sums;
  const char* device = "the gradients' device";  // in messages

  const float* scale() const { return number("inv_scale", inv_scale); }
  float* flag() const { return const_cast<float*>(number("found_inf", found_inf)); }
  int64_t* counters() const { return places<int64_t>("stats", stats, ScalarType::Long, "int64", count * kGradStats); }
  double* squares() const { return places<double>("square_sums", square_sums, ScalarType::Double, "float64", count); }

  const float* number(const char* name, const OptionalTensor& tensor) const {
    if (!tensor.has_value()) return nullptr;
    require_here(name, *tensor);
    require(tensor->scalar_type() == ScalarType::Float && tensor->numel() == 1, op,
            std::string(name) + " must be one float32 element");
    return static_cast<const float*>(readable(op, name, *tensor));
  }

  void require_here(const char* name, const Tensor& tensor) const {
    require(tensor.device() == grad.device(), op, std::string(name) + " must be on " + device);
  }

  template <typename E>
  E* places(const char* name, const OptionalTensor& tensor, ScalarType type, const char* word, int64_t elements) const {
    if (!tensor.has_value()) return nullptr;
    require_here(name, *tensor);
    require(tensor->scalar_type() == type && tensor->numel() == elements && tensor->is_contiguous(), op,
            std::string(name) + " must be contiguous " + word + " of " + std::to_string(elements) + " elements");
    if constexpr (std::is_const_v<E>) {
      return static_cast<E*>(readable(op, name, *tensor));
    } else {
      return static_cast<E*>(writable(op, name, *tensor));
    }
  }
};

template <class Backend>
struct GradOperators {
  static void grad_check_(std::vector<Tensor> grads, OptionalTensor inv_scale, OptionalTensor found_inf,
                          OptionalTensor stats, OptionalTensor square_sums, bool unscale) {
    const std::string op = "grad_check_";
    if (grads.empty()) return;
    const int64_t count = static_cast<int64_t>(grads.size());
    const GradPlaces places{op, grads[0], count, inv_scale, found_inf, stats, square_sums};
    std::vector<GradCheck> problems(grads.size());
    for (size_t i = 0; i < grads.size(); ++i) {
      const Tensor& grad = grads[i];
      problems[i].grad_type = dtype_of(op, grad.scalar_type());
      require(grad.is_contiguous(), op, "gradients must be contiguous");
      require(grad.device() == grads[0].device(), op, "gradients must be on one device");
      problems[i].grad = writable(op, "grad", grad);
      problems[i].numel = grad.numel();
    }
    const float* scale = places.scale();
    float* flag = places.flag();
    int64_t* counters = places.counters();
    double* squares = places.squares();
    const std::string no_table;
    Backend backend(op, grads[0], no_table);
    double* scratch = nullptr;  // one allocation for all
    if (squares != nullptr) {
      int64_t partial_sums = 0;
      for (const GradCheck& problem : problems) partial_sums += grad_check_scratch(problem.numel);
      scratch = static_cast<double*>(backend.scratch(partial_sums * 8));
    }
    for (size_t i = 0; i < grads.size(); ++i) {
      problems[i].inv_scale = scale;
      problems[i].found_inf = flag;
      problems[i].stats = counters == nullptr ? nullptr : counters + i * kGradStats;
      problems[i].unscale = unscale;
      if (squares != nullptr) {
        problems[i].square_sum = squares + i;
        problems[i].scratch = scratch;
        scratch += grad_check_scratch(problems[i].numel);
      }
    }
    backend.grad_check(problems);
  }

  static void row_grad_check_(Tensor grad, OptionalTensor used_rows, OptionalTensor segments, OptionalTensor sources,
                              OptionalTensor coefficients, OptionalTensor inv_scale, OptionalTensor found_inf,
                              OptionalTensor stats, OptionalTensor square_sum, bool unscale) {
    const std::string op = "row_grad_check_";
    require(grad.dim() == 2 && grad.is_contiguous(), op, "grad must be contiguous, [rows, columns]");
    const GradPlaces places{op, grad, 1, inv_scale, found_inf, stats, square_sum};
    RowGradCheck problem{};
    RowStep& rows = problem.rows;
    rows.grad = readable(op, "grad", grad);
    rows.grad_type = dtype_of(op, grad.scalar_type());
    rows.dim = grad.size(1);
    rows.num_rows = segments.has_value() ? segments->numel() - 1 : grad.size(0);
    if (used_rows.has_value()) {
      places.require_here("used_rows", *used_rows);
      require(used_rows->numel() == 1 && used_rows->scalar_type() == ScalarType::Int, op,
              "used_rows must be one int32 element");
      rows.used_rows = static_cast<const int32_t*>(readable(op, "used_rows", *used_rows));
    }
    if (segments.has_value()) places.require_here("segments", *segments);
    if (sources.has_value()) places.require_here("sources", *sources);
    if (coefficients.has_value()) places.require_here("coefficients", *coefficients);
    set_terms(op, grad, segments, sources, coefficients, rows);
    require(!segments.has_value() || !unscale, op, "unscale must be False with segments");
    rows.inv_scale = places.scale();
    problem.found_inf = places.flag();
    problem.stats = places.counters();
    problem.square_sum = places.squares();
    problem.unscale = unscale;
    const std::string no_table;
    Backend backend(op, grad, no_table);
    if (segments.has_value()) rows.partials = backend.scratch(partials_bytes(rows, rows.grad_type == DType::f64));
    if (problem.square_sum != nullptr) {
      problem.scratch = static_cast<double*>(backend.scratch(grad_check_scratch(rows.num_rows * rows.dim) * 8));
    }
    backend.row_grad_check(problem);
  }

  static Tensor boundary_gradient(Tensor grad, Tensor ratio, OptionalTensor inv_scale, Tensor flags,
                                  OptionalTensor stats) {
    const std::string op = "boundary_gradient";
    const Tensor whole = packed(op, "grad", grad);
    const GradPlaces places{op, whole, 1, inv_scale, std::nullopt, stats, std::nullopt};
    BoundaryGradient problem{};
    problem.grad = whole.const_data_ptr();
    problem.grad_type = dtype_of(op, whole.scalar_type());
    problem.numel = whole.numel();
    problem.ratio = places.number("ratio", ratio);
    problem.inv_scale = places.scale();
    places.require_here("flags", flags);
    require(flags.scalar_type() == ScalarType::Float && flags.numel() == 2 && flags.is_contiguous(), op,
            "flags must be contiguous float32 of 2 elements");
    problem.flags = static_cast<float*>(writable(op, "flags", flags));
    problem.stats = places.counters();
    const std::string no_table;
    Backend backend(op, whole, no_table);
    Tensor output = backend.output(std::vector<int64_t>(grad.sizes().begin(), grad.sizes().end()), grad.scalar_type());
    problem.output = output.mutable_data_ptr();
    backend.boundary_gradient(problem);
    return output;
  }

  static void scale_update_(Tensor scales, Tensor states, Tensor found_inf, Tensor configs) {
    const std::string op = "scale_update_";
    ScaleUpdate problem{};
    problem.groups = scales.numel();
    static_assert(sizeof(ScaleConfig) == 6 * sizeof(double) && sizeof(ScaleState) == 2 * sizeof(int32_t));
    const auto memory = [&](const char* name, const Tensor& tensor, ScalarType type, const char* word,
                            int64_t columns) {
      require(tensor.device() == scales.device(), op, std::string(name) + " must be on the device of scales");
      const int64_t elements = problem.groups * columns;
      require(tensor.scalar_type() == type && tensor.numel() == elements && tensor.is_contiguous(), op,
              std::string(name) + " must be contiguous " + word + " of " + std::to_string(elements) + " elements");
      return writable(op, name, tensor);
    };
    problem.scales = static_cast<float*>(memory("scales", scales, ScalarType::Float, "float32", 1));
    problem.states = static_cast<ScaleState*>(memory("states", states, ScalarType::Int, "int32", 2));
    problem.found_inf = static_cast<const float*>(memory("found_inf", found_inf, ScalarType::Float, "float32", 1));
    problem.configs = static_cast<const ScaleConfig*>(memory("configs", configs, ScalarType::Double, "float64", 6));
    const std::string no_table;
    Backend backend(op, scales, no_table);
    backend.scale_update(problem);
  }
};

// Registers the gradient operators of one library: FE_REGISTER_GRAD_OPERATORS(CPU, CpuBackend).
#define FE_REGISTER_GRAD_OPERATORS(KEY, BACKEND)                     \
  STABLE_TORCH_LIBRARY_IMPL(fastemb, KEY, m) {                       \
    using Ops = fastemb::GradOperators<BACKEND>;                     \
    m.impl("grad_check_", TORCH_BOX(&Ops::grad_check_));             \
    m.impl("row_grad_check_", TORCH_BOX(&Ops::row_grad_check_));     \
    m.impl("boundary_gradient", TORCH_BOX(&Ops::boundary_gradient)); \
    m.impl("scale_update_", TORCH_BOX(&Ops::scale_update_));         \
  }

}  // namespace fastemb
