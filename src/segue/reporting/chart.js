
"use strict";

// Small charts by hand: one function draws a panel, another follows pointer and arrow keys.
const Chart = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const HEIGHTS = { narrow: 260, wide: 340 };  // wide: a panel that has its row for itself
  const MARGIN = { left: 50, right: 16, top: 10, bottom: 40 };

  const PREFIXES = ["", "k", "M", "G", "T", "P", "E", "Z"];

  function svg(tag, attributes = {}, ...children) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  function element(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === false) continue;
      node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }

  function trimmed(value, digits) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 1e-4 || size >= 1e6) return value.toExponential(Math.max(0, digits - 1)).replace(/\.?0+e/, "e");
    const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
    const text = value.toFixed(decimals);
    return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
  }

  function duration(seconds) {
    if (seconds === 0) return "0 s";
    if (seconds < 1) return `${trimmed(seconds * 1000, 3)} ms`;
    if (seconds < 59.95) return `${trimmed(seconds, 3)} s`;
    const pair = (count, per, large, small) => {
      const rest = count % per;
      return `${Math.floor(count / per)} ${large}${rest ? ` ${rest} ${small}` : ""}`;
    };
    if (Math.round(seconds) < 3600) return pair(Math.round(seconds), 60, "min", "s");
    if (Math.round(seconds / 60) < 1440) return pair(Math.round(seconds / 60), 60, "h", "min");
    return pair(Math.round(seconds / 3600), 24, "d", "h");
  }

  function flops(value) {
    let power = 0;
    while (Math.abs(value) >= 999.5 && power < PREFIXES.length - 1) { value /= 1000; power += 1; }
    return `${trimmed(value, 3)} ${PREFIXES[power]}FLOPs`;
  }

  const percent = (value, digits = 1) => `${(100 * value).toFixed(digits)} %`;

  // Ticks at 1, 2, 2.5 or 5 times a power of ten.
  function ticks(low, high, count, steps = [1, 2, 2.5, 5, 10]) {
    const rough = (high - low) / Math.max(1, count);
    if (!(rough > 0)) return [low];
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = steps.map((factor) => factor * power).find((one) => one >= rough * 0.999) || 10 * power;
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(i * step);
    return found;
  }

  const CLOCK = [[1, "s"], [60, "min"], [3600, "h"], [86400, "d"]];
  const timeUnit = (high) => CLOCK.findLast(([size]) => high > 2 * size) || CLOCK[0];
  const workUnit = (high) => {
    const power = Math.max(0, Math.min(7, Math.floor(Math.log10(high || 1) / 3)));
    return [1000 ** power, `${PREFIXES[power]}FLOPs`];
  };

  function logTicks(low, high) {
    const found = [];
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const decades = Math.log10(high / low);
    const factors = decades < 0.6 ? [1, 1.2, 1.5, 1.8, 2, 2.2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9] : decades < 2 ? [1, 2, 5] : decades < 3.5 ? [1, 3] : [1];
    const every = Math.max(1, Math.ceil((last - first) / 6));
    for (let power = first; power <= last; power += every) {
      for (const factor of factors) found.push(factor * 10 ** power);
    }
    return found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  }

  // read: one value in words; unit: what the ticks count in, for the largest value; room: pixels a tick needs
  const AXES = {
    epoch: { name: "Epochs", label: "epoch", room: 48, read: (v) => `epoch ${trimmed(v, 3)}` },
    seconds: { name: "Time", label: "training time", room: 48, read: duration, unit: timeUnit },
    step: { name: "Steps", label: "optimizer step", room: 48, read: (v) => `step ${trimmed(v, 6)}`, whole: true },
    flops: { name: "FLOPs", label: "work", room: 48, read: flops, unit: workUnit },
    progress: { name: "Share", label: "training progress", room: 52, read: (v) => `${percent(v, 0)} of the training`, unit: () => [0.01, "%"] },
    tokens: { name: "Tokens", label: "tokens", room: 52, read: (v) => `${Math.round(2 ** v)} tokens`, whole: true, own: true, tick: (v) => String(2 ** v) },  // by their power of two
    site: { name: "Site", label: "site, in the order of depth", room: 26, read: (v) => `site ${v}`, whole: true },
  };

  function marker(kind, x, y, size, colour) {
    const polygon = (corners, turn, inner = 1) => Array.from({ length: corners * (inner < 1 ? 2 : 1) }, (_, i) => {
      const n = corners * (inner < 1 ? 2 : 1), r = size * 1.15 * (inner < 1 && i % 2 ? inner : 1), angle = turn + (2 * Math.PI * i) / n;
      return `${(x + r * Math.sin(angle)).toFixed(1)},${(y - r * Math.cos(angle)).toFixed(1)}`;
    }).join(" ");
    if (kind === "o") return svg("circle", { cx: x, cy: y, r: size, fill: colour });
    if (kind === "P" || kind === "X") {
      const arm = size * 1.2, turn = kind === "X" ? 45 : 0;
      return svg("path", { d: `M${x - arm} ${y}h${2 * arm}M${x} ${y - arm}v${2 * arm}`, stroke: colour, "stroke-width": size * 0.85, transform: `rotate(${turn} ${x} ${y})` });
    }
    const shapes = { s: [4, Math.PI / 4], D: [4, 0], d: [4, 0], "^": [3, 0], v: [3, Math.PI], "<": [3, -Math.PI / 2], ">": [3, Math.PI / 2], h: [6, 0], p: [5, 0], 8: [8, 0], "*": [5, 0, 0.45] };
    return svg("polygon", { points: polygon(...(shapes[kind] || [4, 0])), fill: colour });
  }

  function swatch(style, colour) {
    const node = svg("svg", { class: "swatch", viewBox: "0 0 30 12", "aria-hidden": "true" });
    node.append(svg("path", { d: "M1 6H29", stroke: colour, "stroke-width": 2, "stroke-dasharray": dashes(style), fill: "none" }), marker(style.marker, 15, 6, 3.2, colour));
    return node;
  }

  const dashes = (style) => style.dash.map((part) => part * 1.9).join(" ");

  function path(points, x, y) {
    return points.map((point, i) => `${i ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`).join("");
  }

  function scales(panel, width, height) {
    const xs = panel.xs || panel.series.flatMap((one) => one.points.map((point) => point[0]));
    const means = panel.series.flatMap((one) => one.points.map((point) => point[1]));
    const known = [...(panel.shared || means), ...(panel.reference === null ? [] : [panel.reference])];  // shared: the values of all panels that are compared
    const aside = panel.scatter ? 0.06 * (Math.max(...xs) - Math.min(...xs) || Math.max(...xs)) : 0;
    const x0 = AXES[panel.axis].own || panel.scatter ? Math.min(...xs) - aside : Math.min(0, ...xs), x1 = Math.max(...xs) + aside;
    const positive = [...means, ...(panel.reference === null ? [] : [panel.reference])].filter((value) => value > 0);
    const log = panel.log && positive.length > 0 && (panel.log === "always" || Math.max(...positive) > 30 * Math.min(...positive));
    let low, high;
    if (log) {
      low = Math.min(...positive) / 1.5; high = Math.max(...positive) * 1.5;
    } else {
      const bands = panel.series.filter((one) => !one.bare).flatMap((one) => one.points.flatMap((p) => (p[2] === null ? [] : [p[1] - p[2], p[1] + p[2]])));
      low = panel.low !== null ? panel.low : Math.min(...known, ...bands);
      const top = Math.max(...known);
      high = Math.min(Math.max(top, ...bands), top + 0.15 * Math.abs(top - low));
      if (!(high > low)) { high = low + (Math.abs(low) || 1); }
      high += 0.05 * (high - low);
      if (panel.low === null) low -= 0.04 * (high - low);
    }
    const names = namedAtEnds(panel, width) ? 24 + 7 * Math.max(...panel.series.map((one) => cut(one.name).length)) : MARGIN.right;
    const inner = { left: MARGIN.left, right: width - names, top: MARGIN.top + (panel.reference === null ? 0 : 10) + (panel.yName ? 16 : 0), bottom: height - MARGIN.bottom };
    const place = log ? (v) => Math.log10(Math.max(v, low)) : (v) => v;
    const share = (v) => (place(v) - place(low)) / (place(high) - place(low));
    return {
      inner, low, high, log, x0, x1,
      x: (v) => inner.left + (x1 > x0 ? ((v - x0) / (x1 - x0)) * (inner.right - inner.left) : (inner.right - inner.left) / 2),
      y: (v) => inner.bottom - share(v) * (inner.bottom - inner.top),
    };
  }

  // Site names without what all of them share; what they share, with a star for the rest.
  function shortNames(names) {
    const parts = names.map((name) => name.split("."));
    let head = 0, tail = 0;
    const least = Math.min(...parts.map((one) => one.length));
    while (head < least - 1 && parts.every((one) => one[head] === parts[0][head])) head += 1;
    while (tail < least - 1 - head && parts.every((one) => one[one.length - 1 - tail] === parts[0][parts[0].length - 1 - tail])) tail += 1;
    const short = parts.map((one) => one.slice(head, one.length - tail).join("."));
    const pattern = [...parts[0].slice(0, head), "*", ...parts[0].slice(parts[0].length - tail)].join(".");
    return names.length > 1 && head + tail > 0 ? { short, pattern } : { short: names, pattern: "" };
  }

  function axes(node, panel, at, width, height) {
    const axis = AXES[panel.axis], sites = panel.sites ? shortNames(panel.sites) : null;
    const room = Math.max(2, Math.min(12, Math.floor((width - 70) / axis.room)));
    const [unit, name] = axis.unit ? axis.unit(at.x1) : [1, ""];
    let along = ticks(at.x0 / unit, at.x1 / unit, room, [1, 2, 5, 10]);
    if (axis.whole) along = along.filter((value) => Number.isInteger(value));
    const down = at.log ? logTicks(at.low, at.high) : ticks(at.low, at.high, 5);
    for (const value of down) {
      const y = at.y(value);
      node.append(svg("line", { class: "grid", x1: at.inner.left, x2: at.inner.right, y1: y, y2: y }));
      const text = svg("text", { x: at.inner.left - 7, y: y + 4, "text-anchor": "end" });
      text.textContent = panel.percent ? `${trimmed(100 * value, 3)} %` : trimmed(value, 3);
      node.append(text);
    }
    node.append(svg("line", { class: "axis", x1: at.inner.left, x2: at.inner.right, y1: at.inner.bottom, y2: at.inner.bottom }));
    for (const value of along) {
      const x = at.x(value * unit);
      if (x < at.inner.left - 1 || x > at.inner.right + 1) continue;
      node.append(svg("line", { class: "axis", x1: x, x2: x, y1: at.inner.bottom, y2: at.inner.bottom + 4 }));
      const text = svg("text", { x, y: at.inner.bottom + 17, "text-anchor": "middle" });
      text.textContent = axis.tick ? axis.tick(value) : sites?.pattern ? sites.short[value] : trimmed(value, 3);
      node.append(text);
    }
    const label = svg("text", { x: (at.inner.left + at.inner.right) / 2, y: height - 6, "text-anchor": "middle" });
    label.textContent = sites?.pattern ? `site ${sites.pattern}` : name ? `${axis.label} (${name})` : axis.label;
    node.append(label);
    if (panel.yName) {
      const above = svg("text", { class: "y-name", x: 2, y: 12 });
      above.textContent = at.log ? `${panel.yName} (log scale)` : panel.yName;
      node.append(above);
    }
  }

  const cut = (text, most = 20) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  const namedAtEnds = (panel, width) => panel.named && width > 520;

  // Write the name of each line where it ends, moved up where two would meet.
  function nameEnds(plot, panel, at) {
    const ends = panel.series.map((one) => ({ one, end: one.points[one.points.length - 1] }));
    if (panel.reference !== null) ends.push({ one: { name: panel.referenceName || "teacher", colour: "var(--ink)" }, end: [at.x1, panel.reference] });
    ends.sort((a, b) => a.end[1] - b.end[1]);
    let below = Infinity;
    for (const entry of ends) { entry.y = Math.min(at.y(entry.end[1]), below - 15); below = entry.y; }
    let above = -Infinity;
    for (const entry of [...ends].reverse()) { entry.y = Math.max(entry.y, above + 15, at.inner.top); above = entry.y; }
    for (const { one, end, y } of ends) {
      const x = at.inner.right + 12;
      const lead = svg("line", { class: "end", x1: at.x(end[0]), y1: at.y(end[1]), x2: x - 2, y2: y });
      lead.style.stroke = one.colour;
      const text = svg("text", { class: "end-name", x: x + 2, y: y + 4 });
      text.style.fill = one.colour;
      text.textContent = cut(one.name);
      plot.append(lead, text);
    }
  }

  // Write the name of each mark beside it, where it covers no other, nor the line of the teacher if that can be.
  function nameMarks(plot, panel, at) {
    const taken = panel.series.map((one) => [at.x(one.points[0][0]) - 6, at.y(one.points[0][1]) - 6, 12, 12]);
    const level = panel.reference === null ? [] : [[at.inner.left, at.y(panel.reference) - 1, at.inner.right - at.inner.left, 2], [at.inner.right - 56, at.y(panel.reference) - 16, 56, 16]];
    const inside = (box) => box[0] >= at.inner.left && box[0] + box[2] <= at.inner.right + MARGIN.right && box[1] >= 16 && box[1] + box[3] <= at.inner.bottom;
    const apart = (box, other) => box[0] + box[2] < other[0] || other[0] + other[2] < box[0] || box[1] + box[3] < other[1] || other[1] + other[3] < box[1];
    for (const one of panel.series) {
      const [x, y] = [at.x(one.points[0][0]), at.y(one.points[0][1])], name = cut(one.name, 30), width = 6.7 * name.length;
      const sides = [x + 9, x - 9 - width, x - width / 2], heights = [-7, -20, 6, -34, 20, -48, 34, 48];
      const places = heights.flatMap((high) => sides.map((left) => [left, y + high, width, 14])).filter((box) => inside(box) && taken.every((other) => apart(box, other)));
      const place = places.find((box) => level.every((other) => apart(box, other))) || places[0];
      if (!place) continue;
      taken.push(place);
      const text = svg("text", { class: "mark-name", x: place[0], y: place[1] + 11 });
      text.style.fill = one.colour;
      text.textContent = name;
      plot.append(text);
    }
  }

  // A panel is {title, axis, percent, log, low, reference, referenceName, named, yName, read, scatter, front: [x, y],
  // xs: along x of all panels beside it, series: [{name, style, colour, faint, thin, bare: without a band, points: [x, mean, half], marks: [x]}]}.
  function draw(panel, clip) {
    const box = element("div", { class: "panel" });
    if (panel.title) box.append(element("h3", {}, panel.title));
    panel.series = panel.series.filter((one) => one.points.length);
    if (!panel.series.length) {
      box.append(element("p", { class: "nothing" }, "Nothing to show: not measured, or every method is hidden."));
      return box;
    }
    const plot = svg("svg", { class: "plot", tabindex: "0", role: "img", "aria-label": `${panel.name}. Arrow keys read the values.` });
    const tip = element("div", { class: "tip", hidden: true });
    box.append(plot, tip);
    const follow = { at: null, cursor: null };
    const redraw = () => {
      const width = box.clientWidth, height = width > 560 ? HEIGHTS.wide : HEIGHTS.narrow;
      if (!width) return;
      plot.replaceChildren();
      plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
      plot.setAttribute("height", height);
      follow.at = fill(plot, panel, width, height, clip);
      follow.cursor = svg("g");
      plot.append(follow.cursor);
    };
    const zeros = panel.log ? panel.series.filter((one) => !one.faint && one.points.every((point) => point[1] === 0)) : [];
    if (zeros.length) box.append(element("p", { class: "hint zeros" }, `0 throughout: ${zeros.map((one) => one.name).join(", ")}.`));
    new ResizeObserver(redraw).observe(box);
    listen(plot, tip, panel, follow);
    return box;
  }

  function fill(plot, panel, width, height, clip) {
    const at = scales(panel, width, height);
    axes(plot, panel, at, width, height);
    const frame = svg("clipPath", { id: clip }, svg("rect", { x: at.inner.left - 5, y: at.inner.top - 5, width: at.inner.right - at.inner.left + 10, height: at.inner.bottom - at.inner.top + 10 }));
    const inside = svg("g", { "clip-path": `url(#${clip})` });
    plot.append(frame, inside);
    for (const one of panel.series) {
      const banded = one.bare ? [] : one.points.filter((point) => point[2] !== null && (point[1] > 0 || !at.log));
      if (panel.scatter) {
        for (const [x, mean, half] of banded) inside.append(svg("path", { d: `M${at.x(x)} ${at.y(mean - half)}V${at.y(mean + half)}`, stroke: one.colour, "stroke-width": 1.5, "stroke-opacity": 0.6 }));
      } else if (banded.length > 1 && !one.faint && !one.thin) {
        const upper = path(banded.map((p) => [p[0], p[1] + p[2]]), at.x, at.y);
        const lower = path(banded.map((p) => [p[0], p[1] - p[2]]).reverse(), at.x, at.y);
        inside.append(svg("path", { d: `${upper}L${lower.slice(1)}Z`, fill: one.colour, "fill-opacity": 0.12 }));
      }
    }
    if (panel.reference !== null) {
      const y = at.y(panel.reference);
      plot.append(svg("line", { class: "teacher", x1: at.inner.left, x2: at.inner.right, y1: y, y2: y }));
      const name = svg("text", { class: "teacher-name", x: at.inner.right, y: y - 4, "text-anchor": "end" });
      name.textContent = panel.referenceName || "teacher";
      if (!panel.named) plot.append(name);
    }
    if (panel.front?.length > 1) inside.append(svg("path", { class: "front", d: path(panel.front, at.x, at.y), fill: "none" }));
    for (const one of panel.series.filter((each) => each.thin)) {
      const shown = at.log ? one.points.filter((point) => point[1] > 0) : one.points;
      inside.append(svg("path", { class: "seed", d: path(shown, at.x, at.y), fill: "none", stroke: one.colour, "stroke-width": 0.9, "stroke-opacity": 0.4, "stroke-linejoin": "round" }));
    }
    panel.series.filter((one) => !one.thin).forEach((one, index) => {
      const shown = at.log ? one.points.filter((point) => point[1] > 0) : one.points;
      inside.append(svg("path", { class: "series", d: path(shown, at.x, at.y), fill: "none", stroke: one.colour, "stroke-width": one.faint ? 1.1 : 1.9, "stroke-opacity": one.faint ? 0.7 : 1, "stroke-dasharray": one.faint ? "2 3" : dashes(one.style), "stroke-linejoin": "round" }));
      const every = Math.max(1, Math.floor(shown.length / 6));
      if (panel.scatter) inside.append(marker(one.style.marker, at.x(one.points[0][0]), at.y(one.points[0][1]), 5, one.colour));
      else if (!one.faint) shown.forEach((point, i) => {
        if (shown.length < 2 || i % every === (index * Math.max(1, Math.floor(every / 4))) % every) inside.append(marker(one.style.marker, at.x(point[0]), at.y(point[1]), 3, one.colour));
      });
    });
    for (const one of panel.series) {
      for (const mark of one.marks ?? []) inside.append(svg("line", { class: "restore", x1: at.x(mark), x2: at.x(mark), y1: at.inner.bottom - 8, y2: at.inner.bottom, stroke: one.colour, "stroke-width": 2 }));
    }
    if (namedAtEnds(panel, width)) nameEnds(plot, panel, at);
    if (panel.scatter) nameMarks(plot, panel, at);
    return at;
  }

  function listen(plot, tip, panel, follow) {
    const places = [...new Set(panel.series.flatMap((one) => one.points.map((point) => point[0])))].sort((a, b) => a - b);
    let current = -1;
    const hide = () => { tip.hidden = true; current = -1; follow.cursor?.replaceChildren(); };
    const show = (value, spoken) => {
      const at = follow.at;
      if (!at) return;
      const own = panel.series.filter((one) => !one.thin && (!panel.scatter || one.points[0][0] === value));
      const entries = own.map((one) => ({ one, point: nearest(one.points, value) })).filter((entry) => entry.point);
      entries.sort((a, b) => b.point[1] - a.point[1]);
      const x = at.x(value);
      follow.cursor.replaceChildren(
        svg("line", { class: "cursor", x1: x, x2: x, y1: at.inner.top, y2: at.inner.bottom }),
        ...entries.filter(({ point }) => point[1] >= at.low).map(({ one, point }) => svg("circle", { cx: at.x(point[0]), cy: at.y(point[1]), r: 3.5, fill: one.colour, stroke: "var(--card)" })),
      );
      const head = AXES[panel.axis].read(value);
      tip.replaceChildren(
        element("div", { class: "head" }, panel.axis === "site" && panel.sites ? `${head}: ${panel.sites[value]}` : head),
        ...entries.slice(0, 16).map(({ one, point }) => element("div", { class: "entry" }, swatch(one.style, one.colour), element("span", { class: "name" }, one.name), element("span", { class: "value" }, panel.read(point[1], point[2])))),
        entries.length > 16 ? element("div", { class: "head" }, `and ${entries.length - 16} more: see the table below`) : "",
      );
      tip.hidden = false;
      const box = plot.parentNode.getBoundingClientRect(), frame = plot.getBoundingClientRect();
      const right = x + 14 + tip.offsetWidth <= frame.width, left = x - 14 - tip.offsetWidth >= 0;
      tip.style.left = `${right ? x + 14 : left ? x - 14 - tip.offsetWidth : Math.max(0, frame.width - tip.offsetWidth)}px`;
      tip.style.top = `${frame.top - box.top + (right || left ? at.inner.top : frame.height)}px`;  // below where it would cover the lines
      if (spoken) document.getElementById("spoken").textContent = `${head}: ${entries.map(({ one, point }) => `${one.name} ${panel.read(point[1], point[2])}`).join("; ")}`;
    };
    const move = (event) => {
      const at = follow.at;
      if (!at) return;
      const x = event.clientX - plot.getBoundingClientRect().left;
      const value = at.x0 + ((x - at.inner.left) / (at.inner.right - at.inner.left)) * (at.x1 - at.x0);
      current = closest(places, value);
      show(places[current], false);
    };
    plot.addEventListener("pointermove", move);
    plot.addEventListener("pointerdown", move);
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const last = places.length - 1;
      const goal = { ArrowRight: current + 1, ArrowLeft: current < 0 ? last : current - 1, Home: 0, End: last }[event.key];
      if (event.key === "Escape") hide();
      if (goal === undefined) return;
      event.preventDefault();
      current = Math.max(0, Math.min(last, goal));
      show(places[current], true);
    });
  }

  function closest(values, value) {
    let best = 0;
    values.forEach((one, i) => { if (Math.abs(one - value) < Math.abs(values[best] - value)) best = i; });
    return best;
  }

  function nearest(points, value) {
    const last = points[points.length - 1][0], step = points.length > 1 ? (last - points[0][0]) / (points.length - 1) : Infinity;
    const found = points[closest(points.map((point) => point[0]), value)];
    return Math.abs(found[0] - value) <= Math.max(step, 1e-12) ? found : null;
  }

  return { AXES, draw, shortNames, svg, element, swatch, ticks, trimmed, percent };
})();
