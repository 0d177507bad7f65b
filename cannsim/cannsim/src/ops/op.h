// How one aclnn operator is written. Included by every file of this folder.
//
//   OP(Maximum, (In self, In other, Out out),              // the C parameters, in the public order
//      (dtype(self, kReal), broadcast(out, self, other)),  // what the real library refuses
//      at::maximum_out(out, self, other))                  // what it computes
//
// defines and exports aclnnMaximumGetWorkspaceSize and aclnnMaximum:
//  - the first converts the C arguments, refuses a null pointer (161001), runs the checks (161002)
//    and keeps a task that owns copies of all arguments, because callers destroy theirs at once;
//  - the second counts the launch and puts the task on the stream.
//
// Parameter types: In, Out (also for tensors updated in place), OptIn and OptOut (may be null),
// Num and OptNum (aclScalar), Ints, OptInts, Bools, Floats, InList, OutList, OptInList, NumList,
// Text (char*), and the plain types int64_t, uint64_t, int, int8_t, bool, float, double, aclDataType.
// float and double, and the order, decide registers: take them from the public prototype.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "../core.h"

// Operators accept the whole public parameter list and use what matters for the result.
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wattribute-alias="  // resolvers return an untyped address

// ---- the opaque objects of the aclnn interface --------------------------------------------------

