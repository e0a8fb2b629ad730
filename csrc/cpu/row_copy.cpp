// Rows gathered, scattered, or both, between tables of records and arrays.
#include "cpu/kernels.h"
#include "cpu/pieces.h"

namespace fastemb::cpu::FE_ISA {

void row_copy(const RowCopy& p, const Parallel& parallel) {
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      if (k + kRowsAhead < end) {
        prefetch_row(p.from, p.from_rows, k + kRowsAhead);
        prefetch_row<true>(p.to, p.to_rows, k + kRowsAhead);
      }
      const int64_t to = number(p.to_rows, k), from = number(p.from_rows, k);
      for (int32_t i = 0; i < p.to.count; ++i) {
        memcpy(piece(p.to, i, to), piece(p.from, i, from), static_cast<size_t>(p.to.bytes[i]));
      }
    }
  };
  for_rows(p.num_rows, p.to, parallel, run);
}

}  // namespace fastemb::cpu::FE_ISA
