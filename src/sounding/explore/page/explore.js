"use strict";
// The settings live in the address (after #), so that a link holds them; every move asks each panel anew.
const form = document.getElementById("settings");
const said = document.getElementById("said");
const PANELS = ["numbers", "map", "correlation", "prescription"];
const FORMULA = "max(x, 0.1*x)";
const STEPS = 400; // places of a slider that moves in the logarithm
const SMALLEST = 1e-6; // the first place behind zero
const asked = {};
let choices = null;
let timer = 0;

const fields = () => [...form.elements].filter((one) => one.name);
const valueOf = (input) => (input.type === "range" ? Number(input.dataset.exact) : input.value);
function format(value) {
  const size = Math.abs(value);
  return size >= 1e4 || (size !== 0 && size < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4));
}

// Sliders over several powers of ten move in the logarithm; those that start at zero keep a place for it.
function place(input, value) {
  if (input.type !== "range") { input.value = value; return; }
  const [low, high] = choices.limits[input.name];
  if ("log" in input.dataset) input.value = (STEPS * Math.log(value / low)) / Math.log(high / low);
  else if ("zero" in input.dataset) input.value = value > 0 ? (STEPS * Math.log(value / SMALLEST)) / Math.log(high / SMALLEST) : 0;
  else input.value = value;
  input.dataset.exact = value;
}
function moved(input) {
  const [low, high] = choices.limits[input.name], at = Number(input.value);
  let value = at;
  if ("log" in input.dataset) value = low * (high / low) ** (at / STEPS);
  if ("zero" in input.dataset) value = at === 0 ? 0 : SMALLEST * (high / SMALLEST) ** (at / STEPS);
  return "whole" in input.dataset ? Math.round(value) : Number(value.toPrecision(3));
}

