// The host's part of a gate's call: checks, memory and the node of autograd.
//
// A `Call` stands for one plan of `blend.gpu` or `blend.cpu` on one device under one backend. It runs
// a call that is like the one it was made from, and says None to any other: then Python runs, as it
// does where this file was never compiled. A backward pass that is not the usual one goes to Python
// as well (`State::fallback`), and on a GPU the first of each kind, whose kernel nobody has compiled
// yet. What evaluates the gates is in `host_launched.h` and `host_one_pass.h`.

#include "host_launched.h"
#include "host_one_pass.h"

namespace {

struct Call {
  PyObject_HEAD
  Shared* state;
};

PyTypeObject* call_type = nullptr;

PyObject* call_of(Shared state) {
  PyObject* made = call_type->tp_alloc(call_type, 0);
  if (made != nullptr) reinterpret_cast<Call*>(made)->state = new Shared(std::move(state));
  return made;
}

const Shared& state_of(PyObject* call) { return *reinterpret_cast<Call*>(call)->state; }

// Takes `made` over; an error of Python's goes on as such, to whoever runs the backward pass.
pybind11::object checked(PyObject* made) {
  if (made == nullptr) {
    python_error error;
    error.persist();
    throw error;
  }
  return pybind11::reinterpret_steal<pybind11::object>(made);
}

pybind11::object wrapped(const Tensor& t) {
  if (!t.defined()) return pybind11::none();
  return checked(THPVariable_Wrap(t));
}

variable_list by_python(const Shared& state, const Tensor& dy, const Tensor& x, const Gates& held,
                        const Needed& needed) {
  pybind11::gil_scoped_acquire gil;
  pybind11::tuple gates(HELD), wanted(1 + HELD);
  for (int k = 0; k < HELD; ++k) gates[k] = wrapped(held[k]);
  for (int k = 0; k <= HELD; ++k) wanted[k] = pybind11::bool_(needed[k]);
  const auto call = checked(call_of(state)), grad = wrapped(dy), input = wrapped(x);
  const auto made = checked(PyObject_CallFunctionObjArgs(state->fallback, call.ptr(), grad.ptr(),
                                                         input.ptr(), gates.ptr(), wanted.ptr(),
                                                         nullptr));
  variable_list found;
  for (const auto& each : pybind11::tuple(made)) {
    found.push_back(each.is_none() ? Tensor() : THPVariable_Unpack(each.ptr()));
  }
  return found;
}

bool unpacked(PyObject* given, Tensor& into) {
  if (!THPVariable_CheckExact(given)) return false;
  into = THPVariable_Unpack(given);
  return true;
}

PyObject* answer(const Tensor& y) {
  if (!y.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(y);
}

// blend(x, rho, dtheta, s, c, tau0, theta0)
PyObject* blend(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 1 + HELD, "blend takes x and six tensors");
  Tensor x;
  Gates held;
  if (!unpacked(given[0], x)) Py_RETURN_NONE;
  for (int k = 0; k < HELD; ++k) {
    if (given[1 + k] != Py_None && !unpacked(given[1 + k], held[k])) Py_RETURN_NONE;
  }
  return answer(run(state_of(self), x, held));
  END_HANDLE_TH_ERRORS
}

// again(x, a module's parameters, its buffers, the backend in force, whether y goes over x)
PyObject* again(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 5, "again takes x, parameters, buffers, a backend and a bool");
  const Shared& state = state_of(self);
  const int over = PyObject_IsTrue(given[4]);
  if (over < 0) return nullptr;
  if (over != (state->way != Way::AWAY)) Py_RETURN_NONE;
  if (given[3] != state->backend && PyUnicode_Compare(given[3], state->backend) != 0) {
    Py_RETURN_NONE;
  }
  // a dict of another kind may have its own way to look up
  if (!PyDict_CheckExact(given[1]) || !PyDict_CheckExact(given[2])) Py_RETURN_NONE;
  Tensor x;
  Gates held;
  if (at::impl::PythonTorchFunctionTLS::stack_len() != 0 || !unpacked(given[0], x)) Py_RETURN_NONE;
  for (int k = 0; k < HELD; ++k) {
    PyObject* name = PyTuple_GET_ITEM(state->names, k);
    if (name == Py_None) continue;
    PyObject* found = PyDict_GetItem(given[1], name);
    if (found == nullptr) found = PyDict_GetItem(given[2], name);
    if (found == nullptr || !unpacked(found, held[k])) Py_RETURN_NONE;
  }
  return answer(run(state, x, held));
  END_HANDLE_TH_ERRORS
}

// (function, grid, threads, bytes of shared memory, tensors, numbers behind them)
Kernel kernel_of(pybind11::handle given) {
  const auto parts = pybind11::cast<pybind11::tuple>(given);
  Kernel made;
  made.function = reinterpret_cast<void*>(parts[0].cast<uintptr_t>());
  made.grid = parts[1].cast<std::array<unsigned, 3>>();
  made.threads = parts[2].cast<unsigned>();
  made.shared = parts[3].cast<unsigned>();
  made.pointers = parts[4].cast<size_t>();
  made.numbers = parts[5].cast<std::vector<int64_t>>();
  TORCH_CHECK(made.pointers + made.numbers.size() + 2 <= 32, "too many arguments");
  return made;
}

