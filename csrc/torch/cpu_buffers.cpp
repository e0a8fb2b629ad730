#include "torch/cpu_buffers.h"

#include <cstddef>
#include <cstdlib>
#include <iterator>
#include <list>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

#if defined(__linux__)
#include <pthread.h>
#include <sys/mman.h>
#endif

namespace fastemb {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kSmallPiece = int64_t{64} << 10;  // sizes below a huge page are multiples of it
constexpr int64_t kRecycledBytes = int64_t{256} << 10;
constexpr int64_t kMostCached = int64_t{1} << 30;  // beyond it the oldest go back to the system

struct Buffer {
  void* data;
  int64_t size;
};

struct Pool {
  std::mutex mutex;
  std::list<Buffer> cached;                  // the last released first
  std::unordered_map<void*, int64_t> sizes;  // of every recyclable buffer in use
  int64_t cached_bytes = 0;
};

Pool* make_pool();

// Never destroyed: tensors may outlive static destructors.
Pool& pool() {
  static Pool* const instance = make_pool();
  return *instance;
}

Pool* make_pool() {
#if defined(__linux__)
  // A forked child has only the thread that forked: nobody would release a lock that another one held.
  pthread_atfork([] { pool().mutex.lock(); }, [] { pool().mutex.unlock(); }, [] { pool().mutex.unlock(); });
#endif
  return new Pool;
}

void* allocate(int64_t bytes, int64_t alignment) {
  void* buffer = nullptr;
  if (posix_memalign(&buffer, static_cast<size_t>(alignment), static_cast<size_t>(bytes)) != 0) {
    // The words of torch's allocator, by which those know it who go on with a smaller batch.
    throw std::runtime_error("fastemb: DefaultCPUAllocator: can't allocate memory: you tried to allocate " +
                             std::to_string(bytes) + " bytes");
  }
  return buffer;
}

}  // namespace

void* acquire_buffer(int64_t bytes) {
  if (bytes < kRecycledBytes) return allocate(bytes > 0 ? bytes : 1, 64);
  const int64_t piece = bytes < kHugePage ? kSmallPiece : kHugePage;
  const int64_t size = (bytes + piece - 1) / piece * piece;
  Pool& p = pool();
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    // A buffer up to an eighth larger is close enough: batches differ a little in their number of rows.
    for (auto it = p.cached.begin(); it != p.cached.end(); ++it) {
      if (it->size < size || it->size > size + size / 8 + piece) continue;
      const Buffer found = *it;
      p.cached.erase(it);
      p.cached_bytes -= found.size;
      p.sizes[found.data] = found.size;
      return found.data;
    }
  }
  void* buffer = allocate(size, piece);
  advise_huge_pages(buffer, size);
  const std::lock_guard<std::mutex> lock(p.mutex);
  p.sizes[buffer] = size;
  return buffer;
}

void release_buffer(void* buffer) {
  if (buffer == nullptr) return;
  Pool& p = pool();
  std::list<Buffer> surplus;
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    const auto found = p.sizes.find(buffer);
    if (found == p.sizes.end()) {
      surplus.push_front({buffer, 0});
    } else {
      p.cached.push_front({buffer, found->second});
      p.cached_bytes += found->second;
      p.sizes.erase(found);
      // The newest stays however large it is: the next step will ask for it again.
      while (p.cached_bytes > kMostCached && p.cached.size() > 1) {
        p.cached_bytes -= p.cached.back().size;
        surplus.splice(surplus.end(), p.cached, std::prev(p.cached.end()));
      }
    }
  }
  for (const Buffer& each : surplus) free(each.data);
}

void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data), mask = static_cast<uintptr_t>(kHugePage) - 1;
  const uintptr_t first = (begin + mask) & ~mask, last = (begin + static_cast<uintptr_t>(bytes)) & ~mask;
  // Advice: plain pages work too.
  if (first < last) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

int64_t cached_buffer_bytes() {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  return p.cached_bytes;
}

void release_cached_buffers() {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  for (const Buffer& each : p.cached) free(each.data);
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
