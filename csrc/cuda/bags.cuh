// Reading bags on the device, never out of bounds, whatever the caller's indices and offsets hold.
#pragma once

#include "cuda/primitives.cuh"

namespace fastemb::cuda {

// Bag b as the half-open range of its positions. A bag with a wrong offset is empty, and `wrong` is that offset's
// place.
struct BagRange {
  int64_t begin;
  int64_t end;
  int64_t wrong;
};

FE_DEVICE BagRange bag_range(const Bags& bags, int64_t b) {
  if (bags.offsets == nullptr) return {b * bags.bag_length, (b + 1) * bags.bag_length, -1};
  const int64_t begin = load_integer(bags.offsets, bags.offset_type, b);
  const int64_t end = b + 1 < bags.num_offsets ? load_integer(bags.offsets, bags.offset_type, b + 1) : bags.num_indices;
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

}  // namespace fastemb::cuda
