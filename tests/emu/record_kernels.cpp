// The launchers of the record operators as a Python module, run by cuda_emu.h.

// So few that a block goes round over rows.
#define FASTEMB_RECORD_BLOCKS 3

#include "arguments.h"
#include "cuda/checksum.cuh"
#include "cuda/row_copy.cuh"

using namespace fastemb;
using namespace fastemb::cuda;
using fastemb_emu::Arguments;
using fastemb_emu::check;

namespace {

// A list of (address, stride, bytes), and how many rows there are.
RowPieces pieces_of(Arguments& in, const char* name, const char* rows) {
  RowPieces pieces{};
  for (const py::handle& piece : in.number<py::list>(name)) {
    const auto [address, stride, bytes] = piece.cast<std::tuple<uintptr_t, int64_t, int64_t>>();
    pieces.data[pieces.count] = reinterpret_cast<void*>(address);
    pieces.strides[pieces.count] = stride;
    pieces.bytes[pieces.count++] = bytes;
  }
  pieces.rows = in.number<int64_t>(rows);
  return pieces;
}

void run_row_copy(const py::kwargs& values) {
  Arguments in(values);
  const RowCopy p = {.to = pieces_of(in, "to", "to_limit"),
                     .from = pieces_of(in, "from", "from_limit"),
                     .to_rows = in.pointer<int64_t>("to_rows"),
                     .from_rows = in.pointer<int64_t>("from_rows"),
                     .num_rows = in.number<int64_t>("num_rows"),
                     .error = in.pointer<ErrorReport>("error")};
  in.finish();
  check(launch_row_copy(p, nullptr));
}

void run_checksum(const py::kwargs& values) {
  Arguments in(values);
  const Checksum p = {.mode = in.choice<ChecksumMode>("mode"),
                      .pieces = pieces_of(in, "pieces", "limit"),
                      .headers = in.pointer<void>("headers"),
                      .header_stride = in.number<int64_t>("header_stride"),
                      .at = in.pointer<int64_t>("at"),
                      .rows = in.pointer<int64_t>("rows"),
                      .versions = in.pointer<int64_t>("versions"),
                      .num_rows = in.number<int64_t>("num_rows"),
                      .seed = static_cast<uint64_t>(in.number<int64_t>("seed")),
                      .output = in.pointer<uint64_t>("output"),
                      .found = in.pointer<int64_t>("found"),
                      .error = in.pointer<ErrorReport>("error")};
  in.finish();
  check(launch_checksum(p, nullptr));
}

}  // namespace

PYBIND11_MODULE(fastemb_emu_record_kernels, m) {
  fastemb_emu::define_set_order(m);
  m.def("row_copy", &run_row_copy);
  m.def("checksum", &run_checksum);
}
