// The launchers of the row optimizers as a Python module, run by cuda_emu.h.

// So few that blocks go round more than once in small problems too.
#define FASTEMB_STEP_BLOCKS 2

#include "arguments.h"
#include "cuda/adam_catch_up.cuh"
#include "cuda/row_rowwise.cuh"
#include "cuda/row_steps.cuh"
#include "cuda/term_chunks.cuh"

using namespace fastemb;
using namespace fastemb::cuda;
using fastemb_emu::Arguments;
using fastemb_emu::check;

namespace {

RowStep row_step(Arguments& in) {
  return {.param = in.pointer<void>("param"),
          .param_type = in.choice<DType>("param_type"),
          .param_stride = in.number<int64_t>("param_stride"),
          .master = in.pointer<void>("master"),
          .num_embeddings = in.number<int64_t>("num_embeddings"),
          .dim = in.number<int64_t>("dim"),
          .rows = in.pointer<int64_t>("rows"),
          .num_rows = in.number<int64_t>("num_rows"),
          .used_rows = in.pointer<int32_t>("used_rows"),
          .grad = in.pointer<void>("grad"),
          .grad_type = in.choice<DType>("grad_type"),
          .segments = in.pointer<int32_t>("segments"),
          .sources = in.pointer<int32_t>("sources"),
          .coefficients = in.pointer<void>("coefficients"),
          .num_terms = in.number<int64_t>("num_terms"),
          .partials = in.pointer<void>("partials"),
          .inv_scale = in.pointer<float>("inv_scale"),
          .found_inf = in.pointer<float>("found_inf"),
          .step = in.pointer<float>("step"),
          .lr = in.number<double>("lr"),
          .lr_tensor = in.pointer<void>("lr_tensor"),
          .lr_type = in.choice<DType>("lr_type"),
          .weight_decay = in.number<double>("weight_decay"),
          .maximize = in.number<bool>("maximize"),
          .stochastic = in.number<bool>("stochastic"),
          .seed = in.number<uint64_t>("seed")};
}

void run_row_adam(const py::kwargs& values) {
  Arguments in(values);
  const RowAdam a = {.rows = row_step(in),
                     .exp_avg = in.pointer<void>("exp_avg"),
                     .exp_avg_sq = in.pointer<void>("exp_avg_sq"),
                     .max_exp_avg_sq = in.pointer<void>("max_exp_avg_sq"),
                     .moment_type = in.choice<DType>("moment_type"),
                     .row_step = in.pointer<int32_t>("row_step"),
                     .row_count = in.pointer<int32_t>("row_count"),
                     .beta1 = in.number<double>("beta1"),
                     .beta2 = in.number<double>("beta2"),
                     .eps = in.number<double>("eps"),
                     .decoupled = in.number<bool>("decoupled"),
                     .corrected_denominator = in.number<bool>("corrected_denominator")};
  in.finish();
  check(launch_row_adam(a, nullptr));
}

void run_row_adam_catch_up(const py::kwargs& values) {
  Arguments in(values);
  const RowAdamCatchUp a = {.rows = row_step(in),
                            .exp_avg = in.pointer<void>("exp_avg"),
                            .exp_avg_sq = in.pointer<void>("exp_avg_sq"),
                            .max_exp_avg_sq = in.pointer<void>("max_exp_avg_sq"),
                            .moment_type = in.choice<DType>("moment_type"),
                            .row_step = in.pointer<int32_t>("row_step"),
                            .history = in.pointer<AdamHistory>("history"),
                            .capacity = in.number<int64_t>("capacity"),
                            .beta1 = in.number<double>("beta1"),
                            .beta2 = in.number<double>("beta2"),
                            .eps = in.number<double>("eps"),
                            .smallest_root = in.number<double>("smallest_root"),
                            .horizon = in.number<int64_t>("horizon"),
                            .decoupled = in.number<bool>("decoupled")};
  in.finish();
  check(launch_row_adam_catch_up(a, nullptr));
}

template <typename Problem, int (*kLaunch)(const Problem&, Stream)>
void run_adagrad(const py::kwargs& values) {
  Arguments in(values);
  const Problem a = {.rows = row_step(in),
                     .sum = in.pointer<void>("sum"),
                     .lr_decay = in.number<double>("lr_decay"),
                     .eps = in.number<double>("eps")};
  in.finish();
  check(kLaunch(a, nullptr));
}

void run_row_sgd(const py::kwargs& values) {
  Arguments in(values);
  const RowSgd a = {.rows = row_step(in),
                    .momentum_buffer = in.pointer<void>("momentum_buffer"),
                    .momentum = in.number<double>("momentum"),
                    .dampening = in.number<double>("dampening"),
                    .nesterov = in.number<bool>("nesterov")};
  in.finish();
  check(launch_row_sgd(a, nullptr));
}

}  // namespace

PYBIND11_MODULE(fastemb_emu_row_kernels, m) {
  fastemb_emu::define_set_order(m);
  m.def("row_adam", &run_row_adam);
  m.def("row_adam_catch_up", &run_row_adam_catch_up);
  m.def("row_adagrad", &run_adagrad<RowAdagrad, &launch_row_adagrad>);
  m.def("row_rowwise_adagrad", &run_adagrad<RowRowwiseAdagrad, &launch_row_rowwise_adagrad>);
  m.def("row_sgd", &run_row_sgd);
  m.def("bag_backward_partial_rows", &bag_backward_partial_rows);
}
