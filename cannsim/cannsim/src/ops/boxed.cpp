// The opt-in net for the long tail: CANNSIM_BOXED=1 sends the aten operators of boxed_names.h to the
// CPU kernels, on the same memory, instead of to aclnn operators that are not simulated.
// CANNSIM_BOXED=name,name adds further operators. Off by default: then an operator without a
// simulation fails, so that a test notices it. Boxed operators launch nothing and check nothing; they are
// counted (cannsim.boxed()) and named at the end of the process.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_set>

#include "../core.h"
#include "boxed_names.h"

namespace cannsim {

// Waits for torch_npu's own queue and the device: the CPU is about to touch the memory.
static void synchronize() {
  using Function = void (*)(bool);
  static const auto function = reinterpret_cast<Function>(
      dlsym(dlopen("libtorch_npu.so", RTLD_NOLOAD | RTLD_LAZY), "_ZN7c10_npu20npuSynchronizeDeviceEb"));
  if (function) function(false);
}

static at::Tensor on_cpu(const at::Tensor& x) {
  if (!x.defined() || !x.is_privateuseone()) return x;
  auto options = x.options().device(at::kCPU).requires_grad(false);
  at::Tensor view = at::from_blob(x.mutable_data_ptr(), x.sizes(), x.strides(), options);
  if (x.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}

// Replaces the tensors of one call by CPU views and brings the results back.
class BoxedCall {
 public:
  void lower(c10::IValue& value, bool written) {
    if (value.isTensor()) {
      value = lower(value.toTensor(), written);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& x : value.toTensorVector()) list.push_back(lower(x, written));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& x : value.toOptionalTensorList().vec()) {
        list.push_back(x ? std::optional<at::Tensor>(lower(*x, written)) : x);
      }
      value = list;
    } else if (value.isDevice() && value.toDevice().is_privateuseone()) {
      device_ = value.toDevice();
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      value = c10::IValue();
    }
  }

  void finish_written() {
    for (auto& [npu, cpu] : written_) {
      if (!npu.defined() || npu.sizes() == cpu.sizes()) continue;
      npu.resize_(cpu.sizes());
      on_cpu(npu).copy_(cpu);
    }
  }

  void raise(c10::IValue& value) {
    if (value.isTensor()) {
      value = raise(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& x : value.toTensorVector()) list.push_back(raise(x));
      value = list;
    }
  }

 private:
  at::Tensor lower(const at::Tensor& x, bool written) {
    if (!x.defined() || !x.is_privateuseone()) return x;
    device_ = x.device();
    bool empty_output = written && x.numel() == 0;  // may be resized
    at::Tensor cpu = empty_output ? at::empty(x.sizes(), x.options().device(at::kCPU)) : on_cpu(x);
    if (written) written_.emplace_back(x, cpu);
    return cpu;
  }

  at::Tensor raise(const at::Tensor& y) {
    if (!y.defined() || !device_) return y;
    for (auto& [npu, cpu] : written_) {
      if (cpu.is_same(y)) return npu;
    }
    at::Tensor x = at::empty_strided(y.sizes(), y.strides(), y.options().device(*device_));
    if (y.numel()) on_cpu(x).copy_(y);
    return x;
  }

  std::optional<at::Device> device_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;
};

// What ran boxed in this process, told at its end.
class Tally {
 public:
  void add(const std::string& name) {
    std::lock_guard lock(mutex_);
    ++calls_[name];
    count_calls("boxed/" + name, 1);
  }
  ~Tally() {
    if (calls_.empty()) return;
    std::string names;
    for (const auto& [name, count] : calls_) names += " " + name + " x" + std::to_string(count);
    fprintf(stderr, "cannsim: not simulated, run boxed on the CPU:%s\n", names.c_str());
  }

 private:
  std::mutex mutex_;
  std::map<std::string, int> calls_;
};

static Tally& tally() {
  static Tally instance;
  return instance;
}

static void boxed(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  tally().add(operation.schema().name());
  synchronize();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto& schema = operation.schema();
  size_t first = stack->size() - schema.arguments().size();
  BoxedCall call;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    call.lower((*stack)[first + i], alias && alias->isWrite());
  }
  operation.callBoxed(stack);
  call.finish_written();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) call.raise((*stack)[i]);
}

static bool returns_view(const c10::FunctionSchema& schema) {
  for (const auto& value : schema.returns()) {
    if (value.alias_info() && !value.alias_info()->isWrite()) return true;
  }
  return false;
}

static std::unordered_set<std::string> chosen(const std::string& option) {
  std::unordered_set<std::string> names(std::begin(kBoxedNames), std::end(kBoxedNames));
  std::istringstream words(option);
  for (std::string word; std::getline(words, word, ',');) names.insert(word);
  return names;
}

// Runs when libopapi is loaded, which is after torch_npu has registered its kernels.
struct Install {
  Install() {
    const char* option = std::getenv("CANNSIM_BOXED");
    if (!option || !*option || std::string(option) == "0") return;
    auto names = chosen(option);
    library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__,
                                               __LINE__);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
      if (name.name.rfind("aten::", 0) != 0 || !names.count(name.name.substr(6))) continue;
      auto operation = dispatcher.findOp(name);
      if (!operation || !operation->hasSchema() || returns_view(operation->schema())) continue;
      if (!operation->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
      library->impl(toString(name).substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed>());
    }
  }
  std::unique_ptr<torch::Library> library;
};

static const Install install;

}  // namespace cannsim
