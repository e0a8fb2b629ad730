// Instances of lazy Adam's catching up: 4 parameter types x 2 widths, and bf16 moments beside float.
#include "cuda/adam_catch_up.cuh"

namespace fastemb::cuda {

int row_adam_catch_up(const RowAdamCatchUp* problems, int64_t count, Stream stream) {
  for (int64_t i = 0; i < count; ++i) {
    if (int error = launch_row_adam_catch_up(problems[i], stream)) return error;
  }
  return 0;
}

}  // namespace fastemb::cuda
