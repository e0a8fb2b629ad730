// Positions grouped by row: keys, then the sort and the scan of a `Library` (CUB in group_indices.cu), then segments.
// All on the device: the host learns no count.
#pragma once

#include "cuda/bags.cuh"

namespace fastemb::cuda {

// Rows below 2^32 - 1 sort as 32-bit keys, which halves what the sort moves.
inline bool narrow_keys(const Bags& bags) { return bags.num_embeddings < 0xffffffff; }

// Bits that tell keys 0 .. num_embeddings apart; num_embeddings itself marks positions that take no part.
inline int key_bits(int64_t num_embeddings) {
  int bits = 1;
  while (bits < 63 && (num_embeddings >> bits) != 0) ++bits;
  return bits;
}

template <typename K>
__global__ void __launch_bounds__(kBlock) make_keys(Bags bags, K* keys, int32_t* positions) {
  // Behind the last offset that closes a bag, and where there is no bag at all, positions lie in none.
  int64_t covered = bags.num_indices;
  if (bags.num_bags == 0) {
    covered = 0;
  } else if (bags.offsets != nullptr && bags.num_offsets > bags.num_bags) {
    covered = load_integer(bags.offsets, bags.offset_type, bags.num_bags);
  }
  for (int64_t p = flat_thread(); p < bags.num_indices; p += flat_threads()) {
    const int64_t row = load_integer(bags.indices, bags.index_type, p);
    keys[p] = static_cast<K>(p < covered && takes_part(bags, row) ? row : bags.num_embeddings);
    positions[p] = static_cast<int32_t>(p);
  }
}

// head[i] = 1 where a row's run begins among the sorted keys.
template <typename K>
__global__ void __launch_bounds__(kBlock) mark_heads(const K* keys, int64_t n, K none, int32_t* head) {
  for (int64_t i = flat_thread(); i < n; i += flat_threads()) {
    head[i] = keys[i] != none && (i == 0 || keys[i] != keys[i - 1]) ? 1 : 0;
  }
}

// rank[i] = heads at or before i. Exactly one i in [0, n] is where the runs of rows end; it closes the last segment.
template <typename K>
__global__ void __launch_bounds__(kBlock)
    write_segments(const K* keys, const int32_t* rank, int64_t n, K none, Groups groups) {
  for (int64_t i = flat_thread(); i <= n; i += flat_threads()) {
    const K key = i < n ? keys[i] : none;
    const bool run_before = i > 0 && keys[i - 1] != none;
    if (key != none) {
      if (run_before && keys[i - 1] == key) continue;
      groups.rows[rank[i] - 1] = static_cast<int64_t>(key);
      groups.segments[rank[i] - 1] = static_cast<int32_t>(i);
    } else if (i == 0 || run_before) {
      const int32_t num_rows = i == 0 ? 0 : rank[i - 1];
      groups.segments[num_rows] = static_cast<int32_t>(i);
      *groups.num_rows = num_rows;
    }
  }
}

FE_FUNCTION constexpr int64_t round_up(int64_t bytes) { return ceil_div(bytes, 256) * 256; }

// How scratch is divided: keys, sorted keys, positions (after the sort: ranks), the library's own. total is -1 when the
// library cannot tell its need.
struct GroupScratch {
  int64_t sorted_keys;
  int64_t positions;
  int64_t library;
  int64_t total;
};

template <typename Library>
GroupScratch group_scratch(const Bags& bags) {
  const int64_t n = bags.num_indices;
  const int64_t keys = round_up(n * (narrow_keys(bags) ? 4 : 8));
  const int64_t library = Library::scratch_bytes(narrow_keys(bags), n, key_bits(bags.num_embeddings));
  const int64_t own = 2 * keys + round_up(4 * n);
  return {keys, 2 * keys, own, library < 0 ? -1 : own + round_up(library)};
}

template <typename Library, typename K>
int launch_group_indices_as(const GroupIndices& a, Stream stream) {
  const Bags& bags = a.bags;
  const int64_t n = bags.num_indices;
  const GroupScratch at = group_scratch<Library>(bags);
  char* scratch = static_cast<char*>(a.scratch);
  K* keys = reinterpret_cast<K*>(scratch);
  K* sorted = reinterpret_cast<K*>(scratch + at.sorted_keys);
  int32_t* positions = reinterpret_cast<int32_t*>(scratch + at.positions);
  void* own = scratch + at.library;
  const int64_t own_bytes = at.total - at.library;
  const K none = static_cast<K>(bags.num_embeddings);
  int32_t* rank = positions;
  if (n > 0) {
    if (int error = FE_LAUNCH(make_keys<K>, flat_grid(n), kBlock, stream, bags, keys, positions)) return error;
    if (int error = Library::sort_pairs(own, own_bytes, keys, sorted, positions, a.groups.order, n,
                                        key_bits(bags.num_embeddings), stream)) {
      return error;
    }
    if (int error = FE_LAUNCH(mark_heads<K>, flat_grid(n), kBlock, stream, sorted, n, none, rank)) return error;
    if (int error = Library::inclusive_sum(own, own_bytes, rank, n, stream)) return error;
  }
  return FE_LAUNCH(write_segments<K>, flat_grid(n + 1), kBlock, stream, sorted, rank, n, none, a.groups);
}

template <typename Library>
int launch_group_indices(const GroupIndices& a, Stream stream) {
  return narrow_keys(a.bags) ? launch_group_indices_as<Library, uint32_t>(a, stream)
                             : launch_group_indices_as<Library, uint64_t>(a, stream);
}

}  // namespace fastemb::cuda
