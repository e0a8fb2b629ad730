// Instances of the gradient checks: 4 gradient types x (statistics or not) x (sum of squares or not), for tensors and
// for rows; for sums of terms 2 accumulators at their widths; boundaries in 4 types with statistics or not.
#include "cuda/grad_check.cuh"

#include "cuda/boundary_gradient.cuh"

namespace fastemb::cuda {

int grad_check(const GradCheck* problems, int64_t count, Stream stream) {
  return launch_grad_check(problems, count, stream);
}

int row_grad_check(const RowGradCheck* problems, int64_t count, Stream stream) {
  for (int64_t i = 0; i < count; ++i) {
    if (int error = launch_row_grad_check(problems[i], stream)) return error;
  }
  return 0;
}

int boundary_gradient(const BoundaryGradient* problems, int64_t count, Stream stream) {
  for (int64_t i = 0; i < count; ++i) {
    if (int error = launch_boundary_gradient(problems[i], stream)) return error;
  }
  return 0;
}

}  // namespace fastemb::cuda
