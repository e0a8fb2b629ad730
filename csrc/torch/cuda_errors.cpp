#include "torch/cuda_errors.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstring>
#include <stdexcept>

#include "torch/tensors.h"

namespace fastemb {
namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("fastemb: ") + what + ": " + cudaGetErrorString(error));
  }
}

// Host allocation is refused in other threads' stream captures, unless this thread says that it means no harm.
class OutsideCapture {
 public:
  OutsideCapture() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "stream capture mode"); }
  ~OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

ErrorReports& ErrorReports::of(int32_t device) {
  static std::mutex mutex;
  // Never destroyed: kernels may still write when the process ends.
  static auto* devices = new std::map<int32_t, std::unique_ptr<ErrorReports>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<ErrorReports>& reports = (*devices)[device];
  if (reports == nullptr) reports.reset(new ErrorReports);
  return *reports;
}

ErrorReports::ErrorReports() {
  const OutsideCapture outside;
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, kReports * sizeof(ErrorReport), cudaHostAllocMapped), "allocating error reports");
  std::memset(memory, 0, kReports * sizeof(ErrorReport));
  reports_ = static_cast<ErrorReport*>(memory);
}

ErrorReport* ErrorReports::report_for(const std::string& op, const std::string& table) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = places_.find({op, table});
  if (known != places_.end()) return reports_ + known->second;
  if (names_.size() == kReports) return reports_ + kReports - 1;
  if (names_.size() == kReports - 1) {
    names_.emplace_back("fastemb", "");
    return reports_ + kReports - 1;
  }
  const size_t place = names_.size();
  names_.emplace_back(op, table);
  places_[{op, table}] = place;
  return reports_ + place;
}

void ErrorReports::raise_pending() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < names_.size(); ++i) {
    volatile ErrorReport* shown = reports_ + i;
    if (shown->code == ErrorReport::none) continue;
    // The device published `code` last; free the report for the next in the opposite order.
    std::atomic_thread_fence(std::memory_order_acquire);
    ErrorReport report{};
    report.code = shown->code;
    report.position = shown->position;
    report.value = shown->value;
    report.limit = shown->limit;
    shown->code = ErrorReport::none;
    std::atomic_thread_fence(std::memory_order_release);
    shown->reserved = 0;
    raise(names_[i].first, report, nullptr, names_[i].second);
  }
}

}  // namespace fastemb
