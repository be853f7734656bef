// The node of autograd for a gate's call, whatever evaluates the gates; see `host.cpp`.

#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <memory>
#include <mutex>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr int HELD = 6;  // rho, dtheta, s, c, tau0, theta0: `Tensors` of structure.py
constexpr int LEARNED = 4;  // tau, theta, s, c
enum { RHO, DTHETA, S, C, TAU0, THETA0 };

using Gates = std::array<Tensor, HELD>;
using Needed = std::array<bool, 1 + HELD>;  // of x and of what is held
using Kept = std::shared_ptr<const float[]>;  // what a forward pass leaves for the way back

// Where y goes: into new memory, over x, or over x of which a copy stays for the backward pass.
enum class Way { AWAY, OVER, KEPT };

// One plan on one device under one backend: what its calls are like, and what evaluates its gates.
struct State {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  c10::Device device;
  uint64_t keys = 0;  // of dispatch, that plain memory may have
  std::array<bool, HELD> there{};    // of what may be held
  std::array<int64_t, HELD> rows{};  // along its first axis; of a single one any shape will do
  int64_t group = 0;                 // numbers of a row
  Way way = Way::AWAY;
  PyObject *fallback = nullptr, *backend = nullptr, *names = nullptr;  // owned

  explicit State(c10::Device device) : device(device) {}
  State(const State&) = delete;

  virtual ~State() { let_go({fallback, backend, names}); }

  // Whether gates can be evaluated from this thread as it is now.
  virtual bool is_here() const = 0;
  // Whether memory may begin where that of t does.
  virtual bool is_placed(const Tensor& t) const = 0;
  // Python's lock is held in `forward`, which may release it, and not in `backward`.
  // True if y was written. If false, x is as it was and Python has to look. y may be x; `copy`, if
  // it is defined, gets what x was.
  virtual bool forward(const Tensor& x, const Tensor& copy, const Tensor& y, const Gates& held,
                       Kept& kept) const = 0;
  // True if the needed gradients were written; dy lies as x does.
  virtual bool backward(const Tensor& dy, const Tensor& x, const Gates& held, const Needed& needed,
                        const Kept& kept, variable_list& found) const = 0;

  bool takes_x(const Tensor& x) const;
  bool takes(const Gates& held) const;
  Tensor like_x() const { return made(sizes, strides, dtype); }
  Tensor made(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) const {
    return at::empty_strided(sizes, strides, at::TensorOptions().dtype(type).device(device));
  }

 protected:
  static void let_go(std::initializer_list<PyObject*> owned) {
    if (!Py_IsInitialized()) return;
    pybind11::gil_scoped_acquire gil;  // the last node may end in a thread of autograd
    for (PyObject* each : owned) Py_XDECREF(each);
  }
};

using Shared = std::shared_ptr<const State>;

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

bool State::takes_x(const Tensor& x) const {
  return is_plain(x, keys) && x.scalar_type() == dtype && x.device() == device &&
      x.sizes() == sizes && x.strides() == strides && is_placed(x);
}

bool State::takes(const Gates& held) const {
  for (int k = 0; k < HELD; ++k) {
    const Tensor& t = held[k];
    if (t.defined() != there[k]) return false;
    if (!t.defined()) continue;
    if (!is_plain(t, keys) || t.scalar_type() != at::kFloat || t.device() != device ||
        t.numel() != rows[k] * group || (rows[k] > 1 && t.size(0) != rows[k]) ||
        !t.is_contiguous() || !is_placed(t)) {
      return false;
    }
  }
  // of two that make one parameter, both learned, the formulas have the gradients
  return !(held[RHO].defined() && held[TAU0].defined() && held[TAU0].requires_grad()) &&
      !(held[DTHETA].defined() && held[THETA0].defined() && held[THETA0].requires_grad());
}

// Where t is read.
void* place_of(const Tensor& t) { return const_cast<void*>(t.const_data_ptr()); }
// Where t is written: a lazy clone gets memory of its own first.
void* room_of(const Tensor& t) { return t.mutable_data_ptr(); }

// Of tau, theta, s and c: whose gradients are needed, and where they belong among what is held.
std::array<bool, LEARNED> wanted_of(const Needed& n) {
  return {n[1 + RHO] || n[1 + TAU0], n[1 + DTHETA] || n[1 + THETA0], n[1 + S], n[1 + C]};
}

std::array<int, LEARNED> places_of(const Gates& held) {
  return {held[RHO].defined() ? RHO : TAU0, held[DTHETA].defined() ? DTHETA : THETA0, S, C};
}

// The gradients by what is compiled already; false where Python has to look.
bool usual(const State& state, const Tensor& dy, const Tensor& x, const Gates& held,
           const Needed& needed, const Kept& kept, variable_list& found) {
  if (at::GradMode::is_enabled() || !is_quiet() || !state.is_here() || !state.takes_x(x) ||
      !state.takes(held) || !is_plain(dy, state.keys) || dy.scalar_type() != state.dtype ||
      dy.device() != state.device || dy.sizes() != x.sizes()) {
    return false;
  }
  at::AutoDispatchBelowADInplaceOrView below;
  Tensor laid = dy;
  if (dy.strides() != x.strides()) laid = state.like_x().copy_(dy);
  return state.is_placed(laid) && state.backward(laid, x, held, needed, kept, found);
}

