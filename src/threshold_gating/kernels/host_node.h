// The node of autograd for a gate's call on a GPU, and the launches of its kernels; see `host.cpp`.

#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr int HELD = 6;  // rho, dtheta, s, c, tau0, theta0: `Tensors` of structure.py
constexpr int READ = 6;  // tau, rho, theta, shift, s, c: what kernels read
constexpr int SUMS = 4;  // gradients of tau, theta, s, c
constexpr int NO_CONTEXT = 201;  // CUDA_ERROR_INVALID_CONTEXT
constexpr std::array<int, SUMS> LEARNED = {1, 3, 4, 5};  // their places among what is read
enum { RHO, DTHETA, S, C, TAU0, THETA0 };

using Gates = std::array<Tensor, HELD>;

// cuLaunchKernel, the stream of a device as torch's C functions give it, and two functions of the
// driver for a thread that has no context yet: cuDevicePrimaryCtxRetain, cuCtxSetCurrent.
struct Driver {
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                void**, void**) = nullptr;
  int (*stream)(int32_t, void**) = nullptr;
  int (*retain)(void**, int) = nullptr;
  int (*enter)(void*) = nullptr;
  c10::DeviceType type = c10::DeviceType::CUDA;
} driver;

// A compiled kernel with all of its arguments but the tensors, which come first.
struct Kernel {
  void* function = nullptr;
  std::array<unsigned, 3> grid{};
  unsigned threads = 0, shared = 0;
  size_t pointers = 0;
  std::vector<int64_t> numbers;  // of 32 bits or of 64: a kernel reads as many from the start

  // False if the driver refuses: whoever asked goes to Python, which says why.
  bool run(const std::vector<void*>& places, int device) const {
    void *stream = nullptr, *scratch = nullptr;  // Triton's two memories, which our kernels lack
    if (places.size() != pointers || driver.stream(device, &stream) != 0) return false;
    std::array<void*, 32> arguments;
    size_t n = 0;
    for (void* const& place : places) arguments[n++] = const_cast<void**>(&place);
    for (const int64_t& number : numbers) arguments[n++] = const_cast<int64_t*>(&number);
    arguments[n++] = &scratch;
    arguments[n++] = &scratch;
    const auto launched = [&] {
      return driver.launch(function, grid[0], grid[1], grid[2], threads, 1, 1, shared, stream,
                           arguments.data(), nullptr);
    };
    const int error = launched();
    if (error != NO_CONTEXT) return error == 0;
    // A thread of autograd, which gets its context with torch's first kernel there. It is that of
    // the device, which torch holds for good: once more changes nothing.
    void* context = nullptr;
    return driver.retain(&context, device) == 0 && driver.enter(context) == 0 && launched() == 0;
  }
};

// The kernels of a backward pass for one choice of gradients; see `gpu._Backward`.
struct Back {
  Kernel run;
  std::optional<Kernel> add;
  std::vector<int64_t> sums, stride;
  unsigned whose = 0;  // bits of tau, theta, s, c
};

struct State {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  c10::Device device;
  uint64_t keys = 0;  // of dispatch, that plain memory may have
  std::array<std::optional<std::vector<int64_t>>, HELD> shapes;  // of what is held
  std::array<int, READ> source;      // who is read: one that is held, or a constant (-1)
  std::array<Tensor, READ> constants;
  Kernel forward;
  std::array<std::atomic<const Back*>, 32> backs{};  // by bits of x, tau, theta, s, c
  PyObject *fallback = nullptr, *backend = nullptr, *names = nullptr, *hooks = nullptr;  // owned

  explicit State(c10::Device device) : device(device) {}
  State(const State&) = delete;

  ~State() {
    for (auto& back : backs) delete back.load();
    if (Py_IsInitialized()) {  // the last node may end in a thread of autograd
      pybind11::gil_scoped_acquire gil;
      for (PyObject* each : {fallback, backend, names, hooks}) Py_XDECREF(each);
    }
  }

  // By a profiler of Triton's, in either list. Their sizes may be read without Python's lock: they
  // live as long as this does, and whoever adds to them does not while a backward pass runs.
  bool launches_are_watched() const {
    return PyList_GET_SIZE(PyTuple_GET_ITEM(hooks, 0)) ||
           PyList_GET_SIZE(PyTuple_GET_ITEM(hooks, 1));
  }

  bool is_here() const;  // whether a kernel can be launched from this thread as it is now
  bool takes_x(const Tensor& x) const;
  bool takes(const Gates& held) const;
  std::array<const Tensor*, READ> read(const Gates& held) const;
  Tensor like_x() const { return made(sizes, strides, dtype); }
  Tensor made(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) const {
    return at::empty_strided(sizes, strides, at::TensorOptions().dtype(type).device(device));
  }
};

