// Looking at gradients before the step, in one pass: finite or not, statistics, sum of squares, unscaling.
//
// A launch takes as many tensors as its parameters hold. Blocks share out the chunks of all of them; a block whose
// chunks are of one tensor adds what it has found once. Sums of squares, one for each chunk, are added up by a second
// kernel.
#pragma once

#include "cuda/grad_tally.cuh"
#include "cuda/row_terms.cuh"

namespace fastemb::cuda {

struct GradTensor {
  void* grad;
  int64_t numel;
  int64_t first_chunk;  // of all tensors' chunks, the first of this one
  int64_t* stats;       // as in GradCheck, as the next two
  double* square_sum;
  double* scratch;
};

inline constexpr int kGradTensors = 80;
struct GradTensors {
  GradTensor tensor[kGradTensors];
  int32_t count;
  bool unscale;
  int64_t chunks;
  const float* inv_scale;
  float* found_inf;
};
static_assert(sizeof(GradTensors) <= 4096, "kernel parameters");

// Chunk [first, end) of a gradient; inv_scale * x goes back where `unscale`.
template <typename T, typename Counts, typename A>
FE_DEVICE void look(T* grad, int64_t first, int64_t end, A inv_scale, bool unscale, bool vector, Counts& tally) {
  for_granules<true>(grad, first, end, vector, [&](const auto& x, int64_t at) {
    constexpr int N = static_cast<int>(sizeof(x) / sizeof(A));
    A g[N];
    multiply(x, inv_scale, g);
    Counts::add(tally, x, g);
    if (unscale) store_rounded<T>(grad, at, g);
  });
}

// Takes the squares of a chunk out of the tally. `turn` is another for the block's next chunk.
template <typename Counts>
FE_DEVICE void take_squares(Counts& tally, double* scratch, int64_t chunk, int64_t turn) {
  const double sum = block_sum(tally.squares, turn);
  tally.squares = 0.0;
  if (threadIdx.x == 0) scratch[chunk] = sum;
}

template <typename A, bool kStats, bool kSquares>
FE_DEVICE void hand_in(const Tally<A, kStats, kSquares>& tally, float* found_inf, int64_t* stats) {
  if (tally.found && found_inf != nullptr) *found_inf = 1.0f;
  if constexpr (kStats) add_to_stats(tally, stats);
}

template <typename T, bool kStats, bool kSquares>
__global__ void __launch_bounds__(kBlock, sizeof(T) == 8 ? 2 : 3) grad_check_kernel(GradTensors all) {
  using A = typename AccOf<T>::type;
  using Counts = Tally<A, kStats, kSquares>;
  const A inv_scale = scale_or_one<A>(all.inv_scale);
  const ChunkRange range = chunks_of_block(all.chunks);
  int32_t i = 0;
  for (int64_t chunk = range.first; chunk < range.last; ++i) {
    const GradTensor tensor = all.tensor[i];
    const int64_t behind = tensor.first_chunk + chunks_in(tensor.numel);
    if (chunk >= behind) continue;
    const int64_t last = behind < range.last ? behind : range.last;
    T* grad = static_cast<T*>(tensor.grad);
    const bool vector = reinterpret_cast<uintptr_t>(grad) % 16 == 0;
    Counts tally;
    for (; chunk < last; ++chunk) {
      const int64_t own = chunk - tensor.first_chunk;
      look(grad, own * kSquareChunk, end_of_elements(own, tensor.numel), inv_scale, all.unscale, vector, tally);
      if constexpr (kSquares) take_squares(tally, tensor.scratch, own, chunk);
    }
    hand_in(tally, all.found_inf, tensor.stats);
  }
}

// square_sum = the sums of `chunks` chunks.
FE_DEVICE void sum_chunks(const double* scratch, int64_t chunks, double* square_sum) {
  double sum = 0.0;
  for (int64_t chunk = threadIdx.x; chunk < chunks; chunk += kBlock) {
    sum = add_rn(sum, load<1>(scratch + chunk).item[0]);
  }
  sum = block_sum(sum, 0);
  if (threadIdx.x == 0) *square_sum = sum;
}

// A block for each tensor.
__global__ void __launch_bounds__(kBlock) square_sums_kernel(GradTensors all) {
  const GradTensor tensor = all.tensor[blockIdx.x];
  sum_chunks(tensor.scratch, chunks_in(tensor.numel), tensor.square_sum);
}

// ---- rows --------------------------------------------------------------------------------------------------------

// The rows that count, in one line.
template <typename T, bool kStats, bool kSquares>
__global__ void __launch_bounds__(kBlock, sizeof(T) == 8 ? 2 : 3) row_grad_check_kernel(RowGradCheck p, bool vector) {
  using A = typename AccOf<T>::type;
  using Counts = Tally<A, kStats, kSquares>;
  const A inv_scale = scale_or_one<A>(p.rows.inv_scale);
  const int64_t numel = rows_that_count(p.rows) * p.rows.dim;
  const ChunkRange range = chunks_of_block(chunks_in(numel));
  if (range.first == range.last) return;
  T* grad = static_cast<T*>(const_cast<void*>(p.rows.grad));
  Counts tally;
  for (int64_t chunk = range.first; chunk < range.last; ++chunk) {
    look(grad, chunk * kSquareChunk, end_of_elements(chunk, numel), inv_scale, p.unscale, vector, tally);
    if constexpr (kSquares) take_squares(tally, p.scratch, chunk, chunk);
  }
  hand_in(tally, p.found_inf, p.stats);
}

// Row and column of an element.
struct Cell {
  int64_t row, column;
};

FE_DEVICE Cell cell_of(int64_t element, int64_t dim) {
  if (((element | dim) >> 32) == 0) {  // division of half the width is several times faster
    const uint32_t row = static_cast<uint32_t>(element) / static_cast<uint32_t>(dim);
    return {row, static_cast<uint32_t>(element) - row * static_cast<uint32_t>(dim)};
  }
  const int64_t row = element / dim;
  return {row, element - row * dim};
}

// The same for rows that are sums of terms, V columns at a time: granules are the same, so the bits are those of the
// rows themselves. What nobody asks for costs little beside the sums: one kernel for all.
template <typename A, int V>
__global__ void __launch_bounds__(kBlock, 2) term_grad_check_kernel(RowGradCheck p) {
  using Counts = Tally<A, true, true>;
  const RowStep& r = p.rows;
  const A inv_scale = scale_or_one<A>(r.inv_scale);
  const int64_t num_rows = rows_that_count(r), numel = num_rows * r.dim;
  const ChunkRange range = chunks_of_block(chunks_in(numel));
  if (range.first == range.last) return;
  Counts tally;
  for (int64_t chunk = range.first; chunk < range.last; ++chunk) {
    const int64_t end = end_of_elements(chunk, numel);
    for (int64_t at = chunk * kSquareChunk + threadIdx.x * kGranule; at < end; at += kBlock * kGranule) {
      for (int64_t i = at; i < end && i < at + kGranule; i += V) {
        const Cell cell = cell_of(i, r.dim);
        A x[V], g[V];
        load_gradient(r, cell.row, gradient_place<true>(r, cell.row, num_rows), cell.column, x);
        multiply(x, inv_scale, g);
        Counts::add(tally, x, g);
      }
    }
    if (p.square_sum != nullptr) take_squares(tally, p.scratch, chunk, chunk);
  }
  if (tally.found && p.found_inf != nullptr) *p.found_inf = 1.0f;
  if (p.stats != nullptr) add_to_stats(tally, p.stats);
}

__global__ void __launch_bounds__(kBlock) row_square_sum_kernel(RowGradCheck p) {
  sum_chunks(p.scratch, chunks_in(rows_that_count(p.rows) * p.rows.dim), p.square_sum);
}

// ---- launch ------------------------------------------------------------------------------------------------------

template <typename T>
int launch_grad_tensors(const GradTensors& all, Stream stream) {
  if (all.count == 0) return 0;
  const bool stats = all.tensor[0].stats != nullptr, squares = all.tensor[0].square_sum != nullptr;
  if (all.chunks > 0) {
    const int error = with_findings(stats, squares, [&](auto with_stats, auto with_squares) {
      auto kernel = &grad_check_kernel<T, decltype(with_stats)::value, decltype(with_squares)::value>;
      return FE_LAUNCH(kernel, dim3(grad_blocks(all.chunks)), kBlock, stream, all);
    });
    if (error) return error;
  }
  if (!squares) return 0;
  auto kernel = &square_sums_kernel;
  return FE_LAUNCH(kernel, dim3(static_cast<unsigned>(all.count)), kBlock, stream, all);
}

// May a launch that looks at the first tensors look at this one as well?
inline bool belongs(const GradTensors& all, const GradCheck& p) {
  return all.count < kGradTensors && all.unscale == p.unscale && all.inv_scale == p.inv_scale &&
         all.found_inf == p.found_inf && (all.tensor[0].stats == nullptr) == (p.stats == nullptr) &&
         (all.tensor[0].square_sum == nullptr) == (p.square_sum == nullptr);
}

inline int launch_grad_check(const GradCheck* problems, int64_t count, Stream stream) {
  for (const DType type : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
    const int error = with_dtype(type, [&](auto dtype) {
      using T = typename decltype(dtype)::type;
      GradTensors all{};
      for (int64_t i = 0; i < count; ++i) {
        const GradCheck& p = problems[i];
        if (p.grad_type != type) continue;
        if (all.count > 0 && !belongs(all, p)) {
          if (int failed = launch_grad_tensors<T>(all, stream)) return failed;
          all = GradTensors{};
        }
        all.unscale = p.unscale;
        all.inv_scale = p.inv_scale;
        all.found_inf = p.found_inf;
        all.tensor[all.count++] = {p.grad, p.numel, all.chunks, p.stats, p.square_sum, p.scratch};
        all.chunks += chunks_in(p.numel);
      }
      return launch_grad_tensors<T>(all, stream);
    });
    if (error) return error;
  }
  return 0;
}

inline int launch_row_looks(const RowGradCheck& p, unsigned blocks, Stream stream) {
  return with_dtype(p.rows.grad_type, [&](auto dtype) {
    using T = typename decltype(dtype)::type;
    return with_findings(p.stats != nullptr, p.square_sum != nullptr, [&](auto stats, auto squares) {
      auto kernel = &row_grad_check_kernel<T, decltype(stats)::value, decltype(squares)::value>;
      return FE_LAUNCH(kernel, dim3(blocks), kBlock, stream, p, aligned(p.rows.grad, 16));
    });
  });
}

inline int launch_term_looks(const RowGradCheck& p, unsigned blocks, Stream stream) {
  if (int error = launch_term_chunks(p.rows, stream)) return error;
  return with_dtype(p.rows.grad_type, [&](auto dtype) {
    using G = typename decltype(dtype)::type;
    return with_vector<G>(aligned_terms(p.rows, kVector<G>), [&](auto width) {
      auto kernel = &term_grad_check_kernel<typename AccOf<G>::type, decltype(width)::value>;
      return FE_LAUNCH(kernel, dim3(blocks), kBlock, stream, p);
    });
  });
}

inline int launch_row_grad_check(const RowGradCheck& problem, Stream stream) {
  RowGradCheck p = problem;
  p.rows.param_type = p.rows.grad_type;  // what decides about acc where there is a parameter
  p.rows.found_inf = nullptr;
  if (const int64_t chunks = chunks_in(p.rows.num_rows * p.rows.dim); chunks > 0) {
    const auto launch = p.rows.segments == nullptr ? &launch_row_looks : &launch_term_looks;
    if (int error = launch(p, grad_blocks(chunks), stream)) return error;
  }
  if (p.square_sum == nullptr) return 0;
  auto kernel = &row_square_sum_kernel;
  return FE_LAUNCH(kernel, dim3(1), kBlock, stream, p);
}

}  // namespace fastemb::cuda
