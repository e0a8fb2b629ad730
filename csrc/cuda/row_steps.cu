// Instances of the row optimizers: 4 parameter types x 2 widths, fused or not, and Adam's bf16 moments beside float.
#include "cuda/row_steps.cuh"

#include "cuda/row_rowwise.cuh"

namespace fastemb::cuda {
namespace {

template <typename Problem>
int each(const Problem* problems, int64_t count, Stream stream, int (*launch)(const Problem&, Stream)) {
  for (int64_t i = 0; i < count; ++i) {
    if (int error = launch(problems[i], stream)) return error;
  }
  return 0;
}

}  // namespace

int row_adam(const RowAdam* problems, int64_t count, Stream stream) {
  return each(problems, count, stream, &launch_row_adam);
}

int row_adagrad(const RowAdagrad* problems, int64_t count, Stream stream) {
  return each(problems, count, stream, &launch_row_adagrad);
}

int row_rowwise_adagrad(const RowRowwiseAdagrad* problems, int64_t count, Stream stream) {
  return each(problems, count, stream, &launch_row_rowwise_adagrad);
}

int row_sgd(const RowSgd* problems, int64_t count, Stream stream) {
  return each(problems, count, stream, &launch_row_sgd);
}

}  // namespace fastemb::cuda
