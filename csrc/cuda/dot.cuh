// The `dot` order of ops.h on a group of lanes: kDotLanes partial sums, eight neighbours in the registers of each lane.
//
// Lane l holds partial sums 8 l .. 8 l + 7. Folding in halves h = 128, 64, 32, 16, 8 adds what lanes 16, 8, 4, 2, 1
// apart hold, and h = 4, 2, 1 stays within a lane. A group may have fewer than 32 lanes when dim is small: the partial
// sums it lacks are +0, and adding +0 to a partial sum changes nothing (it began at +0, so it is never -0).
#pragma once

#include "cuda/primitives.cuh"

namespace fastemb::cuda {

inline constexpr int kDotLane = static_cast<int>(kDotLanes) / kWarp;
static_assert(kDotLane == 8);

template <typename A>
struct DotLanes {
  A part[kDotLane] = {};
};

// Elements [d, d + 8) of a row as accumulators; how many of them the row has.
template <bool kVectors, typename T, typename A>
FE_DEVICE int load_dot_lane(const T* row, int64_t d, int64_t dim, A (&x)[kDotLane]) {
  if constexpr (kVectors) {
    constexpr int V = kVector<T>;
#pragma unroll
    for (int i = 0; i < kDotLane; i += V) {
      const Vec<T, V> y = load<V>(row + d + i);
#pragma unroll
      for (int v = 0; v < V; ++v) x[i + v] = widen(y.item[v]);
    }
    return kDotLane;
  } else {
    const int count = dim - d < kDotLane ? static_cast<int>(dim - d) : kDotLane;
#pragma unroll
    for (int v = 0; v < kDotLane; ++v) x[v] = v < count ? widen(load<1>(row + d + v).item[0]) : A(0);
    return count;
  }
}

// The folded value, in every lane of the group. All lanes of the warp take part.
template <typename A, typename Join>
FE_DEVICE A fold(DotLanes<A>& sum, int32_t lanes, Join join) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int v = 0; v < kDotLane; ++v) sum.part[v] = join(sum.part[v], exchange(sum.part[v], distance));
  }
#pragma unroll
  for (int h = kDotLane / 2; h > 0; h /= 2) {
#pragma unroll
    for (int v = 0; v < h; ++v) sum.part[v] = join(sum.part[v], sum.part[v + h]);
  }
  return sum.part[0];
}

inline int32_t dot_group(int64_t dim) { return group_lanes(ceil_div(dim < kDotLanes ? dim : kDotLanes, kDotLane)); }

// May rows be read eight elements at a time?
inline bool dot_vectors(const void* rows, int64_t stride, int64_t dim, int64_t element_bytes) {
  return dim % kDotLane == 0 && stride * element_bytes % 16 == 0 && aligned(rows, 16);
}

}  // namespace fastemb::cuda
