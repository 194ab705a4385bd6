// Records when gradients become ready, without the interpreter.
//
// PyTorch calls one hook of a leaf when its gradient has been accumulated. For a Python hook,
// autograd's thread takes the interpreter lock between two layers, and the code of the hook is in no
// cache: a hundred such hooks in each step cost more than the layers. Leaves without a hook therefore
// get the C++ hook below, which stores the time. If the job registers a hook later, it replaces the
// C++ hook, and the tracer adds a Python hook beside it. On a device, the hook also records where the
// device's work for the gradient ends.
//
// Called by naming/gradient_ready_times.py.

#include "layout.h"

#include <torch/csrc/autograd/function_hook.h>

#include <pthread.h>

#include <memory>
#include <vector>

namespace torch::autograd::impl {

// Declared as in variable.h, which would take longer to compile than the rest of this file. The
// symbols are weak: if a version of PyTorch lacks them, the tracer uses Python hooks.
__attribute__((weak)) TORCH_API void set_post_acc_grad_hooks(
    const at::TensorBase&,
    std::unique_ptr<PostAccumulateGradHook>);
__attribute__((weak)) TORCH_API std::unique_ptr<PostAccumulateGradHook>& post_acc_grad_hooks(
    const at::Tensor&);

} // namespace torch::autograd::impl

namespace {

using ddltrace::now_ns;
using Row = ddltrace::Gradient;

constexpr int64_t kRingSize = 1 << 15;

constexpr int64_t kNone = -1;

ddltrace::GradientControl control;
Row rows[kRingSize]; // gradient n is at n modulo the size

const bool emptied = [] {
  for (Row& row : rows) {
    row.site = kNone;
  }
  return true;
}();

void note(int64_t site, int64_t now) {
  int64_t number = control.written.load();
  do {
    if (rows[number % kRingSize].site.load() != kNone) {
      ++control.missed;
      return;
    }
  } while (!control.written.compare_exchange_weak(number, number + 1));
  Row& row = rows[number % kRingSize];
  row.start_ns = row.end_ns = now;
  row.thread = static_cast<int64_t>(pthread_self());
  row.site = site;
}

class Hook : public torch::autograd::PostAccumulateGradHook {
 public:
  void add(int64_t site, int64_t device_site) {
    if (sites_.empty()) {
      device_site_ = device_site; // several parameters in one leaf have one gradient
    }
    sites_.push_back(site);
  }

  void operator()(const at::Tensor& leaf) override {
    if (control.paused.load()) {
      return;
    }
    const int64_t now = now_ns();
    control.newest_ns = now;
    for (const int64_t site : sites_) {
      note(site, now);
    }
    if (device_site_ != kNone && leaf.is_cuda()) {
      ddltrace::end_gradient(device_site_, leaf.device().index());
    }
  }

  // Graphs of compiled autograd do not call the hook. Some versions of PyTorch declare the first of
  // these overloads, some the second.
  virtual void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const {}
  virtual void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) {}
  void apply_with_saved(at::Tensor&, torch::dynamo::autograd::SwapSavedVariables&) override {}

 private:
  int64_t device_site_ = kNone; // of the device's work for the gradient
  std::vector<int64_t> sites_; // a leaf of FullyShardedDataParallel holds several parameters
};

} // namespace

extern "C" {

// Like ddltrace_memory.
void ddltrace_gradient_memory(void* pieces[2], int64_t lengths[2]) {
  constexpr int64_t kInteger = sizeof(int64_t);
  pieces[0] = &control;
  lengths[0] = sizeof(control) / kInteger;
  pieces[1] = rows;
  lengths[1] = sizeof(rows) / kInteger;
}

// Records from now on when the gradient of a leaf is ready, and the device's work for it if
// `device_site` is not `kNone`. Returns false if it cannot.
int ddltrace_watch_gradient(int64_t tensor_impl, int64_t site, int64_t device_site) {
  using namespace torch::autograd;
  if (impl::set_post_acc_grad_hooks == nullptr || impl::post_acc_grad_hooks == nullptr) {
    return 0;
  }
  try {
    const at::Tensor tensor(c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(
        reinterpret_cast<c10::TensorImpl*>(tensor_impl)));
    if (impl::post_acc_grad_hooks(tensor) == nullptr) {
      impl::set_post_acc_grad_hooks(tensor, std::make_unique<Hook>());
    }
    auto* hook = dynamic_cast<Hook*>(impl::post_acc_grad_hooks(tensor).get());
    if (hook == nullptr) {
      return 0;
    }
    hook->add(site, device_site);
    return 1;
  } catch (...) {
    return 0;
  }
}

} // extern "C"
