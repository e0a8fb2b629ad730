// Chooses the instruction set of the CPU kernels once, at load: the best the machine has, or the one that
// FASTEMB_CPU_ISA names. Everything else here forwards to the chosen table.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "common/scale_update.h"
#include "cpu/kernels.h"

namespace fastemb::cpu {
namespace {

struct Level {
  const char* name;
  bool available;
  Kernels kernels;
};

#define FE_TABLE(isa)                \
  {isa::check_offsets,               \
   isa::check_indices,               \
   isa::group_indices_scratch_bytes, \
   isa::group_indices,               \
   isa::bag_forward,                 \
   isa::gather,                      \
   isa::bag_backward,                \
   isa::bag_terms,                   \
   isa::per_sample_backward,         \
   isa::renorm,                      \
   isa::row_adam,                    \
   isa::row_adam_catch_up,           \
   isa::row_adagrad,                 \
   isa::row_rowwise_adagrad,         \
   isa::row_sgd,                     \
   isa::dense_adam,                  \
   isa::grad_check,                  \
   isa::row_grad_check,              \
   isa::boundary_gradient,           \
   isa::row_copy,                    \
   isa::checksum}

// Best first.
#if FE_X86_LEVELS
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
const Level kLevels[] = {{"avx512", has_avx512(), FE_TABLE(avx512)},
                         {"avx2", has_avx2(), FE_TABLE(avx2)},
                         {"baseline", true, FE_TABLE(baseline)}};
#else
const Level kLevels[] = {{"baseline", true, FE_TABLE(baseline)}};
#endif

#undef FE_TABLE

std::string available_levels() {
  std::string names;
  for (const Level& level : kLevels) {
    if (level.available) names += (names.empty() ? "" : ", ") + std::string(level.name);
  }
  return names;
}

const Level& choose() {
  const char* wanted = std::getenv("FASTEMB_CPU_ISA");
  for (const Level& level : kLevels) {
    if (level.available && (wanted == nullptr || *wanted == '\0' || std::strcmp(wanted, level.name) == 0)) return level;
  }
  throw std::invalid_argument("FASTEMB_CPU_ISA must be one of " + available_levels() + " on this machine, got '" +
                              wanted + "'");
}

const Level& active() {
  static const Level& level = choose();
  return level;
}

template <typename Problem>
void for_each(void (*kernel)(const Problem&, const Parallel&), const Problem* problems, int64_t count,
              const Parallel& parallel) {
  for (int64_t i = 0; i < count; ++i) kernel(problems[i], parallel);
}

}  // namespace

ErrorReport check_offsets(const Bags& bags) { return active().kernels.check_offsets(bags); }
ErrorReport check_indices(const Bags& bags, const Parallel& parallel) {
  return active().kernels.check_indices(bags, parallel);
}
int64_t group_indices_scratch_bytes(const Bags& bags, const Parallel& parallel) {
  return active().kernels.group_indices_scratch_bytes(bags, parallel);
}
void group_indices(const GroupIndices* problems, int64_t count, const Parallel& parallel) {
  for_each(active().kernels.group_indices, problems, count, parallel);
}
void bag_forward(const BagForward* problems, int64_t count, const Parallel& parallel) {
  for_each(active().kernels.bag_forward, problems, count, parallel);
}
void gather(const Gather* problems, int64_t count, const Parallel& parallel) {
  for_each(active().kernels.gather, problems, count, parallel);
}
void bag_backward(const BagBackward* problems, int64_t count, const Parallel& parallel) {
  for_each(active().kernels.bag_backward, problems, count, parallel);
}
void bag_terms(const BagTerms* problems, int64_t count, const Parallel& parallel) {
  for_each(active().kernels.bag_terms, problems, count, parallel);
}
void per_sample_backward(const PerSampleBackward* problems, int64_t count, const Parallel& parallel) {
  for_each(active().kernels.per_sample_backward, problems, count, parallel);
}
void renorm(const Renorm* problems, int64_t count, const Parallel& parallel) {
  for_each(active().kernels.renorm, problems, count, parallel);
}
void row_adam(const RowAdam* problems, int64_t count, const Parallel& parallel) {
  for_each(active().kernels.row_adam, problems, count, parallel);
}
void row_adam_catch_up(const RowAdamCatchUp* problems, int64_t count, const Parallel& parallel) {
  for_each(active().kernels.row_adam_catch_up, problems, count, parallel);
}
void row_adagrad(const RowAdagrad* problems, int64_t count, const Parallel& parallel) {
  for_each(active().kernels.row_adagrad, problems, count, parallel);
}
void row_rowwise_adagrad(const RowRowwiseAdagrad* problems, int64_t count, const Parallel& parallel) {
  for_each(active().kernels.row_rowwise_adagrad, problems, count, parallel);
}
void row_sgd(const RowSgd* problems, int64_t count, const Parallel& parallel) {
  for_each(active().kernels.row_sgd, problems, count, parallel);
}
void dense_adam(const DenseAdam* problems, int64_t count, const Parallel& parallel) {
  for_each(active().kernels.dense_adam, problems, count, parallel);
}
void grad_check(const GradCheck* problems, int64_t count, const Parallel& parallel) {
  for_each(active().kernels.grad_check, problems, count, parallel);
}
void row_grad_check(const RowGradCheck* problems, int64_t count, const Parallel& parallel) {
  for_each(active().kernels.row_grad_check, problems, count, parallel);
}
void boundary_gradient(const BoundaryGradient* problems, int64_t count, const Parallel& parallel) {
  for_each(active().kernels.boundary_gradient, problems, count, parallel);
}
void row_copy(const RowCopy* problems, int64_t count, const Parallel& parallel) {
  for_each(active().kernels.row_copy, problems, count, parallel);
}
void checksum(const Checksum* problems, int64_t count, const Parallel& parallel) {
  for_each(active().kernels.checksum, problems, count, parallel);
}
void scale_update(const ScaleUpdate& problem) {
  for (int64_t g = 0; g < problem.groups; ++g) {
    update_scale(problem.scales[g], problem.states[g], problem.found_inf[g], problem.configs[g]);
  }
}

}  // namespace fastemb::cpu

// Read by fastemb/_native.py for its report: the active level (what is wrong instead, when FASTEMB_CPU_ISA names none),
// and those the machine has.
extern "C" __attribute__((visibility("default"))) const char* fastemb_cpu_isa() noexcept {
  static const std::string name = [] {
    try {
      return std::string(fastemb::cpu::active().name);
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
  }();
  return name.c_str();
}
extern "C" __attribute__((visibility("default"))) const char* fastemb_cpu_isa_available() {
  static const std::string names = fastemb::cpu::available_levels();
  return names.c_str();
}
