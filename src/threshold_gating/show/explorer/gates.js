"use strict";
// Instances as `tg.TG` has them, and what they compute: y, y', y'' and the gates, in float64.
//
// An instance is {tau, theta, s, c, q, form, owner, clamp, hard}: lists low to high in x, tau one number
// for each threshold, q, owner and clamp null where there are none. Nothing here touches the page.

const Gates = (() => {
  const MOST = 8; // branches; nobody tells more colours apart
  const LARGEST = 1e30; // of a number; E[y″²], which has tau to the fourth, is finite then
  const KEYS = ["tau", "theta", "s", "c", "form", "owner", "q", "anchor", "clamp"];

  // What `TG.to_dict` writes, checked as TG checks it. An anchor only changes rounding and is left out.
  function read(given) {
    if (given === null || typeof given !== "object" || Array.isArray(given)) {
      throw new Error(`an instance is named values (tau, theta, s, c); got ${show(given)}.`);
    }
    const unknown = Object.keys(given).find((key) => !KEYS.includes(key));
    if (unknown) throw new Error(`an instance has no '${unknown}'; it has ${KEYS.join(", ")}.`);
    for (const key of KEYS.slice(0, 4)) {
      if (!(key in given)) throw new Error(`an instance needs '${key}'.`);
    }
    const theta = numbers("theta", given.theta), K = theta.length + 1;
    if (K > MOST) throw new Error(`the explorer shows K = 1 to ${MOST} branches; got K = ${K}.`);
    const [s, c] = ["s", "c"].map((key) => numbers(key, given[key], K));
    const tau = sharpness(given.tau, K - 1);
    const hard = K === 1 || tau[0] === Infinity;
    const form = given.form ?? "softmax";
    if (!["softmax", "product"].includes(form)) {
      throw new Error(`form is softmax or product; got ${show(form)}.`);
    }
    if ((hard || form === "product") && theta.some((at, k) => k && at < theta[k - 1])) {
      throw new Error(
        `${hard ? "hard" : "product-form"} gates need thresholds in order, low to high; got ` +
          `${theta.join(", ")}. Sort them, or use soft gates of the softmax form.`,
      );
    }
    const q = given.q == null ? null : numbers("q", given.q, K);
    return {
      tau, theta, s, c,
      q: q && q.some((w) => w !== 0) ? q : null,
      form: hard || K <= 2 ? "softmax" : form, // the two forms agree there
      owner: hard ? owners(given.owner, theta) : unowned(given.owner),
      clamp: bounds(given.clamp),
      hard,
    };
  }

  function show(value) {
    return value === undefined ? "nothing" : JSON.stringify(value).slice(0, 40);
  }

  function numbers(name, given, count) {
    const list = Array.isArray(given) ? given : [given];
    const wrong = list.find((w) => typeof w !== "number" || !Number.isFinite(w));
    if (wrong !== undefined || list.includes(undefined)) {
      const said = typeof wrong === "number" ? String(wrong) : show(wrong);
      throw new Error(`${name} must be finite numbers; got ${said}.`);
    }
    small(name, list);
    if (count !== undefined && list.length !== count) {
      throw new Error(`K = ${count} branches need ${count} values of ${name}; got ${list.length}.`);
    }
    return [...list];
  }

  function small(name, list) {
    const large = list.find((w) => Math.abs(w) > LARGEST && w !== Infinity);
    if (large !== undefined) throw new Error(`the explorer shows numbers up to ${LARGEST}; got ${name} = ${large}.`);
  }

  function sharpness(given, thresholds) {
    const list = (Array.isArray(given) ? given : [given]).map((w) => (w === "inf" ? Infinity : w));
    if (Array.isArray(given) && list.length !== thresholds) {
      throw new Error(`tau is one number or ${thresholds}, one per threshold; got ${list.length}.`);
    }
    for (const w of list) {
      if (typeof w !== "number" || !(w > 0)) {
        const said = typeof w === "number" ? String(w) : show(w);
        throw new Error(`tau must be a positive number, or inf for hard gates; got ${said}.`);
      }
    }
    small("tau", list);
    if (new Set(list.map((w) => w === Infinity)).size > 1) {
      throw new Error(`tau is inf (hard gates) at every threshold or at none; got ${list.join(", ")}.`);
    }
    return Array.isArray(given) ? list : Array(thresholds).fill(list[0]);
  }

  function owners(given, theta) {
    const owner = given ?? theta.map(() => "lo");
    const fits = Array.isArray(owner) && owner.length === theta.length;
    if (!fits || owner.some((o) => o !== "lo" && o !== "hi")) {
      throw new Error(`owner is lo or hi for each of the ${theta.length} thresholds; got ${show(given)}.`);
    }
    const twice = theta.findIndex((at, k) => at === theta[k + 1] && owner[k] === "lo" && owner[k + 1] === "hi");
    if (twice >= 0) {
      throw new Error(`at the equal thresholds ${theta[twice]} the owners lo, hi give x = theta to two regions.`);
    }
    return [...owner];
  }

  function unowned(given) {
    if (given != null) throw new Error(`owner is for hard gates (tau = inf) only; got ${show(given)}.`);
    return null;
  }

  function bounds(given) {
    if (given == null) return null;
    const clamp = numbers("clamp", given, 2);
    if (!(clamp[0] < clamp[1])) throw new Error(`clamp is low, high with low < high; got ${clamp.join(", ")}.`);
    return clamp;
  }

  // As `TG.to_dict` writes it; `read` is the inverse.
  function write(t) {
    const alike = t.tau.every((w) => w === t.tau[0]);
    const given = { tau: t.hard ? "inf" : alike ? t.tau[0] : t.tau, theta: t.theta, s: t.s, c: t.c };
    if (t.form !== "softmax") given.form = t.form;
    if (t.owner && t.owner.includes("hi")) given.owner = t.owner;
    if (t.q) given.q = t.q;
    if (t.clamp) given.clamp = t.clamp;
    return Object.fromEntries(Object.entries(given).map(([key, w]) => [key, Array.isArray(w) ? [...w] : w]));
  }

  // The instance as Python code; evaluated there, it is this instance.
  function python(t) {
    const word = (w) => (typeof w === "string" ? `"${w}"` : String(w));
    const value = (w) => (Array.isArray(w) ? `(${w.map(word).join(", ")}${w.length === 1 ? "," : ""})` : word(w));
    const parts = Object.entries(write(t)).map(([key, w]) => `${key}=${w === "inf" ? 'float("inf")' : value(w)}`);
    return `TG(${parts.join(", ")})`;
  }

  function family(t) {
    const slopes = t.s.map((s, k) => Math.max(Math.abs(s), Math.abs(t.q ? t.q[k] : 0)));
    if (Math.max(...slopes) <= 0) return "constant";
    const saturates = t.clamp !== null || Math.max(slopes[0], slopes.at(-1)) <= 0;
    return saturates ? "saturating" : "multiplicative";
  }

  // The gates of arguments u (logits are their running sums), for thresholds in any order, into g: the drop
  // of each logit below the largest, from the left and from the right, so that nothing overflows.
  function softmax(u, g) {
    const last = u.length;
    let drop = 0, total = 0;
    g[0] = 0;
    for (let k = 0; k < last; k++) g[k + 1] = drop = Math.min(drop + u[k], 0);
    drop = 0;
    for (let k = last; k >= 0; k--) {
      if (k < last) drop = Math.min(drop - u[k], 0);
      total += g[k] = Math.exp(Math.min(g[k], drop));
    }
    for (let k = 0; k <= last; k++) g[k] /= total;
  }

  // The product form of the appendix: log gate k is log sigma(u_{k-1}) + log sigma(-u_k), renormalised.
  function product(u, g) {
    const last = u.length;
    let most = -Infinity, total = 0;
    for (let k = 0; k <= last; k++) {
      g[k] = (k ? logSigmoid(u[k - 1]) : 0) + (k < last ? logSigmoid(-u[k]) : 0);
      most = Math.max(most, g[k]);
    }
    for (let k = 0; k <= last; k++) total += g[k] = Math.exp(g[k] - most);
    for (let k = 0; k <= last; k++) g[k] /= total;
  }

  function sigmoid(u) {
    return u >= 0 ? 1 / (1 + Math.exp(-u)) : 1 - 1 / (1 + Math.exp(u));
  }

  function logSigmoid(u) {
    return Math.min(u, 0) - Math.log1p(Math.exp(-Math.abs(u)));
  }

  const within = (u) => Math.max(-1e300, Math.min(1e300, u));

  // Each of these gives (x, g, g1, g2) => the gates at x with their first and second derivatives.

  function softGates(t) {
    const J = t.theta.length, u = new Float64Array(J), below = new Float64Array(J), above = new Float64Array(J);
    return (x, g, g1, g2) => {
      for (let k = 0; k < J; k++) u[k] = within(t.tau[k] * (x - t.theta[k]));
      softmax(u, g);
      // The slope of a logit less the mean slope, as masses beside each threshold: no difference of large numbers.
      for (let k = 0, sum = 0; k < J; k++) below[k] = sum += g[k];
      for (let k = J, sum = 0; k > 0; k--) above[k - 1] = sum += g[k];
      for (let k = J, fall = 0; k >= 0; k--) {
        if (k < J) fall += t.tau[k] * above[k];
        g1[k] = -fall;
      }
      let spread = 0;
      for (let k = 0, lift = 0; k <= J; k++) {
        if (k) lift += t.tau[k - 1] * below[k - 1];
        g1[k] += lift;
        spread += g[k] * g1[k] * g1[k];
      }
      for (let k = 0; k <= J; k++) {
        const slope = g1[k];
        g2[k] = g[k] * (slope * slope - spread);
        g1[k] = g[k] * slope;
      }
    };
  }

  function productGates(t) {
    const J = t.theta.length, u = new Float64Array(J), slope = new Float64Array(J + 1), bend = new Float64Array(J + 1);
    return (x, g, g1, g2) => {
      for (let k = 0; k < J; k++) u[k] = within(t.tau[k] * (x - t.theta[k]));
      product(u, g);
      slope.fill(0);
      bend.fill(0);
      for (let k = 0; k < J; k++) {
        const up = sigmoid(u[k]), down = sigmoid(-u[k]), curved = t.tau[k] * t.tau[k] * up * down;
        slope[k] -= t.tau[k] * up;
        slope[k + 1] += t.tau[k] * down;
        bend[k] -= curved;
        bend[k + 1] -= curved;
      }
      let mean = 0, spread = 0;
      for (let k = 0; k <= J; k++) mean += g[k] * slope[k];
      for (let k = 0; k <= J; k++) spread += g[k] * ((slope[k] - mean) ** 2 + bend[k]);
      for (let k = 0; k <= J; k++) {
        g1[k] = g[k] * (slope[k] - mean);
        g2[k] = g[k] * ((slope[k] - mean) ** 2 + bend[k] - spread);
      }
    };
  }

  function hardGates(t) {
    return (x, g) => {
      let region = 0;
      for (let k = 0; k < t.theta.length; k++) {
        region += t.owner[k] === "lo" ? x > t.theta[k] : x >= t.theta[k];
      }
      g.fill(0);
      g[region] = 1;
    };
  }

  // y, its derivatives d1 and d2, and the K gates g at each of xs. Hard gates have the derivatives of the branch
  // that x is in; what y'' has at a corner is in `corners`.
  function evaluate(t, xs) {
    const n = xs.length, K = t.s.length, q = t.q ?? new Float64Array(K);
    const [y, d1, d2] = [0, 1, 2].map(() => new Float64Array(n));
    const all = Array.from({ length: K }, () => new Float64Array(n));
    const [g, g1, g2] = [0, 1, 2].map(() => new Float64Array(K));
    const gatesAt = t.hard ? hardGates(t) : t.form === "product" ? productGates(t) : softGates(t);
    for (let i = 0; i < n; i++) {
      const x = xs[i];
      gatesAt(x, g, g1, g2);
      let Q = 0, S = 0, C = 0, Q1 = 0, S1 = 0, C1 = 0, Q2 = 0, S2 = 0, C2 = 0;
      for (let k = 0; k < K; k++) {
        Q += g[k] * q[k]; S += g[k] * t.s[k]; C += g[k] * t.c[k];
        Q1 += g1[k] * q[k]; S1 += g1[k] * t.s[k]; C1 += g1[k] * t.c[k];
        Q2 += g2[k] * q[k]; S2 += g2[k] * t.s[k]; C2 += g2[k] * t.c[k];
        all[k][i] = g[k];
      }
      y[i] = (Q * x + S) * x + C;
      d1[i] = (Q1 * x + S1) * x + C1 + 2 * Q * x + S;
      d2[i] = (Q2 * x + S2) * x + C2 + 2 * (2 * Q1 * x + S1) + 2 * Q;
      if (t.clamp && !(y[i] > t.clamp[0] && y[i] < t.clamp[1])) {
        y[i] = y[i] <= t.clamp[0] ? t.clamp[0] : t.clamp[1];
        d1[i] = d2[i] = 0;
      }
    }
    return { y, d1, d2, g: all };
  }

  function branch(t, k, x) {
    return ((t.q ? t.q[k] : 0) * x + t.s[k]) * x + t.c[k];
  }

  const REACH = 32, CELLS = 1024, JUMP = 1e-6; // as tg.theory looks for corners, in coarser cells
  // A sharp gate may cross a bound twice within a cell: more places around its threshold, in 1 / tau.
  const AROUND = Array.from({ length: 81 }, (_, k) => (k - 40) / 4);

  const known = new WeakMap(); // places of an instance, which is never changed

  // Where y or y' may jump: thresholds of hard gates, and where a clamp takes over.
  function places(t) {
    if (!known.has(t)) {
      const found = [...(t.hard ? t.theta : []), ...(t.clamp ? clampings(t) : [])];
      known.set(t, [...new Set(found)].sort((a, b) => a - b));
    }
    return known.get(t);
  }

  function clampings(t) {
    const free = { ...t, clamp: null }, one = (x) => evaluate(free, [x]).y[0];
    const even = Array.from({ length: CELLS + 1 }, (_, k) => REACH * ((2 * (k + 0.382)) / CELLS - 1));
    const turns = t.hard ? [] : t.theta.flatMap((at, k) => AROUND.map((w) => at + w / t.tau[k]));
    const xs = Float64Array.from([...even, ...turns.filter((x) => Math.abs(x) <= REACH)]).sort();
    const y = evaluate(free, xs).y, found = [];
    for (const bound of t.clamp) {
      for (let k = 0; k + 1 < xs.length; k++) {
        if (y[k] > bound === y[k + 1] > bound) continue;
        let low = xs[k], high = xs[k + 1];
        for (let step = 0; step < 60; step++) {
          const middle = (low + high) / 2;
          if (one(middle) > bound === y[k] > bound) low = middle;
          else high = middle;
        }
        found.push(high);
      }
    }
    return found;
  }

  // {at, step, jump}: where y jumps by `step`, or y' by `jump` (there y'' has a point mass).
  function corners(t) {
    const beside = 1e-9, found = [];
    for (const at of places(t)) {
      const { y, d1 } = evaluate(t, [at - beside, at + beside]);
      const step = y[1] - y[0], jump = d1[1] - d1[0];
      const corner = {
        at,
        step: Math.abs(step) > JUMP * Math.max(1, Math.abs(y[1])) ? step : 0,
        jump: Math.abs(jump) > JUMP * Math.max(1, Math.abs(d1[1])) ? jump : 0,
      };
      if (corner.step || corner.jump) found.push(corner);
    }
    return found;
  }

  return { MOST, read, write, python, family, softmax, product, evaluate, branch, places, corners };
})();
