"use strict";
// What the page says in words and numbers of an instance: what it is, its edge of chaos, and how it is on transistors.

const Tell = (() => {
  const { byId, make } = Controls;
  const FAMILIES = {
    multiplicative: "an outer branch carries x on",
    saturating: "only inner branches carry x on, or a clamp bounds y",
    constant: "no branch carries x on: gates alone move y",
  };

  // Numbers as they are read: four digits, a true minus.
  const say4 = (v) => (v === Infinity ? "∞" : Number.isNaN(v) ? "–" : String(Number(v.toPrecision(4))).replace("-", "−"));
  const say2 = (v) => say4(Number(v.toPrecision(2)));
  const percent = (share) => `${say2(100 * share)} %`;

  // Text that is the same is left alone: each change makes the browser lay the page out again.
  function tell(place, text) {
    if (place.textContent !== text) place.textContent = text;
  }

  function named(id, word, rest) {
    tell(byId(id).firstElementChild, word);
    tell(byId(id).lastElementChild, ` – ${rest}`);
  }

  function facts(id, pairs) {
    const list = byId(id);
    if (list.childElementCount !== 2 * pairs.length) {
      const title = (name) => name.split("_").map((part, k) => (k ? make("sub", {}, part) : part));
      list.replaceChildren(...pairs.flatMap(([name]) => [make("dt", {}, ...title(name)), make("dd", {})]));
    }
    pairs.forEach(([, value], k) => tell(list.children[2 * k + 1], value));
  }

  // `row` is the row of the taxonomy that the instance is, if it is one.
  function what(t, near, { x, values }, row) {
    const family = Gates.family(t), same = near.rms < 1e-12;
    named("family", family, FAMILIES[family]);
    named("nearest", near.key, same ? "the same, to rounding" : `RMS ${say4(near.rms)}, at most ${say4(near.largest)}`);
    tell(byId("near-name"), near.key);
    const how = row && (row.exact ? "exact" : `approximate, off by at most ${say2(row.sup)} over the line`);
    tell(
      byId("nearness"),
      (row ? `This is the row ${row.key} of the table: ${how}. ` : "") +
        `Nearest of ${Object.keys(values).length} named functions by the root mean square difference over ` +
        `${x.length} inputs, evenly from ${say4(x[0])} to ${say4(x.at(-1))}; elsewhere they may differ more.`,
    );
  }

  function edge({ sigma_w, sigma_b2, valid, chi_1, chi_q, beta, moments }) {
    const figures = { "σ_w": sigma_w, "σ_b": Math.sqrt(sigma_b2), "χ₁": chi_1, "χ_q": chi_q, "β": beta };
    facts("edge", Object.entries(figures).map(([name, value]) => [name, valid ? say4(value) : "–"]));
    tell(byId("edge-says"), valid ? aboutEdge(chi_q, beta) : `There is none${whyNoEdge(moments, sigma_b2)}`);
  }

  function aboutEdge(chi_q, beta) {
    const then = chi_q > 1 + 1e-9 ? "χ_q > 1: this variance is not a stable one." : `Two inputs approach like ${beta ? "β/depth" : "1/depth²"}.`;
    return `Weights N(0, σ_w²/width) and biases N(0, σ_b²) keep the variance and, as χ₁ = 1, gradients. ${then}`;
  }

  function whyNoEdge(moments, sigma_b2) {
    if (moments.slope === Infinity) return ": y jumps, so that E[y′²] is infinite.";
    return moments.slope === 0 ? ": y is constant." : ` at this variance: σ_b² would be ${say4(sigma_b2)}.`;
  }

  // Of what `Pairs.shown` gives; null where no pair is chosen.
  function chip(t, shown, reach, count) {
    byId("chip-key").hidden = byId("pair-settings").hidden = !shown;
    byId("no-pair").hidden = Boolean(shown);
    if (!shown) return;
    const { set, pair, made } = shown, each = (key) => made.map((device) => say4(device[key])).join(", ") || "–";
    facts("volts", [
      ["this chip is off by", percent(shown.off)],
      ["perfect pairs by", percent(shown.perfect)],
      ["its thresholds", each("theta")],
      ["σ of θ, in x", each("sigma")],
      ["noise, in x", say4(pair.noise / set.volts)],
      ["volts per unit of x", say4(set.volts)],
    ]);
    tell(
      byId("pair-says"),
      `${pair.device}. The ${count} chips of the band are those of tg simulate (one gate for a layer, seed 0). Off by: RMS of ` +
        `the difference over RMS of y, ${Pairs.COUNT} inputs evenly over ±${say4(reach)}. Noise is not drawn. Inputs beyond ` +
        `±${say4(set.rail / set.volts)} are cut off at the rails.${t.hard && t.s.length > 1 ? " A hard gate is as sharp as the pair." : ""}`,
    );
  }

  return { tell, say4, what, edge, chip };
})();
