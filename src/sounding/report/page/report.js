(() => {
  "use strict";
  const { charts, networks } = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const several = networks.length > 1;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const FLOOR = 1e-16; // where a log axis puts an exact zero
  const OVERFLOW = 290; // decades beyond which e^value is drawn by its exponent
  const plots = [];

  const make = (tag, { text, ...attributes } = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    element.append(...children);
    return element;
  };
  // plotly reads a little HTML in its labels; module names are not HTML
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const color = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const superscript = (n) => String(n).replace(/./g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻");
  const number = (v) => {
    if (v === null || v === undefined) return "–";
    if (v === 0) return "0";
    const size = Math.abs(v);
    if (size >= 1e-3 && size < 1e5) return String(Number(v.toPrecision(3)));
    const exponent = Math.floor(Math.log10(size));
    return `${(v / 10 ** exponent).toFixed(1)}×10${superscript(exponent)}`;
  };
  const power = (log) => {
    if (log === null || log === undefined) return "–";
    const decades = log / Math.LN10;
    if (Math.abs(decades) < 3) return number(Math.exp(log));
    const exponent = Math.floor(decades);
    return `${(10 ** (decades - exponent)).toFixed(1)}×10${superscript(exponent)}`;
  };
  const write = (chart, v) => (chart.scale === "exponent" ? power(v) : number(v));

  // which calls are shown: the weight layers, everything, or one class of module
  const shown = document.getElementById("shown");
  const kinds = [...new Set(networks.flatMap((n) => n.kinds.filter(Boolean)))];
  const weights = networks.some((n) => n.weighs.some(Boolean) && n.weighs.some((w, i) => !w && n.depth[i] > 0));
  if (weights) shown.append(make("option", { value: "weights", text: "weight layers" }));
  shown.append(make("option", { value: "all", text: "every module call" }));
  if (kinds.length > 1) for (const kind of kinds) shown.append(make("option", { value: `=${kind}`, text: `${kind} only` }));
  const keep = (network, i) =>
    network.depth[i] === 0 || shown.value === "all" ||
    (shown.value === "weights" ? network.weighs[i] : network.kinds[i] === shown.value.slice(1));

  const select = (network, measure) => {
    const values = network.measures[measure];
    if (!values) return [];
    const all = values.map((_, i) => i).filter((i) => values[i] !== null);
    const some = all.filter((i) => keep(network, i));
    // a measure of other modules (dead units of an activation) is shown wherever it exists
    return some.some((i) => network.depth[i] > 0) ? some : all;
  };

  // one axis for all networks of a chart, so that they can be compared by eye
  const chooseAxis = (chart) => {
    const values = [];
    for (const network of networks) {
      for (const measure of Object.keys(chart.measures)) {
        for (const i of select(network, measure)) values.push(network.measures[measure][i]);
        for (const v of network.theory[measure]?.value ?? []) if (v !== null) values.push(v);
      }
    }
    let low = Math.min(...values), high = Math.max(...values);
    if (chart.scale === "exponent") {
      low /= Math.LN10; high /= Math.LN10;
      const pad = Math.max(0.06 * (high - low), 0.35 - (high - low) / 2, 0.1);
      const exponents = Math.max(Math.abs(low), Math.abs(high)) > OVERFLOW;
      const map = (v) => (exponents ? v / Math.LN10 : Math.exp(v));
      return { type: exponents ? "linear" : "log", exponents, range: [low - pad, high + pad], map };
    }
    const positive = values.filter((v) => v > 0);
    const least = Math.min(...positive);
    if (chart.scale === "log" && positive.length && low >= 0 && (high / least > 20 || low === 0 && high / least > 5)) {
      const floor = low === 0 ? Math.min(FLOOR, least) : least;
      const [a, b] = [Math.log10(floor), Math.log10(high)];
      const pad = 0.06 * (b - a);
      return { type: "log", range: [a - pad, b + pad], map: (v) => Math.max(v, floor) };
    }
    if (chart.lower !== null) low = Math.min(low, chart.lower);
    else if (low > 0) low = 0;
    if (chart.upper !== null) high = Math.max(high, chart.upper);
    const pad = 0.06 * (high - low || 1);
    return { type: "linear", range: [low - pad, high + pad], map: (v) => v };
  };

  const makeTraces = (chart, network, axis) => {
    const traces = [];
    Object.entries(chart.measures).forEach(([measure, label], index) => {
      const at = select(network, measure);
      if (!at.length) return;
      const values = network.measures[measure], errors = network.stderr[measure];
      traces.push({
        type: "scatter", name: label, x: at.map((i) => network.depth[i]), y: at.map((i) => axis.map(values[i])),
        mode: at.length > 80 ? "lines" : "lines+markers", line: { color: color(`series-${index + 1}`), width: 2 },
        marker: { size: 4.5 }, connectgaps: false,
        customdata: at.map((i) => [
          plain(network.names[i]), plain(network.kinds[i] || ""), network.depth[i],
          write(chart, values[i]) + (errors?.[i] && chart.scale !== "exponent" ? ` ± ${number(errors[i])}` : ""),
        ]),
        hovertemplate: `<b>%{customdata[0]}</b> %{customdata[1]}<br>call %{customdata[2]} · ${label} %{customdata[3]}<extra></extra>`,
      });
      const theory = network.theory[measure];
      if (theory) {
        traces.push({
          type: "scatter", mode: "lines", name: several || index === 0 ? "theory" : `theory, ${label}`,
          x: theory.depth, y: theory.value.map((v) => (v === null ? null : axis.map(v))),
          line: { color: color("ink"), width: 1.6, dash: "dash" },
          customdata: theory.value.map((v) => write(chart, v)),
          hovertemplate: `theory · call %{x}<br>${label} %{customdata}<extra></extra>`,
        });
      }
    });
    if (chart.measures.gradient_log_norm && network.fit && traces.length) {
      const { depth, value, growth } = network.fit;
      // first, so that it lies under the points like a highlighter
      traces.unshift({
        type: "scatter", mode: "lines", x: depth, y: value.map(axis.map), name: growth ? `fit ×${growth}` : "fit",
        line: { color: color("series-2"), width: 8 }, opacity: 0.35, hoverinfo: "skip", legendrank: 2000,
      });
    }
    return traces;
  };

  // powers of ten where there are many, 1–2–5 where there are few
  const makeTicks = ({ type, exponents, range: [low, high] }) => {
    if (type === "linear" && !exponents) return {};
    const span = high - low, marks = [];
    if (exponents || span > 2) {
      const step = Math.ceil(span / 5);
      for (let k = Math.ceil(low / step) * step; k <= high; k += step) marks.push(k);
    } else {
      for (let k = Math.floor(low); k <= high; k++)
        for (const digit of span > 1 ? [1, 3] : [1, 2, 3, 5]) {
          const at = k + Math.log10(digit);
          if (at >= low && at <= high) marks.push(at);
        }
    }
    const text = (k) => (Number.isInteger(k) && Math.abs(k) > 3 ? `10${superscript(k)}` : number(10 ** k));
    return { tickmode: "array", tickvals: marks.map((k) => (exponents ? k : 10 ** k)), ticktext: marks.map(text) };
  };

  const makeLayout = (chart, network, axis, traces) => {
    const muted = color("muted"), line = color("line");
    const marks = network.findings.filter((f) => chart.kinds.includes(f.kind) && f.depth > 0);
    const tint = (f) => color({ high: "bad", medium: "warn", low: "low" }[f.severity]);
    const last = network.depth[network.depth.length - 1] || 1;
    return {
      autosize: true, height: 290, margin: { l: 54, r: 10, t: traces.length > 1 ? 34 : 14, b: 42 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: muted },
      hovermode: "closest", hoverdistance: 40, dragmode: touch.matches ? false : "zoom",
      hoverlabel: { bgcolor: color("surface"), bordercolor: color("strong-line"), font: { color: color("ink"), size: 13 }, align: "left" },
      showlegend: traces.length > 1,
      legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", font: { size: 12.5, color: muted } },
      xaxis: {
        title: { text: "module call", standoff: 8, font: { size: 12.5 } }, range: [-0.02 * last, 1.02 * last], zeroline: false, gridcolor: "rgba(0,0,0,0)",
        linecolor: color("strong-line"), ticks: "outside", tickcolor: color("strong-line"), ticklen: 4,
        showspikes: true, spikemode: "across", spikethickness: 1, spikedash: "dot", spikecolor: muted, rangemode: "tozero", nticks: 8,
      },
      yaxis: {
        type: axis.type, range: axis.range, gridcolor: line, zeroline: false, fixedrange: true, nticks: 7, ...makeTicks(axis),
      },
      shapes: marks.map((f) => ({
        type: "line", xref: "x", yref: "paper", x0: f.depth, x1: f.depth, y0: 0, y1: 1, layer: "below",
        line: { color: tint(f), width: 1.5, dash: "dot" },
      })),
      annotations: marks.map((f, i) => ({
        x: f.depth, y: 1 - 0.09 * i, xref: "x", yref: "paper", text: f.kind.replace(/_/g, " "), showarrow: false,
        xanchor: f.depth > 0.6 * last ? "right" : "left", yanchor: "top", xshift: f.depth > 0.6 * last ? -5 : 5,
        font: { size: 12, color: tint(f) }, bgcolor: color("surface"), opacity: 0.92,
      })),
    };
  };

  const describe = (chart, network) => {
    const parts = Object.entries(chart.measures).flatMap(([measure, label]) => {
      const at = select(network, measure);
      if (!at.length) return [];
      const first = at[0], end = at[at.length - 1], values = network.measures[measure];
      return [`${label} from ${write(chart, values[first])} at ${network.names[first]} to ${write(chart, values[end])} at ${network.names[end]}`];
    });
    return `${chart.title} ${parts.join("; ")}.`;
  };

  const draw = () => {
    for (const { chart, network, element } of plots) {
      const axis = chooseAxis(chart);
      const traces = makeTraces(chart, network, axis);
      element.setAttribute("aria-label", describe(chart, network));
      if (!traces.length) {
        element.replaceChildren(make("p", { class: "absent", text: "Not measured in this network." }));
        continue;
      }
      Plotly.react(element, traces, makeLayout(chart, network, axis, traces), { displayModeBar: false, responsive: true });
    }
  };

  const build = () => {
    const place = document.getElementById("charts");
    charts.forEach((chart, index) => {
      if (!networks.some((n) => Object.keys(chart.measures).some((m) => n.measures[m]))) return;
      const title = make("h3", { id: `chart-${index}`, text: chart.title });
      const row = make("div", { class: "plots" });
      for (const network of networks) {
        const element = make("div", { class: "plot", role: "img" });
        row.append(make("div", {}, ...(several ? [make("h4", { text: network.name })] : []), element));
        plots.push({ chart, network, element });
      }
      const caption = make("figcaption", {}, title, make("p", { text: chart.reading }));
      place.append(make("figure", { class: "chart", "aria-labelledby": `chart-${index}` }, caption, row));
    });
  };

  const tabulate = (network) => {
    const columns = [
      ["mean square", "mean_square", number], ["directions", "participation_ratio", number], ["distinct share", "distinct_share", number],
      ["mean cosine", "mean_cosine", number], ["gradient norm", "gradient_log_norm", power], ["dead units", "dead_fraction", number],
    ].filter(([, measure]) => network.measures[measure]);
    const head = make("tr", {}, ...["call", "module", "class"].map((text) => make("th", { scope: "col", text })),
      ...columns.map(([text]) => make("th", { scope: "col", class: "number", text })));
    const rows = network.depth.map((depth, i) => make("tr", {},
      make("th", { text: String(depth) }), make("th", { scope: "row", class: "name", text: network.names[i] }), make("th", { text: network.kinds[i] }),
      ...columns.map(([, measure, format]) => make("td", { text: format(network.measures[measure][i]) }))));
    const caption = several ? [make("caption", { text: network.name })] : [];
    return make("table", {}, ...caption, make("thead", {}, head), make("tbody", {}, ...rows));
  };

  const calls = document.getElementById("calls");
  calls.addEventListener("toggle", () => {
    const place = calls.querySelector(".scroll");
    if (calls.open && !place.firstChild) place.append(...networks.map(tabulate));
  });

  build();
  draw();
  shown.addEventListener("change", draw);
  dark.addEventListener("change", draw);
  addEventListener("beforeprint", () => { root.classList.add("printing"); draw(); });
  addEventListener("afterprint", () => { root.classList.remove("printing"); draw(); });
})();
