// The view (filters, axes, page) lives in the address after '#', so that what one sees can be linked.
const START = { x: "", y: "", facet: "", colour: "state", kernel: "", tier: "", family: "", state: "", kind: "", q: "", sort: "state", down: false, page: 1, cell: null };
const SELECTS = { kernel: "f-kernel", tier: "f-tier", family: "f-family", state: "f-state", kind: "f-kind", x: "v-x", y: "v-y", facet: "v-facet", colour: "v-colour" };
const SECTIONS = ["matrix", "marginals", "failures", "results"];
const everything = Int32Array.from({ length: N }, (_, row) => row);
const totals = marginalsOf(everything);
const allFailing = totals.failing;
const defaults = { ...START, ...defaultAxes() };
let view = { ...defaults };
let drawn = {}; // what each part was drawn for, to leave alone what did not change (and keep the focus there)

// The two most telling parameters when results fail, else the two with the most values (of the plain matrix, where
// there is one: edge families have odd values of their own); one map per kernel.
function defaultAxes() {
  const telling = totals.failing ? totals.tables.filter((t) => parameterByKey.has(t.dim.key)).map((t) => t.dim.key) : [];
  const family = columnByKey.get("family").codes, plain = family.includes(-1);
  const many = parameters.map((d) => ({ key: d.key, size: new Set(d.codes.filter((code, at) => code >= 0 && (!plain || family[at] < 0))).size }))
    .filter((d) => d.size > 1 && d.size <= MOST_VALUES).sort((a, b) => b.size - a.size).map((d) => d.key);
  const keys = [...new Set([...telling, ...many, ...dims.map((d) => d.key)])].slice(0, 2);
  keys.sort((a, b) => dimByKey.get(b).values.length - dimByKey.get(a).values.length);
  return { x: keys[0] || "", y: keys[1] || keys[0] || "", facet: raw.kernels.length > 1 ? "kernel" : "" };
}

function readAddress() {
  const text = location.hash.slice(1);
  if (SECTIONS.includes(text)) return; // a link inside the page
  const given = new URLSearchParams(text);
  view = { ...defaults };
  for (const key of [...Object.keys(SELECTS), "q", "sort"]) if (given.has(key)) view[key] = given.get(key);
  for (const key of ["x", "y"]) if (!dimByKey.has(view[key])) view[key] = defaults[key];
  if (view.facet && !dimByKey.has(view.facet)) view.facet = defaults.facet;
  view.down = given.get("down") === "1";
  view.page = Number.parseInt(given.get("page") || "1", 10) || 1;
  if (given.has("cx") && given.has("cy")) view.cell = { x: given.get("cx"), y: given.get("cy"), f: given.get("cf") || "" };
}

function writeAddress() {
  const now = new URLSearchParams();
  for (const key of [...Object.keys(SELECTS), "q", "sort"]) if (view[key] !== defaults[key]) now.set(key, view[key]);
  if (view.down) now.set("down", "1");
  if (view.page > 1) now.set("page", view.page);
  if (view.cell) { now.set("cx", view.cell.x); now.set("cy", view.cell.y); if (view.facet) now.set("cf", view.cell.f); }
  try { history.replaceState(null, "", `#${now}`); } catch (_) { /* a sandboxed viewer: the page works without */ }
}

function change(part) {
  view = { ...view, page: 1, ...part };
  if (["x", "y", "facet"].some((key) => key in part)) view.cell = part.cell || null;
  draw();
  writeAddress();
}

function draw() {
  for (const [key, id] of Object.entries(SELECTS)) if (byId(id).value !== view[key]) {
    byId(id).value = view[key];
    if (byId(id).selectedIndex < 0) { byId(id).selectedIndex = 0; view[key] = byId(id).value; }
  }
  if (byId("f-q").value !== view.q) byId("f-q").value = view.q;
  const filterKey = JSON.stringify([view.kernel, view.tier, view.family, view.state, view.kind, view.q]);
  if (drawn.filter !== filterKey) drawn.rows = filtered(view);
  const { scope, base } = drawn.rows;
  const mapKey = JSON.stringify([filterKey, view.x, view.y, view.facet, view.colour]);
  if (drawn.map !== mapKey) { drawLegend(view); drawMaps(view, scope, base); } else markCell(view);
  if (drawn.filter !== filterKey) drawMarginals(marginalsOf(scope));
  const place = !view.cell ? "" : [`${view.x}:${view.cell.x}`, `${view.y}:${view.cell.y}`, ...(view.facet ? [`${view.facet}:${view.cell.f}`] : [])].join(" ");
  const rowKey = JSON.stringify([filterKey, view.cell, view.cell && [view.x, view.y, view.facet]]);
  if (drawn.row !== rowKey) {
    drawn.picked = rowsOfCell(view, base);
    drawFailures(drawn.picked, allFailing, place, listGroup);
  }
  const sortKey = JSON.stringify([rowKey, view.sort, view.down]);
  if (drawn.sort !== sortKey) drawn.sorted = sorted(drawn.picked, view);
  drawn.pages = drawTable(drawn.sorted, view, place);
  byId("clear-cell").hidden = !view.cell;
  byId("clear-cell").textContent = place ? `${place} ✕` : "";
  byId("clear-cell").setAttribute("aria-label", `Release the cell ${place}`);
  byId("count").textContent = `${drawn.picked.length} of ${plural(N, "result")}${place && " in one cell"}`;
  Object.assign(document.body.dataset, { shown: drawn.picked.length, cells: cells.length });
  Object.assign(drawn, { filter: filterKey, map: mapKey, row: rowKey, sort: sortKey });
}

