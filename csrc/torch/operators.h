// The operators of fastemb/_ops.py, written once for the CPU and the CUDA library: checked structs, outputs and
// scratch.
//
// A Backend is made once per call and owns what differs between devices:
//   Backend(op, like, table)       device guard; raises an error pending from an earlier call
//   check(bags)                    raises for bad ids or offsets before anything is written (CUDA: kernels report)
//   check_offsets(bags)            the same for offsets alone, before a kernel that reports bad ids
//   error()                        where kernels report
//   output(sizes, type)            for the model: a tensor as torch makes it
//   empty(sizes, type)             for autograd and optimizers, from recycled memory; zeros(sizes, type)
//   dense_gradient(sizes, type)    zeroed, unless the device's kernel writes the zeros itself
//   scratch(bytes)                 memory that lives as long as the Backend
//   bag_forward(problem), ...      launches
#pragma once

#include "torch/tensors.h"

namespace fastemb {

template <class Backend>
struct Operators {
  static Tensor embedding(Tensor weight, Tensor indices, int64_t /*padding_idx*/, bool /*scale_grad_by_freq*/,
                          bool /*sparse*/, ScalarType output_dtype, Text table_name) {
    const std::string op = "embedding", table = table_name.taken();
    require_table(op, weight);
    Backend backend(op, weight, table);
    const BagTensors tensors(op, indices, weight.size(0));
    backend.check(tensors.bags);
    const Tensor rows = with_whole_rows(op, "weight", weight);
    std::vector<int64_t> sizes(indices.sizes().begin(), indices.sizes().end());
    sizes.push_back(weight.size(1));
    Tensor output = backend.output(sizes, output_dtype);
    Gather problem{};
    problem.bags = tensors.bags;
    problem.weight = rows.const_data_ptr();
    problem.weight_type = dtype_of(op, weight.scalar_type());
    problem.weight_stride = row_stride(rows);
    problem.dim = weight.size(1);
    problem.output = output.mutable_data_ptr();
    problem.output_type = dtype_of(op, output_dtype);
    problem.error = backend.error();
    backend.gather(problem);
    return output;
  }

