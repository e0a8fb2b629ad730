// The launchers of gradient scaling as a Python module, run by cuda_emu.h.

// So few that blocks have several chunks, of several tensors too.
#define FASTEMB_GRAD_BLOCKS 3

#include "arguments.h"
#include "cuda/boundary_gradient.cuh"
#include "cuda/grad_check.cuh"
#include "cuda/scale_update.cuh"
#include "cuda/term_chunks.cuh"

#include <vector>

using namespace fastemb;
using namespace fastemb::cuda;
using fastemb_emu::Arguments;
using fastemb_emu::check;

namespace {

void run_grad_check(const py::list& tensors) {
  std::vector<GradCheck> problems;
  for (const py::handle& tensor : tensors) {
    Arguments in(tensor.cast<py::kwargs>());
    problems.push_back({.grad = in.pointer<void>("grad"),
                        .grad_type = in.choice<DType>("grad_type"),
                        .numel = in.number<int64_t>("numel"),
                        .inv_scale = in.pointer<float>("inv_scale"),
                        .found_inf = in.pointer<float>("found_inf"),
                        .stats = in.pointer<int64_t>("stats"),
                        .square_sum = in.pointer<double>("square_sum"),
                        .scratch = in.pointer<double>("scratch"),
                        .unscale = in.number<bool>("unscale")});
    in.finish();
  }
  check(launch_grad_check(problems.data(), static_cast<int64_t>(problems.size()), nullptr));
}

void run_row_grad_check(const py::kwargs& values) {
  Arguments in(values);
  RowGradCheck p{};
  p.rows.grad = in.pointer<void>("grad");
  p.rows.grad_type = in.choice<DType>("grad_type");
  p.rows.dim = in.number<int64_t>("dim");
  p.rows.num_rows = in.number<int64_t>("num_rows");
  p.rows.used_rows = in.pointer<int32_t>("used_rows");
  p.rows.segments = in.pointer<int32_t>("segments");
  p.rows.sources = in.pointer<int32_t>("sources");
  p.rows.coefficients = in.pointer<void>("coefficients");
  p.rows.num_terms = in.number<int64_t>("num_terms");
  p.rows.partials = in.pointer<void>("partials");
  p.rows.inv_scale = in.pointer<float>("inv_scale");
  p.found_inf = in.pointer<float>("found_inf");
  p.stats = in.pointer<int64_t>("stats");
  p.square_sum = in.pointer<double>("square_sum");
  p.scratch = in.pointer<double>("scratch");
  p.unscale = in.number<bool>("unscale");
  in.finish();
  check(launch_row_grad_check(p, nullptr));
}

void run_boundary_gradient(const py::kwargs& values) {
  Arguments in(values);
  const BoundaryGradient p = {.grad = in.pointer<void>("grad"),
                              .grad_type = in.choice<DType>("grad_type"),
                              .numel = in.number<int64_t>("numel"),
                              .ratio = in.pointer<float>("ratio"),
                              .inv_scale = in.pointer<float>("inv_scale"),
                              .output = in.pointer<void>("output"),
                              .flags = in.pointer<float>("flags"),
                              .stats = in.pointer<int64_t>("stats")};
  in.finish();
  check(launch_boundary_gradient(p, nullptr));
}

void run_scale_update(const py::kwargs& values) {
  Arguments in(values);
  const ScaleUpdate p = {.scales = in.pointer<float>("scales"),
                         .states = in.pointer<ScaleState>("states"),
                         .found_inf = in.pointer<float>("found_inf"),
                         .configs = in.pointer<ScaleConfig>("configs"),
                         .groups = in.number<int64_t>("groups")};
  in.finish();
  check(launch_scale_update(p, nullptr));
}

}  // namespace

PYBIND11_MODULE(fastemb_emu_grad_kernels, m) {
  fastemb_emu::define_set_order(m);
  m.def("grad_check", &run_grad_check);
  m.def("row_grad_check", &run_row_grad_check);
  m.def("boundary_gradient", &run_boundary_gradient);
  m.def("scale_update", &run_scale_update);
  m.def("bag_backward_partial_rows", &bag_backward_partial_rows);
  m.def("grad_check_scratch", &grad_check_scratch);
  m.attr("tensors_of_a_launch") = kGradTensors;
}
