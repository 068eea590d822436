// One result in full: used by the failure cards and by the rows of the table.
function caseNodes(row) {
  const at = caseOf[row];
  if (at in raw.cases.ids) return [raw.cases.ids[at]];
  const family = caseValue(at, "family"), operators = columnByKey.get("operator").values.length;
  const nodes = [];
  if (operators > 1) nodes.push(`${caseValue(at, "operator")}/`);
  if (family) nodes.push(h("b", {}, family), "/", h("wbr"));
  caseParams(at).forEach(([key, value], i) => {
    const constant = parameterByKey.get(key).values.length === 1;
    nodes.push(...(i ? ["-", h("wbr")] : []), h("span", { class: constant ? "pair-of dim" : "pair-of" }, h("i", {}, `${key}:`), value));
  });
  return nodes;
}

function levelText(o) {
  if (!o.promised && !o.level) return "–";
  if (o.promised === o.level) return o.level;
  return `${o.level || "none"} / ${o.promised || "no promise"}`;
}
const belowPromise = (o) => o.promised && o.level && raw.levels.indexOf(o.level) > raw.levels.indexOf(o.promised);

function detail(row) {
  const o = outcome(row), kept = raw.details[row] || {}, failing = isFailing(stateOf[row]);
  const facts = [
    ["state", kindText(o.state, o.kind)], ["promised", o.promised], ["reached", o.level],
    ["budget fraction", raw.budget[row] === -1 ? null : fractionText(raw.budget[row], 4)],
    ["largest error", raw.error[row] === -1 ? null : numberText(raw.error[row])],
    ["wrong elements", wrongOf.has(row) ? `${wrongOf.get(row)} of ${elementsOf.get(row) || 0}, ${percent(wrongOf.get(row), elementsOf.get(row))}` : null],
    ["diagnosed as", kept.diagnosed],
    ...Object.entries(kept.first || {}).map(([key, value]) => [`first mismatch: ${key}`, value]),
    ...Object.entries(kept.details || {}), ["path", o.path], ["lane", o.lane], ["went no further", o.stopped], ["expected", o.expected],
    ["time", raw.seconds[row] === -1 ? null : `${numberText(raw.seconds[row])} s`], ["worker", kept.worker],
    ["tiers", raw.cases.tiers[raw.cases.tier[caseOf[row]]].join(", ")],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  const box = h("div", { class: "detail" });
  const said = message(row);
  if (said) box.append(h("p", { class: "message" }, said));
  else if (failing) box.append(h("p", { class: "hint" }, "No message is kept here; the record file may hold it."));
  box.append(h("dl", { class: "facts small" }, ...facts.map(([key, value]) => h("div", {}, h("dt", {}, key), h("dd", {}, value)))));
  if (kept.trace) box.append(h("details", {}, h("summary", {}, "Trace"), h("pre", { tabindex: "0" }, kept.trace)));
  if (failing && !(row in raw.details)) {
    box.append(h("p", { class: "hint" }, `First mismatch and trace are kept for ${plural(Object.keys(raw.details).length, "failure")} of all kinds, not for this one; the record file holds them.`));
  }
  if (o.rerun) box.append(h("p", { class: "label" }, "Run it again"), copyable(rerun(row), "command"));
  else box.append(h("p", { class: "label" }, "Case"), copyable(caseId(caseOf[row]), "case id"));
  return box;
}