// add_backward(bits of the wanted, kernel, the adding one or None, sums, their strides, whose)
PyObject* add_backward(PyObject* self, PyObject* given) {
  HANDLE_TH_ERRORS
  const auto* state = dynamic_cast<const Launched*>(state_of(self).get());
  TORCH_CHECK_TYPE(state != nullptr, "add_backward is for calls that launch kernels");
  const auto parts = pybind11::reinterpret_borrow<pybind11::tuple>(given);
  auto made = std::make_unique<Back>();
  made->run = kernel_of(parts[1]);
  if (!parts[2].is_none()) made->add = kernel_of(parts[2]);
  made->sums = parts[3].cast<std::vector<int64_t>>();
  made->stride = parts[4].cast<std::vector<int64_t>>();
  made->whose = parts[5].cast<unsigned>();
  const Back* before = nullptr;  // what is there stays: somebody may be running it
  auto& place = state->backs.at(parts[0].cast<unsigned>());
  if (place.compare_exchange_strong(before, made.get())) made.release();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

const Tensor& tensor_of(const pybind11::object& given) {
  TORCH_CHECK_TYPE(THPVariable_Check(given.ptr()), "a call takes tensors for x and for gates");
  return THPVariable_Unpack(given.ptr());
}

PyObject* owned(const pybind11::object& given) { return pybind11::object(given).release().ptr(); }

// What every call has, from one that can be made.
template <class Kind>
std::shared_ptr<Kind> like(const pybind11::dict& given) {
  const Tensor& x = tensor_of(given["x"]);
  auto state = std::make_shared<Kind>(x.device());
  state->sizes = x.sizes().vec();
  state->strides = x.strides().vec();
  state->dtype = x.scalar_type();
  state->keys = keys_of(x.device().type());
  state->there = given["there"].template cast<std::array<bool, HELD>>();
  state->rows = given["rows"].template cast<std::array<int64_t, HELD>>();
  state->group = given["group"].template cast<int64_t>();
  state->way = static_cast<Way>(given["way"].template cast<int>());
  state->fallback = owned(given["fallback"]);
  state->backend = owned(given["backend"]);
  state->names = owned(given["names"]);
  return state;
}

PyObject* launched(PyObject*, PyObject* facts) {
  HANDLE_TH_ERRORS
  const auto given = pybind11::cast<pybind11::dict>(pybind11::handle(facts));
  const auto state = like<Launched>(given);
  const pybind11::tuple read = given["read"], sources = given["sources"];
  for (int k = 0; k < READ; ++k) {
    state->source[k] = sources[k].cast<int>();
    if (state->source[k] < 0) state->constants[k] = tensor_of(read[k]).detach();
  }
  state->kernel = kernel_of(given["kernel"]);
  state->hooks = owned(given["hooks"]);
  return call_of(state);
  END_HANDLE_TH_ERRORS
}

Cut cut_of(const pybind11::tuple& given) {
  return {given[0].cast<std::array<long, 9>>(), given[1].cast<int64_t>(), given[2].cast<int64_t>()};
}

template <class Pointer>
Pointer pointer(const pybind11::object& address) {
  return reinterpret_cast<Pointer>(address.cast<uintptr_t>());
}

PyObject* one_pass(PyObject*, PyObject* facts) {
  HANDLE_TH_ERRORS
  const auto given = pybind11::cast<pybind11::dict>(pybind11::handle(facts));
  const auto state = like<OnePass>(given);
  state->blend = pointer<decltype(state->blend)>(given["blend"]);
  state->fold = pointer<decltype(state->fold)>(given["fold"]);
  state->team = pointer<void*>(given["team"]);
  state->may_start = pointer<const int*>(given["may start"]);
  state->known = given["known"].cast<std::vector<double>>();
  state->widest = given["widest"].cast<double>();
  state->count = given["count"].cast<int64_t>();
  state->folded = given["folded"].cast<int64_t>();
  state->few = given["few"].cast<int64_t>();
  state->type = given["type"].cast<int>();
  state->constants = given["constants"].cast<bool>();
  state->keeps = given["keeps"].cast<bool>();
  state->plain = cut_of(given["plain"]);
  state->summed = cut_of(given["summed"]);
  state->by_python = given["by python"].cast<std::array<bool, LEARNED>>();
  return call_of(state);
  END_HANDLE_TH_ERRORS
}

void end_call(PyObject* self) {
  delete reinterpret_cast<Call*>(self)->state;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// drive(addresses of the functions of `Driver`, in their order, on a CPU)
PyObject* drive(PyObject*, PyObject* given) {
  unsigned long long launch, stream, retain, enter;
  int cpu;
  if (!PyArg_ParseTuple(given, "KKKKp", &launch, &stream, &retain, &enter, &cpu)) return nullptr;
  driver.launch = reinterpret_cast<decltype(driver.launch)>(launch);
  driver.stream = reinterpret_cast<decltype(driver.stream)>(stream);
  driver.retain = reinterpret_cast<decltype(driver.retain)>(retain);
  driver.enter = reinterpret_cast<decltype(driver.enter)>(enter);
  driver.type = cpu ? c10::DeviceType::CPU : c10::DeviceType::CUDA;
  Py_RETURN_NONE;
}

template <class Function>
PyCFunction function_of(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"blend", function_of(blend), METH_FASTCALL, nullptr},
    {"again", function_of(again), METH_FASTCALL, nullptr},
    {"add_backward", add_backward, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(end_call)},
                       {Py_tp_methods, methods},
                       {0, nullptr}};
PyType_Spec spec = {"threshold_gating_host.Call", sizeof(Call), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
PyMethodDef functions[] = {{"drive", drive, METH_VARARGS, nullptr},
                           {"launched", launched, METH_O, nullptr},
                           {"one_pass", one_pass, METH_O, nullptr},
                           {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "threshold_gating_host", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_threshold_gating_host() {
  PyObject* module = PyModule_Create(&definition);
  call_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (module == nullptr || call_type == nullptr) return nullptr;
  PyModule_AddObjectRef(module, "Call", reinterpret_cast<PyObject*>(call_type));
  return module;
}
