"use strict";
// Numbers before words, nothing last; "1,234", "3.5%" and "inf" are numbers.
function key(body, column) {
  const cell = body.rows[0].cells[column];
  const text = (cell.dataset.v ?? cell.textContent).trim();
  const number = text === "inf" ? Infinity : Number(text.replaceAll(",", "").replace(/[%*]$/, ""));
  return text === "" ? null : Number.isNaN(number) ? text : number;
}

function compare(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
}

function sort(table, header) {
  const column = header.cellIndex, bodies = [...table.tBodies];
  const keys = new Map(bodies.map((body) => [body, key(body, column)]));
  const numbers = [...keys.values()].some((value) => typeof value === "number");
  const before = header.getAttribute("aria-sort");
  const up = before ? before === "descending" : !numbers; // the largest number first
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", up ? "ascending" : "descending");
  const blank = (body) => keys.get(body) === null;
  bodies.sort((a, b) => blank(a) - blank(b) || (up ? 1 : -1) * compare(keys.get(a), keys.get(b)));
  table.append(...bodies);
}

function search(table) {
  const tools = document.createElement("p"), count = document.createElement("span");
  const label = document.createElement("label"), input = document.createElement("input");
  tools.className = "tools";
  input.type = "search";
  label.append("Search ", input);
  count.setAttribute("role", "status");
  tools.append(label, count);
  table.parentElement.before(tools);
  const show = () => {
    const wanted = input.value.toLowerCase(), bodies = [...table.tBodies];
    for (const body of bodies) body.hidden = !body.rows[0].textContent.toLowerCase().includes(wanted);
    count.textContent = `${bodies.filter((body) => !body.hidden).length} of ${bodies.length}`;
  };
  input.addEventListener("input", show);
  show();
}

for (const table of document.querySelectorAll("table.sort")) {
  for (const header of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = header.textContent;
    button.addEventListener("click", () => sort(table, header));
    header.replaceChildren(button);
  }
  if (table.tBodies.length > 10) search(table);
}

// A click anywhere in a row opens it, a second one or Escape closes it.
const links = [...document.querySelectorAll("tr[data-opens] a")];
const opened = () => links.find((link) => link.hash === location.hash);
const close = (link) => { location.hash = link.closest("tr").id; link.focus(); };

function tell() {
  for (const link of links) link.setAttribute("aria-expanded", link.hash === location.hash);
}

for (const link of links) {
  link.closest("tr").addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey) return; // in a new tab
    event.preventDefault();
    if (link === opened()) close(link);
    else location.hash = link.hash;
  });
}
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && opened()) close(opened());
});
addEventListener("hashchange", tell);
tell();

const data = document.getElementById("data"), download = document.getElementById("download");
if (data) {
  download.hidden = false;
  download.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([data.textContent], { type: "application/json" }));
    link.download = `${document.title.replace(/[^\w.-]+/g, "_")}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });
}
