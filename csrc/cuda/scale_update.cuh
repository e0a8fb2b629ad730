// The scales of all groups after a step.
#pragma once

#include "common/scale_update.h"
#include "cuda/primitives.cuh"

namespace fastemb::cuda {

__global__ void __launch_bounds__(kBlock) scale_update_kernel(ScaleUpdate p) {
  for (int64_t group = flat_thread(); group < p.groups; group += flat_threads()) {
    update_scale(p.scales[group], p.states[group], p.found_inf[group], p.configs[group]);
  }
}

inline int launch_scale_update(const ScaleUpdate& p, Stream stream) {
  if (p.groups == 0) return 0;
  auto kernel = &scale_update_kernel;
  return FE_LAUNCH(kernel, flat_grid(p.groups), kBlock, stream, p);
}

}  // namespace fastemb::cuda
