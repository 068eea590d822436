// Small helpers: elements, number formatting, the clipboard. All text goes in as text, never as markup.
const byId = (id) => document.getElementById(id);

function h(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const plural = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

// Columns spell absent, infinite and NaN as -1, -2 and -3.
function numberText(value, digits = 3) {
  if (value === -1) return "–";
  if (value === -2) return "∞";
  if (value === -3) return "NaN";
  return value === 0 ? "0" : Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5
    ? value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e")
    : String(Number(value.toPrecision(digits)));
}
// A budget fraction: 1 is the limit, so what is not 1 is never rounded to it.
function fractionText(value, digits) {
  const text = numberText(value, digits);
  return text !== "1" || value === 1 ? text : value < 1 ? "<1" : ">1";
}
// For comparing: NaN above infinity above all numbers, absent below.
const numberOrder = (value) => (value === -2 ? Infinity : value === -3 ? Infinity : value);
const percent = (part, whole) => (!whole ? "–" : !part ? "0 %" : part === whole ? "100 %" : `${Math.min(99.9, Number((100 * part / whole).toPrecision(part / whole > 0.99 ? 3 : 2)))} %`);

function sign(state) {
  return h("span", { class: `sign s-${raw.marks[state]}`, "aria-hidden": "true" }, raw.signs[state]);
}

function announce(text) { byId("announce").textContent = text; }

async function copy(text, button) {
  let done = false;
  try { await navigator.clipboard.writeText(text); done = true; } catch (_) {
    const area = h("textarea", { class: "hidden", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    try { done = document.execCommand("copy"); } catch (_) { done = false; }
    area.remove();
    button.focus();
  }
  const label = button.dataset.label || (button.dataset.label = button.textContent);
  button.textContent = done ? "Copied" : "Select it";
  announce(done ? "Copied to the clipboard" : "The clipboard is closed to this page; select the text instead");
  setTimeout(() => { button.textContent = label; }, 1500);
}

function copyable(text, label) {
  const button = h("button", { type: "button", class: "copy", "aria-label": `Copy the ${label}` }, "Copy");
  button.addEventListener("click", () => copy(text, button));
  return h("div", { class: "copyable" }, h("code", {}, text), button);
}

function fill(select, options, chosen) {
  select.replaceChildren(...options.map(([value, text]) => h("option", { value }, text)));
  select.value = chosen;
  if (select.selectedIndex < 0) select.selectedIndex = 0;
}
