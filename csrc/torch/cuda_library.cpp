// The operators for CUDA tensors: the current stream, scratch from torch's caching allocator, errors that surface
// later.
//
// FASTEMB_SYNC_CHECKS=1 waits for the stream after each operator, so that an error is raised by the call that made it.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "torch/cuda_errors.h"
#include "torch/grad_operators.h"
#include "torch/operators.h"
#include "torch/record_operators.h"
#include "torch/row_operators.h"

namespace fastemb {
namespace {

void require_success(const std::string& op, cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(op + ": CUDA error: " + cudaGetErrorString(error));
}

bool sync_checks() {
  const char* value = std::getenv("FASTEMB_SYNC_CHECKS");
  return value != nullptr && std::strcmp(value, "") != 0 && std::strcmp(value, "0") != 0;
}

struct CudaBackend {
  CudaBackend(const std::string& op_name, const Tensor& like_tensor, const std::string& table_name)
      : op(op_name),
        table(table_name),
        like(like_tensor),
        guard(like.get_device_index()),
        reports(ErrorReports::of(like.get_device_index())) {
    void* current = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(like.get_device_index(), &current));
    stream = static_cast<cudaStream_t>(current);
    reports.raise_pending();
  }

  // The kernels check what they read.
  void check(const Bags&) const {}
  void check_offsets(const Bags&) const {}
  void check_rows(const int64_t*, int64_t, int64_t) const {}

  ErrorReport* error() { return reports.report_for(op, table); }

  Tensor output(const std::vector<int64_t>& sizes, ScalarType type) const { return empty(sizes, type); }

  Tensor empty(const std::vector<int64_t>& sizes, ScalarType type) const {
    return call_torch(op, [&] { return torch::stable::new_empty(like, sizes, type); });
  }

  Tensor zeros(const std::vector<int64_t>& sizes, ScalarType type) const {
    Tensor tensor = empty(sizes, type);
    const size_t bytes = static_cast<size_t>(tensor.numel()) * static_cast<size_t>(tensor.element_size());
    if (bytes > 0) require_success(op, cudaMemsetAsync(tensor.mutable_data_ptr(), 0, bytes, stream));
    return tensor;
  }

  Tensor dense_gradient(const std::vector<int64_t>& sizes, ScalarType type) const { return zeros(sizes, type); }

  // Memory that the allocator hands out again once this stream has passed the operator.
  void* scratch(int64_t bytes) {
    buffers.push_back(empty({bytes}, ScalarType::Byte));
    return buffers.back().mutable_data_ptr();
  }

  void gather(const Gather& problem) { finish(cuda::gather(&problem, 1, stream)); }
  void bag_forward(const BagForward& problem) { finish(cuda::bag_forward(&problem, 1, stream)); }
  void bag_backward(const BagBackward& problem) { finish(cuda::bag_backward(&problem, 1, stream)); }
  void bag_terms(const BagTerms& problem) { finish(cuda::bag_terms(&problem, 1, stream)); }
  void renorm(const Renorm& problem) { finish(cuda::renorm(&problem, 1, stream)); }
  void row_adam(const RowAdam& problem) { finish(cuda::row_adam(&problem, 1, stream)); }
  void row_adam_catch_up(const RowAdamCatchUp& problem) { finish(cuda::row_adam_catch_up(&problem, 1, stream)); }
  void row_adagrad(const RowAdagrad& problem) { finish(cuda::row_adagrad(&problem, 1, stream)); }
  void row_rowwise_adagrad(const RowRowwiseAdagrad& problem) { finish(cuda::row_rowwise_adagrad(&problem, 1, stream)); }
  void row_sgd(const RowSgd& problem) { finish(cuda::row_sgd(&problem, 1, stream)); }

  void grad_check(const std::vector<GradCheck>& problems) {
    finish(cuda::grad_check(problems.data(), static_cast<int64_t>(problems.size()), stream));
  }
  void row_grad_check(const RowGradCheck& problem) { finish(cuda::row_grad_check(&problem, 1, stream)); }
  void boundary_gradient(const BoundaryGradient& problem) { finish(cuda::boundary_gradient(&problem, 1, stream)); }
  void scale_update(const ScaleUpdate& problem) { finish(cuda::scale_update(problem, stream)); }
  void row_copy(const RowCopy& problem) { finish(cuda::row_copy(&problem, 1, stream)); }
  void checksum(const Checksum& problem) { finish(cuda::checksum(&problem, 1, stream)); }

  void per_sample_backward(PerSampleBackward problem) {
    const int64_t acc_bytes = problem.weight_type == DType::f64 ? 8 : 4;
    problem.bag_of = static_cast<int32_t*>(scratch(problem.bags.offsets == nullptr ? 0 : problem.bags.num_indices * 4));
    problem.bag_count = scratch(problem.mode == Mode::mean ? problem.bags.num_bags * acc_bytes : 0);
    finish(cuda::per_sample_backward(&problem, 1, stream));
  }

  void group_indices(GroupIndices problem) {
    problem.scratch_bytes = cuda::group_indices_scratch_bytes(problem.bags);
    if (problem.scratch_bytes < 0) throw std::runtime_error(op + ": the CUDA device cannot be used for sorting");
    problem.scratch = scratch(problem.scratch_bytes);
    finish(cuda::group_indices(&problem, 1, stream));
  }

 private:
  void finish(int launched) {
    require_success(op, static_cast<cudaError_t>(launched));
    if (!sync_checks()) return;
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    require_success(op, cudaStreamIsCapturing(stream, &capturing));
    if (capturing != cudaStreamCaptureStatusNone) return;
    require_success(op, cudaStreamSynchronize(stream));
    reports.raise_pending();
  }

  const std::string op;
  const std::string table;  // as it came, which may be a temporary
  const Tensor& like;
  torch::stable::accelerator::DeviceGuard guard;
  ErrorReports& reports;
  cudaStream_t stream = nullptr;
  std::vector<Tensor> buffers;
};

// Waits for the probe's device and raises what its kernels have reported.
void check_errors(Tensor probe) {
  const torch::stable::accelerator::DeviceGuard guard(probe.get_device_index());
  require_success("check_errors", cudaDeviceSynchronize());
  ErrorReports::of(probe.get_device_index()).raise_pending();
}

}  // namespace

FE_REGISTER_OPERATORS(CUDA, CudaBackend)
FE_REGISTER_ROW_OPERATORS(CUDA, CudaBackend)
FE_REGISTER_GRAD_OPERATORS(CUDA, CudaBackend)
FE_REGISTER_RECORD_OPERATORS(CUDA, CudaBackend)

STABLE_TORCH_LIBRARY_IMPL(fastemb, CUDA, m) { m.impl("check_errors", TORCH_BOX(&check_errors)); }

}  // namespace fastemb
