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
//   rounding      to fp16/bf16 once, at the store, to nearest even (row steps: or stochastically, see RowStep).
//   row steps     csrc/common/row_update.h, one element at a time in acc; scalars that come of the hyperparameters are
//                 computed in double and rounded to acc once; integer powers by square and multiply, in double.
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
  ErrorReport* error;  // where a bad id (CUDA: or offset) is reported; the output is then of no use
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

// The row gradients of a sum or a mean as a sparse matrix times grad_output: for the j-th of the sorted positions,
// p = order[j], sources[j] = bag(p) and coefficients[j] = t_p (see `backward` above). What stands for
// positions of no row, behind the last segment, is unspecified.
struct BagTerms {
  Bags bags;
  const int32_t* order;            // what group_indices made of them
  Mode mode;                       // sum or mean
  const void* per_sample_weights;  // [num_indices] per_sample_type or null
  DType per_sample_type;
  DType acc_type;      // f32 or f64
  int32_t* sources;    // [num_indices]
  void* coefficients;  // [num_indices] acc_type; null for a sum without weights, where all are 1
  int32_t* bag_of;     // scratch as in BagBackward
  void* bag_count;     // scratch as in BagBackward
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

// What every optimizer step of rows has in common. The k-th gradient row belongs to table row rows[k]; rows are
// distinct.
//
//   gradient   g = grad[k], or, fused with the backward that would have made it ("segments" given), the accumulation
//              (as above, in acc) of coefficients[j] * grad[sources[j]] over j from segments[k] to segments[k + 1];
//              g *= inv_scale (skipped when inv_scale is null), negated under maximize, then
//              g += weight_decay * p unless the decay is decoupled.
//   value      p = master where there is one, but the parameter's own value where the master no longer rounds to the
//              parameter's bits (somebody else has written it); the parameter's value without a master.
//   store      master = p', param = p' rounded to nearest, or, when `stochastic` (no master), to one of its two
//              neighbours with the probability that makes the expectation p' (common/stochastic.h). Moments in bf16
//              are rounded so when `stochastic`, with a master, too.
//   skip       found_inf != 0: nothing at all is written.
struct RowStep {
  void* param;  // [num_embeddings, dim] param_type, rows param_stride elements apart
  DType param_type;
  int64_t param_stride;
  void* master;  // [num_embeddings, dim] acc, or null
  int64_t num_embeddings;
  int64_t dim;
  const int64_t* rows;       // [num_rows] or null: row k is k. Rows outside the table are left out.
  int64_t num_rows;          // rows in `rows` and `grad`
  const int32_t* used_rows;  // [1] how many of them count, or null: all
  const void* grad;          // [num_rows, dim] grad_type, contiguous; with segments [any, dim]
  DType grad_type;
  const int32_t* segments;   // [num_rows + 1] or null
  const int32_t* sources;    // [num_terms], rows of grad
  const void* coefficients;  // [num_terms] acc, or null: all 1, nothing is multiplied
  int64_t num_terms;
  void* partials;          // scratch, bag_backward_partial_rows(num_terms) * dim of acc; null without segments
  const float* inv_scale;  // [1] or null
  const float* found_inf;  // [1] or null
  const float* step;       // [1] number of this step, from 1
  double lr;
  const void* lr_tensor;  // [1] lr_type, in place of lr, or null
  DType lr_type;
  double weight_decay;
  bool maximize;
  bool stochastic;
  uint64_t seed;
};

// bc1 = 1 - beta1^t, bc2 = 1 - beta2^t, t = step, or the row's own count of updates, this one included.
//   m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g * g;  u = max_exp_avg_sq ? (its new maximum) : v
//   corrected_denominator (Adam):        p = p * f - (lr / bc1) * (m / (sqrt(u) / sqrt(bc2) + eps))
//   otherwise (torch's SparseAdam):      p = p * f - (lr * sqrt(bc2) / bc1) * (m / (sqrt(u) + eps))
//   f = (1 - lr * weight_decay)^k when decoupled, k = row_step ? step - row_step[row] : 1; no multiplication otherwise.
struct RowAdam {
  RowStep rows;
  void* exp_avg;  // [num_embeddings, dim] moment_type, contiguous, as the next two
  void* exp_avg_sq;
  void* max_exp_avg_sq;  // or null
  DType moment_type;     // acc or bf16
  int32_t* row_step;     // [num_embeddings] step of the row's last update, or null
  int32_t* row_count;    // [num_embeddings] the row's updates so far, or null
  double beta1, beta2, eps;
  bool decoupled;
  bool corrected_denominator;
};

// Rows that slept while dense Adam would have moved them (its moments decay and its momentum carries on under a zero
// gradient): brings them from the end of step row_step[row] to the end of step t. common/adam_catch_up.h.
//
// The history is a ring: slot s % capacity holds what is asked about step s, for s in (t - capacity, t].
struct AdamHistory {
  // For rows current at the end of step s, with age = r - s over the steps r in (s, t]:
  double series[4];  // sum over r of a_r * q_r^(n+1) * (beta1 * beta2^(-(n+1)/2))^age * (product of d over (r, t]);
                     // under amsgrad without the power of beta2
  double keep;       // product of d over (s, t]
  // Of step s itself.
  double rate;   // a = lr / (1 - beta1^s)
  double root;   // q = sqrt(1 - beta2^s)
  double decay;  // d = 1 - lr * weight_decay when decoupled, else 1
};

struct RowAdamCatchUp {
  RowStep rows;   // param, master, rows, used_rows, step (t), weight_decay, maximize and rounding; no gradient
  void* exp_avg;  // as in RowAdam
  void* exp_avg_sq;
  void* max_exp_avg_sq;
  DType moment_type;
  int32_t* row_step;  // [num_embeddings]
  const AdamHistory* history;
  int64_t capacity;
  double beta1, beta2, eps;
  double smallest_root;  // below it sqrt(v) is too near to eps for the series: the steps are replayed
  int64_t horizon;       // steps after which what is left of the momentum moves nothing
  bool decoupled;
};

// clr = lr / (1 + (step - 1) * lr_decay);  s += g * g;  p -= clr * (g / (sqrt(s) + eps))
struct RowAdagrad {
  RowStep rows;
  void* sum;  // [num_embeddings, dim] acc, contiguous
  double lr_decay, eps;
};

// s[row] += dot(g, g) / acc(dim);  p -= (clr / (sqrt(s[row]) + eps)) * g
struct RowRowwiseAdagrad {
  RowStep rows;
  void* sum;  // [num_embeddings] acc
  double lr_decay, eps;
};

// With momentum:  b = step == 1 ? g : momentum * b + (1 - dampening) * g;  g = nesterov ? g + momentum * b : b
// p -= lr * g
struct RowSgd {
  RowStep rows;
  void* momentum_buffer;  // [num_embeddings, dim] acc, contiguous, or null: no momentum
  double momentum, dampening;
  bool nesterov;
};

// torch's fused Adam on the CPU, to the bit, of gradients that are unscaled on the way (torch's own kernel would store
// them). torch's vectorised loop is what is followed, so numel is a multiple of kDenseAdamElements; fma where it has
// one, here alone. All in float:
//   g = grad * factor, or grad / factor;  g = -g to maximize;  p = p * (1 - lr * wd), or g = fma(p, wd, g)
//   m = rate1 < 0.5 ? fma(rate1, g - m, m) : fma(rate1 - 1, g - m, g),  rate1 = 1 - beta1
//   v = fma((1 - beta2) * g, g, v * beta2);  u = max(u, v), a NaN wins
//   p = p + (-lr / bc1 * m) / (sqrt(v or u) / sqrt(bc2) + eps),  bc = 1 - beta^step
inline constexpr int64_t kDenseAdamElements = 64;
struct DenseAdam {
  float* param;  // [numel], as all of them
  const float* grad;
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;  // or null
  int64_t numel;
  const float* factor;     // [1]
  const float* found_inf;  // [1] or null; not 0: nothing happens
  const float* step;       // [1], from 1 on
  double lr, beta1, beta2, eps, weight_decay;
  bool divide, decoupled, maximize;
};

// Counters of gradient statistics, one row of int64 for each gradient. x is an element as it is, scaled; g = inv_scale
// * x in acc. All are added to what is there, `largest` is a maximum.
enum GradStat : int32_t {
  kCount,      // elements
  kZeros,      // x == 0
  kTiny,       // 0 < |g| < 2^-24: fp16 would flush them without a scale
  kFlushed,    // 0 < |x| <= 2^-25: fp16 flushes them at this scale
  kSubnormal,  // 2^-25 < |x| < 2^-14: fp16 rounds them to fewer bits
  kInfinite,   // g or x is
  kNan,
  kLargest,  // bits, as those of a float, of the largest finite |g|; 0 without one
  kGradStats
};

// What is done with a gradient before the step: found_inf becomes 1 where an x or a g is not finite, else it stays;
// statistics; the sum of g * g in double, in an order that only the shape decides (the same bits in every run, not on
// every backend); and, when `unscale`, x = g, rounded to nearest.
struct GradCheck {
  void* grad;  // [numel] grad_type
  DType grad_type;
  int64_t numel;
  const float* inv_scale;  // [1] or null: 1
  float* found_inf;        // [1] or null
  int64_t* stats;          // [kGradStats] or null
  double* square_sum;      // [1] or null
  double* scratch;         // grad_check_scratch(numel) elements; with square_sum
  bool unscale;
};

// The same for the rows of a sparse gradient, and for what is not there yet in a step that is fused with the backward:
// the gradient fields of RowStep count, and inv_scale, found_inf is not read. Rows outside the table count, too.
// `unscale` is false with segments.
struct RowGradCheck {
  RowStep rows;  // grad, grad_type, dim, num_rows, used_rows, inv_scale, segments, sources, coefficients, ...
  float* found_inf;
  int64_t* stats;
  double* square_sum;
  double* scratch;  // grad_check_scratch(num_rows * dim) elements; with square_sum
  bool unscale;
};

// Partial sums of GradCheck, each of kSquareChunk elements at least (of whole rows for RowGradCheck).
inline constexpr int64_t kSquareChunk = 1 << 13;
constexpr int64_t grad_check_scratch(int64_t numel) { return numel / kSquareChunk + 1; }

// The gradient that passes a boundary between two scale groups: output = ratio * grad in float (double for f64),
// rounded to nearest. flags[0] = 1 where an element of grad is not finite, flags[1] = 1 where one of output is not and
// that of grad is. Statistics are those of grad, with inv_scale.
struct BoundaryGradient {
  const void* grad;  // [numel] grad_type
  DType grad_type;
  int64_t numel;
  const float* ratio;      // [1]
  const float* inv_scale;  // [1] of the scale that grad has, or null: 1
  void* output;            // [numel] grad_type
  float* flags;            // [2]
  int64_t* stats;          // [kGradStats] or null
};

// The scales of all groups after a step, one thread for each. Group 0 is the root.
//   overflow (found_inf != 0): skips += 1, growth = 0; skips >= hysteresis: scale = max(scale * backoff, min_scale)
//   else:                      skips = 0, growth += 1; at growth_interval it becomes 0 and scale * growth_factor, where
//                              that is finite, the scale, at most max_scale and no less than before
struct ScaleConfig {
  double growth_factor, backoff_factor, min_scale, max_scale;
  double growth_interval, hysteresis;  // whole numbers
};
struct ScaleState {
  int32_t growth, skips;
};
struct ScaleUpdate {
  float* scales;           // [groups]
  ScaleState* states;      // [groups]
  const float* found_inf;  // [groups]
  const ScaleConfig* configs;
  int64_t groups;
};

// Rows that consist of several pieces of memory: one table of records, or arrays with a row per slot. Piece p of row r
// is bytes[p] bytes at data[p] + r * strides[p].
inline constexpr int kMaxPieces = 12;
struct RowPieces {
  int32_t count;
  void* data[kMaxPieces];
  int64_t strides[kMaxPieces];  // bytes
  int64_t bytes[kMaxPieces];
  int64_t rows;  // that there are
};

// Row to_rows[k] of `to` becomes row from_rows[k] of `from`; to_rows are distinct.
struct RowCopy {
  RowPieces to, from;        // of one count, with the same bytes
  const int64_t* to_rows;    // [num_rows] or null: row k
  const int64_t* from_rows;  // [num_rows] or null: row k
  int64_t num_rows;
  ErrorReport* error;  // CUDA only: a row that is not there is left out and reported
};

// What stands before the payload of a record.
struct RecordHeader {
  uint64_t checksum;
  int64_t version;
};

// Checksums of records: of the payload, the row of the table that it belongs to, and its version. Not cryptographic.
//   words     of 8 bytes, little-endian: the pieces one after the other, each filled up with zeros
//   checksum  mix(key + sum over words i = 0, 1, ... of mix(word[i] + (i + 1) * kGolden)), modulo 2^64, with
//             key = mix(mix(mix(seed) + row) + version); mix and kGolden as in common/mix.h
// mix is a bijection: damage within one word is found for certain, other damage with probability 1 - 2^-64.
//   compute   output[k] = checksum
//   seal      header k = {checksum, versions[k]}
//   check     where header k is not that, ++found[0] and found[1] = min(found[1], k)
enum class ChecksumMode : int32_t { compute, seal, check };
struct Checksum {
  ChecksumMode mode;
  RowPieces pieces;         // the payload
  void* headers;            // RecordHeader of row r at headers + r * header_stride; seal and check
  int64_t header_stride;    // bytes
  const int64_t* at;        // [num_rows] row of pieces and headers that holds record k, or null: row k
  const int64_t* rows;      // [num_rows] row of the table, any number
  const int64_t* versions;  // [num_rows]; check: or null, the header's own is right
  int64_t num_rows;
  uint64_t seed;
  uint64_t* output;    // [num_rows], compute
  int64_t* found;      // [2], check
  ErrorReport* error;  // CUDA only: as in RowCopy
};

// Upper bound on the partial sums that long segments leave behind: two per window of kChunk sorted positions.
constexpr int64_t bag_backward_partial_rows(int64_t num_indices) { return 2 * ((num_indices + kChunk - 1) / kChunk); }

namespace cpu {

// Threads, handed in by the caller: run body(begin, end, context) over disjoint ranges that cover [begin, end).
struct Parallel {
  void (*run)(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
  int64_t threads;
};

// First position (in order) that breaks the contract, code none when all is well. The second relies on the offsets.
ErrorReport check_offsets(const Bags& bags);
ErrorReport check_indices(const Bags& bags, const Parallel& parallel);

int64_t group_indices_scratch_bytes(const Bags& bags, const Parallel& parallel);
void group_indices(const GroupIndices* problems, int64_t count, const Parallel& parallel);
void bag_forward(const BagForward* problems, int64_t count, const Parallel& parallel);
void gather(const Gather* problems, int64_t count, const Parallel& parallel);
void bag_backward(const BagBackward* problems, int64_t count, const Parallel& parallel);
void bag_terms(const BagTerms* problems, int64_t count, const Parallel& parallel);
void per_sample_backward(const PerSampleBackward* problems, int64_t count, const Parallel& parallel);
void renorm(const Renorm* problems, int64_t count, const Parallel& parallel);
void row_adam(const RowAdam* problems, int64_t count, const Parallel& parallel);
void row_adam_catch_up(const RowAdamCatchUp* problems, int64_t count, const Parallel& parallel);
void row_adagrad(const RowAdagrad* problems, int64_t count, const Parallel& parallel);
void row_rowwise_adagrad(const RowRowwiseAdagrad* problems, int64_t count, const Parallel& parallel);
void row_sgd(const RowSgd* problems, int64_t count, const Parallel& parallel);
void dense_adam(const DenseAdam* problems, int64_t count, const Parallel& parallel);
void grad_check(const GradCheck* problems, int64_t count, const Parallel& parallel);
void row_grad_check(const RowGradCheck* problems, int64_t count, const Parallel& parallel);
void boundary_gradient(const BoundaryGradient* problems, int64_t count, const Parallel& parallel);
void scale_update(const ScaleUpdate& problem);
void row_copy(const RowCopy* problems, int64_t count, const Parallel& parallel);
void checksum(const Checksum* problems, int64_t count, const Parallel& parallel);

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
int bag_terms(const BagTerms* problems, int64_t count, Stream stream);
int per_sample_backward(const PerSampleBackward* problems, int64_t count, Stream stream);
int renorm(const Renorm* problems, int64_t count, Stream stream);
int row_adam(const RowAdam* problems, int64_t count, Stream stream);
int row_adam_catch_up(const RowAdamCatchUp* problems, int64_t count, Stream stream);
int row_adagrad(const RowAdagrad* problems, int64_t count, Stream stream);
int row_rowwise_adagrad(const RowRowwiseAdagrad* problems, int64_t count, Stream stream);
int row_sgd(const RowSgd* problems, int64_t count, Stream stream);
int grad_check(const GradCheck* problems, int64_t count, Stream stream);
int row_grad_check(const RowGradCheck* problems, int64_t count, Stream stream);
int boundary_gradient(const BoundaryGradient* problems, int64_t count, Stream stream);
int scale_update(const ScaleUpdate& problem, Stream stream);
int row_copy(const RowCopy* problems, int64_t count, Stream stream);
int checksum(const Checksum* problems, int64_t count, Stream stream);

}  // namespace cuda

}  // namespace fastemb
