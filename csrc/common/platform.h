// The few CUDA words that shared headers need, for the three compilers that read them: nvcc, the plain host compiler,
// and the host compiler under the test shim (FASTEMB_EMU, tests/emu/cuda_emu.h).
#pragma once

#if defined(FASTEMB_EMU)
#include "cuda_emu.h"
#elif defined(__CUDACC__)
#include <cuda_runtime.h>
#endif

#if defined(__CUDACC__)
#define FE_FUNCTION static __host__ __device__ __forceinline__
#else
// Forced inline and internal: the CPU kernels are compiled once per instruction set, and a shared out-of-line copy
// could carry instructions that the running machine lacks.
#define FE_FUNCTION static inline __attribute__((always_inline))
#endif

// FE_LAUNCH(kernel, grid, block, stream, arguments...) starts a kernel and is its cudaError_t as int (0: started).
// FE_SHARED(type, name, count) is a static shared array.
#if defined(__CUDACC__)
#define FE_DEVICE static __device__ __forceinline__
// clang-format off
#define FE_LAUNCH(kernel, grid, block, stream, ...)                                    \
  ((kernel)<<<(grid), (block), 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__), \
   static_cast<int>(cudaGetLastError()))
// clang-format on
#define FE_SHARED(type, name, count) __shared__ type name[count]
#elif defined(FASTEMB_EMU)
#define FE_DEVICE static inline
#define FE_LAUNCH(kernel, grid, block, stream, ...) \
  (static_cast<void>(stream), fastemb_emu::launch((grid), (block), [&] { (kernel)(__VA_ARGS__); }))
#define FE_SHARED(type, name, count) type* name = fastemb_emu::shared<type>(__FILE__, __LINE__, (count))
#endif
