// The launchers of the lookups as a Python module, run by cuda_emu.h. Arguments are raw addresses and plain numbers.
#include <algorithm>
#include <numeric>
#include <string>

#include "arguments.h"
#include "cuda/embedding_bag.cuh"
#include "cuda/embedding_bag_backward.cuh"
#include "cuda/group_indices.cuh"
#include "cuda/renorm.cuh"

using namespace fastemb;
using namespace fastemb::cuda;
using fastemb_emu::Arguments;
using fastemb_emu::check;

namespace {

// The sort and the scan that CUB does on the device.
struct Serial {
  static int64_t scratch_bytes(bool, int64_t, int) { return 0; }

  template <typename K>
  static int sort_pairs(void*, int64_t, const K* keys, K* sorted, const int32_t* values, int32_t* sorted_values,
                        int64_t n, int bits, Stream) {
    const K mask = bits >= static_cast<int>(8 * sizeof(K)) ? ~K(0) : (K(1) << bits) - 1;
    std::vector<int64_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return (keys[a] & mask) < (keys[b] & mask); });
    for (int64_t i = 0; i < n; ++i) {
      sorted[i] = keys[order[i]];
      sorted_values[i] = values[order[i]];
    }
    return 0;
  }

  static int inclusive_sum(void*, int64_t, int32_t* values, int64_t n, Stream) {
    std::partial_sum(values, values + n, values);
    return 0;
  }
};

class LookupArguments : public Arguments {
 public:
  using Arguments::Arguments;

  Bags bags() {
    return {.indices = pointer<void>("indices"),
            .offsets = pointer<void>("offsets"),
            .index_type = choice<IndexType>("index_type"),
            .offset_type = choice<IndexType>("offset_type"),
            .num_indices = number<int64_t>("num_indices"),
            .num_offsets = number<int64_t>("num_offsets"),
            .num_bags = number<int64_t>("num_bags"),
            .bag_length = number<int64_t>("bag_length"),
            .num_embeddings = number<int64_t>("num_embeddings"),
            .padding_idx = number<int64_t>("padding_idx")};
  }

  Groups groups() {
    return {.order = pointer<int32_t>("order"),
            .rows = pointer<int64_t>("rows"),
            .segments = pointer<int32_t>("segments"),
            .num_rows = pointer<int32_t>("num_rows")};
  }
};

void run_bag_forward(const py::kwargs& values) {
  LookupArguments in(values);
  const BagForward a = {.bags = in.bags(),
                        .mode = in.choice<Mode>("mode"),
                        .weight = in.pointer<void>("weight"),
                        .weight_type = in.choice<DType>("weight_type"),
                        .weight_stride = in.number<int64_t>("weight_stride"),
                        .dim = in.number<int64_t>("dim"),
                        .per_sample_weights = in.pointer<void>("per_sample_weights"),
                        .per_sample_type = in.choice<DType>("per_sample_type"),
                        .output = in.pointer<void>("output"),
                        .output_type = in.choice<DType>("output_type"),
                        .argmax = in.pointer<int32_t>("argmax"),
                        .error = in.pointer<ErrorReport>("error")};
  in.finish();
  check(launch_bag_forward(a, nullptr));
}

void run_gather(const py::kwargs& values) {
  LookupArguments in(values);
  const Gather a = {.bags = in.bags(),
                    .weight = in.pointer<void>("weight"),
                    .weight_type = in.choice<DType>("weight_type"),
                    .weight_stride = in.number<int64_t>("weight_stride"),
                    .dim = in.number<int64_t>("dim"),
                    .output = in.pointer<void>("output"),
                    .output_type = in.choice<DType>("output_type"),
                    .error = in.pointer<ErrorReport>("error")};
  in.finish();
  check(launch_gather(a, nullptr));
}

void run_group_indices(const py::kwargs& values) {
  LookupArguments in(values);
  GroupIndices a = {.bags = in.bags(), .groups = in.groups(), .scratch = nullptr, .scratch_bytes = 0};
  in.finish();
  a.scratch_bytes = group_scratch<Serial>(a.bags).total;
  // uint4: as aligned as the device allocator's memory. Fresh for each call, so that a sanitizer sees its ends.
  std::unique_ptr<uint4[]> scratch(new uint4[static_cast<size_t>(a.scratch_bytes) / sizeof(uint4)]);
  std::memset(static_cast<void*>(scratch.get()), 0xff, static_cast<size_t>(a.scratch_bytes));
  a.scratch = scratch.get();
  check(launch_group_indices<Serial>(a, nullptr));
}

void run_bag_backward(const py::kwargs& values) {
  LookupArguments in(values);
  const BagBackward a = {.bags = in.bags(),
                         .groups = in.groups(),
                         .mode = in.choice<Mode>("mode"),
                         .scale_grad_by_freq = in.number<bool>("scale_grad_by_freq"),
                         .dense = in.number<bool>("dense"),
                         .grad_output = in.pointer<void>("grad_output"),
                         .grad_type = in.choice<DType>("grad_type"),
                         .dim = in.number<int64_t>("dim"),
                         .per_sample_weights = in.pointer<void>("per_sample_weights"),
                         .per_sample_type = in.choice<DType>("per_sample_type"),
                         .argmax = in.pointer<int32_t>("argmax"),
                         .grad_rows = in.pointer<void>("grad_rows"),
                         .bag_of = in.pointer<int32_t>("bag_of"),
                         .bag_count = in.pointer<void>("bag_count"),
                         .partials = in.pointer<void>("partials")};
  in.finish();
  check(launch_bag_backward(a, nullptr));
}

