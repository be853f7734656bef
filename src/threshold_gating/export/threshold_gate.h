// One unit for every activation: y = sum_k g_k(x) (s_k x + c_k), the numbers are the layer's.
//
// Soft gates are the softmax of running sums of u_k = tau_k (x - theta_k). Branch by branch,
//     d_1 = u_1,  d_k = u_k - softplus(-d_{k-1}),   y <- y + sigma(d_k) (b_k - y),
// so that any number of branches takes one sigmoid and its integral, in segments of 1/8.

#ifndef NNET_THRESHOLD_GATE_H_
#define NNET_THRESHOLD_GATE_H_

#include "nnet_common.h"
#include <cmath>

namespace nnet {

struct threshold_gate_segments {
    static const unsigned n = 128; // of 1/8: up to |u| = 16, beyond which a gate is shut
    double sigma[n + 1];
    double softplus[n + 1]; // of -|u|
    threshold_gate_segments() {
        for (unsigned k = 0; k <= n; k++) {
            double u = k / 8.0;
            sigma[k] = 1 / (1 + std::exp(-u));
            softplus[k] = std::log1p(std::exp(-u));
        }
    }
};

typedef ap_fixed<32, 12> threshold_gate_t; // of sums; |u| is below 16 in each of up to 8 gates

// The gate, and the softplus of -u, by a segment of each.
inline void threshold_gate_unit(threshold_gate_t u, threshold_gate_t &gate, threshold_gate_t &rest) {
    static const threshold_gate_segments table;
    const threshold_gate_t most = 15.9375;
    threshold_gate_t a = u < 0 ? threshold_gate_t(-u) : u;
    threshold_gate_t near = a > most ? most : a;
    unsigned k = (unsigned)(near * 8).to_int();
    threshold_gate_t part = near * 8 - (int)k;
    threshold_gate_t g0 = table.sigma[k], g1 = table.sigma[k + 1];
    threshold_gate_t p0 = table.softplus[k], p1 = table.softplus[k + 1];
    threshold_gate_t g = g0 + part * (g1 - g0);
    threshold_gate_t p = p0 + part * (p1 - p0);
    gate = u < 0 ? threshold_gate_t(1 - g) : g;
    rest = u < 0 ? threshold_gate_t(p + a) : p; // softplus(-u)
}

struct threshold_gate_config {
    static const unsigned n_in = 10;
    static const unsigned branches = 2;
    static const unsigned groups = 1; // that have numbers of their own; element i is of i % groups
    static const bool hard = false;
};

template <class data_T, class res_T, typename CONFIG_T>
void threshold_gate(data_T data[CONFIG_T::n_in], res_T res[CONFIG_T::n_in]) {
    const unsigned K = CONFIG_T::branches;
    for (unsigned i = 0; i < CONFIG_T::n_in; i++) {
        #pragma HLS UNROLL
        const unsigned at = (i % CONFIG_T::groups) * K;
        const double *s = CONFIG_T::s() + at, *c = CONFIG_T::c() + at;
        const double *tau = CONFIG_T::tau() + at, *theta = CONFIG_T::theta() + at;
        const bool *above = CONFIG_T::owner_is_above() + at;
        threshold_gate_t x = data[i];
        threshold_gate_t y = threshold_gate_t(s[0]) * x + threshold_gate_t(c[0]);
        threshold_gate_t d = 0, gate = 0, rest = 0;
        for (unsigned k = 1; k < K; k++) {
            threshold_gate_t b = threshold_gate_t(s[k]) * x + threshold_gate_t(c[k]);
            threshold_gate_t limit = theta[k - 1];
            if (CONFIG_T::hard) {
                if (above[k - 1] ? x >= limit : x > limit)
                    y = b;
                continue;
            }
            threshold_gate_t u = threshold_gate_t(tau[k - 1]) * (x - limit);
            d = k == 1 ? u : threshold_gate_t(u - rest);
            threshold_gate_unit(d, gate, rest);
            y = y + gate * (b - y);
        }
        res[i] = y;
    }
}

} // namespace nnet

#endif