function query() {
  const shown = fields().filter((input) => !input.closest("label").hidden);
  return new URLSearchParams(shown.map((input) => [input.name, valueOf(input)])).toString();
}
function show() {
  const network = form.elements.network.value;
  for (const label of form.querySelectorAll("label[data-for]")) label.hidden = !label.dataset.for.split(" ").includes(network);
  form.querySelector("[data-when=formula]").hidden = form.elements.activation.value !== "formula";
  for (const input of fields()) {
    const output = input.parentElement.querySelector("output");
    if (!output) continue;
    output.textContent = format(valueOf(input));
    input.setAttribute("aria-valuetext", output.textContent);
  }
}
function update() {
  show();
  const text = query();
  history.replaceState(null, "", `#${text}`);
  for (const name of PANELS) ask(name, text);
}
async function ask(name, text) {
  const section = document.getElementById(name);
  const mine = (asked[name] = (asked[name] || 0) + 1);
  section.classList.add("waiting");
  let panel;
  try {
    panel = await (await fetch(`panel/${name}?${text}`)).json();
  } catch {
    panel = { error: "The explorer does not answer: is `sounding explore` still running?" };
  }
  if (mine !== asked[name]) return; // a later move has been asked for
  section.classList.remove("waiting");
  draw(section, name, panel);
  if (panel.more) ask(name, text); // what took too long for one answer comes with the next ones
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
function shape(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function draw(section, name, panel) {
  section.replaceChildren(section.querySelector("h2"));
  if (panel.error) { section.append(element("p", { class: "note error" }, panel.error)); return; }
  if (panel.numbers.length) {
    const list = element("dl");
    for (const one of panel.numbers) {
      list.append(element("dt", {}, one.text), element("dd", {}, element("b", {}, one.name), element("span", {}, `: ${one.meaning}.`)));
    }
    section.append(list);
  }
  const curves = panel.curves.filter((curve) => curve.y.some((value) => value !== null));
  const picture = curves.length ? chart(curves, panel.axes, Math.max(section.clientWidth - 36, 240)) : null;
  if (picture) section.append(picture, key(curves));
  if (panel.rows.length) {
    const lines = panel.rows.map((row, at) => element("tr", {}, ...row.map((cell) => element(at ? "td" : "th", {}, cell))));
    section.append(element("table", {}, ...lines));
  }
  for (const note of panel.notes) section.append(element("p", { class: "note" }, note));
  if (!panel.python) return;
  const buttons = element("p", { class: "buttons" });
  if (picture) {
    const png = element("button", { type: "button" }, "PNG"), csv = element("button", { type: "button" }, "CSV");
    png.onclick = () => savePicture(picture, name);
    csv.onclick = () => save(new Blob([table(curves)], { type: "text/csv" }), `${name}.csv`);
    buttons.append(png, csv);
  }
  section.append(element("details", {}, element("summary", {}, "As a Python call and as files"), element("pre", {}, panel.python), buttons));
}
function key(curves) {
  const made = element("p", { class: "key" });
  curves.forEach((curve, at) => {
    const line = element("i");
    line.className = curve.dots ? "dots" : curve.name === "unchanged" ? "guide" : "";
    line.style.borderColor = `var(--series-${at + 1})`;
    made.append(element("span", {}, line, curve.name));
  });
  return made;
}

function ticks(low, high) {
  const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((one) => one * power >= raw), found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) found.push(+value.toPrecision(10));
  return found;
}
function range(curves, axis) {
  const values = curves.flatMap((curve) => curve[axis]).filter((value) => value !== null);
  const low = Math.min(...values), high = Math.max(...values);
  return high - low < 1e-9 ? [low - 0.5, high + 0.5] : [low, high];
}
// As wide as its panel, so that letters keep their size on a phone.
function chart(curves, axes, W) {
  const H = Math.min(Math.round(0.58 * W) + 20, 320), L = 56, R = 12, T = 10, B = 40;
  const [x0, x1] = range(curves, "x");
  let [y0, y1] = range(curves, "y");
  const room = (y1 - y0) * 0.04;
  y0 -= room;
  y1 += room;
  const px = (x) => L + ((x - x0) / (x1 - x0)) * (W - L - R), py = (y) => H - B - ((y - y0) / (y1 - y0)) * (H - T - B);
  const svg = shape("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${axes[1]} against ${axes[0]}` });
  for (const y of ticks(y0, y1)) {
    svg.append(shape("line", { class: "grid", x1: L, x2: W - R, y1: py(y), y2: py(y) }));
    svg.append(shape("text", { x: L - 6, y: py(y) + 4, "text-anchor": "end" }, format(y)));
  }
  for (const x of ticks(x0, x1)) svg.append(shape("text", { x: px(x), y: H - B + 16, "text-anchor": "middle" }, format(x)));
  svg.append(shape("rect", { class: "frame", x: L, y: T, width: W - L - R, height: H - T - B }));
  svg.append(shape("text", { x: (L + W - R) / 2, y: H - 6, "text-anchor": "middle" }, axes[0]));
  svg.append(shape("text", { transform: `translate(12 ${(H - B + T) / 2}) rotate(-90)`, "text-anchor": "middle" }, axes[1]));
  curves.forEach((curve, at) => {
    const color = `var(--series-${at + 1})`, guide = curve.name === "unchanged";
    const points = curve.x.map((x, index) => [x, curve.y[index], curve.error[index]]).filter(([x, y]) => x !== null && y !== null);
    if (!curve.dots) {
      const line = points.map(([x, y]) => `${px(x)},${py(y)}`).join(" ");
      svg.append(shape("polyline", { points: line, fill: "none", stroke: color, "stroke-width": guide ? 1 : 2, "stroke-dasharray": guide ? "3 4" : "none" }));
      return;
    }
    for (const [x, y, error] of points) {
      const [high, low] = [Math.min(y + 2 * (error || 0), y1), Math.max(y - 2 * (error || 0), y0)];
      if (error) svg.append(shape("line", { x1: px(x), x2: px(x), y1: py(high), y2: py(low), stroke: color, "stroke-opacity": 0.5 }));
      svg.append(shape("circle", { cx: px(x), cy: py(y), r: 2.4, fill: color }));
    }
  });
  return svg;
}

function table(curves) {
  const lines = [["curve", "x", "y", "standard error"]];
  for (const curve of curves) curve.x.forEach((x, at) => lines.push([curve.name, x, curve.y[at] ?? "", curve.error[at] ?? ""]));
  return lines.map((line) => line.join(",")).join("\n") + "\n";
}
function save(blob, name) {
  const link = element("a", { href: URL.createObjectURL(blob), download: `sounding-${name}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
function savePicture(svg, name) {
  const copy = svg.cloneNode(true), style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const solid = (text) => text.replace(/var\((--[a-z0-9-]+)\)/g, (_, name) => color(name));
  const { width, height } = svg.viewBox.baseVal, wide = 1040, high = Math.round((wide * height) / width);
  copy.setAttribute("width", wide);
  copy.setAttribute("height", high);
  for (const one of copy.querySelectorAll("*")) {
    for (const part of ["stroke", "fill"]) if (one.hasAttribute(part)) one.setAttribute(part, solid(one.getAttribute(part)));
    if (one.tagName === "text") for (const [part, value] of [["fill", color("--muted")], ["font-family", "sans-serif"], ["font-size", 11]]) one.setAttribute(part, value);
    if (one.matches(".grid, .frame")) { one.setAttribute("stroke", color("--line")); one.setAttribute("fill", "none"); }
  }
  const image = new Image();
  image.onload = () => {
    const canvas = element("canvas", { width: wide, height: high }), pen = canvas.getContext("2d");
    pen.fillStyle = color("--surface");
    pen.fillRect(0, 0, wide, high);
    pen.drawImage(image, 0, 0, wide, high);
    canvas.toBlob((blob) => save(blob, `${name}.png`));
  };
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
}

function restore(values) {
  for (const input of fields()) if (input.name in values) place(input, input.type === "range" ? Number(values[input.name]) : values[input.name]);
}
const held = () => ({ ...choices.defaults, formula: FORMULA, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) });
async function begin() {
  choices = await (await fetch("choices")).json();
  for (const name of choices.activations) {
    form.elements.activation.append(element("option", { value: name }, name === "formula" ? "a formula of your own" : name));
  }
  for (const input of fields()) {
    if (input.type !== "range") continue;
    const [low, high] = choices.limits[input.name], logarithmic = "log" in input.dataset || "zero" in input.dataset;
    input.min = logarithmic ? 0 : low;
    input.max = logarithmic ? STEPS : high;
  }
  restore(held());
  form.addEventListener("input", (event) => {
    if (event.target.type === "range") event.target.dataset.exact = moved(event.target);
    show();
    clearTimeout(timer);
    timer = setTimeout(update, 60); // a slider sends many moves while it is drawn
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("reset").onclick = () => { restore({ ...choices.defaults, formula: FORMULA }); update(); };
  document.getElementById("link").onclick = async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      said.textContent = "The link is copied.";
    } catch {
      said.textContent = location.href;
    }
  };
  window.addEventListener("hashchange", () => { restore(held()); update(); });
  update();
}
begin();
