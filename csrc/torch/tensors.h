// From stable-ABI tensors to the structs of ops.h. Shapes and dtypes are checked only as far as memory safety needs;
// fastemb/functional.py has raised before, with better words.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "ops.h"

// Since torch 2.13; null before.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace fastemb {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// A str argument of an operator, as it comes from torch, whose own conversion to std::string leaves one behind for each
// call until torch 2.14 (pytorch#191340). Whoever gets one calls `taken`, once.
struct Text {
  StringHandle handle;

  std::string taken() const {
    size_t length = 0;
    const char* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    std::string text(data, length);
    STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};

// std::invalid_argument arrives in Python as ValueError, std::out_of_range as IndexError.
inline void require(bool good, const std::string& op, const std::string& rule) {
  if (!good) throw std::invalid_argument(op + ": " + rule);
}

[[noreturn]] inline void raise(const std::string& op, const ErrorReport& report, const Bags* bags,
                               const std::string& table) {
  const std::string position = std::to_string(report.position), value = std::to_string(report.value);
  if (report.code == ErrorReport::bad_index) {
    throw std::out_of_range(op + ": index " + value + " at position " + position + " is out of range for " +
                            (table.empty() ? "the table" : "table '" + table + "'") + " with " +
                            std::to_string(report.limit) + " rows");
  }
  const std::string offset = op + ": offsets[" + position + "] = " + value;
  if (report.position == 0) throw std::invalid_argument(op + ": offsets[0] must be 0, got " + value);
  if (report.value > report.limit) {
    throw std::invalid_argument(offset + " is greater than the number of indices, " + std::to_string(report.limit));
  }
  const std::string before = "offsets[" + std::to_string(report.position - 1) + "]";
  if (bags == nullptr) throw std::invalid_argument(offset + " is less than " + before);
  const int64_t at = report.position - 1;
  const int64_t previous = bags->offset_type == IndexType::i32 ? static_cast<const int32_t*>(bags->offsets)[at]
                                                               : static_cast<const int64_t*>(bags->offsets)[at];
  throw std::invalid_argument(offset + " is less than " + before + " = " + std::to_string(previous));
}

inline DType dtype_of(const std::string& op, ScalarType type) {
  switch (type) {
    case ScalarType::Half: return DType::f16;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Float: return DType::f32;
    case ScalarType::Double: return DType::f64;
    default: throw std::invalid_argument(op + ": dtype must be float16, bfloat16, float32 or float64");
  }
}

inline IndexType index_type_of(const std::string& op, const Tensor& tensor) {
  if (tensor.scalar_type() == ScalarType::Int) return IndexType::i32;
  require(tensor.scalar_type() == ScalarType::Long, op, "indices and offsets must be int32 or int64");
  return IndexType::i64;
}

inline Mode mode_of(const std::string& op, const std::string& mode) {
  if (mode == "sum") return Mode::sum;
  if (mode == "mean") return Mode::mean;
  require(mode == "max", op, "mode must be 'sum', 'mean' or 'max', got '" + mode + "'");
  return Mode::max;
}

inline ScalarType accumulation_type(DType type) { return type == DType::f64 ? ScalarType::Double : ScalarType::Float; }

// Raises where a tensor lies outside its storage, which untyped_storage().resize_() frees or makes smaller.
inline void require_memory(const std::string& op, const char* name, const Tensor& tensor) {
  if (tensor.numel() == 0) return;
  int64_t end = tensor.storage_offset() + 1, bytes = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) end += (tensor.size(d) - 1) * tensor.stride(d);
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  const int64_t needed = end * static_cast<int64_t>(tensor.element_size());
  if (needed > bytes) {
    throw std::runtime_error(op + ": " + name + " needs " + std::to_string(needed) + " bytes, but its storage has " +
                             std::to_string(bytes) + " (was it freed?)");
  }
}

