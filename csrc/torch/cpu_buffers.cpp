#include "torch/cpu_buffers.h"

#include <cstddef>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <unordered_map>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fastemb {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kRecycledBytes = int64_t{1} << 20;
constexpr int64_t kMostCached = int64_t{1} << 30;  // beyond it, freed buffers go back to the system

struct Pool {
  std::mutex mutex;
  std::multimap<int64_t, void*> cached;      // by size
  std::unordered_map<void*, int64_t> sizes;  // of every recyclable buffer in use
  int64_t cached_bytes = 0;
};

// Never destroyed: tensors may outlive static destructors.
Pool& pool() {
  static Pool* const instance = new Pool;
  return *instance;
}

void* allocate(int64_t bytes, int64_t alignment) {
  void* buffer = nullptr;
  if (posix_memalign(&buffer, static_cast<size_t>(alignment), static_cast<size_t>(bytes)) != 0) throw std::bad_alloc();
  return buffer;
}

}  // namespace

void* acquire_buffer(int64_t bytes) {
  if (bytes < kRecycledBytes) return allocate(bytes > 0 ? bytes : 1, 64);
  const int64_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  Pool& p = pool();
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    // A buffer up to an eighth larger is close enough: batches differ a little in their number of rows.
    const auto found = p.cached.lower_bound(size);
    if (found != p.cached.end() && found->first <= size + size / 8 + kHugePage) {
      void* buffer = found->second;
      p.sizes[buffer] = found->first;
      p.cached_bytes -= found->first;
      p.cached.erase(found);
      return buffer;
    }
  }
  void* buffer = allocate(size, kHugePage);
#if defined(MADV_HUGEPAGE)
  (void)madvise(buffer, static_cast<size_t>(size), MADV_HUGEPAGE);  // advice: plain pages work too
#endif
  const std::lock_guard<std::mutex> lock(p.mutex);
  p.sizes[buffer] = size;
  return buffer;
}

void release_buffer(void* buffer) {
  if (buffer == nullptr) return;
  Pool& p = pool();
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    const auto found = p.sizes.find(buffer);
    if (found != p.sizes.end()) {
      const int64_t size = found->second;
      p.sizes.erase(found);
      if (p.cached_bytes + size <= kMostCached) {
        p.cached.emplace(size, buffer);
        p.cached_bytes += size;
        return;
      }
    }
  }
  free(buffer);
}

int64_t cached_buffer_bytes() {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  return p.cached_bytes;
}

void release_cached_buffers() {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  for (const auto& [size, buffer] : p.cached) free(buffer);
  p.cached.clear();
  p.cached_bytes = 0;
}

}  // namespace fastemb

// For fastemb.empty_cache(): bytes given back.
extern "C" __attribute__((visibility("default"))) int64_t fastemb_empty_cpu_cache() {
  const int64_t bytes = fastemb::cached_buffer_bytes();
  fastemb::release_cached_buffers();
  return bytes;
}
