// Instances of the bag's forward and of the gather: 4 table types x 2 index types x (max or not, gather) x 2 widths.
#include "cuda/embedding_bag.cuh"

namespace fastemb::cuda {

int bag_forward(const BagForward* problems, int64_t count, Stream stream) {
  for (int64_t i = 0; i < count; ++i) {
    if (int error = launch_bag_forward(problems[i], stream)) return error;
  }
  return 0;
}

int gather(const Gather* problems, int64_t count, Stream stream) {
  for (int64_t i = 0; i < count; ++i) {
    if (int error = launch_gather(problems[i], stream)) return error;
  }
  return 0;
}

}  // namespace fastemb::cuda
