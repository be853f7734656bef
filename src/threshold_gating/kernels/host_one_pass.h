// Gates on a CPU: the functions of `blend.c`, compiled for a number of branches; see `host.cpp`.

#pragma once

#include "host_node.h"

#include <ATen/Parallel.h>

#include <algorithm>

namespace {

// How work is cut into chunks; see `one_pass._Cut`.
struct Cut {
  std::array<long, 9> sizes;
  int64_t chunks = 1, slots = 0;
};

struct OnePass : State {
  // as `blend.c` has them
  int (*blend)(const void* x, const void* dy, void* out, const float* from, float* sums, float* dtau,
               float* dtheta, float* ds, float* dc, const long* sizes, int type, int constants,
               int back, unsigned threads, void* team) = nullptr;
  double (*fold)(const float* rho, const float* dtheta, const float* s, const float* c,
                 const float* tau0, const float* theta0, const double* known, long group,
                 float* into) = nullptr;
  void* team = nullptr;            // what starts threads, if there is such a function
  const int* may_start = nullptr;  // whether it may: not in a process that was forked
  std::vector<double> known;       // numbers, NaN for what is in a tensor
  double widest = 0.0;             // largest exponent of a weight
  int64_t count = 0;               // rows of all sums
  int64_t folded = 0;              // rows of folded parameters
  int64_t few = 0;                 // sums that need no room
  int type = 0, constants = 0;
  bool keeps = false;  // folded parameters, until the backward pass
  Cut plain, summed;   // the latter where there are sums
  std::array<bool, LEARNED> by_python{};  // whose gradients are put together there

  using State::State;

  bool is_here() const override { return true; }
  bool is_placed(const Tensor&) const override { return true; }

  // It stays until the end, though another thread gives a tensor new memory by `.data` meanwhile.
  static std::array<c10::Storage, 1 + HELD> memory_of(const Tensor& x, const Gates& held) {
    std::array<c10::Storage, 1 + HELD> found;
    found[HELD] = x.storage();
    for (int k = 0; k < HELD; ++k) {
      if (held[k].defined()) found[k] = held[k].storage();
    }
    return found;
  }

  // The parameters as they are read; nothing if the code does not take them.
  Kept folded_from(const Gates& held) const {
    std::array<const float*, HELD> at{};
    for (int k = 0; k < HELD; ++k) {
      if (!held[k].defined()) continue;
      at[k] = static_cast<const float*>(held[k].const_data_ptr());
      if (at[k] == nullptr) return nullptr;  // a tensor without memory
    }
    std::shared_ptr<float[]> made(new float[folded * group]);
    const double found = fold(at[RHO], at[DTHETA], at[S], at[C], at[TAU0], at[THETA0],
                              known.data(), group, made.get());
    return found <= widest ? Kept(made) : nullptr;  // NaN is not
  }

  // Whether all that came out is finite; going back, dy may turn out to have no memory.
  bool run(bool back, const Cut& cut, const Tensor& x, const void* dy, const Tensor& out,
           const float* from, float* sums, const std::array<float*, LEARNED>& into) const {
    unsigned threads = 1;
    if (cut.chunks > 1 && team != nullptr && *may_start) {
      threads = static_cast<unsigned>(std::min<int64_t>(at::get_num_threads(), cut.chunks));
    }
    void* const room = room_of(out);  // before x is looked up, which it may be
    return blend(place_of(x), dy, room, from, sums, into[0], into[1], into[2], into[3],
                 cut.sizes.data(), type, constants, back, threads, team) == 0;
  }

  bool forward(const Tensor& x, const Tensor& copy, const Tensor& y, const Gates& held,
               Kept& kept) const override {
    const auto memory = memory_of(x, held);
    const pybind11::gil_scoped_release free;  // others may go on meanwhile
    const Kept from = folded_from(held);
    if (from == nullptr) return false;
    Tensor was = x;
    if (way != Way::AWAY) was = (copy.defined() ? copy : like_x()).copy_(x);
    if (!run(false, plain, was, nullptr, y, from.get(), nullptr, {})) {
      if (way != Way::AWAY) y.copy_(was);  // Python looks at x as it was
      return false;
    }
    if (keeps) kept = from;
    return true;
  }

  bool backward(const Tensor& dy, const Tensor& x, const Gates& held, const Needed& needed,
                const Kept& kept, variable_list& found) const override {
    const auto memory = memory_of(x, held);
    const auto wanted = wanted_of(needed);
    const auto places = places_of(held);
    std::array<float*, LEARNED> into{};
    found.resize(1 + HELD);
    bool sums = false;
    for (int k = 0; k < LEARNED; ++k) {
      if (!wanted[k]) continue;
      const Tensor& of = held[places[k]];
      if (by_python[k] || !of.defined()) return false;
      Tensor& grad = found[1 + places[k]];
      grad = made(of.sizes(), of.strides(), at::kFloat);
      into[k] = static_cast<float*>(room_of(grad));
      sums = true;
    }
    const Kept from = kept == nullptr ? folded_from(held) : kept;
    if (from == nullptr) return false;
    const Cut& cut = sums ? summed : plain;
    const int64_t numbers = cut.slots * count * group;
    const std::unique_ptr<float[]> room(numbers > few ? new float[numbers] : nullptr);
    found[0] = like_x();
    if (!run(true, cut, x, place_of(dy), found[0], from.get(), room.get(), into)) return false;
    if (!needed[0]) found[0] = Tensor();
    return true;
  }
};

}  // namespace