  static std::tuple<Tensor, Tensor> embedding_bag(Tensor weight, Tensor indices, OptionalTensor offsets,
                                                  OptionalTensor per_sample_weights, Text mode_name,
                                                  int64_t padding_idx, bool include_last_offset,
                                                  bool /*scale_grad_by_freq*/, bool /*sparse*/, ScalarType output_dtype,
                                                  Text table_name) {
    const std::string op = "embedding_bag", mode = mode_name.taken(), table = table_name.taken();
    require_table(op, weight);
    Backend backend(op, weight, table);
    const BagTensors tensors(op, indices, offsets, weight.size(0), padding_idx, include_last_offset);
    backend.check_offsets(tensors.bags);
    const Tensor rows = with_whole_rows(op, "weight", weight);
    const OptionalTensor samples = per_sample(op, per_sample_weights, indices);
    BagForward problem{};
    problem.bags = tensors.bags;
    problem.mode = mode_of(op, mode);
    problem.weight = rows.const_data_ptr();
    problem.weight_type = dtype_of(op, weight.scalar_type());
    problem.weight_stride = row_stride(rows);
    problem.dim = weight.size(1);
    set_per_sample(op, samples, problem);
    require(samples == std::nullopt || problem.mode != Mode::max, op, "per_sample_weights must be None in mode 'max'");
    const int64_t num_bags = tensors.bags.num_bags;
    Tensor output = backend.output({num_bags, problem.dim}, output_dtype);
    Tensor argmax = problem.mode == Mode::max ? backend.empty({num_bags, problem.dim}, ScalarType::Int)
                                              : backend.empty({0}, ScalarType::Int);
    problem.output = output.mutable_data_ptr();
    problem.output_type = dtype_of(op, output_dtype);
    problem.argmax = static_cast<int32_t*>(argmax.mutable_data_ptr());
    problem.error = backend.error();
    backend.bag_forward(problem);
    return {output, argmax};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> group_indices(Tensor indices, OptionalTensor offsets,
                                                                  int64_t num_embeddings, int64_t padding_idx,
                                                                  bool include_last_offset) {
    const std::string op = "group_indices";
    Backend backend(op, indices, "");
    const BagTensors tensors = offsets.has_value() || indices.dim() == 2
                                   ? BagTensors(op, indices, offsets, num_embeddings, padding_idx, include_last_offset)
                                   : BagTensors(op, indices, num_embeddings);
    const int64_t n = tensors.bags.num_indices;
    Tensor order = backend.empty({n}, ScalarType::Int);
    Tensor rows = backend.empty({n}, ScalarType::Long);
    Tensor segments = backend.empty({n + 1}, ScalarType::Int);
    Tensor num_rows = backend.empty({1}, ScalarType::Int);
    GroupIndices problem{};
    problem.bags = tensors.bags;
    problem.bags.padding_idx = padding_idx;
    problem.groups = groups_of(op, order, rows, segments, num_rows, n);
    backend.group_indices(problem);
    return {order, rows, segments, num_rows};
  }

  static Tensor embedding_bag_backward(Tensor grad_output, Tensor indices, OptionalTensor offsets,
                                       OptionalTensor per_sample_weights, OptionalTensor argmax, Tensor order,
                                       Tensor rows, Tensor segments, Tensor num_rows, int64_t num_embeddings,
                                       int64_t out_rows, Text mode_name, int64_t padding_idx, bool include_last_offset,
                                       bool scale_grad_by_freq, bool dense, ScalarType grad_dtype) {
    const std::string op = "embedding_bag_backward", mode = mode_name.taken();
    Backend backend(op, grad_output, "");
    const BagTensors tensors(op, indices, offsets, num_embeddings, padding_idx, include_last_offset);
    backend.check_offsets(tensors.bags);  // someone may have written to them since the forward
    const int64_t n = tensors.bags.num_indices;
    require(grad_dtype == ScalarType::Float || grad_dtype == ScalarType::Double, op,
            "grad_dtype must be float32 or float64");
    require(grad_output.dim() == 2 && grad_output.size(0) == tensors.bags.num_bags, op,
            "grad_output must have one row per bag");
    require(dense ? out_rows == num_embeddings : out_rows >= 0 && out_rows <= n, op,
            "a dense gradient has num_embeddings rows, another at most one per index");
    const bool wide = grad_dtype == ScalarType::Double;
    const bool is_wide = grad_output.scalar_type() == ScalarType::Double;
    const Tensor typed = wide == is_wide ? grad_output : to_dtype(op, "grad_output", grad_output, grad_dtype);
    const Tensor grad = packed(op, "grad_output", typed);
    const OptionalTensor samples = per_sample(op, per_sample_weights, indices);

    BagBackward problem{};
    problem.bags = tensors.bags;
    problem.groups = groups_of(op, order, rows, segments, num_rows, n);
    problem.mode = mode_of(op, mode);
    problem.scale_grad_by_freq = scale_grad_by_freq;
    problem.dense = dense;
    problem.grad_output = grad.const_data_ptr();
    problem.grad_type = dtype_of(op, grad.scalar_type());
    problem.dim = grad.size(1);
    set_per_sample(op, samples, problem);
    OptionalTensor winners;
    if (problem.mode == Mode::max) {
      require(argmax.has_value() && argmax->numel() == grad.numel() && argmax->scalar_type() == ScalarType::Int, op,
              "argmax must be the int32 argmax of the forward");
      winners = packed(op, "argmax", *argmax);
      problem.argmax = static_cast<const int32_t*>(winners->const_data_ptr());
    }
    Tensor grad_rows = dense ? backend.dense_gradient({out_rows, problem.dim}, grad_dtype)
                             : backend.empty({out_rows, problem.dim}, grad_dtype);
    problem.grad_rows = grad_rows.mutable_data_ptr();
    const int64_t acc_bytes = wide ? 8 : 4;
    problem.bag_of = static_cast<int32_t*>(backend.scratch(n * 4));
    problem.bag_count = backend.scratch(problem.mode == Mode::mean ? tensors.bags.num_bags * acc_bytes : 0);
    problem.partials = backend.scratch(bag_backward_partial_rows(n) * problem.dim * acc_bytes);
    backend.bag_backward(problem);
    return grad_rows;
  }

  static std::tuple<Tensor, Tensor> bag_terms(Tensor indices, OptionalTensor offsets, OptionalTensor per_sample_weights,
                                              Tensor order, int64_t num_embeddings, Text mode_name, int64_t padding_idx,
                                              bool include_last_offset, ScalarType acc_dtype) {
    const std::string op = "bag_terms", mode = mode_name.taken();
    Backend backend(op, indices, "");
    const BagTensors tensors(op, indices, offsets, num_embeddings, padding_idx, include_last_offset);
    backend.check_offsets(tensors.bags);  // someone may have written to them since the forward
    const int64_t n = tensors.bags.num_indices;
    require(order.scalar_type() == ScalarType::Int && order.numel() == n && order.is_contiguous(), op,
            "order must be what group_indices made of these indices");
    require(acc_dtype == ScalarType::Float || acc_dtype == ScalarType::Double, op,
            "acc_dtype must be float32 or float64");
    const OptionalTensor samples = per_sample(op, per_sample_weights, indices);
    BagTerms problem{};
    problem.bags = tensors.bags;
    problem.order = static_cast<const int32_t*>(readable(op, "order", order));
    problem.mode = mode_of(op, mode);
    require(problem.mode != Mode::max, op, "mode must be 'sum' or 'mean', got 'max'");
    set_per_sample(op, samples, problem);
    problem.acc_type = dtype_of(op, acc_dtype);
    const bool all_ones = problem.mode == Mode::sum && !samples.has_value();
    Tensor sources = backend.empty({n}, ScalarType::Int);
    Tensor coefficients = backend.empty({all_ones ? 0 : n}, acc_dtype);
    problem.sources = static_cast<int32_t*>(sources.mutable_data_ptr());
    problem.coefficients = all_ones ? nullptr : coefficients.mutable_data_ptr();
    const int64_t acc_bytes = acc_dtype == ScalarType::Double ? 8 : 4;
    problem.bag_of = static_cast<int32_t*>(backend.scratch(n * 4));
    problem.bag_count = backend.scratch(problem.mode == Mode::mean ? tensors.bags.num_bags * acc_bytes : 0);
    backend.bag_terms(problem);
    return {sources, coefficients};
  }

  static Tensor embedding_bag_per_sample_weights_backward(Tensor grad_output, Tensor weight, Tensor indices,
                                                          OptionalTensor offsets, Text mode_name, int64_t padding_idx,
                                                          bool include_last_offset) {
    const std::string op = "embedding_bag_per_sample_weights_backward", mode = mode_name.taken();
    require_table(op, weight);
    Backend backend(op, weight, "");
    const BagTensors tensors(op, indices, offsets, weight.size(0), padding_idx, include_last_offset);
    backend.check(tensors.bags);
    require(
        grad_output.dim() == 2 && grad_output.size(0) == tensors.bags.num_bags && grad_output.size(1) == weight.size(1),
        op, "grad_output must have one row per bag and weight's columns");
    const Tensor table_rows = with_whole_rows(op, "weight", weight);
    PerSampleBackward problem{};
    problem.bags = tensors.bags;
    problem.mode = mode_of(op, mode);
    require(problem.mode != Mode::max, op, "mode must be 'sum' or 'mean', got 'max'");
    problem.weight = table_rows.const_data_ptr();
    problem.weight_type = dtype_of(op, weight.scalar_type());
    problem.weight_stride = row_stride(table_rows);
    problem.dim = weight.size(1);
    const ScalarType acc = accumulation_type(problem.weight_type);
    const Tensor grad = packed(op, "grad_output", to_dtype(op, "grad_output", grad_output, acc));
    problem.grad_output = grad.const_data_ptr();
    Tensor result = backend.zeros(std::vector<int64_t>(indices.sizes().begin(), indices.sizes().end()), acc);
    problem.grad_weights = result.mutable_data_ptr();
    backend.per_sample_backward(problem);
    return result;
  }

  static void embedding_renorm_(Tensor weight, Tensor indices, double max_norm, double norm_type, Text table_name) {
    const std::string op = "embedding_renorm_", table = table_name.taken();
    require_table(op, weight);
    Backend backend(op, weight, table);
    const BagTensors tensors(op, indices, weight.size(0));
    backend.check(tensors.bags);
    const int64_t n = tensors.bags.num_indices;
    GroupIndices grouping{};
    grouping.bags = tensors.bags;
    grouping.groups.order = static_cast<int32_t*>(backend.scratch(n * 4));
    grouping.groups.rows = static_cast<int64_t*>(backend.scratch(n * 8));
    grouping.groups.segments = static_cast<int32_t*>(backend.scratch((n + 1) * 4));
    grouping.groups.num_rows = static_cast<int32_t*>(backend.scratch(4));
    backend.group_indices(grouping);

    Tensor rows = with_whole_rows(op, "weight", weight);
    Renorm problem{};
    problem.groups = grouping.groups;
    problem.num_groups_capacity = n;
    problem.weight = rows.mutable_data_ptr();
    problem.weight_type = dtype_of(op, weight.scalar_type());
    problem.weight_stride = row_stride(rows);
    problem.dim = weight.size(1);
    problem.max_norm = max_norm;
    problem.norm_type = norm_type;
    backend.renorm(problem);
    if (rows.get() != weight.get()) call_torch(op, [&] { return torch::stable::copy_(weight, rows); });
  }

 private:
  static void require_table(const std::string& op, const Tensor& weight) {
    require(weight.dim() == 2, op, "weight must be 2-D, got " + std::to_string(weight.dim()) + "-D");
  }

  static int64_t row_stride(const Tensor& weight) { return weight.size(0) <= 1 ? weight.size(1) : weight.stride(0); }

  static OptionalTensor per_sample(const std::string& op, const OptionalTensor& weights, const Tensor& indices) {
    if (!weights.has_value()) return std::nullopt;
    require(weights->numel() == indices.numel(), op, "per_sample_weights must have one element per index");
    return packed(op, "per_sample_weights", *weights);
  }

  template <typename Problem>
  static void set_per_sample(const std::string& op, const OptionalTensor& samples, Problem& problem) {
    if (!samples.has_value()) return;
    problem.per_sample_weights = samples->const_data_ptr();
    problem.per_sample_type = dtype_of(op, samples->scalar_type());
  }

  static Groups groups_of(const std::string& op, const Tensor& order, const Tensor& rows, const Tensor& segments,
                          const Tensor& num_rows, int64_t n) {
    require(order.scalar_type() == ScalarType::Int && order.numel() == n && order.is_contiguous() &&
                rows.scalar_type() == ScalarType::Long && rows.numel() == n && rows.is_contiguous() &&
                segments.scalar_type() == ScalarType::Int && segments.numel() == n + 1 && segments.is_contiguous() &&
                num_rows.scalar_type() == ScalarType::Int && num_rows.numel() == 1,
            op, "order, rows, segments and num_rows must be what group_indices made of these indices");
    return {static_cast<int32_t*>(writable(op, "order", order)), static_cast<int64_t*>(writable(op, "rows", rows)),
            static_cast<int32_t*>(writable(op, "segments", segments)),
            static_cast<int32_t*>(writable(op, "num_rows", num_rows))};
  }
};

// Registers every operator of one library: FE_REGISTER_OPERATORS(CPU, CpuBackend).
#define FE_REGISTER_OPERATORS(KEY, BACKEND)                                                                          \
  STABLE_TORCH_LIBRARY_IMPL(fastemb, KEY, m) {                                                                       \
    using Ops = fastemb::Operators<BACKEND>;                                                                         \
    m.impl("embedding", TORCH_BOX(&Ops::embedding));                                                                 \
    m.impl("embedding_bag", TORCH_BOX(&Ops::embedding_bag));                                                         \
    m.impl("group_indices", TORCH_BOX(&Ops::group_indices));                                                         \
    m.impl("embedding_bag_backward", TORCH_BOX(&Ops::embedding_bag_backward));                                       \
    m.impl("bag_terms", TORCH_BOX(&Ops::bag_terms));                                                                 \
    m.impl("embedding_bag_per_sample_weights_backward", TORCH_BOX(&Ops::embedding_bag_per_sample_weights_backward)); \
    m.impl("embedding_renorm_", TORCH_BOX(&Ops::embedding_renorm_));                                                 \
  }

}  // namespace fastemb
