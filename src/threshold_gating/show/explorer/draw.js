"use strict";
// The three pictures of one frame: function, gates and derivatives. `frame` has what is drawn: the instance t, the
// view, xs (px in pixels) with what `Gates.evaluate` found there, its corners, the nearest named function and the chip.

const Draw = (() => {
  const SAMPLES = 256, BESIDE = 1e-9;

  // Evenly over the picture, closer where a gate turns, and on both sides of a corner.
  function samples(t, view) {
    const xs = Array.from({ length: SAMPLES + 1 }, (_, k) => view * ((2 * k) / SAMPLES - 1));
    const add = (x) => Math.abs(x) < view && xs.push(x);
    if (!t.hard) t.theta.forEach((at, k) => [-4, -2, -1, -0.5, 0, 0.5, 1, 2, 4].forEach((w) => add(at + w / t.tau[k])));
    for (const at of Gates.places(t)) [at - BESIDE, at + BESIDE].forEach(add);
    return Float64Array.from(xs).sort();
  }

  // Indices of xs at which a line begins anew: behind each of these places.
  const breaks = (xs, places) => new Set(places.map((at) => xs.findIndex((x) => x > at)).filter((i) => i > 0));
  const places = (corners) => corners.map(({ at }) => at);

  function extent(ys) {
    let low = Infinity, high = -Infinity;
    for (const y of ys) {
      low = Math.min(low, y);
      high = Math.max(high, y);
    }
    return [low, high];
  }

  function theFunction(plot, { t, view, xs, px, found, corners, near, chip }) {
    const extents = [found.y, ...(chip ? [chip.band.low, chip.band.high] : [])].map(extent);
    Plot.span(plot, Math.min(...extents.map(([low]) => low)), Math.max(...extents.map(([, high]) => high)));
    Plot.axes(plot, view);
    const pixels = (list) => Plot.pixels(plot, view, list), jumps = (list) => places(list.filter((corner) => corner.step));
    Plot.line(plot, "near", "near", pixels(near.x), near.y, breaks(near.x, jumps(near.corners)));
    Plot.area(plot, "band", "band", chip && pixels(chip.band.xs), chip?.band.low, chip?.band.high);
    const ends = t.q ? xs : [-view, view], ofEnds = t.q ? px : pixels(ends);
    for (let k = 0; k < Gates.MOST; k++) {
      const ys = k < t.s.length ? Array.from(ends, (x) => Gates.branch(t, k, x)) : null;
      Plot.line(plot, `branch${k}`, `branch b${k}`, ys && ofEnds, ys);
    }
    Plot.line(plot, "y", "y", px, found.y, breaks(xs, jumps(corners)));
    Plot.line(plot, "chip", "chip", chip && px, chip?.y);
  }

  function theGates(plot, { t, view, xs, px, found }) {
    [plot.low, plot.high] = [-0.05, 1.05];
    Plot.axes(plot, view);
    const parts = breaks(xs, t.hard ? t.theta : []);
    for (let k = 0; k < Gates.MOST; k++) {
      Plot.line(plot, `g${k}`, `gate b${k}`, k < t.s.length ? px : null, found.g[k], parts);
    }
  }

  // Returns what has to be said: jumps, whose point masses are not drawn, and what is beyond the picture.
  function theSlopes(plot, { view, xs, px, found, corners }, say) {
    const [low, high] = extent(found.d1), [low2, high2] = extent(found.d2), room = Math.max(1, high - low);
    // y'' of a sharp gate is far higher than all else; it is cut off, and that is said.
    Plot.span(plot, Math.max(Math.min(low, low2), low - room), Math.min(Math.max(high, high2), high + room));
    Plot.axes(plot, view);
    const parts = breaks(xs, places(corners));
    Plot.line(plot, "d2", "d2", px, found.d2, parts);
    Plot.line(plot, "d1", "d1", px, found.d1, parts);
    const seen = corners.filter(({ at }) => Math.abs(at) <= view), said = [];
    const listed = (list) => list.map(({ at }) => say(at)).join(", ");
    const steps = seen.filter(({ step }) => step), kinks = seen.filter(({ step }) => !step);
    if (steps.length) said.push(`y jumps at ${listed(steps)}`);
    if (kinks.length) said.push(`y′ jumps at ${listed(kinks)}`);
    if (seen.length) said.push("point masses there are not drawn");
    if (high2 > plot.high || low2 < plot.low) said.push(`y″ reaches ${say(high2 > -low2 ? high2 : low2)}, beyond the picture`);
    return said.join("; ");
  }

  return { samples, theFunction, theGates, theSlopes };
})();
