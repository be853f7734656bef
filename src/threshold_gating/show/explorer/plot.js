"use strict";
// Pictures: an SVG as wide as the page gives it, with axes, lines that keep their elements, and thresholds that
// are dragged. Values come in, pixels go out; what they mean is not known here.

const Plot = (() => {
  const LEFT = 46, RIGHT = 12, TOP = 12, BOTTOM = 24;
  const FAR = 1e4; // pixels; beyond them a browser draws nothing useful

  function element(name, attributes, parent) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    parent?.append(made);
    return made;
  }

  // A picture in an <svg> of the page. `field` is a nested svg: it cuts off what is outside.
  function make(svg, { ticksX = true } = {}) {
    const grid = element("g", { class: "grid" }, svg);
    const field = element("svg", { class: "field" }, svg);
    return { svg, grid, field, lines: new Map(), bottom: ticksX ? BOTTOM : 8, low: 0, high: 1, drawn: "" };
  }

  // Take over the size that the page gives.
  function fit(plot) {
    const { width, height } = plot.svg.getBoundingClientRect();
    plot.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const inner = { x: LEFT, y: TOP, width: Math.max(1, width - LEFT - RIGHT) };
    inner.height = Math.max(1, height - TOP - plot.bottom);
    for (const [key, value] of Object.entries(inner)) plot.field.setAttribute(key, value);
    plot.inner = inner;
    plot.drawn = "";
  }

  // The range of y: round numbers around what is drawn, and the same as before while that still fits well.
  function span(plot, low, high) {
    if (!(high - low > 1e-9 * Math.max(1, Math.abs(high)))) [low, high] = [low - 1, high + 1];
    const room = 0.06 * (high - low);
    const fits = low >= plot.low && high <= plot.high && high - low > 0.55 * (plot.high - plot.low);
    if (fits) return;
    const step = tickStep(low - room, high + room) / 2;
    plot.low = step * Math.floor((low - room) / step);
    plot.high = step * Math.ceil((high + room) / step);
  }

  function tickStep(low, high) {
    const rough = (high - low) / 4, ten = 10 ** Math.floor(Math.log10(rough));
    return ten * [5, 2, 1].find((m) => m * ten <= rough);
  }

  function ticks(low, high) {
    const step = tickStep(low, high), found = [];
    for (let k = Math.ceil(low / step); k <= Math.floor(high / step + 1e-9); k++) found.push(k * step);
    return found;
  }

  function label(value) {
    return String(Number(value.toPrecision(4))).replace("-", "−");
  }

  const across = (plot, view) => (x) => ((x + view) / (2 * view)) * plot.inner.width;
  const up = (plot) => (y) => ((plot.high - y) / (plot.high - plot.low)) * plot.inner.height;
  const valueAt = (plot, view, clientX) => {
    const left = plot.svg.getBoundingClientRect().left + LEFT;
    return ((clientX - left) / plot.inner.width) * 2 * view - view;
  };

  // Axes for x from -view to view; drawn anew only where they changed.
  function axes(plot, view) {
    const now = `${view} ${plot.low} ${plot.high}`;
    if (plot.drawn === now) return;
    plot.drawn = now;
    plot.grid.replaceChildren();
    const { x, y, width, height } = plot.inner, sx = across(plot, view), sy = up(plot);
    for (const tick of ticks(-view, view)) {
      const at = (x + sx(tick)).toFixed(1);
      element("path", { d: `M${at} ${y}v${height}`, class: tick === 0 ? "zero" : "" }, plot.grid);
      if (plot.bottom === BOTTOM) {
        element("text", { x: at, y: y + height + 16, "text-anchor": "middle" }, plot.grid).textContent = label(tick);
      }
    }
    for (const tick of ticks(plot.low, plot.high)) {
      const at = (y + sy(tick)).toFixed(1);
      element("path", { d: `M${x} ${at}h${width}`, class: tick === 0 ? "zero" : "" }, plot.grid);
      element("text", { x: x - 7, y: Number(at) + 4, "text-anchor": "end" }, plot.grid).textContent = label(tick);
    }
  }

  const tenth = (v) => Math.round(v * 10) / 10;

  // Where xs are in the picture, as they are written: all lines of a frame share them.
  const pixels = (plot, view, xs) => Array.from(xs, (x) => `${tenth(across(plot, view)(x))} `);

  // Set the line of that name; without points it is empty. `breaks` has the indices at which it begins anew.
  function line(plot, name, look, px, ys, breaks) {
    let path = plot.lines.get(name);
    if (!path) plot.lines.set(name, (path = element("path", {}, plot.field)));
    if (path.getAttribute("class") !== look) path.setAttribute("class", look);
    const d = px ? points(plot, px, ys, breaks) : "";
    if (d || path.getAttribute("d")) path.setAttribute("d", d);
  }

  function points(plot, px, ys, breaks) {
    const sy = up(plot);
    let d = "";
    for (let i = 0; i < px.length; i++) {
      d += (i === 0 || breaks?.has(i) ? "M" : "L") + px[i] + tenth(Math.max(-FAR, Math.min(FAR, sy(ys[i]))));
    }
    return d;
  }

  // An area between two lines over the same xs.
  function area(plot, name, look, px, low, high) {
    line(plot, name, look, px, high);
    if (!px) return;
    const back = points(plot, [...px].reverse(), [...low].reverse()).replace("M", "L"), path = plot.lines.get(name);
    path.setAttribute("d", `${path.getAttribute("d")}${back}Z`);
  }

  // Handles for thresholds, one for each: `moved(k, x)` is called while one is dragged, `nudged(k, steps)` for keys.
  function handles(plot, count, { moved, nudged, done }) {
    plot.handles ??= [];
    while (plot.handles.length > count) plot.handles.pop().remove();
    while (plot.handles.length < count) {
      const k = plot.handles.length;
      const handle = element("g", { class: "handle", role: "slider", tabindex: "0", "aria-label": `threshold ${k + 1}` }, plot.svg);
      element("path", { class: "reach", d: `M0 0V1` }, handle);
      element("path", { class: "rule", d: `M0 0V1` }, handle);
      element("rect", { x: -14, width: 28, height: 19, rx: 9.5 }, handle);
      element("text", { x: 0, "text-anchor": "middle" }, handle).textContent = `θ${"₁₂₃₄₅₆₇"[k]}`;
      handle.addEventListener("pointerdown", (event) => {
        handle.setPointerCapture(event.pointerId);
        handle.classList.add("held");
        handle.focus();
        event.preventDefault();
      });
      handle.addEventListener("pointermove", (event) => {
        if (handle.hasPointerCapture(event.pointerId)) moved(k, event.clientX);
      });
      for (const end of ["pointerup", "pointercancel"]) {
        handle.addEventListener(end, () => {
          handle.classList.remove("held");
          done();
        });
      }
      handle.addEventListener("keydown", (event) => {
        const way = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10 }[event.key];
        if (!way) return;
        event.preventDefault();
        nudged(k, way * (event.shiftKey ? 10 : 1));
      });
      plot.handles.push(handle);
    }
  }

  // Put the handles where the thresholds are; one outside of the picture waits at its edge.
  function place(plot, theta, view) {
    const sx = across(plot, view), { x, y, width, height } = plot.inner;
    const pixels = theta.map((at) => Math.max(0, Math.min(width, sx(at)))), taken = [];
    theta.forEach((at, k) => {
      const handle = plot.handles[k];
      let row = 0; // a grip that would hide another goes below it
      while (taken.some((other) => other.row === row && Math.abs(other.px - pixels[k]) < 30)) row++;
      taken.push({ row, px: pixels[k] });
      handle.setAttribute("transform", `translate(${(x + pixels[k]).toFixed(1)} ${y})`);
      handle.querySelector("rect").setAttribute("y", row * 22);
      handle.querySelector("text").setAttribute("y", row * 22 + 13);
      handle.classList.toggle("outside", Math.abs(at) > view);
      for (const rule of handle.querySelectorAll("path")) rule.setAttribute("d", `M0 0V${height}`);
      for (const [key, value] of [["valuenow", at], ["valuemin", -view], ["valuemax", view]]) {
        handle.setAttribute(`aria-${key}`, String(value));
      }
    });
  }

  return { make, fit, span, valueAt, axes, pixels, line, area, handles, place };
})();
