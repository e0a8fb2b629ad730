#include "cuda/scale_update.cuh"

namespace fastemb::cuda {

int scale_update(const ScaleUpdate& problem, Stream stream) { return launch_scale_update(problem, stream); }

}  // namespace fastemb::cuda
