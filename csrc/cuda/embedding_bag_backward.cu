// Instances of the bag's backward: 4 gradient types x (max or not) x 2 widths, and 4 table types x 2 widths for the
// per-sample weights.
#include "cuda/embedding_bag_backward.cuh"

namespace fastemb::cuda {

int bag_backward(const BagBackward* problems, int64_t count, Stream stream) {
  for (int64_t i = 0; i < count; ++i) {
    if (int error = launch_bag_backward(problems[i], stream)) return error;
  }
  return 0;
}

int bag_terms(const BagTerms* problems, int64_t count, Stream stream) {
  for (int64_t i = 0; i < count; ++i) {
    if (int error = launch_bag_terms(problems[i], stream)) return error;
  }
  return 0;
}

int per_sample_backward(const PerSampleBackward* problems, int64_t count, Stream stream) {
  for (int64_t i = 0; i < count; ++i) {
    if (int error = launch_per_sample_backward(problems[i], stream)) return error;
  }
  return 0;
}

}  // namespace fastemb::cuda