// Calls a function of torch. Of what that raises (that there is no memory, say) the stable ABI of torch 2.11 passes on
// nothing; later ones keep the words.
template <class Function>
auto call_torch(const std::string& op, Function function) {
  try {
    return function();
  } catch (const std::exception& error) {
    const bool kept = torch_exception_get_what_without_backtrace != nullptr;
    throw std::runtime_error(op + ": " + (kept ? torch_exception_get_what_without_backtrace() : error.what()));
  }
}

inline Tensor contiguous(const std::string& op, const Tensor& tensor) {
  return call_torch(op, [&] { return torch::stable::contiguous(tensor); });
}

inline Tensor packed(const std::string& op, const char* name, const Tensor& tensor) {
  require_memory(op, name, tensor);
  return tensor.is_contiguous() ? tensor : contiguous(op, tensor);
}

// Rows may lie apart, the elements of a row may not: a transposed table is copied.
inline Tensor with_whole_rows(const std::string& op, const char* name, const Tensor& weight) {
  require_memory(op, name, weight);
  return weight.size(1) <= 1 || weight.stride(1) == 1 ? weight : contiguous(op, weight);
}

inline Tensor to_dtype(const std::string& op, const char* name, const Tensor& tensor, ScalarType type) {
  require_memory(op, name, tensor);
  if (tensor.scalar_type() == type) return tensor;
  return call_torch(op, [&] { return torch::stable::to(tensor, type); });
}

inline const void* readable(const std::string& op, const char* name, const Tensor& tensor) {
  require_memory(op, name, tensor);
  return tensor.const_data_ptr();
}

inline void* writable(const std::string& op, const char* name, const Tensor& tensor) {
  require_memory(op, name, tensor);
  return tensor.data_ptr();
}

inline constexpr int64_t kNoOffsets = 0;  // stands for an empty offsets tensor, whose pointer may be null

// Indices and offsets, contiguous and kept alive, with the struct that points at them.
struct BagTensors {
  BagTensors(const std::string& op, const Tensor& indices_in, const OptionalTensor& offsets_in, int64_t num_embeddings,
             int64_t padding_idx, bool include_last_offset)
      : indices(packed(op, "indices", indices_in)) {
    bags.indices = indices.const_data_ptr();
    bags.index_type = index_type_of(op, indices);
    bags.num_indices = indices.numel();
    bags.num_embeddings = num_embeddings;
    bags.padding_idx = padding_idx;
    require(bags.num_indices <= INT32_MAX, op, "indices must hold at most 2147483647 ids");
    if (offsets_in.has_value()) {
      offsets = packed(op, "offsets", *offsets_in);
      require(indices.dim() == 1 && offsets->dim() == 1, op, "indices and offsets must be 1-D");
      bags.offsets = offsets->const_data_ptr();
      bags.offset_type = index_type_of(op, *offsets);
      bags.num_offsets = offsets->numel();
      bags.num_bags = bags.num_offsets - (include_last_offset ? 1 : 0);
      require(bags.num_bags >= 0, op, "offsets must hold at least one element with include_last_offset, got 0");
      // A null pointer would mean bags of fixed length.
      if (bags.num_offsets == 0) bags.offsets = &kNoOffsets;
    } else {
      require(indices.dim() == 2, op, "indices must be 2-D without offsets");
      bags.num_bags = indices.size(0);
      bags.bag_length = indices.size(1);
    }
  }

  // Every index a bag of its own: the lookup of nn.Embedding.
  BagTensors(const std::string& op, const Tensor& indices_in, int64_t num_embeddings)
      : indices(packed(op, "indices", indices_in)) {
    bags.indices = indices.const_data_ptr();
    bags.index_type = index_type_of(op, indices);
    bags.num_indices = bags.num_bags = indices.numel();
    bags.bag_length = 1;
    bags.num_embeddings = num_embeddings;
    bags.padding_idx = -1;
    require(bags.num_indices <= INT32_MAX, op, "indices must hold at most 2147483647 ids");
  }

  Tensor indices;
  OptionalTensor offsets;
  Bags bags{};
};

}  // namespace fastemb
