// What a thread finds in the gradients that it looks at, and how a block puts that together. Counters are added
// atomically, whole numbers in any order; sums of squares are added in an order that only the positions of the elements
// decide, not their type, their alignment or the number of blocks:
//   chunks of kSquareChunk elements; thread t of the block has granules t, t + kBlock, ... of a chunk, each of kGranule
//   elements; its sum is folded over the lanes of the warp and then over the warps; the chunks' sums are folded
//   likewise.
#pragma once

#include "cuda/primitives.cuh"

#ifndef FASTEMB_GRAD_BLOCKS
#define FASTEMB_GRAD_BLOCKS 2048
#endif

namespace fastemb::cuda {

inline constexpr int kGranule = 8;
inline constexpr int64_t kGradBlocks = FASTEMB_GRAD_BLOCKS;
static_assert(kSquareChunk % (kBlock * kGranule) == 0);

FE_DEVICE float infinity(float) { return bits_float(0x7f800000u); }
FE_DEVICE double infinity(double) { return static_cast<double>(bits_float(0x7f800000u)); }

template <typename A>
FE_DEVICE bool not_finite(A x) {
  return !(magnitude(x) < infinity(x));
}

// Counters of the elements since the last flush: how many are at most, or below, a bound. Bounds lie inside one
// another, so the statistics are differences.
template <typename A, bool kStats, bool kSquares>
struct Tally {
  int32_t count = 0, zeros = 0, up_to_25 = 0, below_14 = 0, below_24 = 0, infinite = 0, nan = 0;
  A largest = 0;
  double squares = 0.0;
  bool found = false;  // something that is not finite

  template <int N>
  FE_DEVICE void add(Tally& t, const A (&x)[N], const A (&g)[N]) {
    bool finite = true;  // x is where g is
#pragma unroll
    for (int v = 0; v < N; ++v) finite &= magnitude(g[v]) < infinity(A{});
    if constexpr (kStats) {
      t.count += N;
#pragma unroll
      for (int v = 0; v < N; ++v) {
        t.zeros += x[v] == A{0};
        t.up_to_25 += magnitude(x[v]) <= A(0x1p-25);
        t.below_14 += magnitude(x[v]) < A(0x1p-14);
        t.below_24 += magnitude(g[v]) < A(0x1p-24);
      }
      if (finite) {
#pragma unroll
        for (int v = 0; v < N; ++v) t.largest = magnitude(g[v]) > t.largest ? magnitude(g[v]) : t.largest;
      } else {
#pragma unroll
        for (int v = 0; v < N; ++v) add_special(t, x[v], g[v]);
      }
    }
    t.found |= !finite;
    if constexpr (kSquares) {
#pragma unroll
      for (int v = 0; v < N; ++v) {
        const double wide = static_cast<double>(g[v]);
        t.squares = fma_rn(wide, wide, t.squares);
      }
    }
  }

