// Where CUDA kernels write down wrong ids and offsets, and how that reaches the caller without a synchronisation.
//
// Each device has one block of reports in mapped host memory. A kernel fills the report of its operator and table;
// every later operator on the device looks at the block (a read of host memory) and raises what it finds.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ops.h"

namespace fastemb {

class ErrorReports {
 public:
  // The device's block. The device must be current; the first call for it allocates.
  static ErrorReports& of(int32_t device);

  // Where kernels of this operator on this table report: a pointer for the device.
  ErrorReport* report_for(const std::string& op, const std::string& table);

  // Raises the first report found (std::out_of_range, std::invalid_argument) and forgets it.
  void raise_pending();

 private:
  // Operators on more tables than this share the last report and lose their table's name.
  static constexpr size_t kReports = 1024;

  ErrorReports();

  std::mutex mutex_;
  ErrorReport* reports_ = nullptr;  // one address for host and device (unified addressing, all 64-bit systems)
  std::map<std::pair<std::string, std::string>, size_t> places_;
  std::vector<std::pair<std::string, std::string>> names_;  // of places, in order
};

}  // namespace fastemb
