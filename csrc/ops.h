// The native contract: what every operator takes, for the CPU and the CUDA kernels alike.
//
// Torch-free and CUDA-free. csrc/torch/ checks tensors and fills these structs; csrc/cpu/ and csrc/cuda/ compute on
// them. Every launch takes a list of problems (one per table), so that many tables in one call need no new contract.
//
// Numerics, the same bits on CPU and CUDA, for every thread count and block size ("acc" is float, or double for f64):
//   accumulation  one multiply and one add per term, each rounded (never fused), in index order, in chunks of
//                 kChunk terms: acc = 0; for each chunk: part = 0; part += term...; acc += part.
//   forward       sum  = accumulation of s_j * w[i_j]  (of w[i_j] alone when there are no per-sample weights);
//                 mean = sum / acc(count), count = positions of the bag that are not padding, 0 for an empty bag;
//                 max  = first position that holds the largest value; a NaN wins over everything, the first NaN first.
//                 A chunk counts positions of the bag, padding included (padding terms are skipped, not added as 0).
//   backward      row gradient = accumulation over the row's occurrences, in position order, of t_p * g[bag(p)] with
//                 t_p = s_p for sum, s_p / acc(count) for mean (s_p = 1 without weights; t_p = 1 is not multiplied),
//                 for max of g[bag(p)][d] where p is the winner, else nothing.
//                 scale_grad_by_freq divides the finished sum by acc(occurrences).
//   dot           kDotLanes partial sums, lane j adds the products of d = j, j + kDotLanes, ...; then lanes are folded
//   in
//                 halves: lane[j] += lane[j + h] for h = kDotLanes / 2, ..., 1.  Used by the per-sample-weight
//                 gradient (mean divides the dot by acc(count)) and by the norms of renorm.
//   rounding      to fp16/bf16 once, at the store, to nearest even.
#pragma once

#include <cstdint>

