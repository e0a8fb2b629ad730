#include "cuda/checksum.cuh"

namespace fastemb::cuda {

int checksum(const Checksum* problems, int64_t count, Stream stream) {
  for (int64_t i = 0; i < count; ++i) {
    if (int error = launch_checksum(problems[i], stream)) return error;
  }
  return 0;
}

}  // namespace fastemb::cuda