using Shared = std::shared_ptr<State>;

bool is_aligned(const Tensor& t) {  // Triton compiles anew for other addresses
  return (reinterpret_cast<uintptr_t>(t.const_data_ptr()) & 15) == 0;
}

// Memory and nothing else: no subclass, batch, proxy, lazy negation or zeros that nobody wrote.
bool is_plain(const Tensor& t, uint64_t allowed) {
  return (t.key_set().raw_repr() & ~allowed) == 0 && !t._fw_grad(0).defined();
}

uint64_t keys_of(c10::DeviceType type) {
  const auto key = type == c10::DeviceType::CUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  const auto bit = c10::toBackendComponent(key);
  const auto keys = c10::DispatchKeySet(key) |
      c10::getAutogradRelatedKeySetFromBackend(bit) |
      c10::getAutocastRelatedKeySetFromBackend(bit) |
      c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);
  return keys.raw_repr();
}

// Names of axes: torch 2.11 leaves them out while a node runs, 2.13 has no such key any more.
template <class Key, class = void>
struct Names {
  static uint64_t keys() { return 0; }
};
template <class Key>
struct Names<Key, std::void_t<decltype(Key::Named)>> {
  static uint64_t keys() { return c10::DispatchKeySet(Key::Named).raw_repr(); }
};

// Whether nothing that torch dispatches to is switched on here: a mode, a transform, a tracer.
bool is_quiet() {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const uint64_t on = local.included_.raw_repr() & ~c10::default_included_set.raw_repr();
  uint64_t off = local.excluded_.raw_repr() & ~c10::default_excluded_set.raw_repr();
  off &= ~Names<c10::DispatchKey>::keys();
  if (c10::InferenceMode::is_enabled()) off &= ~c10::autograd_dispatch_keyset.raw_repr();
  return on == 0 && off == 0;
}

bool State::is_here() const {
  if (!is_quiet() || driver.launch == nullptr || device.type() != driver.type) return false;
  return !device.is_cuda() || c10::impl::VirtualGuardImpl(device.type()).getDevice() == device;
}

bool State::takes_x(const Tensor& x) const {
  return is_plain(x, keys) && x.scalar_type() == dtype && x.device() == device &&
      x.sizes() == sizes && x.strides() == strides && is_aligned(x);
}

bool State::takes(const Gates& held) const {
  for (int k = 0; k < HELD; ++k) {
    const Tensor& t = held[k];
    if (t.defined() != shapes[k].has_value()) return false;
    if (!t.defined()) continue;
    if (!is_plain(t, keys) || t.scalar_type() != at::kFloat || t.device() != device ||
        t.sizes() != *shapes[k] || !t.is_contiguous() || !is_aligned(t)) {
      return false;
    }
  }
  // of two that make one parameter, both learned, the formulas have the gradients
  return !(held[RHO].defined() && held[TAU0].defined() && held[TAU0].requires_grad()) &&
      !(held[DTHETA].defined() && held[THETA0].defined() && held[THETA0].requires_grad());
}

std::array<const Tensor*, READ> State::read(const Gates& held) const {
  std::array<const Tensor*, READ> found;
  for (int k = 0; k < READ; ++k) found[k] = source[k] < 0 ? &constants[k] : &held[source[k]];
  return found;
}

void* place_of(const Tensor& t) { return const_cast<void*>(t.const_data_ptr()); }

struct Blend : Node {
  Shared state;
  SavedVariable x;
  std::array<SavedVariable, HELD> held;

  Blend(Shared state, const Tensor& x, const Gates& held)
      : Node(torch::autograd::collect_next_edges(x, held[0], held[1], held[2], held[3], held[4],
                                                 held[5])),
        state(std::move(state)), x(x, false) {
    for (int k = 0; k < HELD; ++k) {
      if (held[k].defined()) this->held[k] = SavedVariable(held[k], false);
    }
  }

  std::string name() const override { return "BlendBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    x.reset_data();
    for (SavedVariable& each : held) each.reset_data();
  }

