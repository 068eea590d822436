// Per parameter value: the share of executed results that fail, and the largest budget fraction.
const MOST_MARGINALS = 40;

// Bits of information that a dimension gives on whether a result fails (mutual information).
function gain(table, failing, total) {
  const entropy = (part, whole) => {
    const p = whole ? part / whole : 0;
    return p <= 0 || p >= 1 ? 0 : -p * Math.log2(p) - (1 - p) * Math.log2(1 - p);
  };
  return entropy(failing, total) - table.reduce((sum, v) => sum + v.total / total * entropy(v.failing, v.total), 0);
}

function marginalsOf(rows) {
  const executed = rows.filter((row) => stateOf[row] !== NOT_RUN);
  const failing = executed.reduce((sum, row) => sum + isFailing(stateOf[row]), 0);
  const tables = dims.filter((dim) => varies(dim) && !["level", "kind", "lane", "path"].includes(dim.key)).map((dim) => {
    const code = codeIn(dim), values = [...dim.values, "none"].map((value) => ({ value, total: 0, failing: 0, budget: -1 }));
    for (const row of executed) {
      const v = values[code(row)];
      v.total++;
      v.failing += isFailing(stateOf[row]) ? 1 : 0;
      if (numberOrder(raw.budget[row]) > numberOrder(v.budget)) v.budget = raw.budget[row];
    }
    const used = values.filter((v) => v.total);
    return { dim, values: used, gain: executed.length ? gain(used, failing, executed.length) : 0 };
  }).filter((table) => table.values.length > 1);
  if (failing) tables.sort((a, b) => b.gain - a.gain);
  return { executed: executed.length, failing, tables };
}

function drawMarginals(found) {
  const { executed, failing, tables } = found;
  byId("marginals-note").textContent = !executed ? "nothing was executed in this selection"
    : failing ? `which one explains the ${plural(failing, "failure")}? Share of failing results and largest budget fraction, most telling parameter first`
      : `no failing result among ${executed}; bars show the largest budget fraction`;
  // Bars of failures are drawn against the largest share, or five failures in a thousand could not be seen.
  const most = Math.max(...tables.flatMap((table) => table.values.map((v) => v.failing / v.total)), 0);
  byId("marginal-tables").replaceChildren(...tables.map(({ dim, values }) => {
    const shown = values.slice(0, MOST_MARGINALS);
    if (failing) shown.sort((a, b) => b.failing / b.total - a.failing / a.total);
    const rows = shown.map((v) => {
      const budget = v.budget < -1 ? 1 : Math.max(0, Math.min(1, v.budget));
      const bar = h("span", { class: failing ? "bar-fill failing" : "bar-fill" });
      bar.style.width = `${100 * (failing ? v.failing / v.total / most : budget)}%`;
      return h("tr", {}, h("th", { scope: "row" }, v.value), h("td", { class: "track" }, bar),
        h("td", { class: "n" }, failing ? `${v.failing}/${v.total}` : v.total, failing ? h("span", { class: "share" }, percent(v.failing, v.total)) : null),
        h("td", { class: v.budget < -1 || v.budget > 1 ? "n bad" : "n" }, fractionText(v.budget)));
    });
    if (values.length > shown.length) rows.push(h("tr", {}, h("td", { colspan: 4 }, `${values.length - shown.length} more values`)));
    return h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, dim.key),
      h("th", { scope: "col" }, h("span", { class: "hidden" }, "bar")),
      h("th", { scope: "col", class: "n" }, failing ? "failing" : "results"), h("th", { scope: "col", class: "n" }, "budget"))),
    h("tbody", {}, ...rows));
  }));
}
