// The grouping with CUB's radix sort (stable, so positions of one row stay in order) and scan.
#include "cuda/group_indices.cuh"

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

namespace fastemb::cuda {
namespace {

struct Cub {
  template <typename K>
  static cudaError_t sort(void* scratch, size_t& bytes, const K* keys, K* sorted, const int32_t* values,
                          int32_t* sorted_values, int64_t n, int bits, cudaStream_t stream) {
    return cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, sorted, values, sorted_values, static_cast<int>(n), 0,
                                           bits, stream);
  }

  static cudaError_t scan(void* scratch, size_t& bytes, int32_t* values, int64_t n, cudaStream_t stream) {
    return cub::DeviceScan::InclusiveSum(scratch, bytes, values, values, static_cast<int>(n), stream);
  }

  // -1 when CUB cannot tell.
  static int64_t scratch_bytes(bool narrow, int64_t n, int bits) {
    size_t sort_bytes = 0;
    size_t scan_bytes = 0;
    const cudaError_t sorting =
        narrow ? sort<uint32_t>(nullptr, sort_bytes, nullptr, nullptr, nullptr, nullptr, n, bits, nullptr)
               : sort<uint64_t>(nullptr, sort_bytes, nullptr, nullptr, nullptr, nullptr, n, bits, nullptr);
    if (sorting != cudaSuccess || scan(nullptr, scan_bytes, nullptr, n, nullptr) != cudaSuccess) return -1;
    return static_cast<int64_t>(sort_bytes > scan_bytes ? sort_bytes : scan_bytes);
  }

  template <typename K>
  static int sort_pairs(void* scratch, int64_t scratch_bytes, const K* keys, K* sorted, const int32_t* values,
                        int32_t* sorted_values, int64_t n, int bits, Stream stream) {
    size_t bytes = static_cast<size_t>(scratch_bytes);
    return sort(scratch, bytes, keys, sorted, values, sorted_values, n, bits, static_cast<cudaStream_t>(stream));
  }

  static int inclusive_sum(void* scratch, int64_t scratch_bytes, int32_t* values, int64_t n, Stream stream) {
    size_t bytes = static_cast<size_t>(scratch_bytes);
    return scan(scratch, bytes, values, n, static_cast<cudaStream_t>(stream));
  }
};

}  // namespace

int64_t group_indices_scratch_bytes(const Bags& bags) { return group_scratch<Cub>(bags).total; }

int group_indices(const GroupIndices* problems, int64_t count, Stream stream) {
  for (int64_t i = 0; i < count; ++i) {
    if (int error = launch_group_indices<Cub>(problems[i], stream)) return error;
  }
  return 0;
}

}  // namespace fastemb::cuda