 private:
  // One of elements that are not all finite.
  FE_DEVICE void add_special(Tally& t, A x, A g) {
    if (g != g) {
      t.nan += 1;
      t.below_24 += x == A{0};  // 0 times an infinite factor: zeros are below every bound
    } else if (magnitude(g) == infinity(g)) {
      t.infinite += 1;
    } else if (magnitude(g) > t.largest) {
      t.largest = magnitude(g);
    }
  }
};

// What each warp of the block hands to the others. Alternate between two places: a warp comes to one again when all
// have passed a barrier in between.
template <typename X>
struct WarpValues {
  X value[kWarps];
};

// The sum over the block's threads, in thread 0. Every thread takes part; `turn` is odd and even by turns.
FE_DEVICE double block_sum(double x, int64_t turn) {
  FE_SHARED(WarpValues<double>, sums, 2);
  WarpValues<double>& here = sums[turn & 1];
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x = add_rn(x, exchange(x, distance));
  if (threadIdx.x % kWarp == 0) here.value[threadIdx.x / kWarp] = x;
  block_barrier();
  if (threadIdx.x != 0) return 0.0;
  double sum = here.value[0];
  for (int warp = 1; warp < kWarps; ++warp) sum = add_rn(sum, here.value[warp]);
  return sum;
}

// Adds what the block has found to `stats`. Every thread takes part.
template <typename A, bool kSquares>
FE_DEVICE void add_to_stats(const Tally<A, true, kSquares>& t, int64_t* stats) {
  FE_SHARED(WarpValues<int64_t>, shared, kGradStats);
  const auto hand_in = [&](GradStat stat, int64_t x) {
    if (stat == kLargest) {
      x = warp_max(x);
    } else {
      x = warp_sum(x);
    }
    if (threadIdx.x % kWarp == 0) shared[stat].value[threadIdx.x / kWarp] = x;
  };
  block_barrier();  // of what was added before, all is read
  hand_in(kCount, t.count);
  hand_in(kZeros, t.zeros);
  hand_in(kTiny, t.below_24 - t.zeros);
  hand_in(kFlushed, t.up_to_25 - t.zeros);
  hand_in(kSubnormal, t.below_14 - t.up_to_25);
  hand_in(kInfinite, t.infinite);
  hand_in(kNan, t.nan);
  hand_in(kLargest, static_cast<int64_t>(float_bits(static_cast<float>(t.largest))));
  block_barrier();
  const int stat = static_cast<int>(threadIdx.x);
  if (stat >= kGradStats) return;
  int64_t all = 0;
  for (int warp = 0; warp < kWarps; ++warp) {
    const int64_t x = shared[stat].value[warp];
    all = stat != kLargest ? all + x : x > all ? x : all;
  }
  if (all == 0) return;
  if (stat == kLargest) {
    atomic_max(stats + stat, all);
  } else {
    atomic_add(stats + stat, all);
  }
}

// The chunks of a block, of `chunks` that all blocks share.
struct ChunkRange {
  int64_t first, last;
};

FE_DEVICE ChunkRange chunks_of_block(int64_t chunks) {
  const int64_t block = blockIdx.x, blocks = gridDim.x;
  return {chunks * block / blocks, chunks * (block + 1) / blocks};
}

FE_FUNCTION int64_t chunks_in(int64_t numel) { return ceil_div(numel, kSquareChunk); }

FE_DEVICE int64_t end_of_elements(int64_t chunk, int64_t numel) {
  const int64_t end = (chunk + 1) * kSquareChunk;
  return end < numel ? end : numel;
}

// visit(x, at) for the elements [first, end) of a chunk that the thread has, in ascending order: x, an array of
// kGranule or of 1, widened, begins at `at`. `vector`: granules are whole words. What the kernel writes itself is
// `kMutable`.
template <bool kMutable, typename T, typename Visit>
FE_DEVICE void for_granules(const T* x, int64_t first, int64_t end, bool vector, const Visit& visit) {
  using A = typename AccOf<T>::type;
  constexpr int kAhead = sizeof(T) == 8 ? 1 : 2;  // granules on the way at once
  constexpr int64_t kStride = kBlock * kGranule;
  for (int64_t at = first + threadIdx.x * kGranule; at < end; at += kAhead * kStride) {
    Vec<T, kGranule> stored[kAhead] = {};
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t here = at + u * kStride;
      if (!vector || here + kGranule > end) continue;
      stored[u] = kMutable ? load_mutable<kGranule>(x + here) : load<kGranule>(x + here);
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t here = at + u * kStride;
      if (vector && here + kGranule <= end) {
        A wide[kGranule];
#pragma unroll
        for (int v = 0; v < kGranule; ++v) wide[v] = widen(stored[u].item[v]);
        visit(wide, here);
        continue;
      }
      for (int64_t i = here; i < end && i < here + kGranule; ++i) {
        const Vec<T, 1> one = kMutable ? load_mutable<1>(x + i) : load<1>(x + i);
        const A wide[1] = {widen(one.item[0])};
        visit(wide, i);
      }
    }
  }
}

template <typename A>
FE_DEVICE A scale_or_one(const float* inv_scale) {
  return inv_scale == nullptr ? A{1} : static_cast<A>(*inv_scale);
}

template <int N, typename A>
FE_DEVICE void multiply(const A (&x)[N], A factor, A (&product)[N]) {
#pragma unroll
  for (int v = 0; v < N; ++v) product[v] = mul_rn(x[v], factor);
}

// ---- launch ------------------------------------------------------------------------------------------------------

inline unsigned grad_blocks(int64_t chunks) {
  return static_cast<unsigned>(chunks < kGradBlocks ? chunks : kGradBlocks);
}

// body(whether statistics, whether squares are asked for)
template <typename Body>
int with_findings(bool stats, bool squares, Body body) {
  if (stats) return squares ? body(std::true_type{}, std::true_type{}) : body(std::true_type{}, std::false_type{});
  return squares ? body(std::false_type{}, std::true_type{}) : body(std::false_type{}, std::false_type{});
}

}  // namespace fastemb::cuda
