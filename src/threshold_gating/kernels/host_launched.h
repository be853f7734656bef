// Gates on a GPU: launches of the kernels that Triton has compiled; see `host.cpp`.
//
// Neither CUDA's headers nor its libraries are needed. The driver's functions come as addresses,
// and so do those that tests put in their place, which let kernels take tensors of a CPU.

#pragma once

#include "host_node.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <optional>

namespace {

constexpr int READ = 6;  // tau, rho, theta, shift, s, c: what kernels read
constexpr int NO_CONTEXT = 201;  // CUDA_ERROR_INVALID_CONTEXT
constexpr std::array<int, LEARNED> AMONG_READ = {1, 3, 4, 5};  // rho, shift, s, c

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

struct Launched : State {
  std::array<int, READ> source;  // who is read: one that is held, or a constant (-1)
  std::array<Tensor, READ> constants;
  Kernel kernel;
  mutable std::array<std::atomic<const Back*>, 32> backs{};  // by bits of x, tau, theta, s, c
  PyObject* hooks = nullptr;  // owned

  using State::State;

  ~Launched() override {
    for (auto& back : backs) delete back.load();
    let_go({hooks});
  }

  // By a profiler of Triton's, in either list. Their sizes may be read without Python's lock: they
  // live as long as this does, and whoever adds to them does not while a backward pass runs.
  bool launches_are_watched() const {
    return PyList_GET_SIZE(PyTuple_GET_ITEM(hooks, 0)) ||
           PyList_GET_SIZE(PyTuple_GET_ITEM(hooks, 1));
  }

  bool is_here() const override {
    if (driver.launch == nullptr || device.type() != driver.type || launches_are_watched()) {
      return false;
    }
    return !device.is_cuda() || c10::impl::VirtualGuardImpl(device.type()).getDevice() == device;
  }

  bool is_placed(const Tensor& t) const override {  // Triton compiles anew for other addresses
    return (reinterpret_cast<uintptr_t>(t.const_data_ptr()) & 15) == 0;
  }

  std::array<const Tensor*, READ> read(const Gates& held) const {
    std::array<const Tensor*, READ> found;
    for (int k = 0; k < READ; ++k) found[k] = source[k] < 0 ? &constants[k] : &held[source[k]];
    return found;
  }

  bool forward(const Tensor& x, const Tensor& copy, const Tensor& y, const Gates& held,
               Kept&) const override {
    void* const room = room_of(y);  // before x is looked up, which it may be
    std::vector<void*> places = {place_of(x), copy.defined() ? room_of(copy) : place_of(x), room};
    for (const Tensor* each : read(held)) places.push_back(place_of(*each));
    return kernel.run(places, device.index());
  }

  bool backward(const Tensor& dy, const Tensor& x, const Gates& held, const Needed& needed,
                const Kept&, variable_list& found) const override {
    const auto wanted = wanted_of(needed);
    unsigned bits = needed[0];
    for (int k = 0; k < LEARNED; ++k) bits |= wanted[k] << (1 + k);
    const Back* back = backs[bits].load(std::memory_order_acquire);
    if (back == nullptr) return false;
    const auto from = read(held);
    const Tensor dx = needed[0] ? like_x() : x;
    std::array<Tensor, LEARNED> grads;
    std::array<void*, LEARNED> into;
    for (int k = 0; k < LEARNED; ++k) {
      const Tensor& of = *from[AMONG_READ[k]];
      const bool is_wanted = back->whose >> k & 1;
      if (is_wanted) grads[k] = made(of.sizes(), of.strides(), at::kFloat);
      into[k] = is_wanted ? room_of(grads[k]) : place_of(*from[AMONG_READ[0]]);  // not written
    }
    Tensor sums;
    if (back->add) sums = made(back->sums, back->stride, at::kFloat);
    void* const room = needed[0] ? room_of(dx) : place_of(x);
    std::vector<void*> given = {place_of(x), place_of(x), place_of(dy), room, place_of(x)};
    for (void* each : into) given.push_back(back->add ? room_of(sums) : each);
    for (const Tensor* each : from) given.push_back(place_of(*each));
    if (!back->run.run(given, device.index())) return false;
    if (back->add) {
      if (!back->add->run({room_of(sums), into[0], into[1], into[2], into[3]}, device.index())) {
        return false;
      }
    }
    found.resize(1 + HELD);
    if (needed[0]) found[0] = dx;
    const auto places = places_of(held);
    for (int k = 0; k < LEARNED; ++k) found[1 + places[k]] = grads[k];
    return true;
  }
};

}  // namespace
