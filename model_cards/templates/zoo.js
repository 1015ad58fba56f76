
"use strict";
const table = document.querySelector("table");
const rows = [...table.tBodies[0].rows];

function filter() {
  const words = document.getElementById("filter").value.toLowerCase().split(/\s+/);
  for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  document.getElementById("count").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
}

function sort(heading, column) {
  const number = heading.classList.contains("number");
  const now = heading.getAttribute("aria-sort");
  const down = now ? now === "ascending" : number;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = (row) => row.cells[column].dataset.value;
  rows.sort((a, b) => {
    const [one, other] = [value(a), value(b)];
    if (one === "" || other === "") return (one === "") - (other === "");
    const order = number ? Number(one) - Number(other) : one.localeCompare(other);
    return down ? -order : order;
  });
  table.tBodies[0].append(...rows);
}

[...table.tHead.rows[0].cells].forEach((heading, column) => heading.addEventListener("click", () => sort(heading, column)));
for (const row of rows) row.addEventListener("click", () => {
  const sheet = document.getElementById(row.cells[0].dataset.value);
  sheet.open = true;
  sheet.scrollIntoView();
});
document.getElementById("filter").addEventListener("input", filter);
filter();