namespace fastemb {

inline constexpr int64_t kChunk = 256;     // terms per partial sum
inline constexpr int64_t kDotLanes = 256;  // partial sums of a dot product

enum class DType : int32_t { f16, bf16, f32, f64 };
enum class IndexType : int32_t { i32, i64 };
enum class Mode : int32_t { sum, mean, max };

// How the positions of `indices` fall into bags. Bag b is [begin(b), end(b)):
//   offsets given:  begin(b) = offsets[b], end(b) = b + 1 < num_offsets ? offsets[b + 1] : num_indices
//   offsets null:   bags of bag_length positions each, begin(b) = b * bag_length
// Positions that no bag covers (behind the last offset) take no part in anything.
struct Bags {
  const void* indices;  // [num_indices] index_type, row numbers
  const void* offsets;  // [num_offsets] offset_type, ascending from 0, or null
  IndexType index_type;
  IndexType offset_type;
  int64_t num_indices;
  int64_t num_offsets;  // num_bags, or num_bags + 1 when the last offset closes the last bag
  int64_t num_bags;
  int64_t bag_length;      // used when offsets is null
  int64_t num_embeddings;  // rows are in [0, num_embeddings)
  int64_t padding_idx;     // positions naming this row are left out; -1: none
};

// Positions grouped by the row they name: what group_indices makes and the backward reads.
struct Groups {
  int32_t* order;     // [num_indices] positions sorted by (row, position); positions that take no part come last
  int64_t* rows;      // [num_indices] the distinct rows, ascending; *num_rows of them are set
  int32_t* segments;  // [num_indices + 1] row k owns order[segments[k] .. segments[k + 1]); *num_rows + 1 are set
  int32_t* num_rows;  // [1]
};

// What went wrong on the device. Kernels skip what is wrong and record the first report; the host raises it later.
struct ErrorReport {
  enum Code : int32_t { none = 0, bad_index = 1, bad_offset = 2 };
  int32_t code;
  int32_t reserved;
  int64_t position;  // in indices (bad_index) or offsets (bad_offset)
  int64_t value;     // what stood there
  int64_t limit;     // num_embeddings (bad_index) or num_indices (bad_offset)
};

// output[b] = reduction of weight rows over bag b
struct BagForward {
  Bags bags;
  Mode mode;
  const void* weight;  // [num_embeddings, dim] weight_type, rows weight_stride elements apart
  DType weight_type;
  int64_t weight_stride;
  int64_t dim;
  const void* per_sample_weights;  // [num_indices] per_sample_type or null (sum and mean only)
  DType per_sample_type;
  void* output;  // [num_bags, dim] output_type
  DType output_type;
  int32_t* argmax;     // max only: [num_bags, dim] winner's position within its bag, -1 in an empty bag
  ErrorReport* error;  // CUDA only
};

// output[n] = weight[indices[n]], padding included
struct Gather {
  Bags bags;           // bag_length 1, padding_idx -1
  const void* weight;  // [num_embeddings, dim] weight_type, rows weight_stride elements apart
  DType weight_type;
  int64_t weight_stride;
  int64_t dim;
  void* output;  // [num_indices, dim] output_type
  DType output_type;
  ErrorReport* error;  // CUDA only
};

struct GroupIndices {
  Bags bags;
  Groups groups;
  void* scratch;  // group_indices_scratch_bytes() bytes
  int64_t scratch_bytes;
};

// grad_rows[k] (or grad_rows[rows[k]] when dense) = gradient of the k-th distinct row
struct BagBackward {
  Bags bags;
  Groups groups;
  Mode mode;
  bool scale_grad_by_freq;
  bool dense;               // CUDA: the caller has zeroed grad_rows; CPU: the kernel zeroes the other rows
  const void* grad_output;  // [num_bags, dim] grad_type
  DType grad_type;          // f64 goes with acc double, the others with float
  int64_t dim;
  const void* per_sample_weights;  // [num_indices] per_sample_type or null
  DType per_sample_type;
  const int32_t* argmax;  // max only: what the forward wrote
  void* grad_rows;        // [distinct rows or num_embeddings, dim] acc
  int32_t* bag_of;        // scratch [num_indices], -1 for positions in no bag; unused when bag_length is 1
  void* bag_count;        // scratch [num_bags] acc, non-padding positions; mean only
  void* partials;         // scratch, bag_backward_partial_rows() * dim of acc
};

// grad_weights[p] = dot(grad_output[bag(p)], weight[indices[p]]) (mean: / count); the caller has zeroed it
struct PerSampleBackward {
  Bags bags;
  Mode mode;                // sum or mean
  const void* grad_output;  // [num_bags, dim] acc
  const void* weight;       // as in BagForward
  DType weight_type;
  int64_t weight_stride;
  int64_t dim;
  void* grad_weights;  // [num_indices] acc
  int32_t* bag_of;     // CUDA only, scratch as in BagBackward
  void* bag_count;     // CUDA only, scratch as in BagBackward
};

// Rows named by the groups whose norm exceeds max_norm are scaled by max_norm / (norm + 1e-7), in place. The norm is
// accumulated in acc as by `dot`: of |x| (norm_type 1), x * x (2), max |x| (inf), |x|^p otherwise.
struct Renorm {
  Groups groups;
  int64_t num_groups_capacity;  // number of indices
  void* weight;                 // as in BagForward
  DType weight_type;
  int64_t weight_stride;
  int64_t dim;
  double max_norm;
  double norm_type;
};

// Upper bound on the partial sums that long segments leave behind: two per window of kChunk sorted positions.
constexpr int64_t bag_backward_partial_rows(int64_t num_indices) { return 2 * ((num_indices + kChunk - 1) / kChunk); }

namespace cpu {

// Threads, handed in by the caller: run body(begin, end, context) over disjoint ranges that cover [begin, end).
struct Parallel {
  void (*run)(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
  int64_t threads;
};

// First position (in order) that breaks the contract, code none when all is well. Reads indices and offsets only.
ErrorReport check_bags(const Bags& bags, const Parallel& parallel);

int64_t group_indices_scratch_bytes(const Bags& bags, const Parallel& parallel);
void group_indices(const GroupIndices* problems, int64_t count, const Parallel& parallel);
void bag_forward(const BagForward* problems, int64_t count, const Parallel& parallel);
void gather(const Gather* problems, int64_t count, const Parallel& parallel);
void bag_backward(const BagBackward* problems, int64_t count, const Parallel& parallel);
void per_sample_backward(const PerSampleBackward* problems, int64_t count, const Parallel& parallel);
void renorm(const Renorm* problems, int64_t count, const Parallel& parallel);

}  // namespace cpu

namespace cuda {

using Stream = void*;  // a cudaStream_t

// All return a cudaError_t as int (0: success); group_indices_scratch_bytes returns -1 when the device cannot be asked.
// Pointers are device pointers, `error` may be mapped host memory.
int64_t group_indices_scratch_bytes(const Bags& bags);
int group_indices(const GroupIndices* problems, int64_t count, Stream stream);
int bag_forward(const BagForward* problems, int64_t count, Stream stream);
int gather(const Gather* problems, int64_t count, Stream stream);
int bag_backward(const BagBackward* problems, int64_t count, Stream stream);
int per_sample_backward(const PerSampleBackward* problems, int64_t count, Stream stream);
int renorm(const Renorm* problems, int64_t count, Stream stream);

}  // namespace cuda

}  // namespace fastemb
