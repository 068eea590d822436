// The embedded columns, decoded into typed arrays. A row is one result, a case holds the parameters.
const raw = JSON.parse(byId("data").textContent);
const N = raw.outcome.length;
const PASS = raw.states.indexOf("pass"), NOT_RUN = raw.states.indexOf("not-run");
const STATE_COUNT = raw.states.length;
const kindText = (state, kind) => raw.labels[state] + (kind && kind !== raw.states[state] ? `: ${kind}` : "");
const EXPECTED = raw.states.indexOf("expected");
const isFailing = (state) => state !== PASS && state !== NOT_RUN && state !== EXPECTED;
// Worst first: what a cell with several states shows.
const SEVERITY = ["crash", "timeout", "error", "fail", "not-run", "expected", "pass"].map((name) => raw.states.indexOf(name));
const severityOf = raw.states.map((_, state) => SEVERITY.indexOf(state));

function expandRuns(runs, size) {
  const out = new Int32Array(size);
  for (let i = 0, at = 0; i < runs.length; i += 2) { out.fill(runs[i], at, at + runs[i + 1]); at += runs[i + 1]; }
  return out;
}
function expandDeltas(deltas) {
  const out = new Int32Array(deltas.length);
  for (let i = 0, sum = 0; i < deltas.length; i++) out[i] = sum += deltas[i];
  return out;
}
function expandSparse(column) {
  const rows = expandDeltas(column.rows);
  return new Map(column.values.map((value, i) => [rows[i], value]));
}

const kernelOf = expandRuns(raw.kernel, N);
const caseOf = expandDeltas(raw.case);
const orderOf = expandRuns(raw.cases.order, raw.cases.count);
const wrongOf = expandSparse(raw.wrong), elementsOf = expandSparse(raw.elements), messageOf = expandSparse(raw.message);
const outcomes = raw.outcomes.map(([state, kind, promised, level, path, lane, rerun, expected, stopped]) =>
  ({ state, kind, promised, level, path, lane, rerun, expected, stopped }));
const outcome = (row) => outcomes[raw.outcome[row]];
const stateOf = Uint8Array.from(raw.outcome, (o) => outcomes[o].state);

// Dimensions: everything that can be an axis. `codes` has one entry per case or, for `perRow`, per result.
function rowDimension(key, values, codeOf) {
  const codes = new Int32Array(N);
  for (let row = 0; row < N; row++) codes[row] = codeOf(row);
  return { key, values, codes, perRow: true };
}
function outcomeDimension(key, order) {
  const used = [...new Set(outcomes.map((o) => o[key]).filter(Boolean))];
  if (order) used.sort((a, b) => order.indexOf(a) - order.indexOf(b)); else used.sort();
  const codes = outcomes.map((o) => used.indexOf(o[key]));
  return rowDimension(key, used, (row) => codes[raw.outcome[row]]);
}
const parameters = raw.cases.columns.filter((c) => c.parameter);
const dims = [
  ...parameters, ...raw.cases.columns.filter((c) => !c.parameter),
  { key: "kernel", values: raw.kernels, codes: kernelOf, perRow: true },
  outcomeDimension("level", raw.levels), outcomeDimension("kind"), outcomeDimension("path"), outcomeDimension("lane", ["route", "lower", "assemble", "execute"]),
].filter((dim) => dim.values.length);
const dimByKey = new Map(dims.map((dim) => [dim.key, dim]));
// A code of -1 (absent) becomes the last index, so that codes can index arrays.
function codeIn(dim) {
  const last = dim.values.length, codes = dim.codes;
  return dim.perRow
    ? (row) => (codes[row] < 0 ? last : codes[row])
    : (row) => { const code = codes[caseOf[row]]; return code < 0 ? last : code; };
}
const valueText = (dim, code) => (code < dim.values.length ? dim.values[code] : "none");
const varies = (dim) => dim.values.length > 1 || (dim.values.length === 1 && dim.codes.includes(-1));

// Names. An id is spelled from its columns; the few that would differ are stored whole.
const columnByKey = new Map(raw.cases.columns.filter((c) => !c.parameter).map((c) => [c.key, c]));
function caseValue(at, key) {
  const column = columnByKey.get(key), code = column.codes[at];
  return code < 0 ? "" : column.values[code];
}
const caseParams = (at) => raw.cases.orders[orderOf[at]].map((key) => [key, parameterValue(at, key)]);
const parameterByKey = new Map(parameters.map((c) => [c.key, c]));
function parameterValue(at, key) {
  const column = parameterByKey.get(key);
  return column.values[column.codes[at]];
}
function caseId(at) {
  if (at in raw.cases.ids) return raw.cases.ids[at];
  const point = caseParams(at).map(([key, value]) => `${key}:${value}`).join("-");
  return [caseValue(at, "operator"), caseValue(at, "family"), point].filter(Boolean).join("/");
}
function withNames(text, row) {
  const id = caseId(caseOf[row]);
  return text.replace(/\u0001/g, () => id).replace(/\u0002/g, () => id.slice(id.indexOf("/") + 1))
    .replace(/\u0003/g, () => raw.kernels[kernelOf[row]]);
}
const message = (row) => (messageOf.has(row) ? withNames(raw.messages[messageOf.get(row)], row) : "");
// Without its opening "case on kernel:", for where both stand beside it.
function shortMessage(row) {
  if (!messageOf.has(row)) return "";
  const text = raw.messages[messageOf.get(row)];
  return withNames(text.replace(/^[\w ]*[\u0001-\u0003][\w \u0001-\u0003]*: */, "") || text, row);
}
const rerun = (row) => withNames(outcome(row).rerun, row);

// Filters. `scope` ignores state, kind and text, so that shares of failures keep their whole.
let texts = null;
function textOf(row) {
  texts = texts || new Array(N);
  return texts[row] || (texts[row] =
    `${caseId(caseOf[row])} ${raw.kernels[kernelOf[row]]} ${outcome(row).kind || ""} ${message(row)}`.toLowerCase());
}
function filtered(view) {
  const kernel = raw.kernels.indexOf(view.kernel);
  const tiers = raw.cases.tiers.map((names) => !view.tier || names.includes(view.tier));
  const family = columnByKey.get("family"), wanted = view.family ? family.values.indexOf(view.family) : -1;
  const states = raw.states.map((name, state) =>
    !view.state || view.state === name || (view.state === "failing" && isFailing(state)));
  const words = view.q.toLowerCase().split(/\s+/).filter(Boolean);
  const scope = new Int32Array(N), base = new Int32Array(N);
  let inScope = 0, inBase = 0;
  for (let row = 0; row < N; row++) {
    if (kernel >= 0 && kernelOf[row] !== kernel) continue;
    const at = caseOf[row];
    if (!tiers[raw.cases.tier[at]] || (view.family === "-" ? family.codes[at] >= 0 : wanted >= 0 && family.codes[at] !== wanted)) continue;
    scope[inScope++] = row;
    if (!states[stateOf[row]] || (view.kind && outcome(row).kind !== view.kind)) continue;
    if (words.length && !words.every((word) => textOf(row).includes(word))) continue;
    base[inBase++] = row;
  }
  return { scope: scope.subarray(0, inScope), base: base.subarray(0, inBase) };
}
