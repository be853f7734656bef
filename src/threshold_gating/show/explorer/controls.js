"use strict";
// Controls of an instance: a slider and a number for each parameter. They are built anew only where their count
// changes, so that nobody loses the one in hand. `propose(given)` gets a whole new instance, which may be refused.

const Controls = (() => {
  const LOG = { to: Math.log10, from: (v) => Number((10 ** v).toPrecision(3)) };
  const PLAIN = { to: (v) => v, from: (v) => v };
  const RANGES = {
    tau: { min: -1, max: 2, step: 0.02, ...LOG },
    theta: { min: -8, max: 8, step: 0.05, ...PLAIN },
    s: { min: -2, max: 2, step: 0.05, ...PLAIN },
    c: { min: -4, max: 4, step: 0.05, ...PLAIN },
    q: { min: -1, max: 1, step: 0.05, ...PLAIN },
  };
  const SIGNS = "₁₂₃₄₅₆₇₈";

  const byId = (id) => document.getElementById(id);

  function make(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key in made && typeof value !== "string") made[key] = value;
      else made.setAttribute(key, value);
    }
    made.append(...children);
    return made;
  }

  // Five digits, for reading; what was typed is kept whole.
  const brief = (value) => (value === Infinity ? "inf" : String(Number(value.toPrecision(5))));

  // Bind a slider and a number to one value: `set(value)` on every move, `wrong(error)` for what is no number.
  function bind(slider, number, { name, to, from, get, set, wrong }) {
    slider.addEventListener("input", () => set(from(Number(slider.value))));
    number?.addEventListener("change", () => {
      try {
        set(State.number(name, number.value));
      } catch (error) {
        wrong(error);
      }
      number.value = brief(get());
    });
    return () => {
      const value = get(), at = String(to(value));
      if (slider.value !== at) slider.value = at;
      slider.setAttribute("aria-valuetext", brief(value));
      if (number && document.activeElement !== number) number.value = brief(value);
    };
  }

  let t, remembered, extra, built = {}, shown = [], actions;

  // Once: the settings that are always there.
  function start(given) {
    actions = given;
    extra = { own: false, quadratic: false };
    forget();
    const K = make("input", { type: "range", id: "K", min: "1", max: String(Gates.MOST), step: "1", "aria-label": "number of branches K" });
    const count = make("output", { for: "K" });
    K.addEventListener("input", () => setCount(Number(K.value)));
    const hard = make("input", { type: "checkbox", id: "hard" });
    hard.addEventListener("change", () => setHard(hard.checked));
    const form = make("select", { id: "form", "aria-label": "form of the gates" }, make("option", {}, "softmax"), make("option", {}, "product"));
    form.addEventListener("change", () => change({ form: form.value }));
    const own = make("input", { type: "checkbox", id: "own" });
    own.addEventListener("change", () => {
      extra.own = own.checked;
      if (!own.checked) change({ tau: Array(t.tau.length).fill(t.tau[0]) });
      show(t);
    });
    byId("shape").append(
      make("label", { class: "setting" }, make("span", {}, "K"), K, count),
      make("div", { id: "tau-all" }),
      make("div", { class: "choices" }, make("label", {}, hard, " hard (τ = ∞)"), make("label", {}, own, " τ each"), form),
    );
    const clamp = make("input", { type: "checkbox", id: "clamp" });
    const bounds = ["low", "high"].map((which) => make("input", { type: "text", inputmode: "decimal", id: `clamp-${which}`, "aria-label": `clamp, ${which}` }));
    clamp.addEventListener("change", () => change({ clamp: clamp.checked ? remembered.clamp : null }));
    bounds.forEach((bound, k) => bound.addEventListener("change", () => setBound(k, bound.value)));
    const curved = make("input", { type: "checkbox", id: "curved" });
    curved.addEventListener("change", () => {
      extra.quadratic = curved.checked;
      if (!curved.checked) change({ q: null });
      show(t);
    });
    byId("more").append(
      make("div", { class: "choices" }, make("label", {}, clamp, " clamp y from "), bounds[0], " to ", bounds[1]),
      make("div", { class: "choices" }, make("label", {}, curved, " quadratic branches, q x²")),
    );
    shown = [
      () => {
        K.value = String(t.s.length);
        count.value = K.value;
        hard.checked = t.hard;
        hard.disabled = t.s.length === 1;
        own.checked = extra.own;
        own.disabled = t.hard || t.s.length < 3;
        form.value = t.form;
        form.disabled = t.hard || t.s.length < 3;
        clamp.checked = t.clamp !== null;
        bounds.forEach((bound, k) => {
          bound.disabled = !t.clamp;
          if (document.activeElement !== bound) bound.value = brief((t.clamp ?? remembered.clamp)[k]);
        });
        curved.checked = extra.quadratic;
      },
    ];
  }

  // What a control of this page hides is kept, for when it is shown again; another instance forgets it.
  function forget() {
    remembered = { branches: [], tau: null, clamp: [-1, 1] };
    if (extra) Object.assign(extra, { own: false, quadratic: false });
  }

  const whole = () => ({ tau: t.hard ? "inf" : t.tau, theta: t.theta, s: t.s, c: t.c, form: t.form, owner: t.owner, q: t.q, clamp: t.clamp });
  const change = (part) => actions.propose({ ...whole(), ...part });
  const replaced = (list, k, value) => list.map((w, i) => (i === k ? value : w));

  function setCount(K) {
    const next = whole(), kept = [...remembered.branches];
    for (const key of ["theta", "s", "c"]) next[key] = [...next[key]];
    let tau = t.hard ? [] : [...t.tau], owner = t.owner && [...t.owner], q = t.q && [...t.q];
    while (next.s.length > K) {
      kept.push({ tau: tau.pop(), owner: owner?.pop(), q: q?.pop(), theta: next.theta.pop(), s: next.s.pop(), c: next.c.pop() });
    }
    while (next.s.length < K) {
      const last = kept.pop() ?? { s: next.s.at(-1), c: next.c.at(-1), q: q?.at(-1) };
      const top = next.theta.at(-1) ?? -1, at = last.theta ?? top + 1;
      next.theta.push(t.hard || t.form === "product" ? Math.max(at, top) : at);
      tau.push(last.tau ?? tau.at(-1) ?? 1);
      owner?.push(last.owner ?? "lo");
      q?.push(last.q ?? 0);
      next.s.push(last.s);
      next.c.push(last.c);
    }
    const soft = !t.hard || (t.s.length === 1 && K > 1);
    if (actions.propose({ ...next, tau: soft && K > 1 ? tau : "inf", owner: soft ? null : owner, q })) remembered.branches = kept;
  }

  function setHard(hard) {
    if (hard) remembered.tau = t.tau;
    const tau = t.theta.map((_, k) => remembered.tau?.[k] ?? 1);
    change(hard ? { tau: "inf", form: "softmax" } : { tau, owner: null });
  }

  function setBound(k, text) {
    try {
      change({ clamp: replaced(t.clamp, k, State.number("clamp", text)) });
    } catch (error) {
      actions.wrong(error);
    }
    show(t);
  }

  // Show an instance.
  function show(given) {
    t = given;
    extra.own ||= t.tau.some((w) => w !== t.tau[0]);
    extra.quadratic ||= t.q !== null;
    if (t.clamp) remembered.clamp = t.clamp;
    const J = t.theta.length, own = extra.own && !t.hard;
    rows("tau-all", `${J > 0 && !t.hard && !own}`, () => (J > 0 && !t.hard && !own ? [tauRow("τ", null)] : []));
    rows("thresholds", `${J} ${t.hard} ${own}`, () => {
      const list = t.theta.map((_, k) => [thetaRow(k), ...(own ? [tauRow(`τ${SIGNS[k]}`, k)] : [])]);
      return list.length ? list.flat() : [{ row: make("p", { class: "small" }, "One branch: nothing is gated."), sync() {} }];
    });
    rows("branches", `${J} ${extra.quadratic}`, () =>
      t.s.flatMap((_, k) => (extra.quadratic ? ["q", "s", "c"] : ["s", "c"]).map((key, i) => branchRow(key, k, i === 0))),
    );
    for (const sync of [...shown, ...Object.values(built).flatMap((part) => part.syncs)]) sync();
  }

  // The rows of a part of the page, built anew if `layout` is another one.
  function rows(id, layout, build) {
    if (built[id]?.layout === layout) return;
    const made = build();
    built[id] = { layout, syncs: made.map((each) => each.sync) };
    byId(id).replaceChildren(...made.map((each) => each.row));
  }

  function parameter(name, id, words, label, get, set, ...behind) {
    const { min, max, step, ...scale } = RANGES[name];
    const slider = make("input", { type: "range", id, min: String(min), max: String(max), step: String(step), "aria-label": words });
    const number = make("input", { type: "text", inputmode: "decimal", id: `${id}-number`, "aria-label": `${words}, number` });
    const row = make("div", { class: "setting" }, label, slider, number, ...behind);
    return { row, sync: bind(slider, number, { name, ...scale, get, set, wrong: actions.wrong }) };
  }

  function tauRow(text, k) {
    const set = (value) => change({ tau: t.tau.map((w, i) => (k === null || i === k ? value : w)) });
    const words = k === null ? "sharpness tau" : `sharpness tau of threshold ${k + 1}`;
    return parameter("tau", k === null ? "tau" : `tau${k}`, words, make("span", {}, text), () => t.tau[k ?? 0], set);
  }

  function thetaRow(k) {
    const set = (value) => change({ theta: replaced(t.theta, k, value) });
    const owner = make("select", { id: `owner${k}`, "aria-label": `x = threshold ${k + 1} belongs` }, make("option", { value: "lo" }, "x = θ below"), make("option", { value: "hi" }, "x = θ above"));
    owner.addEventListener("change", () => change({ owner: replaced(t.owner, k, owner.value) }));
    const label = make("span", {}, `θ${SIGNS[k]}`);
    const made = parameter("theta", `theta${k}`, `threshold ${k + 1}`, label, () => t.theta[k], set, ...(t.hard ? [owner] : []));
    return {
      row: made.row,
      sync() {
        made.sync();
        if (t.owner) owner.value = t.owner[k];
      },
    };
  }

  function branchRow(key, k, first) {
    const set = (value) => change({ [key]: replaced(t[key] ?? t.s.map(() => 0), k, value) });
    const words = { q: "quadratic coefficient", s: "slope", c: "intercept" }[key];
    const label = make("span", { class: `branch b${k}${first ? " first" : ""}` }, `${key}${SIGNS[k]}`);
    return parameter(key, `${key}${k}`, `${words} of branch ${k + 1}`, label, () => t[key]?.[k] ?? 0, set);
  }

  return { start, show, forget, bind, make, brief, byId, LOG, PLAIN };
})();
