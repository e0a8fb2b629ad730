// The operators for CPU tensors: torch's threads, recycled buffers, checks before anything is written.
#include <cstring>
#include <vector>

#include "torch/cpu_buffers.h"
#include "torch/dense_operators.h"
#include "torch/grad_operators.h"
#include "torch/operators.h"
#include "torch/record_operators.h"
#include "torch/row_operators.h"

namespace fastemb {
namespace {

void run_parallel(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
  torch::stable::parallel_for(begin, end, grain, [&](int64_t from, int64_t to) { body(from, to, context); });
}

struct CpuBackend {
  CpuBackend(const std::string& op_name, const Tensor& like, const std::string& table_name)
      : op(op_name),
        table(table_name),
        device(like.device()),
        parallel{run_parallel, torch::stable::get_num_threads()} {}
  ~CpuBackend() {
    for (void* buffer : buffers) release_buffer(buffer);
  }
  CpuBackend(const CpuBackend&) = delete;
  CpuBackend& operator=(const CpuBackend&) = delete;

  void check_offsets(const Bags& bags) const { raise_if_bad(cpu::check_offsets(bags), bags); }

  void check(const Bags& bags) const {
    check_offsets(bags);
    raise_if_bad(cpu::check_indices(bags, parallel), bags);
  }

  ErrorReport* error() { return &report; }

  // Not from recycled memory: torch resizes and frees the storage of what a model passes on, and its operators with
  // out= change the sizes of a tensor before they find that its storage cannot be resized.
  Tensor output(const std::vector<int64_t>& sizes, ScalarType type) const {
    Tensor tensor = call_torch(op, [&] { return torch::stable::empty(sizes, type, std::nullopt, device); });
    advise_huge_pages(tensor.mutable_data_ptr(), tensor.numel() * element_bytes(type));
    return tensor;
  }

  Tensor empty(const std::vector<int64_t>& sizes, ScalarType type) const {
    std::vector<int64_t> strides(sizes.size());
    int64_t elements = 1;
    for (size_t d = sizes.size(); d-- > 0;) {
      strides[d] = elements;
      elements *= sizes[d] > 0 ? sizes[d] : 1;
    }
    for (int64_t size : sizes) elements = size == 0 ? 0 : elements;
    void* data = acquire_buffer(elements * element_bytes(type));
    return torch::stable::from_blob(data, sizes, strides, device, type, release_buffer);
  }

  Tensor zeros(const std::vector<int64_t>& sizes, ScalarType type) const {
    Tensor tensor = empty(sizes, type);
    char* data = static_cast<char*>(tensor.mutable_data_ptr());
    torch::stable::parallel_for(
        0, tensor.numel() * element_bytes(type), int64_t{1} << 20,
        [&](int64_t from, int64_t to) { std::memset(data + from, 0, static_cast<size_t>(to - from)); });
    return tensor;
  }

  Tensor dense_gradient(const std::vector<int64_t>& sizes, ScalarType type) const { return empty(sizes, type); }

  void* scratch(int64_t bytes) {
    buffers.push_back(acquire_buffer(bytes));
    return buffers.back();
  }

  void gather(const Gather& problem) const { cpu::gather(&problem, 1, parallel); }
  void bag_forward(const BagForward& problem) const {
    cpu::bag_forward(&problem, 1, parallel);
    raise_if_bad(report, problem.bags);
  }
  void bag_backward(const BagBackward& problem) const { cpu::bag_backward(&problem, 1, parallel); }
  void bag_terms(const BagTerms& problem) const { cpu::bag_terms(&problem, 1, parallel); }
  void per_sample_backward(const PerSampleBackward& problem) const { cpu::per_sample_backward(&problem, 1, parallel); }
  void renorm(const Renorm& problem) const { cpu::renorm(&problem, 1, parallel); }
  void row_adam(const RowAdam& problem) const { cpu::row_adam(&problem, 1, parallel); }
  void row_adam_catch_up(const RowAdamCatchUp& problem) const { cpu::row_adam_catch_up(&problem, 1, parallel); }
  void row_adagrad(const RowAdagrad& problem) const { cpu::row_adagrad(&problem, 1, parallel); }
  void row_rowwise_adagrad(const RowRowwiseAdagrad& problem) const { cpu::row_rowwise_adagrad(&problem, 1, parallel); }
  void row_sgd(const RowSgd& problem) const { cpu::row_sgd(&problem, 1, parallel); }
  void dense_adam(const DenseAdam& problem) const { cpu::dense_adam(&problem, 1, parallel); }
  void grad_check(const std::vector<GradCheck>& problems) const {
    cpu::grad_check(problems.data(), static_cast<int64_t>(problems.size()), parallel);
  }
  void row_grad_check(const RowGradCheck& problem) const { cpu::row_grad_check(&problem, 1, parallel); }
  void boundary_gradient(const BoundaryGradient& problem) const { cpu::boundary_gradient(&problem, 1, parallel); }
  void scale_update(const ScaleUpdate& problem) const { cpu::scale_update(problem); }
  void row_copy(const RowCopy& problem) const { cpu::row_copy(&problem, 1, parallel); }
  void checksum(const Checksum& problem) const { cpu::checksum(&problem, 1, parallel); }
  // Before anything is written: a row number that is not in [0, limit).
  void check_rows(const int64_t* rows, int64_t num_rows, int64_t limit) const {
    Bags bags{};
    bags.indices = rows;
    bags.index_type = IndexType::i64;
    bags.num_indices = num_rows;
    bags.num_bags = num_rows;
    bags.bag_length = 1;
    bags.num_embeddings = limit;
    raise_if_bad(cpu::check_indices(bags, parallel), bags);
  }
  void group_indices(GroupIndices problem) {
    problem.scratch_bytes = cpu::group_indices_scratch_bytes(problem.bags, parallel);
    problem.scratch = scratch(problem.scratch_bytes);
    cpu::group_indices(&problem, 1, parallel);
  }

 private:
  void raise_if_bad(const ErrorReport& found, const Bags& bags) const {
    if (found.code != ErrorReport::none) raise(op, found, &bags, table);
  }

  static int64_t element_bytes(ScalarType type) {
    switch (type) {
      case ScalarType::Half:
      case ScalarType::BFloat16: return 2;
      case ScalarType::Int:
      case ScalarType::Float: return 4;
      default: return 8;
    }
  }

  const std::string op;
  const std::string table;  // as it came, which may be a temporary
  torch::stable::Device device;
  cpu::Parallel parallel;
  ErrorReport report{};
  std::vector<void*> buffers;
};

}  // namespace

FE_REGISTER_OPERATORS(CPU, CpuBackend)
FE_REGISTER_ROW_OPERATORS(CPU, CpuBackend)
FE_REGISTER_DENSE_OPERATORS(CPU, CpuBackend)
FE_REGISTER_GRAD_OPERATORS(CPU, CpuBackend)
FE_REGISTER_RECORD_OPERATORS(CPU, CpuBackend)

}  // namespace fastemb
