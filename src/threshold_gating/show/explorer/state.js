"use strict";
// What the page shows, as the fragment of its address and back, and sites read from a tg_config.json.
// Nothing here touches the page.

const State = (() => {
  // name: [least, most, default]
  const RANGES = {
    view: [0.5, 100, 5], // x from -view to view
    variance: [0.01, 100, 1], // of the inputs, for the edge of chaos
    reach: [0.1, 100, 4], // largest input on hardware
    celsius: [-273, 1000, 27],
    chip: [0, Infinity, 0],
  };
  const LISTS = ["tau", "theta", "s", "c", "q", "clamp"];

  const defaults = () => Object.fromEntries(Object.entries(RANGES).map(([name, [, , value]]) => [name, value]));

  // A state around an instance: {t, view, variance, reach, celsius, chip, pair, site}.
  const around = (t) => ({ t, ...defaults(), pair: "", site: "" });

  function write(state) {
    const { tau, ...rest } = Gates.write(state.t), parts = [["tau", tau], ...Object.entries(rest)];
    const usual = defaults();
    for (const name of Object.keys(RANGES)) if (state[name] !== usual[name]) parts.push([name, state[name]]);
    for (const name of ["pair", "site"]) if (state[name]) parts.push([name, encodeURIComponent(state[name])]);
    return parts.map(([name, value]) => `${name}=${value}`).join("&");
  }

  // The state that a fragment means; an Error says what is wrong with it. `data` has the presets.
  function read(fragment, data) {
    const given = {};
    for (const part of fragment.replace(/^#/, "").split("&").filter(Boolean)) {
      const [, name, value] = /^([a-z]+)=(.*)$/.exec(part) ?? [];
      const known = [...LISTS, "form", "owner", "pair", "site", ...Object.keys(RANGES)];
      if (!known.includes(name)) throw new Error(`'${part.slice(0, 40)}' means nothing here.`);
      if (name in given) throw new Error(`'${name}' is given twice.`);
      given[name] = value;
    }
    const instance = {};
    for (const name of LISTS) {
      if (name in given) instance[name] = given[name] === "" ? [] : given[name].split(",").map((word) => number(name, word));
    }
    if (instance.tau?.length === 1) instance.tau = instance.tau[0];
    if ("form" in given) instance.form = given.form;
    if ("owner" in given) instance.owner = given.owner.split(",");
    const state = around(Gates.read(instance));
    for (const name of Object.keys(RANGES)) if (name in given) state[name] = ranged(name, number(name, given[name]));
    for (const name of ["pair", "site"]) if (name in given) state[name] = decoded(name, given[name]);
    return checked(state, data);
  }

  function number(name, word) {
    if (name === "tau" && word === "inf") return Infinity;
    if (!/^-?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(word.trim())) {
      throw new Error(`${name} must be a number${name === "tau" ? ", or inf" : ""}; got '${word.slice(0, 20)}'.`);
    }
    return Number(word);
  }

  function ranged(name, value) {
    const [least, most] = RANGES[name];
    if (!(value >= least && value <= most)) {
      const upTo = most === Infinity ? "on" : `to ${most}`;
      throw new Error(`${name} is from ${least} ${upTo}; got ${value}.`);
    }
    return value;
  }

  function decoded(name, word) {
    try {
      return decodeURIComponent(word);
    } catch {
      throw new Error(`${name} cannot be read; got '${word.slice(0, 20)}'.`);
    }
  }

  // What depends on the presets: their names, how many chips there are, and the temperatures they were measured at.
  function checked(state, data) {
    const chips = data.chips.theta.length, pair = Object.hasOwn(data.presets, state.pair) && data.presets[state.pair];
    if (state.pair && !pair) {
      throw new Error(`there is no preset '${state.pair}'; there are ${Object.keys(data.presets).join(", ")}.`);
    }
    if (!Number.isInteger(state.chip) || state.chip >= chips) {
      throw new Error(`chip is a whole number from 0 to ${chips - 1}; got ${state.chip}.`);
    }
    const [low, high] = pair ? [pair.temperature[0][0], pair.temperature.at(-1)[0]] : RANGES.celsius;
    if (state.celsius < low || state.celsius > high) {
      throw new Error(`${state.pair} was measured from ${low} to ${high} C; ${state.celsius} C is outside.`);
    }
    return state;
  }

  // Sites of a file: a tg_config.json, or one instance as `TG.to_dict` writes it. As the network that the page may
  // come with: {name, sites: [{name, kind, says, total, instances}]}; `says` is what a reader has to know.
  function open(text, name) {
    let config;
    try {
      config = JSON.parse(text);
    } catch (error) {
      throw new Error(`it is not JSON, so it is truncated or no tg_config.json (${error.message}).`);
    }
    if (config && typeof config === "object" && "theta" in config) {
      return { name, sites: [{ name: "instance", kind: "instance", says: "", total: 1, instances: [Gates.write(Gates.read(config))] }] };
    }
    const lists = ["modules", "owners", "recurrent"];
    if (!config || lists.some((key) => !Array.isArray(config[key]))) {
      throw new Error("it is no config of gates; choose the tg_config.json that `tg convert -o` or `save` wrote.");
    }
    let found;
    try {
      found = [...entries(config)].map(([place, call]) => site(place, call));
    } catch (error) {
      throw new Error(`it is damaged: ${error.message}`);
    }
    if (!found.some((each) => each.instances.length)) {
      throw new Error("it has no site with a curve to show.");
    }
    return { name: config.model ?? name, sites: found };
  }

  function* entries(config) {
    for (const module of config.modules) {
      for (const [k, call] of module.calls.entries()) yield [`${module.name}${k ? `#${k}` : ""}`, call];
    }
    for (const owner of config.owners) {
      const calls = typeof owner.calls === "string" ? { [owner.calls]: null } : owner.calls;
      for (const [call, what] of Object.entries(calls)) yield [`${owner.name}:${call}`, what];
    }
    for (const layer of config.recurrent) {
      for (const [gate, instance] of Object.entries(layer.gates)) {
        yield [`${layer.name}.${gate}`, { kind: gate, instance }];
      }
    }
  }

  function site(name, call) {
    const none = { name, kind: call?.kind ?? "not a gate", total: 0, instances: [] };
    if (!call) return { ...none, says: "no gate stands here" };
    if (!call.instance) return { ...none, says: "no function of one number, so it has no curve" };
    if (call.instance.s?.length > Gates.MOST) {
      return { ...none, says: `K = ${call.instance.s.length}; the explorer shows up to ${Gates.MOST} branches` };
    }
    const train = (call.learns ?? call.activation)?.train ?? [];
    const says = [];
    if (!("exact" in call)) says.push("gate of a recurrent layer as it started; what its units learned is not shown");
    else if (!call.exact) says.push(`approximate: off by at most ${Number(call.sup).toPrecision(2)} over the line`);
    if (train.length) {
      says.push(`learns ${train.join(", ")}: this is where it started; \`tg explore FOLDER\` shows what it learned`);
    }
    let instance;
    try {
      instance = Gates.write(Gates.read(call.instance));
    } catch (error) {
      throw new Error(`site ${name}: ${error.message}`);
    }
    return { name, kind: call.kind, says: says.join("; "), total: 1, instances: [instance] };
  }

  return { RANGES, around, write, read, number, ranged, checked, open };
})();
