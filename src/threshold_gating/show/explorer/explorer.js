"use strict";
// The page: its state, what it draws and says of it, and how it is shared. Every change goes through `propose` or
// `set`, is checked there, and is drawn in the next frame; what is refused says why and changes nothing.

const Explorer = (() => {
  const { byId, make, brief } = Controls, { tell, say4 } = Tell;
  let data, state, network = null, chosen = null, plots, hover = null, waiting = false, lastFragment = "";
  const syncs = [];

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
      Controls.show(state.t); // at once: a field that keeps the focus shows what it set
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
    Controls.show(t);
    for (const sync of syncs) sync();
    const xs = Draw.samples(t, view), near = Theory.nearest(t, data.named), pair = data.presets[state.pair];
    const chip = pair ? Pairs.shown(t, pair, data.chips, state, xs) : null;
    const known = { x: data.named.x, y: data.named.values[near.key], corners: Gates.corners(rowOf(near.key).t) };
    const px = Plot.pixels(plots.function, view, xs); // all pictures are equally wide
    const frame = { t, view, xs, px, found: Gates.evaluate(t, xs), corners: Gates.corners(t), near: known, chip };
    Draw.theFunction(plots.function, frame);
    Draw.theGates(plots.gates, frame);
    tell(byId("corners"), Draw.theSlopes(plots.slopes, frame, say4));
    if (plots.function.handles?.length !== t.theta.length) Plot.handles(plots.function, t.theta.length, { moved, nudged, done: remember });
    Plot.place(plots.function, t.theta, view);
    const text = Gates.python(t), row = data.rows.find((each) => (each.text ??= Gates.python(rowOf(each.key).t)) === text);
    if (byId("start").value !== (row?.key ?? "")) byId("start").value = row?.key ?? "";
    Tell.what(t, near, data.named, row);
    Tell.edge(Theory.edge(t, state.variance));
    Tell.chip(t, chip, state.reach, data.chips.theta.length);
    tellSite();
    readout();
    tell(byId("python"), text);
  }

  function rowOf(key) {
    const row = data.rows.find((each) => each.key === key);
    row.t ??= Gates.read(row.instance);
    return row;
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
    tell(byId("says"), [site?.says, moved].filter(Boolean).join("; "));
  }

  // A site of the address is marked where this page has it; its curve is in the address in any case.
  function mark() {
    chosen = null;
    if (!state.site) return;
    const find = (name) => (network ? network.sites.findIndex((site) => site.name === name) : -1);
    // the name itself first: a module may be called "act[1]"
    let [index, group] = [find(state.site), "0"];
    if (index < 0) {
      const [, name, number = "0"] = /^(.*?)(?:\[(\d+)\])?$/s.exec(state.site);
      [index, group] = [find(name), number];
    }
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
    for (const [id, [value]] of [["y", y], ["d1", d1], ["d2", d2]]) tell(byId(`${id}-there`), say4(value));
    const key = byId("gate-key");
    if (key.childElementCount !== 3 * g.length) {
      const item = (k) => [make("i", { class: `gate-key b${k}` }), make("span", {}, `g${"₁₂₃₄₅₆₇₈"[k]}`), make("span", { class: "there" })];
      key.replaceChildren(...g.flatMap((_, k) => item(k)));
    }
    key.querySelectorAll(".there").forEach((output, k) => tell(output, g[k][0].toFixed(3)));
    for (const plot of Object.values(plots)) {
      const [at] = Plot.pixels(plot, state.view, [x]);
      Plot.line(plot, "cursor", "cursor", [at, at], [plot.low, plot.high]);
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
    const sizes = new ResizeObserver(() => {
      for (const plot of Object.values(plots)) Plot.fit(plot);
      soon();
    });
    for (const plot of Object.values(plots)) sizes.observe(plot.svg);
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
    for (const plot of Object.values(plots)) Plot.fit(plot);
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

  return { render, propose, get state() { return state; }, get plots() { return plots; } };
})();