function listGroup(group) {
  change({ kernel: raw.kernels[group.kernel], state: raw.states[group.state], kind: group.kind });
  goTo("results");
}

function goTo(id) {
  byId(id).scrollIntoView();
  byId(id).focus({ preventScroll: true });
}

function optionsOfFilters() {
  const all = (values, text) => [["", text], ...values.map((value) => [value, value])];
  const tiers = [...new Set(raw.cases.tiers.flat())];
  const families = columnByKey.get("family").values;
  const kinds = dimByKey.get("kind") ? dimByKey.get("kind").values : [];
  const counts = new Uint32Array(STATE_COUNT);
  for (const state of stateOf) counts[state]++;
  fill(byId("f-kernel"), all(raw.kernels, "all"), "");
  fill(byId("f-tier"), all(tiers, "all"), "");
  fill(byId("f-family"), [["", "all"], ...(families.length ? [["-", "no family"]] : []), ...families.map((name) => [name, name])], "");
  fill(byId("f-state"), [["", "all"], ["failing", `failing ${allFailing}`],
    ...raw.states.map((name, state) => [name, `${raw.signs[state]} ${raw.labels[state]} ${counts[state]}`])], "");
  fill(byId("f-kind"), all(kinds, "all"), "");
  byId("tier-label").hidden = tiers.length < 2;
  byId("family-label").hidden = !families.length;
  byId("kind-label").hidden = !kinds.length;
  const axes = [...dims].sort((a, b) => varies(b) - varies(a)).map((dim) => [dim.key, varies(dim) ? dim.key : `${dim.key} (constant)`]);
  fill(byId("v-x"), axes, view.x);
  fill(byId("v-y"), axes, view.y);
  fill(byId("v-facet"), [["", "one map"], ...axes], view.facet);
  fill(byId("v-colour"), [["state", "worst state"], ["budget", "budget fraction"], ["level", "level reached"]], view.colour);
  return counts;
}

function wire() {
  for (const [key, id] of Object.entries(SELECTS)) byId(id).addEventListener("change", () => change({ [key]: byId(id).value }));
  let waiting = 0;
  byId("f-q").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => change({ q: byId("f-q").value }), 150);
  });
  byId("reset").addEventListener("click", () => change({ ...defaults }));
  byId("clear-cell").addEventListener("click", () => { change({ cell: null }); goTo("matrix"); });
  byId("swap").addEventListener("click", () => {
    const cell = view.cell && { x: view.cell.y, y: view.cell.x, f: view.cell.f };
    change({ x: view.y, y: view.x, cell });
  });
  byId("maps").addEventListener("click", (event) => {
    const button = event.target.closest("button.cell");
    if (button) change({ cell: button.getAttribute("aria-pressed") === "true" ? null : cells[button.dataset.cell] });
  });
  byId("maps").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && view.cell) change({ cell: null });
    else moveInMap(event);
  });
  for (const [id, to] of [["first", () => 1], ["prev", () => view.page - 1], ["next", () => view.page + 1], ["last", () => drawn.pages]]) {
    byId(`p-${id}`).addEventListener("click", () => change({ page: to() }));
  }
  // Links inside the page move the focus and leave the view in the address alone.
  for (const link of document.querySelectorAll('a[href^="#"]')) link.addEventListener("click", (event) => {
    event.preventDefault();
    goTo(link.getAttribute("href").slice(1));
  });
  addEventListener("hashchange", () => { readAddress(); draw(); });
}

// The counts that the page states were made in Python; the script counts its own columns and compares.
function selfCheck(counts) {
  const stated = [...byId("counts").tBodies[0].rows].map((line) => [...line.cells].slice(3, 3 + STATE_COUNT).map((cell) => Number(cell.textContent)));
  const sums = raw.states.map((_, state) => stated.reduce((sum, line) => sum + line[state], 0) - (state === NOT_RUN ? raw.missing : 0));
  const wrong = raw.states.filter((_, state) => sums[state] !== counts[state]);
  if (wrong.length) {
    byId("check").hidden = false;
    byId("check").textContent = `This page is damaged: its summary and its data disagree on ${wrong.join(", ")}. Make it again from the record file.`;
  }
  document.body.dataset.check = wrong.length ? "bad" : "ok";
}

const began = performance.now();
const counts = optionsOfFilters();
drawTableHead((key) => change({ sort: key, down: view.sort === key ? !view.down : ["budget", "error", "seconds"].includes(key) }));
readAddress();
wire();
draw();
selfCheck(counts);
Object.assign(document.body.dataset, { ready: "1", renderMs: Math.round(performance.now()), scriptMs: Math.round(performance.now() - began), results: N });
