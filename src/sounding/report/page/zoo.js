(() => {
  "use strict";
  const table = document.getElementById("zoo"), body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  const key = (row, column) => {
    const text = row.cells[column].dataset.value;
    return text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
  };
  headings.forEach((heading, column) => heading.firstChild.addEventListener("click", () => {
    const down = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of headings) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", down > 0 ? "ascending" : "descending");
    const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
    body.append(...[...body.rows].sort((a, b) => down * compare(key(a, column), key(b, column))));
  }));
})();
