// Failures by kernel, state and kind: a thousand of them read as a few rules, each with examples.
const FIRST_CARDS = 3, MORE_CARDS = 20;

function failureGroups(rows) {
  const groups = new Map();
  for (const row of rows) {
    if (!isFailing(stateOf[row])) continue;
    const o = outcome(row), key = `${raw.kernels[kernelOf[row]]}|${raw.states[o.state]}|${o.kind || ""}`;
    if (!groups.has(key)) groups.set(key, { key, kernel: kernelOf[row], state: o.state, kind: o.kind || "", rows: [] });
    groups.get(key).rows.push(row);
  }
  // Those that were diagnosed first, then those with kept details: they say more.
  const says = (row) => (row in raw.details ? (raw.details[row].diagnosed ? 2 : 1) : 0);
  for (const group of groups.values()) group.rows.sort((a, b) => says(b) - says(a) || a - b);
  const contradicts = (group) => raw.contradictions.includes(group.kind);
  return [...groups.values()].sort((a, b) => contradicts(b) - contradicts(a) || severityOf[a.state] - severityOf[b.state] || b.rows.length - a.rows.length);
}

function drawFailures(rows, whole, place, listGroup) {
  const groups = failureGroups(rows);
  const failing = groups.reduce((sum, group) => sum + group.rows.length, 0);
  const kept = Object.keys(raw.details).length;
  const limited = kept < whole ? `; first mismatch and trace kept for ${kept}` : "";
  byId("failures-note").textContent = !whole ? "none in this run"
    : `${failing}${failing < whole ? ` of ${whole}` : ""} in ${plural(groups.length, "group")}${place && `, ${place}`}${limited}`;
  byId("failure-groups").replaceChildren(...groups.slice(0, 30).map((group) => drawGroup(group, rows.length < N, listGroup)),
    ...(groups.length > 30 ? [h("p", { class: "hint" }, `${groups.length - 30} more groups: filter by kernel or kind to see them.`)] : []));
}

function drawGroup(group, part, listGroup) {
  const cards = h("div", { class: "cards" });
  const more = h("button", { type: "button" });
  let shown = 0;
  const show = (count) => {
    const next = group.rows.slice(shown, shown + count), first = shown;
    cards.append(...next.map((row, i) => card(row, first + i === 0)));
    shown += next.length;
    const left = group.rows.length - shown;
    more.hidden = !left;
    more.textContent = `Show ${Math.min(left, MORE_CARDS)} more of ${left}`;
    return cards.children[first];
  };
  more.addEventListener("click", () => show(MORE_CARDS).querySelector("summary").focus());
  show(FIRST_CARDS);
  const list = h("button", { type: "button" }, "List them below");
  list.addEventListener("click", () => listGroup(group));
  const rule = raw.rules[group.key];
  return h("article", { class: "group" },
    h("h3", {}, sign(group.state), h("code", {}, raw.kernels[group.kernel]), h("span", {}, kindText(group.state, group.kind)),
      h("small", {}, plural(group.rows.length, "result"))),
    rule ? h("p", { class: "rule" }, part ? `In the whole run: ${rule}` : rule) : null, cards, h("div", { class: "buttons" }, more, list));
}

function card(row, open) {
  const head = h("summary", {}, h("code", {}, ...caseNodes(row)), " ", h("span", { class: "said" }, shortMessage(row)));
  const box = h("details", { class: "card", open }, head);
  const draw = () => { if (box.open && box.children.length === 1) box.append(detail(row)); };
  box.addEventListener("toggle", draw);
  draw();
  return box;
}
