// The matrix as heat maps: two dimensions as axes, a third may split it. Cells are buttons in real tables.
const MOST_VALUES = 60, MOST_MAPS = 24;
const LEVEL_SIGNS = { "bit-exact": "B", "within-budget": "W", "published": "U" };
let cells = []; // what each button stands for, by its data-cell

function drawMaps(view, scope, base) {
  const x = dimByKey.get(view.x), y = dimByKey.get(view.y), facet = dimByKey.get(view.facet);
  const xs = codeIn(x), ys = codeIn(y), fs = facet ? codeIn(facet) : () => 0;
  const nx = x.values.length + 1, ny = y.values.length + 1, nf = facet ? facet.values.length + 1 : 1;
  const seen = [new Uint8Array(nx), new Uint8Array(ny), new Uint8Array(nf)];
  const stats = new Map();
  const keyOf = (row) => (fs(row) * ny + ys(row)) * nx + xs(row);
  for (const row of scope) {
    seen[0][xs(row)] = seen[1][ys(row)] = seen[2][fs(row)] = 1;
    const key = keyOf(row);
    if (!stats.has(key)) stats.set(key, { states: new Uint32Array(STATE_COUNT), total: 0, budget: -1, level: -1, low: 0 });
  }
  for (const row of base) {
    const stat = stats.get(keyOf(row)), { level, promised } = outcome(row);
    stat.states[stateOf[row]]++;
    stat.total++;
    if (numberOrder(raw.budget[row]) > numberOrder(stat.budget)) stat.budget = raw.budget[row];
    const rank = level ? raw.levels.indexOf(level) : -1;
    if (rank > stat.level) stat.level = rank;
    if (promised && rank > raw.levels.indexOf(promised)) stat.low++;
  }
  const used = seen.map((flags) => [...flags.keys()].filter((code) => flags[code]));
  const [columns, lines, maps] = [used[0].slice(0, MOST_VALUES), used[1].slice(0, MOST_VALUES), used[2].slice(0, MOST_MAPS)];
  cells = [];
  const tables = maps.map((f) => oneMap(view, { x, y, facet, f, columns, lines }, (cx, cy) => stats.get((f * ny + cy) * nx + cx)));
  const cut = used.reduce((sum, codes, i) => sum + codes.length - [columns, lines, maps][i].length, 0);
  if (cut) tables.push(h("p", { class: "hint" }, `${plural(cut, "value")} not drawn: this map stops at ${MOST_VALUES} values a side and ${MOST_MAPS} maps. Choose other axes or filter.`));
  if (!maps.length) tables.push(h("p", { class: "calm" }, "No result matches the filters."));
  byId("maps").replaceChildren(...tables);
  markCell(view);
}

function oneMap(view, map, statAt) {
  const { x, y, facet, f, columns, lines } = map;
  const name = facet ? `${facet.key}:${valueText(facet, f)}` : `${y.key} down, ${x.key} across`;
  const head = h("tr", {}, h("th", { scope: "col", class: "corner" }, h("span", {}, `${x.key} →`), h("span", {}, `${y.key} ↓`)),
    ...columns.map((cx) => h("th", { scope: "col" }, valueText(x, cx))));
  let first = true;
  const rows = lines.map((cy, j) => h("tr", {}, h("th", { scope: "row" }, valueText(y, cy)), ...columns.map((cx, i) => {
    const stat = statAt(cx, cy);
    if (!stat) return h("td", { class: "none" });
    const place = { x: valueText(x, cx), y: valueText(y, cy), f: facet ? valueText(facet, f) : "" };
    const where = [`${x.key}:${place.x}`, `${y.key}:${place.y}`, ...(facet ? [`${facet.key}:${place.f}`] : [])].join(", ");
    const button = drawCell(view.colour, stat);
    button.dataset.cell = cells.push(place) - 1;
    button.dataset.i = i;
    button.dataset.j = j;
    button.tabIndex = first ? 0 : -1;
    first = false;
    const said = `${where}: ${sentence(stat)}`;
    button.setAttribute("aria-label", said);
    button.title = said;
    return h("td", {}, button);
  })));
  return h("div", { class: "map scroll" }, h("table", { "aria-describedby": "matrix-hint" },
    h("caption", { class: facet ? "" : "hidden" }, name), h("thead", {}, head), h("tbody", {}, ...rows)));
}

