// Gates on a CPU: the functions of `blend.c`, compiled for a number of branches; see `host.cpp`.

#pragma once

#include "host_node.h"

#include <ATen/Parallel.h>

namespace {

// How work is cut into chunks; see `one_pass._Cut`.
struct Cut {
  std::array<long, 9> sizes;
  int64_t chunks = 1;
};

struct OnePass : State {
  int (*blend)(const void*, const void*, void*, const float*, float*, float*, float*, float*,
               float*, const long*, int, int, int, unsigned, void*) = nullptr;
  double (*fold)(const float*, const float*, const float*, const float*, const float*,
                 const float*, const double*, long, float*) = nullptr;
  void* team = nullptr;           // what starts threads, if there is such a function
  const int* threads = nullptr;   // whether it may: not in a process that was forked
  std::vector<double> known;      // numbers, NaN for what is in a tensor
  double widest = 0.0;            // largest exponent of a weight
  std::array<int64_t, SUMS> rows{};  // of tau, theta, s and c, and of their gradients
  int64_t folded = 0, few = 0;    // rows of folded parameters; sums that need no room
  int type = 0, constants = 0;
  bool keeps = false;  // folded parameters, until the backward pass
  Cut plain, summed;  // the latter where there are sums
  std::array<bool, SUMS> by_python{};  // whose gradients are put together there

  using State::State;

  bool is_here() const override { return true; }
  bool is_placed(const Tensor&) const override { return true; }

  int64_t group() const { return plain.sizes[1]; }

  // The parameters as they are read; nothing if the code does not take them.
  Kept folded_from(const Gates& held) const {
    std::array<const float*, HELD> at{};
    for (int k = 0; k < HELD; ++k) {
      if (!held[k].defined()) continue;
      at[k] = static_cast<const float*>(held[k].const_data_ptr());
      if (at[k] == nullptr) return nullptr;  // a tensor without memory
    }
    std::shared_ptr<float[]> made(new float[folded * group()]);
    const double found = fold(at[0], at[1], at[2], at[3], at[4], at[5], known.data(), group(),
                              made.get());
    return found <= widest ? Kept(made) : nullptr;  // NaN is not
  }

  // Whether all that came out is finite.
  bool run(const Cut& cut, const Tensor& x, const void* dy, const Tensor& out, const float* from,
           float* sums, const std::array<float*, SUMS>& into) const {
    unsigned most = 1;
    if (cut.chunks > 1 && team != nullptr && *threads) {
      most = static_cast<unsigned>(std::min<int64_t>(at::get_num_threads(), cut.chunks));
    }
    return blend(place_of(x), dy, place_of(out), from, sums, into[0], into[1], into[2], into[3],
                 cut.sizes.data(), type, constants, dy != nullptr, most, team) == 0;
  }

  Tensor forward(const Tensor& x, const Gates& held, Kept& kept) const override {
    const pybind11::gil_scoped_release free;  // others may go on meanwhile
    const Kept from = folded_from(held);
    if (from == nullptr) return {};
    const Tensor y = like_x();
    if (!run(plain, x, nullptr, y, from.get(), nullptr, {})) return {};
    if (keeps) kept = from;
    return y;
  }

  bool backward(const Tensor& dy, const Tensor& x, const Gates& held, const Needed& needed,
                const Kept& kept, variable_list& found) const override {
    const auto wanted = wanted_of(needed);
    const auto learned = learned_of(held);
    std::array<float*, SUMS> into{};
    found.resize(1 + HELD);
    int64_t asked = 0;
    for (int k = 0; k < SUMS; ++k) {
      if (!wanted[k]) continue;
      const Tensor& of = held[learned[k]];
      if (by_python[k] || !of.defined()) return false;
      Tensor& grad = found[1 + learned[k]];
      grad = made(of.sizes(), of.strides(), at::kFloat);
      into[k] = static_cast<float*>(place_of(grad));
      ++asked;
    }
    const Kept from = kept == nullptr ? folded_from(held) : kept;
    if (from == nullptr) return false;
    const Cut& cut = asked ? summed : plain;
    int64_t count = cut.sizes[8] * group();
    count *= rows[0] + rows[1] + rows[2] + rows[3];
    std::unique_ptr<float[]> room(count > few ? new float[count] : nullptr);
    found[0] = like_x();
    if (!run(cut, x, place_of(dy), found[0], from.get(), room.get(), into)) return false;
    if (!needed[0]) found[0] = Tensor();
    return true;
  }
};

}  // namespace
