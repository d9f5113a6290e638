
"use strict";

// Heat maps: sites down, steps across, one colour scale for all maps of a figure.
const Heat = (() => {
  const { svg, element, shortNames, trimmed, ticks } = Chart;
  const STOPS = ["#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];
  const RGB = STOPS.map((text) => [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16)));

  function colour(share) {
    const place = Math.max(0, Math.min(1, share)) * (RGB.length - 1), i = Math.min(RGB.length - 2, Math.floor(place));
    return `rgb(${RGB[i].map((part, k) => Math.round(part + (place - i) * (RGB[i + 1][k] - part))).join(",")})`;
  }

  // The scale of maps that are compared: from the smallest value to the largest, along their logarithm where that is asked for.
  function scale(maps) {
    const known = maps.flatMap((map) => map.rows.flat()).filter((value) => value !== null);
    const positive = known.filter((value) => value > 0);
    const log = maps.some((map) => map.log) && positive.length > 0 && Math.max(...positive) > 5 * Math.min(...positive);
    const usable = log ? positive : known;
    const low = usable.reduce((a, b) => Math.min(a, b), Infinity), high = usable.reduce((a, b) => Math.max(a, b), -Infinity);
    const place = log ? (value) => Math.log(Math.max(value, low)) : (value) => value;
    return { log, low, high, share: (value) => (high > low ? (place(value) - place(low)) / (place(high) - place(low)) : 0.5) };
  }

  function bar(at) {
    const node = svg("svg", { class: "plot bar", viewBox: "0 0 260 34", width: 260, height: 34, role: "img", "aria-label": `Colours from ${trimmed(at.low, 3)} to ${trimmed(at.high, 3)}${at.log ? ", log scale" : ""}` });
    for (let i = 0; i < 65; i += 1) node.append(svg("rect", { x: 4 * i, y: 0, width: 4.3, height: 14, fill: colour(i / 64) }));
    const text = (x, anchor, words) => { const one = svg("text", { x, y: 29, "text-anchor": anchor }); one.textContent = words; node.append(one); };
    text(0, "start", trimmed(at.low, 3));
    text(130, "middle", at.log ? "log scale" : "linear scale");
    text(260, "end", trimmed(at.high, 3));
    return node;
  }

  // A map is {title, name, log, read, sites, steps, rows: by site, one value per step}.
  function draw(map, at) {
    const box = element("div", { class: "panel" }, element("h3", {}, map.title));
    const plot = svg("svg", { class: "plot", tabindex: "0", role: "img", "aria-label": `${map.name}, sites by steps. Arrow keys read the values.` });
    const tip = element("div", { class: "tip", hidden: true });
    box.append(plot, tip);
    const place = {};
    const redraw = () => { if (box.clientWidth) fill(plot, map, at, box.clientWidth, place); };
    new ResizeObserver(redraw).observe(box);
    listen(plot, tip, map, place);
    return box;
  }

  function fill(plot, map, at, width, place) {
    const { short, pattern } = shortNames(map.sites);
    const row = Math.max(6, Math.min(20, 190 / map.sites.length)), longest = Math.max(...short.map((name) => name.length));
    const left = Math.min(130, 14 + 6.6 * Math.min(18, longest)), right = 8, top = 6, bottom = top + row * map.sites.length, height = bottom + 42;
    const cell = (width - left - right) / map.steps.length;
    Object.assign(place, { left, top, cell, row, bottom });
    plot.replaceChildren();
    plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    plot.setAttribute("height", height);
    map.rows.forEach((values, i) => values.forEach((value, j) => {
      if (value !== null) plot.append(svg("rect", { class: "cell", x: left + j * cell, y: top + i * row, width: cell + 0.4, height: row + 0.4, fill: colour(at.share(value)) }));
    }));
    plot.append(svg("rect", { class: "frame", x: left, y: top, width: width - left - right, height: bottom - top, fill: "none" }));
    const write = (x, y, anchor, words) => { const text = svg("text", { x, y, "text-anchor": anchor }); text.textContent = words; plot.append(text); };
    const every = Math.ceil(14 / row);
    short.forEach((name, i) => { if (i % every === 0) write(left - 6, top + i * row + row / 2 + 4, "end", name.length > 18 ? `${name.slice(0, 17)}…` : name); });
    const most = Math.max(2, Math.floor((width - left) / 60));
    ticks(0, map.steps.length - 1, most, [1, 2, 5, 10]).filter(Number.isInteger).forEach((j) => write(left + (j + 0.5) * cell, bottom + 16, "middle", trimmed(map.steps[j], 3)));
    write((left + width - right) / 2, height - 6, "middle", pattern ? `step; rows are ${pattern}` : "step");
    place.cursor = svg("rect", { class: "at", width: cell, height: row, fill: "none", visibility: "hidden" });
    plot.append(place.cursor);
  }

  function listen(plot, tip, map, place) {
    let current = null;
    const hide = () => { tip.hidden = true; current = null; place.cursor?.setAttribute("visibility", "hidden"); };
    const show = (i, j, spoken) => {
      if (place.cell === undefined) return;
      current = [i, j];
      const value = map.rows[i][j], words = `step ${map.steps[j]}, ${map.sites[i]}`;
      const x = place.left + j * place.cell, y = place.top + i * place.row;
      for (const [name, at] of [["x", x], ["y", y], ["visibility", "visible"]]) place.cursor.setAttribute(name, at);
      tip.replaceChildren(element("div", { class: "head" }, words), element("div", { class: "value" }, value === null ? "not measured" : map.read(value, null)));
      tip.hidden = false;
      tip.style.left = `${Math.max(0, Math.min(x + 14, plot.clientWidth - tip.offsetWidth))}px`;
      tip.style.top = `${plot.offsetTop + y + place.row + 6}px`;
      if (spoken) document.getElementById("spoken").textContent = `${words}: ${value === null ? "not measured" : map.read(value, null)}`;
    };
    const move = (event) => {
      const frame = plot.getBoundingClientRect();
      const j = Math.floor((event.clientX - frame.left - place.left) / place.cell), i = Math.floor((event.clientY - frame.top - place.top) / place.row);
      if (i < 0 || j < 0 || i >= map.rows.length || j >= map.steps.length) hide(); else show(i, j, false);
    };
    plot.addEventListener("pointermove", move);
    plot.addEventListener("pointerdown", move);
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const [i, j] = current ?? [0, -1];
      const goal = { ArrowRight: [i, j + 1], ArrowLeft: [i, j - 1], ArrowDown: [i + 1, Math.max(0, j)], ArrowUp: [i - 1, Math.max(0, j)], Home: [i, 0], End: [i, map.steps.length - 1] }[event.key];
      if (event.key === "Escape") hide();
      if (goal === undefined) return;
      event.preventDefault();
      show(Math.max(0, Math.min(map.rows.length - 1, goal[0])), Math.max(0, Math.min(map.steps.length - 1, goal[1])), true);
    });
  }

  return { draw, scale, bar };
})();