function sentence(stat) {
  if (!stat.total) return "nothing matches the filters";
  const parts = SEVERITY.filter((state) => stat.states[state]).map((state) => `${stat.states[state]} ${raw.labels[state]}`);
  const level = stat.level >= 0 ? `; lowest level ${raw.levels[stat.level]}` : "";
  const budget = stat.budget !== -1 ? `; largest budget fraction ${fractionText(stat.budget)}` : "";
  return `${plural(stat.total, "result")}: ${parts.join(", ")}${level}${budget}`;
}

function drawCell(colour, stat) {
  const button = h("button", { type: "button", class: "cell" });
  const set = (classes, text, value) => { button.className = `cell ${classes}`; button.append(h("b", {}, text), value); };
  if (!stat.total) set("empty", "·", "");
  else if (colour === "budget") {
    if (stat.budget === -1) set("empty", "", "–");
    else if (stat.budget < -1 || stat.budget > 1) set("over", "!", fractionText(stat.budget));
    else {
      set("scale", "", fractionText(stat.budget));
      button.style.setProperty("--v", `${Math.round(stat.budget * 100)}%`);
    }
  } else if (colour === "level") {
    if (stat.level < 0) set("empty", "", "–");
    else {
      const level = raw.levels[stat.level];
      set(`l-${level}${stat.low ? " low" : ""}`, LEVEL_SIGNS[level] || "?", stat.low ? `${stat.low}<` : stat.total);
    }
  } else {
    const failing = stat.states.reduce((sum, n, state) => sum + (isFailing(state) ? n : 0), 0);
    const executed = stat.total - stat.states[NOT_RUN];
    const worst = SEVERITY.find((state) => stat.states[state] && (state !== NOT_RUN || !executed));
    const count = failing ? failing : executed || stat.total;
    const partial = executed && stat.states[NOT_RUN] ? " partial" : "";
    set(`s-${raw.marks[worst]}${partial}`, raw.signs[worst], count === stat.total ? count : `${count}/${stat.total}`);
  }
  return button;
}

function drawLegend(view) {
  const entry = (classes, text, word) => h("span", {}, h("i", { class: `cell ${classes}` }, text), word);
  const states = raw.labels.map((name, state) => entry(`s-${raw.marks[state]}`, raw.signs[state], name));
  const levels = raw.levels.map((name) => entry(`l-${name}`, LEVEL_SIGNS[name], name));
  byId("legend").replaceChildren(...(view.colour === "budget"
    ? [h("span", {}, "0", h("i", { class: "ramp" }), "1 = budget"), entry("over", "!", "over budget")]
    : view.colour === "level" ? [...levels, entry("low", "<", "below the promise")] : states));
}

function markCell(view) {
  for (const button of byId("maps").querySelectorAll("button.cell")) {
    const place = cells[button.dataset.cell], on = view.cell && ["x", "y", "f"].every((k) => place[k] === view.cell[k]);
    button.setAttribute("aria-pressed", on ? "true" : "false");
  }
}

// The rows of a cell: those whose values are written the same.
function rowsOfCell(view, rows) {
  if (!view.cell) return rows;
  const tests = [["x", view.x], ["y", view.y], ["f", view.facet]].filter(([, key]) => dimByKey.has(key)).map(([part, key]) => {
    const dim = dimByKey.get(key), code = codeIn(dim), wanted = view.cell[part];
    return (row) => valueText(dim, code(row)) === wanted;
  });
  return rows.filter((row) => tests.every((test) => test(row)));
}

function moveInMap(event) {
  const button = event.target.closest("button.cell");
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!button || !(step || event.key === "Home" || event.key === "End")) return;
  event.preventDefault();
  const all = [...button.closest("table").querySelectorAll("button.cell")];
  const i = Number(button.dataset.i), j = Number(button.dataset.j);
  let next;
  if (!step) next = all.filter((b) => Number(b.dataset.j) === j).at(event.key === "Home" ? 0 : -1);
  else { // the nearest cell in that direction, over gaps
    const ahead = all.filter((b) => step[0] ? Number(b.dataset.j) === j && (b.dataset.i - i) * step[0] > 0
      : Number(b.dataset.i) === i && (b.dataset.j - j) * step[1] > 0);
    next = ahead.at(step[0] + step[1] > 0 ? 0 : -1);
  }
  if (!next) return;
  button.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
