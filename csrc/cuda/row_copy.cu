#include "cuda/row_copy.cuh"

namespace fastemb::cuda {

int row_copy(const RowCopy* problems, int64_t count, Stream stream) {
  for (int64_t i = 0; i < count; ++i) {
    if (int error = launch_row_copy(problems[i], stream)) return error;
  }
  return 0;
}

}  // namespace fastemb::cuda
