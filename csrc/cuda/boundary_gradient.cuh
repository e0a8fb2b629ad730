// The gradient that passes from one scale group to another, and what came and what was made not finite.
#pragma once

#include "cuda/grad_tally.cuh"

namespace fastemb::cuda {

template <typename T, bool kStats>
__global__ void __launch_bounds__(kBlock, sizeof(T) == 8 ? 2 : 3)
    boundary_gradient_kernel(BoundaryGradient p, bool vector) {
  using A = typename AccOf<T>::type;
  using Counts = Tally<A, kStats, false>;
  const A inv_scale = scale_or_one<A>(p.inv_scale), ratio = static_cast<A>(*p.ratio);
  const ChunkRange range = chunks_of_block(chunks_in(p.numel));
  Counts tally;
  bool came = false, made = false;
  for (int64_t chunk = range.first; chunk < range.last; ++chunk) {
    const int64_t end = end_of_elements(chunk, p.numel);
    for_granules<false>(static_cast<const T*>(p.grad), chunk * kSquareChunk, end, vector,
                        [&](const auto& x, int64_t at) {
                          constexpr int N = static_cast<int>(sizeof(x) / sizeof(A));
                          if constexpr (kStats) {
                            A g[N];
                            multiply(x, inv_scale, g);
                            Counts::add(tally, x, g);
                          }
                          A product[N];
                          multiply(x, ratio, product);
                          Vec<T, N> passed;
#pragma unroll
                          for (int v = 0; v < N; ++v) {
                            passed.item[v] = narrow<T>(product[v]);
                            const bool bad = not_finite(x[v]);
                            came |= bad;
                            made |= !bad && not_finite(static_cast<A>(widen(passed.item[v])));
                          }
                          store<N>(static_cast<T*>(p.output) + at, passed);
                        });
  }
  if (came) p.flags[0] = 1.0f;
  if (made) p.flags[1] = 1.0f;
  if constexpr (kStats) add_to_stats(tally, p.stats);
}

inline int launch_boundary_gradient(const BoundaryGradient& p, Stream stream) {
  const int64_t chunks = chunks_in(p.numel);
  if (chunks == 0) return 0;
  const bool vector = aligned(p.grad, 16) && aligned(p.output, 16);
  return with_dtype(p.grad_type, [&](auto dtype) {
    using T = typename decltype(dtype)::type;
    auto kernel = p.stats == nullptr ? &boundary_gradient_kernel<T, false> : &boundary_gradient_kernel<T, true>;
    return FE_LAUNCH(kernel, dim3(grad_blocks(chunks)), kBlock, stream, p, vector);
  });
}

}  // namespace fastemb::cuda
