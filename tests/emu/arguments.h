// What the modules over the emulated kernels share: arguments from Python, launch errors, the order of threads.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/primitives.cuh"

namespace py = pybind11;

namespace fastemb_emu {

// Keyword arguments by name; a name that nobody reads is an error of the test.
class Arguments {
 public:
  explicit Arguments(const py::kwargs& values) : values_(values) {}

  template <typename T>
  T number(const char* name) {
    ++read_;
    return values_[name].cast<T>();
  }

  template <typename T>
  T* pointer(const char* name) {
    return reinterpret_cast<T*>(number<uintptr_t>(name));
  }

  template <typename T>
  T choice(const char* name) {
    return static_cast<T>(number<int32_t>(name));
  }

  void finish() const {
    if (read_ != values_.size()) throw py::type_error("unknown arguments");
  }

 private:
  py::kwargs values_;
  size_t read_ = 0;
};

inline void check(int error) {
  if (error != 0) throw std::runtime_error("launch failed: " + std::to_string(error));
}

inline void set_order(const std::string& order, uint64_t seed) {
  options() = {order == "forward" ? Order::forward : order == "backward" ? Order::backward : Order::shuffled, seed};
}

inline void define_set_order(py::module_& m) { m.def("set_order", &set_order, py::arg("order"), py::arg("seed") = 0); }

}  // namespace fastemb_emu
