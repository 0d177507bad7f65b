// How one operator of the older interface is written (see ../older.h for the interface itself).
//
//   OLDER(Mish, o.put(0, at::mish(wide(o.in[0]))))
//
// Inputs and outputs stand in the order in which op-plugin names them. A call that the line cannot compute
// throws Refused, as an aclnn operator does.
#pragma once

#include "../older.h"
#include "checks.h"

namespace cannsim {

struct Older {
  std::vector<at::Tensor> in, out;  // an optional input that is absent is undefined
  std::map<std::string, OlderAttribute> attributes;

  template <class T>
  T attribute(const char* name, T otherwise) const {
    auto found = attributes.find(name);
    if (found == attributes.end()) return otherwise;
    require(std::holds_alternative<T>(found->second), "attribute ", name, " has another type than cannsim knows");
    return std::get<T>(found->second);
  }
  std::vector<int64_t> constant(size_t i) const {  // a list of integers that torch_npu passes as a tensor
    at::Tensor values = in.at(i).to(at::kLong).contiguous();
    return {values.const_data_ptr<int64_t>(), values.const_data_ptr<int64_t>() + values.numel()};
  }
  // Writes with conversion to the dtype of the output; the same number of elements in another shape will do.
  void put(size_t i, const at::Tensor& result) const {
    const at::Tensor& to = out.at(i);
    to.copy_(result.sizes() == to.sizes() ? result : result.reshape(to.sizes()));
  }
};

using OlderBody = void (*)(const Older& o);

struct OlderEntry {
  OlderEntry(const char* name, OlderBody body);
};

}  // namespace cannsim

#define OLDER(name, ...) \
  static const cannsim::OlderEntry older_##name(#name, [](const cannsim::Older& o) { __VA_ARGS__; });
