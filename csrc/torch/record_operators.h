// The operators of fastemb/_record_ops.py, written once for the CPU and the CUDA library: checked structs from tensors.
// Backend is that of operators.h, with
//   row_copy(problem), checksum(problem)   launches
//   check_rows(rows, num_rows, limit)      raises for rows out of range before anything is written (CUDA: kernels
//   report)
// Rules and words are those of fastemb/_record_reference.py.
#pragma once

#include <vector>

#include "torch/tensors.h"

namespace fastemb {

struct RecordRules {
  const std::string& op;

  void one_device(const Tensor& tensor, const Tensor& like) const {
    require(tensor.device() == like.device(), op, "all tensors must be on one device");
  }

  RowPieces pieces(const std::vector<Tensor>& tensors) const {
    require(!tensors.empty() && tensors.size() <= kMaxPieces, op,
            "there must be 1 to " + std::to_string(kMaxPieces) + " pieces");
    RowPieces pieces{};
    pieces.count = static_cast<int32_t>(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Tensor& tensor = tensors[i];
      require(tensor.dim() == 2, op, "pieces must be 2-D");
      require(tensor.size(1) <= 1 || tensor.stride(1) == 1, op, "rows must be contiguous");
      one_device(tensor, tensors[0]);
      require(tensor.size(0) == tensors[0].size(0), op, "pieces must have the same number of rows");
      const int64_t element = static_cast<int64_t>(tensor.element_size());
      pieces.data[i] = const_cast<void*>(readable(op, "a piece", tensor));
      pieces.strides[i] = tensor.stride(0) * element;
      pieces.bytes[i] = tensor.size(1) * element;
    }
    pieces.rows = tensors[0].size(0);
    return pieces;
  }

  const int64_t* numbers(const char* name, const OptionalTensor& tensor, const Tensor& like) const {
    if (!tensor.has_value()) return nullptr;
    one_device(*tensor, like);
    require(tensor->scalar_type() == ScalarType::Long && tensor->dim() == 1 && tensor->is_contiguous(), op,
            std::string(name) + " must be contiguous 1-D int64");
    return static_cast<const int64_t*>(readable(op, name, *tensor));
  }

  template <class Backend>
  void check_rows(const Backend& backend, const int64_t* rows, int64_t num_rows, int64_t limit) const {
    if (rows == nullptr) {
      require(num_rows <= limit, op, "pieces must have a row for each row number");
    } else {
      backend.check_rows(rows, num_rows, limit);
    }
  }
};

template <class Backend>
struct RecordOperators {
  static void row_copy_(std::vector<Tensor> to, OptionalTensor to_rows, std::vector<Tensor> from,
                        OptionalTensor from_rows) {
    const std::string op = "row_copy_", no_table;
    const RecordRules rules{op};
    require(to.size() == from.size(), op, "to and from_ must have the same number of pieces");
    RowCopy problem{};
    problem.to = rules.pieces(to);
    problem.from = rules.pieces(from);
    rules.one_device(from[0], to[0]);
    for (int32_t i = 0; i < problem.to.count; ++i) {
      require(problem.to.bytes[i] == problem.from.bytes[i], op, "pieces must have rows of the same number of bytes");
    }
    problem.to_rows = rules.numbers("to_rows", to_rows, to[0]);
    problem.from_rows = rules.numbers("from_rows", from_rows, to[0]);
    require(!to_rows.has_value() || !from_rows.has_value() || to_rows->numel() == from_rows->numel(), op,
            "to_rows and from_rows must have the same length");
    require(to_rows.has_value() || from_rows.has_value() || problem.to.rows == problem.from.rows, op,
            "without row numbers to and from_ must be as long");
    problem.num_rows = to_rows.has_value()     ? to_rows->numel()
                       : from_rows.has_value() ? from_rows->numel()
                                               : to[0].size(0);
    Backend backend(op, to[0], no_table);
    rules.check_rows(backend, problem.to_rows, problem.num_rows, problem.to.rows);
    rules.check_rows(backend, problem.from_rows, problem.num_rows, problem.from.rows);
    problem.error = backend.error();
    backend.row_copy(problem);
  }

