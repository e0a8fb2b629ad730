// Reading bags on the device, never out of bounds, whatever the caller's indices and offsets hold.
#pragma once

#include "cuda/primitives.cuh"

namespace fastemb::cuda {

// Bag b as the half-open range of its positions. A bag with a wrong offset is empty, and `wrong` is that offset's place.
struct BagRange {
  int64_t begin;
  int64_t end;
  int64_t wrong;
};

FE_DEVICE BagRange bag_range(const Bags& bags, int64_t b) {
  if (bags.offsets == nullptr) return {b * bags.bag_length, (b + 1) * bags.bag_length, -1};
  const int64_t begin = load_integer(bags.offsets, bags.offset_type, b);
  const int64_t end =
      b + 1 < bags.num_offsets ? load_integer(bags.offsets, bags.offset_type, b + 1) : bags.num_indices;
  if (begin < 0 || begin > bags.num_indices || (b == 0 && begin != 0)) return {0, 0, b};
  if (end < begin || end > bags.num_indices) return {0, 0, b + 1};
  return {begin, end, -1};
}

// As bag_range, and the report where `reporter` is set.
FE_DEVICE BagRange checked_bag_range(const Bags& bags, int64_t b, ErrorReport* error, bool reporter) {
  const BagRange range = bag_range(bags, b);
  if (range.wrong >= 0 && reporter) {
    report(error, ErrorReport::bad_offset, range.wrong, load_integer(bags.offsets, bags.offset_type, range.wrong),
           bags.num_indices);
  }
  return range;
}

FE_DEVICE bool in_table(const Bags& bags, int64_t row) { return row >= 0 && row < bags.num_embeddings; }

// Does the position's row take part in sums and counts?
FE_DEVICE bool takes_part(const Bags& bags, int64_t row) { return in_table(bags, row) && row != bags.padding_idx; }

// The bag of position p, or -1: the last bag that begins at or before p, if it also reaches p.
FE_DEVICE int32_t find_bag(const Bags& bags, int64_t p) {
  int64_t low = 0;
  int64_t high = bags.num_bags;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (load_integer(bags.offsets, bags.offset_type, middle) <= p) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == 0) return -1;
  const BagRange range = bag_range(bags, low - 1);
  return range.begin <= p && p < range.end ? static_cast<int32_t>(low - 1) : -1;
}

// bag_of[p] for bags with offsets.
__global__ void __launch_bounds__(kBlock) find_bags(Bags bags, int32_t* bag_of) {
  for (int64_t p = flat_thread(); p < bags.num_indices; p += flat_threads()) bag_of[p] = find_bag(bags, p);
}

// The same without a search where bags have one length. Positions fit 31 bits.
FE_DEVICE int64_t bag_at(const Bags& bags, const int32_t* bag_of, int64_t p) {
  if (bags.offsets != nullptr) return load<1>(bag_of + p).item[0];
  if (bags.bag_length == 1) return p;
  return static_cast<uint32_t>(p) / static_cast<uint32_t>(bags.bag_length);
}

// count[b] = positions of bag b that take part. One warp a bag.
template <typename A>
__global__ void __launch_bounds__(kBlock) count_bags(Bags bags, A* count) {
  const Place at = place(kWarp);
  for (int64_t b = at.item; b < bags.num_bags; b += at.step) {
    const BagRange range = bag_range(bags, b);
    int64_t n = 0;
    for (int64_t p = range.begin + at.lane; p < range.end; p += kWarp) {
      n += takes_part(bags, load_integer(bags.indices, bags.index_type, p)) ? 1 : 0;
    }
    n = warp_sum(n);
    if (at.lane == 0) count[b] = static_cast<A>(n);
  }
}

// What the backward passes ask about bags, written where they need it: bag_of for bags with offsets, count for mean.
template <typename A>
int describe_bags(const Bags& bags, Mode mode, int32_t* bag_of, A* count, Stream stream) {
  if (bags.offsets != nullptr) {
    if (int error = FE_LAUNCH(find_bags, flat_grid(bags.num_indices), kBlock, stream, bags, bag_of)) return error;
  }
  if (mode == Mode::mean && bags.num_bags > 0) {
    if (int error = FE_LAUNCH(count_bags<A>, flat_grid(bags.num_bags * kWarp), kBlock, stream, bags, count)) {
      return error;
    }
  }
  return 0;
}

}  // namespace fastemb::cuda