void run_bag_terms(const py::kwargs& values) {
  LookupArguments in(values);
  const BagTerms a = {.bags = in.bags(),
                      .order = in.pointer<int32_t>("order"),
                      .mode = in.choice<Mode>("mode"),
                      .per_sample_weights = in.pointer<void>("per_sample_weights"),
                      .per_sample_type = in.choice<DType>("per_sample_type"),
                      .acc_type = in.choice<DType>("acc_type"),
                      .sources = in.pointer<int32_t>("sources"),
                      .coefficients = in.pointer<void>("coefficients"),
                      .bag_of = in.pointer<int32_t>("bag_of"),
                      .bag_count = in.pointer<void>("bag_count")};
  in.finish();
  check(launch_bag_terms(a, nullptr));
}

void run_per_sample_backward(const py::kwargs& values) {
  LookupArguments in(values);
  const PerSampleBackward a = {.bags = in.bags(),
                               .mode = in.choice<Mode>("mode"),
                               .grad_output = in.pointer<void>("grad_output"),
                               .weight = in.pointer<void>("weight"),
                               .weight_type = in.choice<DType>("weight_type"),
                               .weight_stride = in.number<int64_t>("weight_stride"),
                               .dim = in.number<int64_t>("dim"),
                               .grad_weights = in.pointer<void>("grad_weights"),
                               .bag_of = in.pointer<int32_t>("bag_of"),
                               .bag_count = in.pointer<void>("bag_count")};
  in.finish();
  check(launch_per_sample_backward(a, nullptr));
}

void run_renorm(const py::kwargs& values) {
  LookupArguments in(values);
  const Renorm a = {.groups = in.groups(),
                    .num_groups_capacity = in.number<int64_t>("num_groups_capacity"),
                    .weight = in.pointer<void>("weight"),
                    .weight_type = in.choice<DType>("weight_type"),
                    .weight_stride = in.number<int64_t>("weight_stride"),
                    .dim = in.number<int64_t>("dim"),
                    .max_norm = in.number<double>("max_norm"),
                    .norm_type = in.number<double>("norm_type")};
  in.finish();
  check(launch_renorm(a, nullptr));
}

// ---- kernels that break a rule, for the tests of the shim itself --------------------------------------------------

__global__ void early_return(int* out) {
  if (threadIdx.x == 5) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

__global__ void two_barriers(int* out) {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

__global__ void missing_lane(int* out) {
  if (threadIdx.x == 3) return;
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
}

__global__ void half_mask(int* out) { out[threadIdx.x] = __shfl_xor_sync(0xffffu, 1, 1); }

// Reverses the block through shared memory; right only with the barrier.
__global__ void reverse(int* out, bool with_barrier) {
  FE_SHARED(int, tile, 64);
  tile[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (with_barrier) __syncthreads();
  out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

// Sums shared memory that only the block's first half has written.
__global__ void half_written(float* out) {
  FE_SHARED(float, tile, 64);
  if (threadIdx.x < 32) tile[threadIdx.x] = 1.0f;
  __syncthreads();
  float sum = 0.0f;
  for (unsigned i = 0; i < blockDim.x; ++i) sum += tile[i];
  out[threadIdx.x] = sum;
}

__global__ void misaligned(const float* in, float* out) {
  out[threadIdx.x] = bits_float(__ldg(reinterpret_cast<const uint4*>(in + 1)).x);
}

__global__ void lanes_exchange(int* out) {
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, static_cast<int>(threadIdx.x), 16);
}

void shim_case(const std::string& name, uintptr_t out) {
  int* ints = reinterpret_cast<int*>(out);
  float* floats = reinterpret_cast<float*>(out);
  const auto run = [](auto kernel, auto... arguments) {
    return FE_LAUNCH(kernel, dim3(2), dim3(64), nullptr, arguments...);
  };
  if (name == "early_return") return check(run(early_return, ints));
  if (name == "two_barriers") return check(run(two_barriers, ints));
  if (name == "missing_lane") return check(run(missing_lane, ints));
  if (name == "half_mask") return check(run(half_mask, ints));
  if (name == "reverse") return check(run(reverse, ints, true));
  if (name == "reverse_without_barrier") return check(run(reverse, ints, false));
  if (name == "half_written") return check(run(half_written, floats));
  if (name == "misaligned") return check(run(misaligned, floats, floats));
  if (name == "lanes_exchange") return check(run(lanes_exchange, ints));
  if (name == "no_blocks") return check(FE_LAUNCH(lanes_exchange, dim3(0), dim3(64), nullptr, ints));
  if (name == "part_of_a_warp") return check(FE_LAUNCH(lanes_exchange, dim3(1), dim3(40), nullptr, ints));
  throw py::value_error(name);
}

}  // namespace

PYBIND11_MODULE(fastemb_emu_kernels, m) {
  fastemb_emu::define_set_order(m);
  m.def("shim_case", &shim_case);
  m.def("bag_forward", &run_bag_forward);
  m.def("gather", &run_gather);
  m.def("group_indices", &run_group_indices);
  m.def("bag_backward", &run_bag_backward);
  m.def("bag_terms", &run_bag_terms);
  m.def("per_sample_backward", &run_per_sample_backward);
  m.def("renorm", &run_renorm);
  m.def("bag_backward_partial_rows", &bag_backward_partial_rows);
  m.attr("CHUNK") = kChunk;
  m.attr("BLOCK") = kBlock;
}
