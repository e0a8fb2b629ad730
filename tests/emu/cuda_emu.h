// CUDA on the CPU, for tests: just enough of the language to run this project's kernels as plain C++.
//
// Blocks run one after another. The threads of a block are fibers; one runs until it blocks (a barrier, a shuffle, an
// atomic) and then another is chosen, in the order that `options().order` names. What a GPU would leave undefined is an
// error here: a barrier that some threads never reach, a shuffle in which a lane of the warp is missing, two barriers
// at different lines, a misaligned access through load words, a launch without threads. Shared memory holds NaN bytes
// when a block begins. Memory-model faults and speed do not show.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

// ---- words of the language ---------------------------------------------------------------------------------------

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __syncthreads() fastemb_emu::barrier(__FILE__, __LINE__)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

// ---- fibers ------------------------------------------------------------------------------------------------------

namespace fastemb_emu {

enum class Order { forward, backward, shuffled };

struct Options {
  Order order = Order::forward;
  uint64_t seed = 0;
};

inline Options& options() {
  static Options value;
  return value;
}

constexpr int kWarpLanes = 32;
constexpr size_t kStackBytes = 256 * 1024;

enum class State { ready, at_barrier, at_shuffle, done };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  State state = State::done;
  dim3 thread;
  const char* file = "";  // where it waits
  int line = 0;
  unsigned char slot[16];  // what it offers to the warp
  void* fake_stack = nullptr;
};

struct Shared {
  std::vector<unsigned char> bytes;
};

struct Machine {
  std::vector<Fiber> fibers;  // their stacks stay from block to block
  int count = 0;              // threads of the running block
  Fiber* current = nullptr;
  ucontext_t scheduler;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_size = 0;
  void* scheduler_fake_stack = nullptr;
  std::function<void()> body;
  std::exception_ptr failure;
  std::map<std::pair<std::string, int>, Shared> shared;
  dim3 grid, block, block_index;
  std::mt19937_64 random;
};

inline Machine& machine() {
  static Machine value;
  return value;
}

inline void leave_fiber(bool for_good = false) {
  Machine& m = machine();
  Fiber* self = m.current;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &self->fake_stack, m.scheduler_stack, m.scheduler_stack_size);
#endif
  if (for_good) {
    setcontext(&m.scheduler);
  } else {
    swapcontext(&self->context, &m.scheduler);
  }
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(self->fake_stack, &m.scheduler_stack, &m.scheduler_stack_size);
#endif
}

inline void enter_fiber(Fiber& fiber) {
  Machine& m = machine();
  m.current = &fiber;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&m.scheduler_fake_stack, fiber.stack.get(), kStackBytes);
#endif
  swapcontext(&m.scheduler, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(m.scheduler_fake_stack, nullptr, nullptr);
#endif
  m.current = nullptr;
}

inline void fiber_main() {
  Machine& m = machine();
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &m.scheduler_stack, &m.scheduler_stack_size);
#endif
  try {
    m.body();
  } catch (...) {
    m.failure = std::current_exception();
  }
  m.current->state = State::done;
  leave_fiber(true);
}

inline void wait(State state, const char* file, int line) {
  Fiber* self = machine().current;
  self->state = state;
  self->file = file;
  self->line = line;
  leave_fiber();
}

inline void barrier(const char* file, int line) { wait(State::at_barrier, file, line); }

// Lets other threads run in between.
inline void yield() { wait(State::ready, "", 0); }

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error("cuda_emu: " + what); }

inline std::string place(const Fiber& fiber) {
  return "thread " + std::to_string(fiber.thread.x) + " at " + fiber.file + ":" + std::to_string(fiber.line);
}

// No thread is ready: complete the barrier if all of them wait at it, else say who is missing.
inline void release_barrier(Machine& m) {
  const Fiber* waiting = nullptr;
  for (int i = 0; i < m.count; ++i) {
    if (m.fibers[i].state == State::at_shuffle) fail("shuffle with missing lanes: " + place(m.fibers[i]));
    if (m.fibers[i].state == State::at_barrier) waiting = &m.fibers[i];
  }
  for (int i = 0; i < m.count; ++i) {
    const Fiber& fiber = m.fibers[i];
    if (fiber.state == State::done) {
      fail("barrier divergence: thread " + std::to_string(fiber.thread.x) + " has returned, " + place(*waiting));
    }
    if (fiber.line != waiting->line || std::strcmp(fiber.file, waiting->file) != 0) {
      fail("barrier divergence: " + place(fiber) + ", " + place(*waiting));
    }
  }
  for (int i = 0; i < m.count; ++i) m.fibers[i].state = State::ready;
}

// A warp's shuffle goes on when all its lanes have come. Lanes read their neighbours' slots after that.
inline void release_shuffle(Machine& m, int thread) {
  const int first = thread / kWarpLanes * kWarpLanes;
  for (int i = first; i < first + kWarpLanes; ++i) {
    if (m.fibers[i].state != State::at_shuffle) return;
  }
  for (int i = first; i < first + kWarpLanes; ++i) m.fibers[i].state = State::ready;
}

