// What all operators share: preparing, launching, running, and writing results.
#include "op.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <unistd.h>

#include <cstring>
#include <exception>

#include "checks.h"

namespace cannsim {

// Every OP line of the library, in link order.
static std::vector<const Declaration*>& declarations() {
  static std::vector<const Declaration*> all;
  return all;
}

// "(In self, const std::vector<int64_t>& dim)" -> {"self", "dim"}
static std::vector<std::string> parameter_names(const std::string& parameters) {
  std::vector<std::string> names;
  std::string word;
  for (char c : parameters) {
    if (c == ',' || c == ')') {
      names.push_back(word);
      word.clear();
    } else if (c == ' ' || c == '(') {
      word.clear();
    } else {
      word += c;
    }
  }
  return names;
}

Declaration::Declaration(const char* name, const char* parameters, const char* checks, const char* file)
    : name(name), parameters(parameters), checks(checks), file(file), names(parameter_names(parameters)) {
  declarations().push_back(this);
}

void refuse_null(const std::string& name) {
  throw Refused{kNullArgument, "Expected a value for argument [" + name + "] but instead found nullptr."};
}

static std::string error_text(const char* code, const char* operation, const std::string& text) {
  return std::string(code) + ": [PID: " + std::to_string(getpid()) + "] Call " + operation + " failed. " + text;
}

int prepare(const Declaration& operation, uint64_t* workspace, aclOpExecutor** executor,
            const std::function<void(aclOpExecutor&)>& make) {
  auto made = std::make_unique<aclOpExecutor>();
  try {
    make(*made);
  } catch (const Refused& refused) {
    set_error(error_text("EZ1001", operation.name, refused.text));
    return refused.code;
  } catch (const c10::Error& error) {  // a check tripped over a shape
    set_error(error_text("EZ1001", operation.name, error.what_without_backtrace()));
    return kInvalidArgument;
  }
  *workspace = made->workspace;
  *executor = made.release();
  return 0;
}

// Runs on the worker thread of a stream. The caller's dispatch state must not leak into it, and no
// autograd graph is wanted.
int run_task(const char* name, const std::function<void()>& task) {
  try {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::NoGradGuard no_grad;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    task();
    return 0;
  } catch (const c10::Error& error) {
    set_error(error_text("EZ9999", name, std::string("fault kernel_name=") + name + ", " +
                                                   error.what_without_backtrace()));
  } catch (const Refused& refused) {
    set_error(error_text("EZ9999", name, std::string("fault kernel_name=") + name + ", " + refused.text));
  } catch (const std::exception& error) {
    set_error(error_text("EZ9999", name, std::string("fault kernel_name=") + name + ", " + error.what()));
  }
  return kKernelFailed;
}

int launch(const char* name, aclOpExecutor* executor, aclrtStream stream) {
  if (!executor) return kNullArgument;
  if (int error = enter(name)) {
    if (!executor->repeatable) delete executor;
    return error;
  }
  count_bytes(name, executor->bytes);
  if (executor->aicpu) count_calls(std::string("aicpu/") + name, 1);
  if (executor->inner) count_calls(std::string("inner/") + name, executor->inner);
  if (executor->repeatable) {
    enqueue(stream, name, [name, task = executor->task] { return run_task(name, task); });
  } else {
    enqueue(stream, name, [name, task = std::move(executor->task)] { return run_task(name, task); });
    delete executor;
  }
  return 0;
}

void saturate(const at::Tensor& out) {
  if (!out.defined() || !at::isFloatingType(out.scalar_type())) return;
  if (at::isfinite(out).all().item<bool>()) return;
  note_overflow();
  if (out.scalar_type() == at::kHalf) out.copy_(at::nan_to_num(out.to(at::kFloat), 0.0, 65504.0, -65504.0));
}

static void write(const at::Tensor& out, const at::Tensor& result) {
  if (!out.defined() || !result.defined()) return;
  bool reshaped = out.sizes() != result.sizes() && out.numel() == result.numel();
  out.copy_(reshaped ? result.reshape(out.sizes()) : result);
}

void Out::operator=(const at::Tensor& result) const { write(*this, result); }
void OptOut::operator=(const at::Tensor& result) const { write(*this, result); }
void Outputs::write(size_t i, const at::Tensor& result) const { cannsim::write(at(i), result); }

void Out::resize_and_write(const at::Tensor& result) const {
  at::Tensor value = result.to(scalar_type()).contiguous();
  std::memcpy(mutable_data_ptr(), value.const_data_ptr(), value.nbytes());
  *found_shape = value.sizes().vec();
}

// One line per operator: name, parameters, checks, file, separated by tabs. Read from Python by
// cannsim/operators_table.py.
extern "C" CANNSIM_API const char* cannsimOperators() {
  static const std::string text = [] {
    std::string lines;
    for (const Declaration* d : declarations()) {
      const char* slash = std::strrchr(d->file, '/');
      lines += std::string(d->name) + "\t" + d->parameters + "\t" + d->checks + "\t" +
               (slash ? slash + 1 : d->file) + "\n";
    }
    return lines;
  }();
  return text.c_str();
}

}  // namespace cannsim
