"use strict";
// One instance on differential pairs, as `tg.hardware.analog.simulate` computes it for one gate shared by a
// layer: volts, thresholds and sharpness of a chip, and its curve. Noise is not drawn. Nothing here touches
// the page.

const Pairs = (() => {
  // Log odds of a pair as a function of u = tau (v - theta); u itself where the gate is logistic.
  function logOdds([slope, rise, knee, bend]) {
    if (slope === 1 && rise === 0) return (u) => u;
    return (u) => slope * u + (rise / bend) * (softplus(bend * (u - knee)) - softplus(bend * (-u - knee)));
  }

  function softplus(u) {
    return Math.max(u, 0) + Math.log1p(Math.exp(-Math.abs(u)));
  }

  // tau over that at 27 C, by a straight line in 1 / T between the temperatures that were measured.
  function warmth(pair, celsius) {
    if (celsius === 27) return 1;
    const points = pair.temperature.map(([at, tau]) => [1 / (at + 273.15), tau]);
    const x = 1 / (celsius + 273.15);
    let k = points.length - 2;
    while (k > 0 && points[k][0] < x) k--;
    const [[x0, y0], [x1, y1]] = [points[k], points[k + 1]];
    return (y0 + ((y1 - y0) * (x - x0)) / (x1 - x0)) / pair.tau;
  }

  // Volts per unit of x, and the most that a pair gets behind its divider, for inputs that fill -reach to reach.
  function settle(t, pair, reach) {
    const rail = pair.supply / 2;
    if (t.hard) return { volts: pair.swing / reach, cap: Infinity, rail };
    const own = Math.max(...t.tau) / pair.tau, least = Math.min(...t.tau) / pair.tau;
    if (least === own || own * reach <= rail) return { volts: own, cap: Infinity, rail };
    // Too sharp for the rails: ten tries a decade, and of these the one at which perfect pairs come closest.
    const count = Math.max(2, Math.ceil(10 * Math.log10(own / least))), rms = reach / Math.sqrt(3);
    let tried = Array.from({ length: count + 1 }, (_, k) => least * (own / least) ** (k / count));
    tried = tried.filter((volts) => volts * rms <= rail);
    let best = { off: Infinity };
    for (const volts of tried.length ? tried : [least]) {
      const set = { volts, cap: volts, rail }, off = distance(t, pair, set, reach);
      if (off < best.off) best = { ...set, off };
    }
    return best;
  }

  // How far perfect pairs are from the instance: RMS over RMS, evenly over the inputs.
  function distance(t, pair, set, reach) {
    const xs = Float64Array.from({ length: 501 }, (_, k) => reach * (k / 250 - 1));
    return apart(Gates.evaluate(t, xs).y, curve(t, pair, set, null, 27, xs));
  }

  function apart(want, got) {
    let size = 0, off = 0;
    for (let i = 0; i < want.length; i++) {
      size += want[i] ** 2;
      off += (got[i] - want[i]) ** 2;
    }
    return size || !off ? Math.sqrt(off / (size || 1)) : Infinity;
  }

  // The thresholds and the sharpness that a chip has; `chip` holds standard normal numbers, null for no errors.
  function devices(t, pair, set, chip, celsius) {
    const warm = warmth(pair, celsius);
    return t.theta.map((theta, k) => {
      const volts = t.hard ? set.volts : Math.min(t.tau[k] / pair.tau, set.cap);
      return {
        theta: theta + (chip ? (pair.sigma_theta / volts) * chip.theta[k] : 0),
        tau: pair.tau * warm * volts * (chip ? Math.exp(pair.sigma_tau * chip.tau[k]) : 1),
        sigma: pair.sigma_theta / volts, // of theta, in units of x
      };
    });
  }

  // y of a chip at each of xs: inputs end at the rails, for gates and branches.
  function curve(t, pair, set, chip, celsius, xs) {
    const made = devices(t, pair, set, chip, celsius), K = t.s.length, most = set.rail / set.volts;
    const u = new Float64Array(K - 1), g = new Float64Array(K), y = new Float64Array(xs.length);
    const gates = t.form === "product" ? Gates.product : Gates.softmax, odds = logOdds(pair.shape);
    for (let i = 0; i < xs.length; i++) {
      const x = Math.max(-most, Math.min(most, xs[i]));
      for (let k = 0; k < K - 1; k++) u[k] = odds(made[k].tau * (x - made[k].theta));
      gates(u, g);
      let Q = 0, S = 0, C = 0;
      for (let k = 0; k < K; k++) {
        if (t.q) Q += g[k] * t.q[k];
        S += g[k] * t.s[k];
        C += g[k] * t.c[k];
      }
      y[i] = (Q * x + S) * x + C;
      if (t.clamp) y[i] = Math.max(t.clamp[0], Math.min(t.clamp[1], y[i]));
    }
    return y;
  }

  const COUNT = 49; // points of the band, and inputs over which a chip is off

  const evenly = (end) => Float64Array.from({ length: COUNT }, (_, k) => end * ((2 * k) / (COUNT - 1) - 1));

  // What is shown of one chip: its curve at xs, the band of all chips, and how far it and perfect pairs are off.
  function shown(t, pair, numbers, { chip, reach, celsius, view }, xs) {
    const set = settle(t, pair, reach), drawn = (k) => ({ theta: numbers.theta[k], tau: numbers.tau[k] });
    const band = { xs: evenly(view), low: new Float64Array(COUNT).fill(Infinity), high: new Float64Array(COUNT).fill(-Infinity) };
    for (let k = 0; k < numbers.theta.length; k++) {
      const y = curve(t, pair, set, drawn(k), celsius, band.xs);
      for (let i = 0; i < COUNT; i++) {
        band.low[i] = Math.min(band.low[i], y[i]);
        band.high[i] = Math.max(band.high[i], y[i]);
      }
    }
    const inputs = evenly(reach), want = Gates.evaluate(t, inputs).y;
    const off = (its) => apart(want, curve(t, pair, set, its, celsius, inputs));
    return {
      band, set, pair,
      y: curve(t, pair, set, drawn(chip), celsius, xs),
      made: devices(t, pair, set, drawn(chip), celsius),
      off: off(drawn(chip)),
      perfect: off(null),
    };
  }

  return { COUNT, settle, curve, shown };
})();