struct aclTensor {
  at::Tensor tensor;  // a CPU tensor on the simulated device memory, with the caller's strides
  aclFormat format;
  // Shape found while running, for operators whose output size depends on data (Nonzero ...).
  std::shared_ptr<std::vector<int64_t>> found_shape;
};
struct aclScalar {
  at::Scalar value;
  aclDataType dtype;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclFloatArray {
  std::vector<float> values;
};
struct aclBoolArray {
  std::vector<uint8_t> values;
};
struct aclTensorList {
  std::vector<const aclTensor*> items;
};
struct aclScalarList {
  std::vector<const aclScalar*> items;
};
struct aclOpExecutor {
  std::function<void()> task;
  size_t bytes = 0;      // memory the operator reads and writes
  size_t workspace = 0;  // device memory that it needs beside its arguments while it runs
  int inner = 0;         // kernels that it launches before its own, to make arguments contiguous
  bool aicpu = false;    // runs on the AICPU of this chip, in this dtype
  bool repeatable = false;
};

namespace cannsim {

constexpr int kNullArgument = 161001;     // ACLNN_ERR_PARAM_NULLPTR
constexpr int kInvalidArgument = 161002;  // ACLNN_ERR_PARAM_INVALID
constexpr int kKernelFailed = 507015;     // ACL_ERROR_RT_AICORE_EXCEPTION

// Thrown while an operator is prepared; becomes the return code and the EZ1001 text.
struct Refused {
  int code;
  std::string text;
};

at::ScalarType to_torch(aclDataType dtype);

// ---- parameter types ----------------------------------------------------------------------------

// A tensor argument is an at::Tensor that knows its parameter name, for messages.
struct In : at::Tensor {
  In(const at::Tensor& tensor, std::string name) : at::Tensor(tensor), name(std::move(name)) {}
  std::string name;
};

struct Out : In {
  Out(const aclTensor& source, std::string name)
      : In(source.tensor, std::move(name)), found_shape(source.found_shape) {}
  Out(const Out&) = default;
  // Writes `result` with conversion to the dtype and strides of the output.
  void operator=(const at::Tensor& result) const;
  // For outputs whose size is known only now: writes and reports the shape.
  void resize_and_write(const at::Tensor& result) const;
  std::shared_ptr<std::vector<int64_t>> found_shape;
};

struct OptIn : In {
  using In::In;
  bool given() const { return defined() && numel() > 0; }
  std::optional<at::Tensor> optional() const {
    return defined() ? std::optional<at::Tensor>(*this) : std::nullopt;
  }
};

struct OptOut : In {
  using In::In;
  bool given() const { return defined() && numel() > 0; }
  void operator=(const at::Tensor& result) const;
};

struct Num : at::Scalar {
  Num(const aclScalar& source, std::string) : at::Scalar(source.value) {}
};
using OptNum = std::optional<at::Scalar>;

using Ints = const std::vector<int64_t>&;
struct OptInts : std::vector<int64_t> {  // a null array is an empty one, as in the public interface
  using std::vector<int64_t>::vector;
  at::OptionalIntArrayRef optional() const {  // empty means: all dimensions
    return empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(*this);
  }
};
using Floats = const std::vector<float>&;
using Bools = const std::vector<uint8_t>&;
using NumList = const std::vector<at::Scalar>&;
using Text = const std::string&;

struct Tensors : std::vector<at::Tensor> {
  std::string name;
};
struct MaybeTensors : Tensors {  // items, or the whole list, may be null: undefined tensors
  bool given() const { return !empty() && front().defined(); }
};
struct Outputs : Tensors {
  void write(size_t i, const at::Tensor& result) const;
};
using InList = const Tensors&;
using OptInList = const MaybeTensors&;
using OutList = const Outputs&;

// ---- from C arguments to parameter types --------------------------------------------------------

[[noreturn]] void refuse_null(const std::string& name);

// Convert<P>::Raw is the C type of a parameter P, Convert<P>::from makes the value.
template <class P>
struct Convert {  // plain numbers
  using Raw = P;
  static P from(P raw, const std::string&) { return raw; }
};

template <class P, class Object>
struct ConvertRequired {
  using Raw = const Object*;
  static P from(Raw raw, const std::string& name) {
    if (!raw) refuse_null(name);
    return P(*raw, name);
  }
};
template <>
struct Convert<Out> : ConvertRequired<Out, aclTensor> {};
template <>
struct Convert<Num> : ConvertRequired<Num, aclScalar> {};
template <>
struct Convert<In> {
  using Raw = const aclTensor*;
  static In from(Raw raw, const std::string& name) {
    if (!raw) refuse_null(name);
    return In(raw->tensor, name);
  }
};

template <class P>
struct ConvertOptionalTensor {
  using Raw = const aclTensor*;
  static P from(Raw raw, const std::string& name) { return P(raw ? raw->tensor : at::Tensor(), name); }
};
template <>
struct Convert<OptIn> : ConvertOptionalTensor<OptIn> {};
template <>
struct Convert<OptOut> : ConvertOptionalTensor<OptOut> {};

template <>
struct Convert<OptNum> {
  using Raw = const aclScalar*;
  static OptNum from(Raw raw, const std::string&) { return raw ? OptNum(raw->value) : OptNum(); }
};

template <class P, class Object>
struct ConvertArray {
  using Raw = const Object*;
  static P from(Raw raw, const std::string& name) {
    if (!raw) refuse_null(name);
    return raw->values;
  }
};
template <>
struct Convert<std::vector<int64_t>> : ConvertArray<std::vector<int64_t>, aclIntArray> {};
template <>
struct Convert<std::vector<float>> : ConvertArray<std::vector<float>, aclFloatArray> {};
template <>
struct Convert<std::vector<uint8_t>> : ConvertArray<std::vector<uint8_t>, aclBoolArray> {};
template <>
struct Convert<OptInts> {
  using Raw = const aclIntArray*;
  static OptInts from(Raw raw, const std::string&) {
    return raw ? OptInts(raw->values.begin(), raw->values.end()) : OptInts();
  }
};

template <class P>
struct ConvertTensorList {
  using Raw = const aclTensorList*;
  static P from(Raw raw, const std::string& name) {
    constexpr bool nullable = std::is_same_v<P, MaybeTensors>;
    if (!raw && !nullable) refuse_null(name);
    P list;
    list.name = name;
    if (!raw) return list;
    for (const aclTensor* item : raw->items) {
      if (!item && !nullable) refuse_null(name);
      list.push_back(item ? item->tensor : at::Tensor());
    }
    return list;
  }
};
template <>
struct Convert<Tensors> : ConvertTensorList<Tensors> {};
template <>
struct Convert<MaybeTensors> : ConvertTensorList<MaybeTensors> {};
template <>
struct Convert<Outputs> : ConvertTensorList<Outputs> {};

template <>
struct Convert<std::vector<at::Scalar>> {
  using Raw = const aclScalarList*;
  static std::vector<at::Scalar> from(Raw raw, const std::string& name) {
    if (!raw) refuse_null(name);
    std::vector<at::Scalar> values;
    for (const aclScalar* item : raw->items) values.push_back(item->value);
    return values;
  }
};

template <>
struct Convert<std::string> {
  using Raw = const char*;
  static std::string from(Raw raw, const std::string&) { return raw ? raw : ""; }
};

template <class Parameter>
using RawOf = typename Convert<std::decay_t<Parameter>>::Raw;

// ---- the generic body of aclnnXxxGetWorkspaceSize and aclnnXxx ----------------------------------

// What an OP line says about itself; the table of `python -m cannsim operators` is made from these.
struct Declaration {
  Declaration(const char* name, const char* parameters, const char* checks, const char* file);
  const char* name;
  const char* parameters;
  const char* checks;
  const char* file;
  std::vector<std::string> names;  // of the parameters
};

// Facts about one argument that every operator needs.
void refuse_missing_dtype(const at::Tensor& tensor, const std::string& name);
inline size_t bytes_of(const at::Tensor& tensor) { return tensor.defined() ? tensor.nbytes() : 0; }

template <class P>
size_t inspect(const P& argument) {
  if constexpr (std::is_base_of_v<at::Tensor, P>) {
    refuse_missing_dtype(argument, argument.name);
    return bytes_of(argument);
  } else if constexpr (std::is_base_of_v<Tensors, P>) {
    size_t total = 0;
    for (const at::Tensor& item : argument) {
      refuse_missing_dtype(item, argument.name);
      total += bytes_of(item);
    }
    return total;
  } else {
    return 0;
  }
}

// The tensors of one argument, for what depends on all of them.
template <class P>
void gather_tensors(const P& argument, std::vector<at::Tensor>& tensors) {
  if constexpr (std::is_base_of_v<at::Tensor, P>) {
    tensors.push_back(argument);
  } else if constexpr (std::is_base_of_v<Tensors, P>) {
    tensors.insert(tensors.end(), argument.begin(), argument.end());
  }
}

// Fills in workspace, inner and aicpu (cost.cpp).
void estimate(const Declaration& operation, const std::vector<at::Tensor>& tensors, aclOpExecutor& made);

// In saturation mode an inf or nan in a result sets the float status, also where it was asked for, as by
// a fill with -inf; half precision then holds the largest number, or 0 for nan.
void saturate(const at::Tensor& out);

template <class P>
void settle(const P& argument) {
  if constexpr (std::is_base_of_v<Out, P> || std::is_base_of_v<OptOut, P>) {
    saturate(argument);
  } else if constexpr (std::is_base_of_v<Outputs, P>) {
    for (const at::Tensor& item : argument) saturate(item);
  }
}

// Runs `make` and turns what it refuses into a return code.
int prepare(const Declaration& operation, uint64_t* workspace, aclOpExecutor** executor,
            const std::function<void(aclOpExecutor&)>& make);
int launch(const char* name, aclOpExecutor* executor, aclrtStream stream);

template <class Function>
struct Entry;

template <class... P>
struct Entry<void(P...)> {
  template <void (*check)(P...), void (*run)(P...), const Declaration& operation>
  static int workspace(RawOf<P>... raw, uint64_t* size, aclOpExecutor** executor) {
    return prepare(operation, size, executor, [&](aclOpExecutor& made) {
      auto arguments = [&]<size_t... i>(std::index_sequence<i...>) {
        return std::tuple<std::decay_t<P>...>{Convert<std::decay_t<P>>::from(raw, operation.names[i])...};
      }(std::index_sequence_for<P...>());
      std::apply(check, arguments);
      std::vector<at::Tensor> tensors;
      std::apply([&](const auto&... argument) { made.bytes = (inspect(argument) + ... + 0); }, arguments);
      std::apply([&](const auto&... argument) { (gather_tensors(argument, tensors), ...); }, arguments);
      estimate(operation, tensors, made);
      made.task = [arguments = std::move(arguments)] {
        std::apply(run, arguments);
        if (saturating()) std::apply([](const auto&... argument) { (settle(argument), ...); }, arguments);
      };
    });
  }
};

}  // namespace cannsim

#define CANNSIM_UNWRAP(...) __VA_ARGS__

// The parameters of the exported function follow from the declared ones by template deduction, and
// a template has no C name. An indirect function (GNU ifunc) gives it one: the loader calls the
// resolver once and uses the address that it returns.
#define OP(...) CANNSIM_OP(__VA_ARGS__)  // so that macros in the arguments are expanded first
#define CANNSIM_OP(name, parameters, checks, ...)                                                    \
  namespace cannsim::op_##name {                                                                     \
  static void check(CANNSIM_UNWRAP parameters) { CANNSIM_UNWRAP checks; }                            \
  static void run(CANNSIM_UNWRAP parameters) { __VA_ARGS__; }                                        \
  static const Declaration operation("aclnn" #name, #parameters, #checks, __FILE__);                 \
  }                                                                                                  \
  extern "C" __attribute__((visibility("hidden"))) void* cannsim_resolve_##name() {                  \
    namespace here = cannsim::op_##name;                                                             \
    using Entry = cannsim::Entry<std::remove_pointer_t<decltype(&here::run)>>;                       \
    return reinterpret_cast<void*>(&Entry::workspace<&here::check, &here::run, here::operation>);    \
  }                                                                                                  \
  extern "C" CANNSIM_API int aclnn##name##GetWorkspaceSize()                                         \
      __attribute__((ifunc("cannsim_resolve_" #name)));                                              \
  extern "C" CANNSIM_API int aclnn##name(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) { \
    return cannsim::launch("aclnn" #name, executor, stream);                                         \
  }