  variable_list apply(variable_list&& given) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const Tensor x = this->x.unpack();
    Gates held;
    for (int k = 0; k < HELD; ++k) held[k] = this->held[k].unpack();
    lock.unlock();  // Python may have to be waited for
    std::array<bool, 1 + HELD> needed;
    for (int k = 0; k <= HELD; ++k) needed[k] = task_should_compute_output(k);
    const Tensor dy = given[0].defined() ? given[0] : input_metadata(0).zeros_like();
    variable_list found;
    if (!usual(dy, x, held, needed, found)) found = by_python(dy, x, held, needed);
    return found;
  }

  bool usual(const Tensor& dy, const Tensor& x, const Gates& held,
             const std::array<bool, 1 + HELD>& needed, variable_list& found) const;
  variable_list by_python(const Tensor& dy, const Tensor& x, const Gates& held,
                          const std::array<bool, 1 + HELD>& needed) const;
};

unsigned wanted_of(const std::array<bool, 1 + HELD>& n) {  // bits of x, tau, theta, s, c
  const bool tau = n[1 + RHO] || n[1 + TAU0], theta = n[1 + DTHETA] || n[1 + THETA0];
  return n[0] | tau << 1 | theta << 2 | n[1 + S] << 3 | n[1 + C] << 4;
}

// The gradients by kernels that are compiled already; false where Python has to look.
bool Blend::usual(const Tensor& dy, const Tensor& x, const Gates& held,
                  const std::array<bool, 1 + HELD>& needed, variable_list& found) const {
  const unsigned wanted = wanted_of(needed);
  const Back* back = state->backs[wanted].load(std::memory_order_acquire);
  if (back == nullptr || at::GradMode::is_enabled() || !state->is_here() ||
      state->launches_are_watched() || !state->takes_x(x) || !state->takes(held) ||
      !is_plain(dy, state->keys) || dy.scalar_type() != state->dtype ||
      dy.device() != state->device || dy.sizes() != x.sizes()) {
    return false;
  }
  at::AutoDispatchBelowADInplaceOrView below;
  Tensor laid = dy;
  if (dy.strides() != x.strides()) laid = state->like_x().copy_(dy);
  if (!is_aligned(laid)) return false;
  const auto read = state->read(held);
  const Tensor dx = needed[0] ? state->like_x() : x;
  std::array<Tensor, SUMS> grads;
  std::array<void*, SUMS> into;
  for (int k = 0; k < SUMS; ++k) {
    const Tensor& of = *read[LEARNED[k]];
    const bool is_wanted = back->whose >> k & 1;
    if (is_wanted) grads[k] = state->made(of.sizes(), of.strides(), at::kFloat);
    into[k] = place_of(is_wanted ? grads[k] : *read[LEARNED[0]]);  // nothing is written to that
  }
  Tensor sums;
  if (back->add) sums = state->made(back->sums, back->stride, at::kFloat);
  std::vector<void*> places = {place_of(x), place_of(x), place_of(laid), place_of(dx), place_of(x)};
  for (void* each : into) places.push_back(back->add ? place_of(sums) : each);
  for (const Tensor* each : read) places.push_back(place_of(*each));
  if (!back->run.run(places, state->device.index())) return false;
  if (back->add) {
    if (!back->add->run({place_of(sums), into[0], into[1], into[2], into[3]},
                        state->device.index())) {
      return false;
    }
  }
  found.resize(1 + HELD);
  if (needed[0]) found[0] = dx;
  found[1 + (held[RHO].defined() ? RHO : TAU0)] = grads[0];
  found[1 + (held[DTHETA].defined() ? DTHETA : THETA0)] = grads[1];
  found[1 + S] = grads[2];
  found[1 + C] = grads[3];
  return true;
}

// torch has held nodes by either kind of pointer; a long graph must not end by recursion.
template <class Pointer>
Pointer held_by(Blend* made) {
  if constexpr (std::is_constructible_v<Pointer, Blend*, void (*)(Node*)>) {
    return Pointer(made, [](auto* each) { deleteNode(each); });
  } else {
    return Pointer::unsafe_steal_from_new(made);
  }
}

// y, or nothing where Python has to look.
Tensor run(const Shared& state, const Tensor& x, const Gates& held) {
  if (!state->is_here() || state->launches_are_watched() || !state->takes_x(x) ||
      !state->takes(held) || !at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) {
    return {};
  }
  Tensor y;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    y = state->like_x();
  }
  std::vector<void*> places = {place_of(x), place_of(x), place_of(y)};
  for (const Tensor* each : state->read(held)) places.push_back(place_of(*each));
  if (!state->forward.run(places, state->device.index())) return {};
  bool learns = x.requires_grad();
  for (const Tensor& each : held) learns = learns || (each.defined() && each.requires_grad());
  if (learns && at::GradMode::is_enabled()) {
    using Pointer = decltype(torch::autograd::Edge::function);
    torch::autograd::create_gradient_edge(y, held_by<Pointer>(new Blend(state, x, held)));
  }
  return y;
}

}  // namespace
