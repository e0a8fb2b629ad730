// Instances of the renorm: 4 table types x 2 widths.
#include "cuda/renorm.cuh"

namespace fastemb::cuda {

int renorm(const Renorm* problems, int64_t count, Stream stream) {
  for (int64_t i = 0; i < count; ++i) {
    if (int error = launch_renorm(problems[i], stream)) return error;
  }
  return 0;
}

}  // namespace fastemb::cuda
