"use strict";
// Numbers about a whole curve: its edge of chaos as `tg.theory.edge_of_chaos` has it, and the named activation
// that it is nearest to. Nothing here touches the page.

const Theory = (() => {
  const NODES = 16, DEVIATIONS = 10; // the normal density beyond is under 1e-22
  // Around a soft threshold, in 1 / tau: panels no wider than their distance to the gate's poles.
  const AROUND = [-40, -18, -6, -2, 0, 2, 6, 18, 40];

  // Nodes and weights of Gauss and Legendre on [-1, 1], by Newton's method.
  const [NODE, WEIGHT] = (() => {
    const node = new Float64Array(NODES), weight = new Float64Array(NODES);
    for (let k = 0; k < NODES; k++) {
      let x = Math.cos((Math.PI * (k + 0.75)) / (NODES + 0.5)), slope = 0;
      for (let step = 0; step < 8; step++) {
        let [before, now] = [1, x];
        for (let n = 1; n < NODES; n++) [before, now] = [now, ((2 * n + 1) * x * now - n * before) / (n + 1)];
        slope = (NODES * (x * now - before)) / (x * x - 1);
        x -= now / slope;
      }
      node[k] = x;
      weight[k] = 2 / ((1 - x * x) * slope * slope);
    }
    return [node, weight];
  })();

  // Nodes and weights for N(0, q), cut where y, y' or y'' jump and where a gate turns.
  function rule(t, q) {
    const reach = DEVIATIONS * Math.sqrt(q), cuts = [...Gates.places(t)];
    for (let k = 0; k <= 2 * DEVIATIONS; k++) cuts.push(reach * (k / DEVIATIONS - 1));
    if (!t.hard) t.theta.forEach((at, k) => cuts.push(...AROUND.map((w) => at + w / t.tau[k])));
    const edges = [...new Set(cuts)].filter((at) => Math.abs(at) <= reach).sort((a, b) => a - b);
    const u = new Float64Array((edges.length - 1) * NODES), weight = new Float64Array(u.length);
    let total = 0;
    for (let i = 0; i + 1 < edges.length; i++) {
      const half = (edges[i + 1] - edges[i]) / 2;
      for (let k = 0; k < NODES; k++) {
        const j = i * NODES + k;
        u[j] = edges[i] + half * (1 + NODE[k]);
        total += weight[j] = half * WEIGHT[k] * Math.exp((-u[j] * u[j]) / (2 * q));
      }
    }
    for (let j = 0; j < u.length; j++) weight[j] /= total;
    return [u, weight];
  }

  // E[y^2], E[y'^2], E[y''^2] for inputs from N(0, q), and d E[y^2] / dq; infinite at steps and corners.
  function moments(t, q) {
    const [u, weight] = rule(t, q), { y, d1, d2 } = Gates.evaluate(t, u);
    let value = 0, slope = 0, curvature = 0, growth = 0;
    for (let j = 0; j < u.length; j++) {
      value += weight[j] * y[j] * y[j];
      slope += weight[j] * d1[j] * d1[j];
      curvature += weight[j] * d2[j] * d2[j];
      growth += (weight[j] * u[j] * y[j] * d1[j]) / q;
    }
    const corners = Gates.corners(t), steps = corners.some((corner) => corner.step);
    return {
      value,
      slope: steps ? Infinity : slope,
      curvature: corners.length ? Infinity : curvature,
      growth,
    };
  }

  // The weights and biases that keep the variance at q with chi_1 = 1; `valid` says whether there are any.
  function edge(t, q) {
    const m = moments(t, q), none = { sigma_w: NaN, sigma_b2: NaN, valid: false, chi_1: NaN, beta: null, chi_q: null };
    if (!(m.slope > 0 && m.slope < Infinity)) return { ...none, moments: m };
    const w2 = 1 / m.slope, b2 = q - w2 * m.value, sigma_b2 = Math.abs(b2) < 1e-9 * q ? 0 : b2;
    const valid = sigma_b2 >= 0, beta = m.curvature ? (2 * m.slope) / (q * m.curvature) : Infinity;
    return {
      sigma_w: Math.sqrt(w2),
      sigma_b2,
      valid,
      chi_1: w2 * m.slope,
      beta: valid ? beta : null,
      chi_q: valid ? w2 * m.growth : null,
      moments: m,
    };
  }

  // The named activation with the least root mean square difference over `named.x`; of equal ones the first.
  function nearest(t, named) {
    const { y } = Gates.evaluate(t, named.x);
    let best = { key: null, rms: Infinity, largest: Infinity };
    for (const [key, f] of Object.entries(named.values)) {
      let squares = 0, largest = 0;
      for (let i = 0; i < y.length; i++) {
        const apart = Math.abs(y[i] - f[i]);
        squares += apart * apart;
        largest = Math.max(largest, apart);
      }
      const rms = Math.sqrt(squares / y.length);
      if (rms < best.rms) best = { key, rms, largest };
    }
    return best;
  }

  return { moments, edge, nearest };
})();