inline std::vector<int64_t> ordered(Machine& m, int64_t count) {
  std::vector<int64_t> order(count);
  for (int64_t i = 0; i < count; ++i) order[i] = i;
  if (options().order == Order::backward) std::reverse(order.begin(), order.end());
  if (options().order == Order::shuffled) std::shuffle(order.begin(), order.end(), m.random);
  return order;
}

inline void prepare(Fiber& fiber) {
  if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
  fiber.state = State::ready;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, fiber_main, 0);
}

inline void run_block(Machine& m) {
  for (auto& [where, array] : m.shared) std::fill(array.bytes.begin(), array.bytes.end(), 0xff);
  for (int i = 0; i < m.count; ++i) {
    Fiber& fiber = m.fibers[i];
    prepare(fiber);
    fiber.thread = dim3(i % m.block.x, i / m.block.x % m.block.y, i / m.block.x / m.block.y);
  }
  for (;;) {
    bool ran = false;
    bool all_done = true;
    for (const int64_t i : ordered(m, m.count)) {
      Fiber& fiber = m.fibers[i];
      if (fiber.state == State::ready) {
        ran = true;
        enter_fiber(fiber);
        if (m.failure) std::rethrow_exception(std::exchange(m.failure, nullptr));
        if (fiber.state == State::at_shuffle) release_shuffle(m, static_cast<int>(i));
      }
      all_done = all_done && fiber.state == State::done;
    }
    if (all_done) return;
    if (!ran) release_barrier(m);
  }
}

template <typename Body>
int launch(dim3 grid, dim3 block, Body body) {
  Machine& m = machine();
  const int64_t threads = static_cast<int64_t>(block.x) * block.y * block.z;
  const int64_t blocks = static_cast<int64_t>(grid.x) * grid.y * grid.z;
  if (blocks <= 0 || threads <= 0 || threads > 1024 || grid.y > 65535 || grid.z > 65535) {
    fail("launch of " + std::to_string(blocks) + " blocks of " + std::to_string(threads) + " threads");
  }
  if (threads % kWarpLanes != 0) fail("a block of " + std::to_string(threads) + " threads is not whole warps");
  m.grid = grid;
  m.block = block;
  m.count = static_cast<int>(threads);
  if (m.fibers.size() < static_cast<size_t>(threads)) m.fibers.resize(threads);
  m.body = body;
  m.random.seed(options().seed);
  for (const int64_t i : ordered(m, blocks)) {
    m.block_index = dim3(static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                         static_cast<unsigned>(i / grid.x / grid.y));
    run_block(m);
  }
  return 0;
}

// The block's array that the line declares.
template <typename T>
T* shared(const char* file, int line, size_t count) {
  auto [found, fresh] = machine().shared.try_emplace({file, line});
  if (found->second.bytes.size() < count * sizeof(T)) found->second.bytes.resize(count * sizeof(T), 0xff);
  return reinterpret_cast<T*>(found->second.bytes.data());
}

template <typename T>
const T* aligned_for(const T* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % alignof(T) != 0) {
    fail("misaligned access of " + std::to_string(sizeof(T)) + " bytes");
  }
  return pointer;
}

template <typename T>
T shuffle(unsigned mask, T value, int source) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(Fiber::slot));
  Machine& m = machine();
  if (mask != 0xffffffffu) fail("shuffle without the full mask");
  Fiber* self = m.current;
  const int64_t me = self - m.fibers.data();
  std::memcpy(self->slot, &value, sizeof(T));
  wait(State::at_shuffle, "shuffle", 0);
  T result;
  std::memcpy(&result, m.fibers[me / kWarpLanes * kWarpLanes + source % kWarpLanes].slot, sizeof(T));
  wait(State::at_shuffle, "shuffle (read)", 0);  // nobody offers the next value before everybody has read this one
  return result;
}

inline int lane() { return static_cast<int>((machine().current - machine().fibers.data()) % kWarpLanes); }

}  // namespace fastemb_emu

// ---- names that kernels use --------------------------------------------------------------------------------------

#define threadIdx (fastemb_emu::machine().current->thread)
#define blockIdx (fastemb_emu::machine().block_index)
#define blockDim (fastemb_emu::machine().block)
#define gridDim (fastemb_emu::machine().grid)

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  return fastemb_emu::shuffle(mask, value, fastemb_emu::lane() ^ distance);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
  return fastemb_emu::shuffle(mask, value, source);
}

template <typename T>
T __ldg(const T* from) {
  T value;
  std::memcpy(&value, fastemb_emu::aligned_for(from), sizeof(T));
  return value;
}

inline int atomicCAS(int* at, int expected, int desired) {
  fastemb_emu::yield();
  const int old = *at;
  if (old == expected) *at = desired;
  return old;
}

inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  fastemb_emu::yield();
  const unsigned long long old = *at;
  *at = old + value;
  return old;
}

inline long long atomicMax(long long* at, long long value) {
  fastemb_emu::yield();
  const long long old = *at;
  if (value > old) *at = value;
  return old;
}

inline long long atomicMin(long long* at, long long value) {
  fastemb_emu::yield();
  const long long old = *at;
  if (value < old) *at = value;
  return old;
}

inline void __threadfence_system() {}

// Built without contraction and without fma, so the plain operators round one by one.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
