// The checks of ids and offsets that precede every lookup.
#pragma once

#include "cpu/vec.h"

namespace fastemb::cpu::FE_ISA {

template <typename I>
FE_FUNCTION bool ids_in_range(const Bags& bags, int64_t begin, int64_t end) {
  const I* indices = static_cast<const I*>(bags.indices);
  const uint64_t limit = static_cast<uint64_t>(bags.num_embeddings);
  uint64_t bad = 0;
  for (int64_t i = begin; i < end; ++i) {
    bad |= static_cast<uint64_t>(static_cast<uint64_t>(int64_t{indices[i]}) >= limit);
  }
  return bad == 0;
}

// Call it when there is one.
template <typename I>
FE_FUNCTION ErrorReport first_bad_id(const Bags& bags) {
  int64_t i = 0;
  while (ids_in_range<I>(bags, i, i + 1)) ++i;
  return {ErrorReport::bad_index, 0, i, load_index(bags.indices, bags.index_type, i), bags.num_embeddings};
}

}  // namespace fastemb::cpu::FE_ISA
