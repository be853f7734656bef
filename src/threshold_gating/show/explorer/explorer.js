"use strict";
// The page: its state, what it draws and says of it, and how it is shared. Every change goes through `propose` or
// `set`, is checked there, and is drawn in the next frame; what is refused says why and changes nothing.

const Explorer = (() => {
  const { byId, make, brief } = Controls;
  const CHIP_SAMPLES = 97;
  const FAMILIES = {
    multiplicative: "an outer branch carries x on",
    saturating: "only inner branches carry x on, or a clamp bounds y",
    constant: "no branch carries x on: gates alone move y",
  };

  let data, state, network = null, chosen = null, plots, hover = null, waiting = false, lastFragment = "";
  const syncs = [];

  // Numbers as they are read: four digits, a true minus.
  const say4 = (v) => (v === Infinity ? "∞" : Number.isNaN(v) ? "–" : String(Number(v.toPrecision(4))).replace("-", "−"));
  const percent = (share) => `${say4(Number((100 * share).toPrecision(2)))} %`;

  function message(text, action) {
    byId("said").replaceChildren(text, ...(action ? [" ", button(action.label, action.run)] : []));
    byId("message").hidden = text === "";
  }

  function button(text, run) {
    const made = make("button", { type: "button" }, text);
    made.addEventListener("click", run);
    return made;
  }

  const wrong = (error) => message(`Refused: ${error.message} The picture is as it was.`);

  // Changes

  function propose(given) {
    try {
      set({ t: Gates.read(given) });
      return true;
    } catch (error) {
      if (/in order/.test(error.message)) {
        const sort = () => propose({ ...given, theta: [...given.theta].sort((a, b) => a - b) });
        message(`Refused: ${error.message}`, { label: "Sort them", run: sort });
      } else wrong(error);
      Controls.show(state.t);
      return false;
    }
  }

  function set(part) {
    state = State.checked({ ...state, ...part }, data);
    message("");
    soon();
  }

  function trySet(part) {
    try {
      set(part);
    } catch (error) {
      wrong(error);
      soon();
    }
  }

  function soon() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      render();
      remember();
    });
  }

  let saving = 0;
  function remember() {
    clearTimeout(saving);
    saving = setTimeout(() => {
      lastFragment = `#${State.write(state)}`;
      history.replaceState(null, "", lastFragment);
    }, 250); // browsers limit how often an address may change
  }

  // A frame

  function render() {
    const { t, view } = state;
    for (const plot of Object.values(plots)) Plot.fit(plot);
    Controls.show(t);
    for (const sync of syncs) sync();
    const xs = Draw.samples(t, view), near = Theory.nearest(t, data.named), chip = onChip();
    const known = { x: data.named.x, y: data.named.values[near.key], corners: Gates.corners(rowOf(near.key).t) };
    const frame = { t, view, xs, found: Gates.evaluate(t, xs), corners: Gates.corners(t), near: known, chip };
    Draw.theFunction(plots.function, frame);
    Draw.theGates(plots.gates, frame);
    byId("corners").textContent = Draw.theSlopes(plots.slopes, frame, say4);
    if (plots.function.handles?.length !== t.theta.length) Plot.handles(plots.function, t.theta.length, { moved, nudged, done: remember });
    Plot.place(plots.function, t.theta, view);
    tellWhat(t, near);
    tellEdge(t);
    tellChip(t, chip);
    tellSite();
    readout();
    byId("python").textContent = Gates.python(t);
  }

  function rowOf(key) {
    const row = data.rows.find((each) => each.key === key);
    row.t ??= Gates.read(row.instance);
    return row;
  }

  // What it is

  function tellWhat(t, near) {
    const family = Gates.family(t), { x, values } = data.named, text = Gates.python(t);
    byId("near-name").textContent = near.key;
    byId("family").replaceChildren(make("b", {}, family), ` – ${FAMILIES[family]}`);
    const same = near.rms < 1e-12;
    byId("nearest").replaceChildren(
      make("b", {}, near.key),
      same ? " – the same, to rounding" : ` – RMS ${say4(near.rms)}, at most ${say4(near.largest)}`,
    );
    const row = data.rows.find((each) => (each.text ??= Gates.python(rowOf(each.key).t)) === text);
    const how = row && (row.exact ? "exact" : `approximate, off by at most ${say4(Number(row.sup.toPrecision(2)))} over the line`);
    byId("nearness").textContent =
      (row ? `This is the row ${row.key} of the table: ${how}. ` : "") +
      `Nearest of ${Object.keys(values).length} named functions by the root mean square difference over ` +
      `${x.length} inputs, evenly from ${say4(x[0])} to ${say4(x.at(-1))}; elsewhere they may differ more.`;
    const start = byId("start");
    if (start.value !== (row?.key ?? "")) start.value = row?.key ?? "";
  }

  function facts(id, pairs) {
    byId(id).replaceChildren(...pairs.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  }

  function tellEdge(t) {
    const q = state.variance, { sigma_w, sigma_b2, valid, chi_1, chi_q, beta, moments } = Theory.edge(t, q);
    const none = "–";
    facts("edge", [
      ["σ_w", valid ? say4(sigma_w) : none],
      ["σ_b", valid ? say4(Math.sqrt(sigma_b2)) : none],
      ["χ₁", valid ? say4(chi_1) : none],
      ["χ_q", valid ? say4(chi_q) : none],
      ["β", valid ? say4(beta) : none],
    ]);
    byId("edge-says").textContent = !valid
      ? moments.slope === Infinity
        ? "There is none: y jumps, so that E[y′²] is infinite."
        : moments.slope === 0
          ? "There is none: y is constant."
          : `There is none at this variance: σ_b² would be ${say4(sigma_b2)}.`
      : `Weights N(0, σ_w²/width) and biases N(0, σ_b²) keep the variance and, as χ₁ = 1, gradients. ` +
        (chi_q > 1 + 1e-9 ? "χ_q > 1: this variance is not a stable one." : `Two inputs approach like ${beta ? "β/depth" : "1/depth²"}.`);
  }

  // On transistors

  function onChip() {
    const { t, pair: name, chip, reach, celsius, view } = state, pair = data.presets[name];
    if (!pair) return null;
    const set = Pairs.settle(t, pair, reach), numbers = (k) => ({ theta: data.chips.theta[k], tau: data.chips.tau[k] });
    const xs = Float64Array.from({ length: CHIP_SAMPLES }, (_, k) => view * ((2 * k) / (CHIP_SAMPLES - 1) - 1));
    const inputs = Float64Array.from({ length: CHIP_SAMPLES }, (_, k) => reach * ((2 * k) / (CHIP_SAMPLES - 1) - 1));
    const want = Gates.evaluate(t, inputs).y, low = new Float64Array(xs.length).fill(Infinity), high = new Float64Array(xs.length).fill(-Infinity);
    let y = null;
    for (let k = 0; k < data.chips.theta.length; k++) {
      const its = Pairs.curve(t, pair, set, numbers(k), celsius, xs);
      its.forEach((value, i) => {
        low[i] = Math.min(low[i], value);
        high[i] = Math.max(high[i], value);
      });
      if (k === chip) y = its;
    }
    const off = (k) => Pairs.apart(want, Pairs.curve(t, pair, set, k === null ? null : numbers(k), celsius, inputs));
    return { xs, low, high, y, set, pair, made: Pairs.devices(t, pair, set, numbers(chip), celsius), off: off(chip), perfect: off(null) };
  }

  function tellChip(t, chip) {
    byId("chip-key").hidden = byId("pair-settings").hidden = !chip;
    byId("no-pair").hidden = Boolean(chip);
    if (!chip) return;
    const { set, pair, made } = chip, count = data.chips.theta.length;
    facts("volts", [
      ["this chip is off by", percent(chip.off)],
      ["perfect pairs by", percent(chip.perfect)],
      ["its thresholds", made.map((each) => say4(each.theta)).join(", ") || "–"],
      ["σ of θ, in x", made.map((each) => say4(each.sigma)).join(", ") || "–"],
      ["noise, in x", say4(pair.noise / set.volts)],
      ["volts per unit of x", say4(set.volts)],
    ]);
    byId("pair-says").textContent =
      `${pair.device}. Off by: RMS of the difference over RMS of y, evenly over ±${say4(state.reach)}, as tg simulate ` +
      `computes it (one gate for a layer, seed 0). The band holds ${count} chips. Noise is not drawn; inputs beyond ` +
      `±${say4(set.rail / set.volts)} are cut off at the rails${t.hard && t.s.length > 1 ? "; a hard gate is as sharp as the pair" : ""}.`;
  }

  // A network's sites

  function walk(found) {
    network = found;
    byId("walk").dataset.open = "true";
    byId("walking").hidden = false;
    byId("network").textContent = `${network.name}: ${network.sites.length} ${network.sites.length === 1 ? "site" : "sites"}`;
    byId("sites").replaceChildren(
      ...network.sites.map((site, k) => {
        const words = `${site.name} – ${site.kind}${site.instances.length ? "" : " (no curve)"}`;
        return make("option", { value: String(k), disabled: !site.instances.length }, words);
      }),
    );
  }

  function choose(index, group = 0) {
    const site = network.sites[index];
    try {
      const t = Gates.read(site.instances[group]);
      Controls.forget();
      set({ t, site: group ? `${site.name}[${group}]` : site.name });
      chosen = { index, group, text: Gates.python(t) };
    } catch (error) {
      message(`${site.name} cannot be shown: ${error.message}`);
    }
  }

  function step(way) {
    const count = network.sites.length, from = chosen ? chosen.index : way > 0 ? -1 : count;
    for (let k = 1; k <= count; k++) {
      const index = (((from + way * k) % count) + count) % count;
      if (network.sites[index].instances.length) return choose(index);
    }
  }

  function tellSite() {
    if (!network) return;
    const site = chosen && network.sites[chosen.index], many = site?.instances.length > 1;
    byId("sites").value = chosen ? String(chosen.index) : "";
    byId("groups").hidden = !many;
    if (many) {
      byId("group").max = String(site.instances.length - 1);
      byId("group").value = String(chosen.group);
      byId("which").value = `${chosen.group} of ${site.total}`;
    }
    const moved = chosen && chosen.text !== Gates.python(state.t) ? "changed here; choose the site again for its own" : "";
    byId("says").textContent = [site?.says, moved].filter(Boolean).join("; ");
  }

  // A site of the address is marked where this page has it; its curve is in the address in any case.
  function mark() {
    chosen = null;
    if (!state.site) return;
    const [, name, group = "0"] = /^(.*?)(?:\[(\d+)\])?$/s.exec(state.site);
    const index = network ? network.sites.findIndex((site) => site.name === name) : -1;
    const instance = network?.sites[index]?.instances[Number(group)];
    if (instance) chosen = { index, group: Number(group), text: Gates.python(Gates.read(instance)) };
    else message(`This page has no site ${state.site}; the curve is that of the link.`);
  }

  function openFile(file) {
    const failed = (why) => message(`${file.name} was not opened: ${why} The picture is as it was.`);
    if (file.size > 2e7) return failed("it is larger than 20 MB.");
    file.text().then((text) => {
      walk(State.open(text, file.name));
      chosen = null;
      step(1);
    }).catch((error) => failed(error.message));
  }

  // Thresholds by hand

  // As fine as the picture shows, so that values stay short.
  const rounded = (x) => {
    const digits = Math.max(0, Math.ceil(-Math.log10(state.view / 300)));
    return Number(x.toFixed(digits));
  };

  function moved(k, clientX) {
    const at = Math.max(-state.view, Math.min(state.view, Plot.valueAt(plots.function, state.view, clientX)));
    moveTo(k, rounded(at));
  }

  function nudged(k, steps) {
    moveTo(k, rounded(state.t.theta[k] + (steps * state.view) / 120));
  }

  // Thresholds that have to be in order stop at their neighbours.
  function moveTo(k, at) {
    const { t } = state, ordered = t.hard || t.form === "product";
    if (ordered) at = Math.max(t.theta[k - 1] ?? -Infinity, Math.min(t.theta[k + 1] ?? Infinity, at));
    if (at !== t.theta[k]) propose({ ...Gates.write(t), theta: t.theta.map((w, i) => (i === k ? at : w)) });
  }

  // What is at one x

  function readout() {
    const x = hover ?? Number(byId("at").dataset.x), { y, d1, d2, g } = Gates.evaluate(state.t, [x]);
    if (document.activeElement !== byId("at")) byId("at").value = brief(Number(x.toPrecision(4)));
    for (const [id, [value]] of [["y", y], ["d1", d1], ["d2", d2]]) byId(`${id}-there`).value = say4(value);
    const key = byId("gate-key");
    if (key.childElementCount !== 3 * g.length) {
      const item = (k) => [make("i", { class: `gate-key b${k}` }), make("span", {}, `g${"₁₂₃₄₅₆₇₈"[k]}`), make("output", {})];
      key.replaceChildren(...g.flatMap((_, k) => item(k)));
    }
    key.querySelectorAll("output").forEach((output, k) => (output.value = g[k][0].toFixed(3)));
    for (const plot of Object.values(plots)) {
      const at = Plot.across(plot, state.view)(x);
      Plot.line(plot, "cursor", "cursor", [0, 0], [0, 1], () => at, (end) => end * plot.inner.height);
    }
  }

  // Start

  function buildSelects() {
    const exact = (flag) => data.rows.filter((row) => row.exact === flag).map((row) => make("option", { value: row.key }, row.key));
    byId("start").append(
      make("option", { value: "", disabled: true }, "your own"),
      make("optgroup", { label: "exact" }, ...exact(true)),
      make("optgroup", { label: "approximate" }, ...exact(false)),
    );
    byId("start").addEventListener("change", (event) => {
      Controls.forget();
      chosen = null;
      set({ t: rowOf(event.target.value).t, site: "" });
    });
    byId("pair").append(make("option", { value: "" }, "none: ideal gates"), ...Object.keys(data.presets).map((name) => make("option", {}, name)));
    byId("pair").addEventListener("change", (event) => trySet({ pair: event.target.value, celsius: 27 }));
    syncs.push(() => {
      byId("pair").value = state.pair;
      const pair = data.presets[state.pair];
      if (!pair) return;
      byId("celsius").min = String(pair.temperature[0][0]);
      byId("celsius").max = String(pair.temperature.at(-1)[0]);
    });
    byId("chip").max = String(data.chips.theta.length - 1);
    for (const [name, scale] of [["view", Controls.LOG], ["variance", Controls.LOG], ["chip", Controls.PLAIN], ["reach", Controls.PLAIN], ["celsius", Controls.PLAIN]]) {
      const put = (value) => set({ [name]: State.ranged(name, value) });
      const safe = (value) => {
        try {
          put(value);
        } catch (error) {
          wrong(error);
        }
      };
      syncs.push(Controls.bind(byId(name), byId(`${name}-number`), { name, ...scale, get: () => state[name], set: safe, wrong }));
    }
  }

  function buildEvents() {
    byId("close").addEventListener("click", () => message(""));
    byId("before").addEventListener("click", () => step(-1));
    byId("after").addEventListener("click", () => step(1));
    byId("sites").addEventListener("change", (event) => choose(Number(event.target.value)));
    byId("group").addEventListener("input", (event) => choose(chosen.index, Number(event.target.value)));
    byId("file").addEventListener("change", (event) => {
      if (event.target.files[0]) openFile(event.target.files[0]);
      event.target.value = ""; // the same file may be opened again
    });
    byId("copy-link").addEventListener("click", () => copy(`${location.href.split("#")[0]}#${State.write(state)}`, "The link"));
    byId("copy-python").addEventListener("click", () => copy(Gates.python(state.t), "The Python code"));
    byId("at").dataset.x = "1";
    byId("at").addEventListener("change", (event) => {
      try {
        event.target.dataset.x = String(State.number("x", event.target.value));
      } catch (error) {
        wrong(error);
      }
      readout();
    });
    for (const plot of Object.values(plots)) {
      plot.svg.addEventListener("pointermove", (event) => {
        const x = Plot.valueAt(plot, state.view, event.clientX);
        hover = Math.abs(x) <= state.view ? x : null;
        readout();
      });
      plot.svg.addEventListener("pointerleave", () => {
        hover = null;
        readout();
      });
    }
    addEventListener("resize", soon);
    addEventListener("hashchange", () => location.hash !== lastFragment && follow());
  }

  function copy(text, what) {
    const failed = () => message(`${what} could not be copied; here it is: ${text}`);
    if (!navigator.clipboard) return failed();
    navigator.clipboard.writeText(text).then(() => message(`${what} is on the clipboard.`), failed);
  }

  // Show what the address says; if it is damaged, say so and keep what is shown.
  function follow() {
    try {
      state = State.read(location.hash, data);
      Controls.forget();
      message("");
      mark();
    } catch (error) {
      message(`The link is damaged: ${error.message} The picture is as it was.`);
    }
    soon();
  }

  function start() {
    data = JSON.parse(byId("data").textContent);
    plots = { function: Plot.make(byId("function")), gates: Plot.make(byId("gates")), slopes: Plot.make(byId("slopes")) };
    state = { ...State.around(rowOf(data.start).t), pair: data.preset };
    Controls.start({ propose, wrong });
    buildSelects();
    buildEvents();
    byId("explorer").hidden = false;
    if (data.network) {
      walk(data.network);
      step(1);
    }
    if (location.hash.length > 1) follow();
    soon();
  }

  if (document.createElementNS("http://www.w3.org/2000/svg", "svg").createSVGRect) {
    start();
  } else {
    byId("stop").textContent = "The explorer draws with SVG, which this browser does not have. Use another one, or `tg explain`.";
    byId("stop").hidden = false;
  }

  return { render, propose, set, get state() { return state; }, get data() { return data; } };
})();
