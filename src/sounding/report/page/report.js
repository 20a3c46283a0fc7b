(() => {
  "use strict";
  const { charts, networks } = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const several = networks.length > 1;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const FLOOR = 1e-16; // where a log axis puts an exact zero
  const DECADES = 3; // powers of ten by which theory may widen an axis beyond what was measured
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
  const shorten = (text) => (text.length > 48 ? `${text.slice(0, 23)}…${text.slice(-24)}` : text);
  const color = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const superscript = (n) => String(n).replace(/./g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻");
  const number = (v) => {
    if (typeof v === "string") return v; // a value that is not finite, in words
    if (v === null || v === undefined) return "–";
    if (v === 0) return "0";
    const size = Math.abs(v);
    if (size >= 1e-3 && size < 1e5) return String(Number(v.toPrecision(3)));
    const exponent = Math.floor(Math.log10(size));
    return `${(v / 10 ** exponent).toFixed(1)}×10${superscript(exponent)}`;
  };
  const power = (log) => {
    if (typeof log === "string") return log;
    if (log === null || log === undefined) return "–";
    const decades = log / Math.LN10;
    if (Math.abs(decades) < 3) return number(Math.exp(log));
    const exponent = Math.floor(decades);
    return `${(10 ** (decades - exponent)).toFixed(1)}×10${superscript(exponent)}`;
  };
  const finite = (v) => typeof v === "number";
  const write = (chart, v) => (chart.scale === "exponent" ? power(v) : number(v));

  // which calls are shown: one per layer, everything, or one class of module
  const shown = document.getElementById("shown");
  const kinds = [...new Set(networks.flatMap((n) => n.kinds.filter(Boolean)))];
  const layered = networks.some((n) => n.weighs.some(Boolean) && n.weighs.some((w, i) => !w && n.depth[i] > 0));
  const roles = [...new Set(networks.flatMap((n) => n.roles.filter(Boolean)))];
  if (roles.length) shown.append(make("option", { value: "roles", text: "one line per role in a block" }));
  if (layered) shown.append(make("option", { value: "layers", text: "one point per layer" }));
  shown.append(make("option", { value: "all", text: "every module call" }));
  if (kinds.length > 1) for (const kind of kinds) shown.append(make("option", { value: `=${kind}`, text: `${kind} outputs` }));

  // theory may speak of activations only; then these are the points to lay it over, in every network alike
  const layerKinds = (chart) => {
    const told = networks.flatMap((n) => Object.keys(chart.measures).filter((m) => n.theory[m]).map((m) => {
      const at = new Set(n.theory[m].depth);
      return new Set(n.kinds.filter((_, i) => at.has(n.depth[i])));
    }));
    const common = told.length ? [...told[0]].filter((kind) => told.every((set) => set.has(kind))) : [];
    const weighing = new Set(networks.flatMap((n) => n.kinds.filter((_, i) => n.weighs[i])));
    return common.some((kind) => weighing.has(kind)) ? [] : common;
  };
  const choose = (chart, network) => {
    if (shown.value === "all") return () => true;
    if (shown.value === "roles" && network.roles.some(Boolean)) return (i) => Boolean(network.roles[i]);
    if (shown.value.startsWith("=")) return (i) => network.kinds[i] === shown.value.slice(1);
    const wanted = layerKinds(chart);
    return network.kinds.some((kind) => wanted.includes(kind)) ? (i) => wanted.includes(network.kinds[i]) : (i) => network.weighs[i];
  };
  const select = (chart, network, measure) => {
    const values = network.measures[measure];
    if (!values) return [];
    const keep = choose(chart, network);
    const all = values.map((_, i) => i).filter((i) => values[i] !== null);
    const some = all.filter((i) => network.depth[i] === 0 || keep(i));
    // a measure of other modules (dead units of an activation) is shown wherever it exists
    return some.some((i) => network.depth[i] > 0) ? some : all;
  };
  const selectTheory = (chart, network, measure) => {
    const line = network.theory[measure];
    if (!line) return [];
    const at = new Set(select(chart, network, measure).map((i) => network.depth[i]));
    return line.depth.map((_, k) => k).filter((k) => at.has(line.depth[k]) && line.value[k] !== null);
  };
  const nameShown = (chart, network) => {
    const at = [...new Set(Object.keys(chart.measures).flatMap((m) => select(chart, network, m)))].filter((i) => network.depth[i] > 0);
    const classes = [...new Set(at.map((i) => network.kinds[i]))];
    if (at.every((i) => network.weighs[i])) return "module call (weight layers)";
    return classes.length <= 2 && classes.every(Boolean) ? plain(`module call (outputs of ${classes.join(" and ")})`) : "module call";
  };

  // one axis for all networks of a chart, so that they can be compared by eye
  // theory may dip by forty powers of ten where the measurement is flat: the axis follows it for a few of them
  const nearby = (chart, values, told) => {
    if (!values.length || chart.scale === "linear") return told;
    const low = Math.min(...values), high = Math.max(...values);
    const [least, most] = chart.scale === "exponent" ? [low - DECADES * Math.LN10, high + DECADES * Math.LN10] : [low / 10 ** DECADES, high * 10 ** DECADES];
    return told.map((v) => Math.min(Math.max(v, least), most));
  };

  const chooseAxis = (chart) => {
    const values = [], told = [];
    for (const network of networks) {
      for (const [place, measure] of Object.keys(chart.measures).entries()) {
        if (!splitByRole(network, measure, place, select(chart, network, measure)).length) continue; // not drawn
        for (const i of select(chart, network, measure)) if (finite(network.measures[measure][i])) values.push(network.measures[measure][i]);
        for (const k of selectTheory(chart, network, measure)) told.push(network.theory[measure].value[k]);
      }
    }
    values.push(...nearby(chart, values, told));
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
      const zero = least < 1 ? FLOOR : least / 2; // a count has no values just above zero
      const floor = low === 0 ? Math.min(zero, least) : least;
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

  // siblings over depth are one line each: the first measure of a chart, where several roles have it
  const splitByRole = (network, label, index, at) => {
    const found = shown.value === "roles" ? [...new Set(at.map((i) => network.roles[i]).filter(Boolean))] : [];
    if (found.length < 2) return [[label, index, at]];
    return index ? [] : found.map((role) => [role, roles.indexOf(role), at.filter((i) => network.roles[i] === role)]);
  };

  const makeTraces = (chart, network, axis) => {
    const traces = [];
    Object.entries(chart.measures).forEach(([measure, name], place) => {
      const every = select(chart, network, measure);
      if (!every.length) return;
      const values = network.measures[measure], errors = network.stderr[measure];
      const groups = splitByRole(network, name, place, every);
      for (const [label, index, at] of groups) {
        traces.push({
          type: "scatter", name: label, x: at.map((i) => network.depth[i]), y: at.map((i) => (finite(values[i]) ? axis.map(values[i]) : null)),
          mode: at.length > 80 ? "lines" : "lines+markers", line: { color: color(`series-${index + 1}`), width: 2 },
          marker: { size: 4.5 }, connectgaps: false,
          customdata: at.map((i) => [
            plain(shorten(network.names[i])), plain(network.kinds[i] || ""), network.depth[i],
            write(chart, values[i]) + (errors?.[i] && chart.scale !== "exponent" ? ` ± ${number(errors[i])}` : ""),
          ]),
          hovertemplate: `<b>%{customdata[0]}</b> %{customdata[1]}<br>call %{customdata[2]} · ${label} %{customdata[3]}<extra></extra>`,
        });
        const depths = new Set(at.map((i) => network.depth[i]));
        const theory = network.theory[measure], told = selectTheory(chart, network, measure).filter((k) => depths.has(theory.depth[k]));
        if (!told.length) continue;
        const banded = told.filter((k) => theory.low[k] !== null && theory.high[k] !== null);
        if (banded.length > 1 && groups.length === 1) {
          const edge = (side, style) => ({
            type: "scatter", mode: "lines", x: banded.map((k) => theory.depth[k]),
            y: banded.map((k) => axis.map(theory[side][k])), line: { width: 0 }, hoverinfo: "skip", showlegend: false, ...style,
          });
          traces.push(edge("low", {}), edge("high", { fill: "tonexty", fillcolor: color("band"), name: "95% of seeds", showlegend: !traces.some((t) => t.name === "95% of seeds") }));
        }
        traces.push({
          type: "scatter", mode: told.length > 1 ? "lines" : "markers", marker: { size: 7, symbol: "line-ew-open", color: color("ink") },
          name: `theory: ${label}`, x: told.map((k) => theory.depth[k]), showlegend: groups.length === 1,
          y: told.map((k) => axis.map(theory.value[k])), line: { color: color("ink"), width: 1.6, dash: "dash" },
          customdata: told.map((k) => write(chart, theory.value[k])),
          hovertemplate: `theory · call %{x}<br>${label} %{customdata}<extra></extra>`,
        });
      }
    });
    if (chart.measures.gradient_log_norm && traces.length) {
      const line = ({ depth, value, growth }, name, style) => ({
        type: "scatter", mode: "lines", x: depth, y: value.map(axis.map), name: growth ? `${name} ×${growth}` : name, hoverinfo: "skip", ...style,
      });
      // the fit comes first, so that it lies under the points like a highlighter
      if (network.fit) traces.unshift(line(network.fit, "fit", { line: { color: color("series-2"), width: 8 }, opacity: 0.35, legendrank: 1001 }));
      if (network.expected) traces.push(line(network.expected, "theory", { line: { color: color("ink"), width: 1.6, dash: "dash" }, legendrank: 1002 }));
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
        title: { text: nameShown(chart, network), standoff: 8, font: { size: 12.5 } }, range: [-0.02 * last, 1.02 * last], zeroline: false, gridcolor: "rgba(0,0,0,0)",
        linecolor: color("strong-line"), ticks: "outside", tickcolor: color("strong-line"), ticklen: 4,
        showspikes: true, spikemode: "across", spikethickness: 1, spikedash: "dot", spikecolor: muted, rangemode: "tozero", nticks: 8, ...(last < 8 ? { dtick: 1 } : {}),
      },
      yaxis: {
        type: axis.type, range: axis.range, gridcolor: line, zeroline: false, fixedrange: true, nticks: 7, automargin: true, ...makeTicks(axis),
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
      const at = select(chart, network, measure);
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
      if (traces.every((trace) => trace.y.every((y) => !y))) {
        const points = Math.max(...traces.map((trace) => trace.y.length));
        element.replaceChildren(make("p", { class: "absent", text: `None: it is 0 at all ${points} places.` }));
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
