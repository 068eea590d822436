// All results that match: one page of rows exists at a time, whatever their number.
const PAGE = 50;
const COLUMNS = [
  { key: "state", text: "state", of: (row) => severityOf[stateOf[row]] },
  { key: "kernel", text: "kernel", of: (row) => kernelOf[row] },
  { key: "case", text: "case", of: (row) => caseOf[row] },
  { key: "level", text: "reached / promised", of: (row) => (outcome(row).level ? raw.levels.indexOf(outcome(row).level) : 99) },
  { key: "budget", text: "budget", of: (row) => numberOrder(raw.budget[row]), number: true },
  { key: "error", text: "max error", of: (row) => numberOrder(raw.error[row]), number: true },
  { key: "seconds", text: "seconds", of: (row) => numberOrder(raw.seconds[row]), number: true },
];

function sorted(rows, view) {
  const column = COLUMNS.find((c) => c.key === view.sort) || COLUMNS[0];
  const keys = new Float64Array(N), down = view.down ? -1 : 1;
  for (const row of rows) keys[row] = column.of(row);
  return rows.slice().sort((a, b) => (keys[a] === keys[b] ? a - b : keys[a] < keys[b] ? -down : down));
}

function drawTable(rows, view, place) {
  const pages = Math.max(1, Math.ceil(rows.length / PAGE));
  view.page = Math.min(Math.max(1, view.page), pages);
  const from = (view.page - 1) * PAGE, here = rows.subarray(from, from + PAGE);
  byId("table-body").replaceChildren(...[...here].map(tableRow));
  byId("results-note").textContent = `${rows.length} of ${N}${place && `, ${place}`}`;
  byId("p-where").textContent = rows.length ? `${from + 1}–${from + here.length}, page ${view.page} of ${pages}` : "nothing matches";
  for (const [id, off] of [["first", view.page === 1], ["prev", view.page === 1], ["next", view.page === pages], ["last", view.page === pages]]) {
    byId(`p-${id}`).disabled = off;
  }
  for (const head of byId("table-head").children) {
    const on = head.dataset.key === view.sort;
    head.setAttribute("aria-sort", !on ? "none" : view.down ? "descending" : "ascending");
  }
  return pages;
}

function tableRow(row) {
  const o = outcome(row), said = shortMessage(row);
  const button = h("button", { type: "button", class: "open", "aria-expanded": "false" }, sign(o.state), raw.labels[o.state]);
  const line = h("tr", {},
    h("td", {}, button), h("td", {}, h("code", {}, raw.kernels[kernelOf[row]])),
    h("td", { class: "case" }, h("code", {}, ...caseNodes(row)), said ? h("p", { class: "message" }, said) : null),
    h("td", { class: belowPromise(o) ? "bad" : "" }, levelText(o)),
    h("td", { class: raw.budget[row] < -1 || raw.budget[row] > 1 ? "n bad" : "n" }, fractionText(raw.budget[row])),
    h("td", { class: "n" }, numberText(raw.error[row])), h("td", { class: "n" }, numberText(raw.seconds[row])));
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!open));
    if (open) line.nextElementSibling.remove();
    else line.after(h("tr", { class: "opened" }, h("td", { colspan: COLUMNS.length }, detail(row))));
  });
  return line;
}

function drawTableHead(onSort) {
  byId("table-head").replaceChildren(...COLUMNS.map((column) => {
    const button = h("button", { type: "button" }, column.text);
    button.addEventListener("click", () => onSort(column.key));
    return h("th", { scope: "col", class: column.number ? "n" : "", "data-key": column.key }, button);
  }));
}
