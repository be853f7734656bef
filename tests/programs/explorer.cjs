// Runs calls of the explorer's JavaScript without a browser: from stdin [[function, arguments], ...], as JSON.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];
const parts = ["gates.js", "theory.js", "pairs.js", "state.js"].map((name) => fs.readFileSync(path.join(folder, name), "utf8"));
const context = vm.createContext({});
vm.runInContext(parts.join("\n"), context);
const plain = (key, value) =>
  ArrayBuffer.isView(value) ? Array.from(value) : typeof value === "number" && !Number.isFinite(value) ? String(value) : value;
const answers = JSON.parse(fs.readFileSync(0, "utf8")).map(([code, args]) => {
  try {
    return vm.runInContext(`(${code})`, context)(...args);
  } catch (error) {
    return { error: error.message };
  }
});
process.stdout.write(JSON.stringify(answers, plain));
