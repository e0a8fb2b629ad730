// What one instruction-set build of the CPU kernels offers. csrc/cpu/*.cpp are compiled once per level, each in its own
// namespace fastemb::cpu::FE_ISA; dispatch.cpp picks one table of entry points at run time.
#pragma once

#include "ops.h"

namespace fastemb::cpu {

struct Kernels {
  ErrorReport (*check_offsets)(const Bags&);
  ErrorReport (*check_indices)(const Bags&, const Parallel&);
  int64_t (*group_indices_scratch_bytes)(const Bags&, const Parallel&);
  void (*group_indices)(const GroupIndices&, const Parallel&);
  void (*bag_forward)(const BagForward&, const Parallel&);
  void (*gather)(const Gather&, const Parallel&);
  void (*bag_backward)(const BagBackward&, const Parallel&);
  void (*bag_terms)(const BagTerms&, const Parallel&);
  void (*per_sample_backward)(const PerSampleBackward&, const Parallel&);
  void (*renorm)(const Renorm&, const Parallel&);
  void (*row_adam)(const RowAdam&, const Parallel&);
  void (*row_adam_catch_up)(const RowAdamCatchUp&, const Parallel&);
  void (*row_adagrad)(const RowAdagrad&, const Parallel&);
  void (*row_rowwise_adagrad)(const RowRowwiseAdagrad&, const Parallel&);
  void (*row_sgd)(const RowSgd&, const Parallel&);
  void (*dense_adam)(const DenseAdam&, const Parallel&);
  void (*grad_check)(const GradCheck&, const Parallel&);
  void (*row_grad_check)(const RowGradCheck&, const Parallel&);
  void (*boundary_gradient)(const BoundaryGradient&, const Parallel&);
  void (*row_copy)(const RowCopy&, const Parallel&);
  void (*checksum)(const Checksum&, const Parallel&);
};

#define FE_DECLARE_KERNELS(isa)                                        \
  namespace isa {                                                      \
  ErrorReport check_offsets(const Bags&);                              \
  ErrorReport check_indices(const Bags&, const Parallel&);             \
  int64_t group_indices_scratch_bytes(const Bags&, const Parallel&);   \
  void group_indices(const GroupIndices&, const Parallel&);            \
  void bag_forward(const BagForward&, const Parallel&);                \
  void gather(const Gather&, const Parallel&);                         \
  void bag_backward(const BagBackward&, const Parallel&);              \
  void bag_terms(const BagTerms&, const Parallel&);                    \
  void per_sample_backward(const PerSampleBackward&, const Parallel&); \
  void renorm(const Renorm&, const Parallel&);                         \
  void row_adam(const RowAdam&, const Parallel&);                      \
  void row_adam_catch_up(const RowAdamCatchUp&, const Parallel&);      \
  void row_adagrad(const RowAdagrad&, const Parallel&);                \
  void row_rowwise_adagrad(const RowRowwiseAdagrad&, const Parallel&); \
  void row_sgd(const RowSgd&, const Parallel&);                        \
  void dense_adam(const DenseAdam&, const Parallel&);                  \
  void grad_check(const GradCheck&, const Parallel&);                  \
  void row_grad_check(const RowGradCheck&, const Parallel&);           \
  void boundary_gradient(const BoundaryGradient&, const Parallel&);    \
  void row_copy(const RowCopy&, const Parallel&);                      \
  void checksum(const Checksum&, const Parallel&);                     \
  }

FE_DECLARE_KERNELS(baseline)
FE_DECLARE_KERNELS(avx2)
FE_DECLARE_KERNELS(avx512)

#undef FE_DECLARE_KERNELS

}  // namespace fastemb::cpu
