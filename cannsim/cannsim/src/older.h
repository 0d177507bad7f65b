// The older operator interface (aclopCompileAndExecute), between the runtime that receives a call
// (runtime/op_compiler.cpp) and the library that computes it (ops/older*.cpp).
#pragma once

#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "core.h"

namespace cannsim {

struct OlderTensor {
  aclDataType type;
  std::vector<int64_t> dims;
  void* data;                               // nullptr: an optional argument that is absent
  std::shared_ptr<std::vector<char>> host;  // a constant of the host: a copy, since the caller's may go
};

using OlderAttribute =
    std::variant<bool, int64_t, float, std::string, std::vector<int64_t>, std::vector<float>, aclDataType>;

struct OlderCall {
  std::string name;
  std::vector<OlderTensor> inputs, outputs;
  std::map<std::string, OlderAttribute> attributes;
};

// Puts the operator on the stream, or sets the error of a fault. False: it is not simulated.
using OlderLibrary = bool (*)(const OlderCall& call, aclrtStream stream, int* error);

// Called by libopapi when it is loaded.
CANNSIM_API void provide_older(OlderLibrary library);

}  // namespace cannsim
