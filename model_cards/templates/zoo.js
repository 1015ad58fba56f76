
"use strict";
const table = document.getElementById("zoo");
const body = table.tBodies[0];
const pairs = [...body.querySelectorAll("tr.entry")].map((row) => ({ row, more: row.nextElementSibling }));
const field = (name) => document.getElementById(name);

function show() {
  const words = field("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const task = field("task").value;
  let shown = 0;
  for (const { row, more } of pairs) {
    const fits = words.every((word) => row.dataset.search.includes(word)) &&
      ["provenance", "method", "base"].every((name) => !field(name).value || row.dataset[name] === field(name).value) &&
      (!field("scored").checked || row.dataset.tasks.split(" ").includes(String(field("task").selectedIndex)));
    row.hidden = !fits;
    more.hidden = !fits || !row.classList.contains("open");
    shown += fits;
  }
  for (const cell of document.querySelectorAll("[data-task]")) cell.hidden = cell.dataset.task !== task;
  field("count").textContent = `${shown} of ${pairs.length}`;
}

function valueOf(row, heading) {
  const cell = heading.dataset.column === "score"
    ? [...row.querySelectorAll("td[data-task]")].find((each) => each.dataset.task === field("task").value)
    : row.querySelector(`td[data-column="${heading.dataset.column}"]`);
  const text = cell ? cell.dataset.value : "";
  if (text === "") return null;
  return heading.dataset.kind === "number" ? Number(text) : text.toLowerCase();
}

function sort(heading, way) {
  for (const other of table.tHead.querySelectorAll("th")) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", way);
  const sign = way === "ascending" ? 1 : -1;
  const keyed = pairs.map((pair, index) => ({ pair, index, value: valueOf(pair.row, heading) }));
  keyed.sort((a, b) => {
    if (a.value === null || b.value === null) return (a.value === null) - (b.value === null) || a.index - b.index;
    return sign * (a.value < b.value ? -1 : a.value > b.value ? 1 : 0) || a.index - b.index;
  });
  for (const { pair } of keyed) body.append(pair.row, pair.more);
}

for (const heading of table.tHead.querySelectorAll("th[data-column]")) {
  heading.querySelector("button").addEventListener("click", () => {
    const first = heading.dataset.column === "score" ? "descending" : "ascending";
    const now = heading.getAttribute("aria-sort");
    sort(heading, now === null ? first : now === "ascending" ? "descending" : "ascending");
  });
}
for (const { row } of pairs) {
  const button = row.querySelector("button.name");
  button.addEventListener("click", () => {
    button.setAttribute("aria-expanded", row.classList.toggle("open"));
    show();
  });
}
field("controls").addEventListener("submit", (event) => event.preventDefault());
field("controls").addEventListener("input", () => {
  show();
  const sorted = table.tHead.querySelector('th[data-column="score"][aria-sort]');
  if (sorted) sort(sorted, sorted.getAttribute("aria-sort"));
});
field("controls").hidden = false;
sort(table.tHead.querySelector('th[data-column="score"]'), "descending");
show();