  static Tensor checksum(std::vector<Tensor> pieces, OptionalTensor at, Tensor rows, Tensor versions, int64_t seed) {
    const std::string op = "checksum", no_table;
    Checksum problem = records(op, ChecksumMode::compute, nullptr, pieces, at, rows, versions, seed);
    Backend backend(op, pieces[0], no_table);
    RecordRules{op}.check_rows(backend, problem.at, problem.num_rows, problem.pieces.rows);
    Tensor output = backend.empty({problem.num_rows}, ScalarType::Long);
    problem.output = static_cast<uint64_t*>(output.mutable_data_ptr());
    problem.error = backend.error();
    backend.checksum(problem);
    return output;
  }

  static void checksum_seal_(Tensor headers, std::vector<Tensor> pieces, OptionalTensor at, Tensor rows,
                             Tensor versions, int64_t seed) {
    const std::string op = "checksum_seal_", no_table;
    Checksum problem = records(op, ChecksumMode::seal, &headers, pieces, at, rows, versions, seed);
    Backend backend(op, pieces[0], no_table);
    RecordRules{op}.check_rows(backend, problem.at, problem.num_rows, problem.pieces.rows);
    problem.error = backend.error();
    backend.checksum(problem);
  }

  static void checksum_check_(Tensor headers, std::vector<Tensor> pieces, OptionalTensor at, Tensor rows,
                              OptionalTensor versions, int64_t seed, Tensor found) {
    const std::string op = "checksum_check_", no_table;
    Checksum problem = records(op, ChecksumMode::check, &headers, pieces, at, rows, versions, seed);
    RecordRules{op}.one_device(found, headers);
    require(found.scalar_type() == ScalarType::Long && found.numel() == 2 && found.is_contiguous(), op,
            "found must be contiguous int64 of 2 elements");
    Backend backend(op, pieces[0], no_table);
    RecordRules{op}.check_rows(backend, problem.at, problem.num_rows, problem.pieces.rows);
    problem.found = static_cast<int64_t*>(writable(op, "found", found));
    problem.error = backend.error();
    backend.checksum(problem);
  }

 private:
  static Checksum records(const std::string& op, ChecksumMode mode, const Tensor* headers,
                          const std::vector<Tensor>& tensors, const OptionalTensor& at, const Tensor& rows,
                          const OptionalTensor& versions, int64_t seed) {
    const RecordRules rules{op};
    Checksum problem{};
    problem.mode = mode;
    problem.pieces = rules.pieces(tensors);
    problem.at = rules.numbers("at", at, tensors[0]);
    problem.rows = rules.numbers("rows", rows, tensors[0]);
    problem.versions = rules.numbers("versions", versions, tensors[0]);
    problem.num_rows = rows.numel();
    problem.seed = static_cast<uint64_t>(seed);
    require(!at.has_value() || at->numel() == problem.num_rows, op, "at and rows must have the same length");
    require(!versions.has_value() || versions->numel() == problem.num_rows, op,
            "versions and rows must have the same length");
    if (headers == nullptr) return problem;
    rules.one_device(*headers, tensors[0]);
    require(headers->scalar_type() == ScalarType::Long && headers->dim() == 2 && headers->size(1) == 2 &&
                headers->stride(1) == 1 && headers->size(0) == problem.pieces.rows,
            op, "headers must be int64 [rows, 2], with a row for each row of the pieces");
    problem.headers = const_cast<void*>(readable(op, "headers", *headers));
    problem.header_stride = headers->stride(0) * static_cast<int64_t>(sizeof(int64_t));
    return problem;
  }
};

// Registers the record operators of one library: FE_REGISTER_RECORD_OPERATORS(CPU, CpuBackend).
#define FE_REGISTER_RECORD_OPERATORS(KEY, BACKEND)               \
  STABLE_TORCH_LIBRARY_IMPL(fastemb, KEY, m) {                   \
    using Ops = fastemb::RecordOperators<BACKEND>;               \
    m.impl("row_copy_", TORCH_BOX(&Ops::row_copy_));             \
    m.impl("checksum", TORCH_BOX(&Ops::checksum));               \
    m.impl("checksum_seal_", TORCH_BOX(&Ops::checksum_seal_));   \
    m.impl("checksum_check_", TORCH_BOX(&Ops::checksum_check_)); \
  }

}  // namespace fastemb