variable_list by_python(const Shared& state, const Tensor& dy, const Tensor& x, const Gates& held,
                        const Needed& needed);

// Of x and of what is held.
variable_list gradients(const Shared& state, const Tensor& given, const Tensor& x,
                        const Gates& held, const Needed& needed, const Kept& kept) {
  const Tensor dy = given.defined() ? given : at::zeros_like(x);
  variable_list found;
  if (!usual(*state, dy, x, held, needed, kept, found)) {
    found = by_python(state, dy, x, held, needed);
  }
  return found;
}

struct Blend : Node {
  Shared state;
  SavedVariable x;
  std::array<SavedVariable, HELD> held;
  Kept kept;

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
    kept.reset();
  }

  variable_list apply(variable_list&& given) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const Tensor x = this->x.unpack();
    const Gates held = unpacked();
    const Kept kept = this->kept;
    lock.unlock();  // Python may have to be waited for
    return gradients(state, given[0], x, held, needed(), kept);
  }

  // Compiled autograd: this node is one call in its graph, which runs as it is. The address in the
  // key is never another state's: the call holds its state, and torch keeps calls for good.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(static_cast<uint64_t>(reinterpret_cast<uintptr_t>(state.get())));
    args.collect(x, false);
    for (const SavedVariable& each : held) args.collect(each, false);
    for (const bool each : needed()) args.collect(each);
  }

  variable_list apply_with_saved(const variable_list& given,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    using namespace torch::dynamo::autograd;
    saved.before(x);
    for (SavedVariable& each : held) saved.before(each);
    std::vector<c10::IValue> tensors = {x.unpack()};
    for (Tensor& each : unpacked()) tensors.emplace_back(std::move(each));
    const auto call = [state = state, needed = needed()](const variable_list& given,
                                                         const std::vector<c10::IValue>& tensors) {
      Gates held;
      for (int k = 0; k < HELD; ++k) held[k] = tensors[1 + k].toTensor();
      return gradients(state, given[0], tensors[0].toTensor(), held, needed, nullptr);
    };
    const std::vector<at::TypePtr> schema(tensors.size(), at::TensorType::get());
    const auto edges = IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::
        pack(get_input_metadata(next_edges()));
    const auto& compiler = getPyCompilerInterface();
    PyObject* graph = saved.get_py_compiler();
    const std::string bound = compiler->bind_function(graph, name(), call, schema, true, false);
    auto found = compiler->call_function(graph, "apply_functional", bound, given, tensors, edges);
    saved.after(x);
    for (SavedVariable& each : held) saved.after(each);
    return found;
  }

 private:
  Gates unpacked() const {
    Gates found;
    for (int k = 0; k < HELD; ++k) found[k] = held[k].unpack();
    return found;
  }

  Needed needed() const {
    Needed found;
    for (int k = 0; k <= HELD; ++k) found[k] = task_should_compute_output(k);
    return found;
  }
};

// torch has held nodes by either kind of pointer; a long graph must not end by recursion.
template <class Pointer>
Pointer held_by(Blend* made) {
  if constexpr (std::is_constructible_v<Pointer, Blend*, void (*)(Node*)>) {
    return Pointer(made, [](auto* each) { deleteNode(each); });
  } else {
    return Pointer::unsafe_steal_from_new(made);
  }
}

// Whether a function of ours may overwrite x, so that autograd goes on from its result; see
// `lowering.may_rebase`.
bool may_overwrite(const Tensor& x, bool learns) {
  if (x.is_inference()) return c10::InferenceMode::is_enabled();
  return !learns || (x.grad_fn() != nullptr && !x.is_view());
}

bool any_learns(const Tensor& x, const Gates& held) {
  if (!at::GradMode::is_enabled()) return false;
  bool learns = x.requires_grad();
  for (const Tensor& each : held) learns = learns || (each.defined() && each.requires_grad());
  return learns;
}

// y, or nothing where Python has to look.
Tensor run(const Shared& state, const Tensor& x, const Gates& held) {
  if (!is_quiet() || !state->is_here() || !state->takes_x(x) || !state->takes(held) ||
      !at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) {
    return {};
  }
  const bool learns = any_learns(x, held), keeps = state->way == Way::KEPT;
  const bool over = state->way != Way::AWAY;
  if (over && (learns != keeps || !may_overwrite(x, learns))) return {};
  using namespace torch::autograd;
  Tensor y = x, read = x;  // what autograd goes on from, and what the backward pass reads
  decltype(Edge::function) node;
  Blend* made = nullptr;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    if (!over) y = state->like_x();
    if (keeps) read = state->like_x();
  }
  if (learns) {  // before anything is written: what is held may refuse to be saved
    if (keeps) impl::set_gradient_edge(read, impl::gradient_edge(x));  // for second derivatives
    made = new Blend(state, read, held);
    node = held_by<decltype(node)>(made);
  }
  Kept kept;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    if (!state->forward(x, keeps ? read : Tensor(), y, held, kept)) return {};
  }
  if (over && !x.is_inference()) impl::bump_version(x);
  if (!learns) return y;
  made->kept = std::move(kept);
  const Edge edge(node, made->add_input_metadata(y));
  if (over) {
    impl::rebase_history(y, edge);
  } else {
    impl::set_gradient_edge(y, edge);
  }
  return y;
}

}  // namespace
