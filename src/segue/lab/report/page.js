
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { AXES, draw, element, swatch, trimmed, percent } = Chart;
  const at = (id) => document.getElementById(id);
  const methodOf = Object.fromEntries(data.methods.map((method) => [method.id, method]));
  const state = { group: 0, axis: "epoch", hidden: new Set(), sites: {}, blend: false, zoom: false, sort: null };
  let clips = 0;

  const colour = (method) => method[Theme.current()];
  const line = (method) => element("span", { class: "line" }, swatch(method, colour(method)), element("span", { title: method.label }, method.label));
  const score = (mean, half) => (data.percent
    ? (half === null ? percent(mean) : `${(100 * mean).toFixed(1)} ± ${(100 * half).toFixed(1)} %`)
    : number(mean, half));
  const number = (mean, half) => (half === null ? trimmed(mean, 3) : `${trimmed(mean, 3)} ± ${trimmed(half, 2)}`);

  const FIGURES = [
    { id: "cosine", title: "Interface cosine", sites: "cosine", read: number,
      hint: "Cosine similarity of the outputs of teacher and student at a site, on the students’ own activations. 1 is the same direction." },
    { id: "accuracy", title: `Validation ${data.score} of the students alone`, read: score,
      hint: "The model without teachers at every evaluation; the dashed line is the original model." },
    { id: "schedules", title: "Schedules", read: number, hint: "Alpha, the teacher’s share, mean over the sites." },
    { id: "alphas", title: "Alpha by site", sites: "alphas", read: number,
      hint: "The teacher’s share at a site. An adaptive schedule lowers it as fast as the measured interface allows." },
    { id: "gradient_norm", title: "Gradient norm by site", sites: "gradient_norm", log: true, read: number,
      hint: "Of each student, mean since the previous evaluation, before clipping. Gates that starve a student of gradient would lower it." },
    { id: "drift", title: "Drift of the residual stream", sites: "drift_blend", other: "drift_students", log: true, read: number,
      hint: "Relative squared distance from the original model’s residual stream after the block of a site: how far the next block’s input is from what it was trained on." },
    { id: "depth", title: "Along the depth", read: number, log: true,
      depth: { early_gradient: "Gradient norm, first fifth", early_drift: "Drift of the blend, first fifth", last_drift: "Drift of the students alone, at the end" },
      hint: "All sites at once: means over the first fifth of the training, when the teachers fade out, and at the end." },
    { id: "gate_variance", title: "Gradient variance caused by the gates", costs: true, log: true, read: number,
      hint: "Variance of the students’ gradients, summed over the sites, while any alpha is above 0: what the gates alone cause for a given minibatch. Thin and dotted: what the choice of the minibatch causes." },
    { id: "variance_depth", title: "Gate-induced variance along the depth", costs: true, log: true, read: number,
      depth: { gate_variance: "Mean over the handover" }, hint: "What the gates alone cause in the gradient of every student." },
    { id: "bounds", title: "Curvature bias and loss path relative to their bounds", costs: true, log: true, read: number, reference: { at: 1, name: "bound" },
      depth: { curvature: "Curvature bias / bound", path: "Rise along the path / bound" },
      hint: "Propositions 3 and 4 of the paper at every site, mean over the evaluations of the handover, relative to the bound: 1 is the most that the paper allows." },
    { id: "loss", title: "Training loss", read: number, hint: "Mean since the previous evaluation, guidance included." },
  ];

  const group = () => data.groups[state.group];
  const present = () => data.methods.filter((method) => method.id in group().lines);
  const visible = () => present().filter((method) => !state.hidden.has(method.id));

  const measured = (byMethod) => Object.values(byMethod).some((one) => one !== null);
  const ownAlphas = () => Object.values(group().lines).some((one) => new Set(one.sites.alphas.map((curve) => JSON.stringify(curve?.[0]))).size > 1);
  const drawable = (figure) => (figure.id === "alphas" ? ownAlphas() : !figure.costs
    || (figure.depth ? Object.keys(figure.depth).some((key) => measured(group().depth[key])) : Object.values(group().lines).some((one) => one.overall[figure.id] !== null)));

  function points(xs, curve) {
    return curve === null || curve === undefined ? [] : xs.map((x, i) => [x, curve[0][i], curve[1][i]]).filter((point) => point[1] !== null);
  }

  function series(read, axis, faint = "") {
    return visible().map((method) => ({
      name: faint ? `${method.label}, ${faint}` : method.label,
      style: method, colour: colour(method), faint: Boolean(faint), points: points(group().lines[method.id].x[axis], read(group().lines[method.id])),
      marks: faint ? [] : group().lines[method.id].marks[axis],
    }));
  }

  function panels(figure) {
    const base = { axis: state.axis, percent: false, log: false, low: null, reference: null, read: figure.read, name: figure.title };
    if (figure.sites) {
      const quantity = figure.other && state[figure.id] ? figure.other : figure.sites;
      const chosen = state.sites[figure.id];
      const found = (chosen === undefined || chosen >= group().sites.length ? group().shown : [chosen]).map((site) => ({
        ...base, title: group().sites[site], name: `${figure.title}, ${group().sites[site]}`, log: figure.log || false, low: figure.log ? 0 : null,
        series: series((one) => one.sites[quantity][site], state.axis),
      }));
      const shared = [0, ...found.flatMap((panel) => panel.series.flatMap((one) => one.points.map((point) => point[1])))];
      return figure.log ? found : found.map((panel) => ({ ...panel, shared, low: 1.04 * Math.min(...shared) }));
    }
    if (figure.id === "accuracy") {
      const all = series((one) => one.overall.students, state.axis);
      if (state.blend) all.push(...series((one) => one.overall.blend, state.axis, "blend"));
      const low = state.zoom ? 0.85 * (group().teacher_eval ?? 0) : data.percent ? 0 : null;
      return [{ ...base, percent: data.percent, low, reference: group().teacher_eval, series: all }];
    }
    if (figure.depth) {
      return Object.entries(figure.depth).filter(([key]) => !figure.costs || measured(group().depth[key])).map(([key, title]) => ({
        ...base, title, name: title, axis: "site", log: true, low: 0, sites: group().sites, reference: figure.reference?.at ?? null, referenceName: figure.reference?.name,
        series: visible().map((method) => ({ name: method.label, style: method, colour: colour(method), points: points(group().sites.map((_, i) => i), group().depth[key][method.id]) })),
      }));
    }
    if (figure.id === "gate_variance") {
      const both = [...series((one) => one.overall.gate_variance, "progress"), ...series((one) => one.overall.data_variance, "progress", "minibatches")];
      for (const one of both) one.points = one.points.filter((point) => point[0] <= group().anneal_end);
      return [{ ...base, axis: "progress", log: true, low: 0, series: both }];
    }
    if (figure.id === "schedules") return [{ ...base, axis: "progress", low: 0, series: series((one) => one.overall.alpha, "progress") }];
    return [{ ...base, low: 0, series: series((one) => one.overall.loss, state.axis) }];
  }

  function button(text, pressed, act, kind = "toggle") {
    const node = element("button", { type: "button", class: kind, "aria-pressed": String(pressed) }, text);
    node.addEventListener("click", act);
    return node;
  }

  function figureCard(figure) {
    const box = element("div", { class: "panels" });
    const controls = element("div", { class: "row" });
    const details = element("details", {}, element("summary", {}, "Data as a table"));
    const card = element("section", { class: "card figure", id: `figure-${figure.id}`, "aria-labelledby": `title-${figure.id}` },
      element("div", { class: "figure-head" }, element("h2", { id: `title-${figure.id}` }, figure.title), controls),
      element("p", { class: "hint" }, figure.hint), box, details);
    const refill = () => {
      controls.replaceChildren(...figureControls(figure, refill));
      const shown = panels(figure);
      box.replaceChildren(...shown.map((panel) => draw(panel, `clip-${(clips += 1)}`)));
      details.querySelectorAll(".scroll").forEach((old) => old.remove());
      if (details.open) details.append(...shown.map(dataTable));
    };
    details.addEventListener("toggle", () => {
      details.querySelectorAll(".scroll").forEach((old) => old.remove());
      if (details.open) details.append(...panels(figure).map(dataTable));
    });
    card.refill = () => { card.hidden = !drawable(figure); if (!card.hidden) refill(); };
    return card;
  }

  function figureControls(figure, refill) {
    const again = (change) => (event) => {
      change();
      const name = event.currentTarget.textContent;
      refill();
      [...at(`figure-${figure.id}`).querySelectorAll("button")].find((one) => one.textContent === name)?.focus();
    };
    const found = [];
    if (figure.id === "accuracy") {
      found.push(button("Also the blend", state.blend, again(() => { state.blend = !state.blend; })));
      if (group().teacher_eval > 0) found.push(button("Zoom to the top", state.zoom, again(() => { state.zoom = !state.zoom; })));
    }
    if (figure.other) found.push(button("Students alone", Boolean(state[figure.id]), again(() => { state[figure.id] = !state[figure.id]; })));
    if (figure.sites && group().sites.length > 1) {
      const select = element("select", { id: `site-${figure.id}` }, element("option", { value: "" }, "first, middle, last"),
        ...group().sites.map((site, i) => element("option", { value: i }, site)));
      select.value = state.sites[figure.id] === undefined ? "" : String(state.sites[figure.id]);
      select.addEventListener("change", () => {
        state.sites[figure.id] = select.value === "" ? undefined : Number(select.value);
        refill();
        at(`site-${figure.id}`).focus();
      });
      found.push(element("label", {}, "Site", select));
    }
    return found;
  }

  function dataTable(panel) {
    const shown = panel.series.filter((one) => one.points.length);
    const places = [...new Set(shown.flatMap((one) => one.points.map((point) => point[0])))].sort((a, b) => a - b);
    const values = shown.map((one) => new Map(one.points.map((point) => [point[0], panel.read(point[1], point[2])])));
    return element("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": panel.name },
      element("table", {}, element("caption", { class: "unseen" }, panel.name),
        element("thead", {}, element("tr", {}, element("th", { scope: "col" }, panel.title || AXES[panel.axis].label), ...shown.map((one) => element("th", { scope: "col" }, one.name)))),
        element("tbody", {}, ...places.map((place) => element("tr", {}, element("th", { scope: "row" }, AXES[panel.axis].read(place)), ...values.map((of) => element("td", {}, of.get(place) ?? "–")))))));
  }

  function methodTable() {
    const { columns, rows } = group();
    const table = at("table");
    const sorted = [...rows];
    if (state.sort !== null && state.sort.column <= columns.length) {
      const { column, down } = state.sort;
      const key = (row) => (column === 0 ? methodOf[row.method].label.toLowerCase() : row.cells[column - 1][1]);
      sorted.sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === null || y === null) return (x === null) - (y === null);
        return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
      });
    }
    const heading = (text, column) => {
      const on = state.sort?.column === column;
      const inner = element("button", { type: "button" }, unbroken(text));
      inner.addEventListener("click", () => {
        const higherFirst = /^(Final|Mean)/.test(text);
        state.sort = { column, down: on ? !state.sort.down : higherFirst };
        methodTable();
        table.querySelectorAll("thead button")[column].focus();
      });
      return element("th", { scope: "col", "aria-sort": on ? (state.sort.down ? "descending" : "ascending") : "none" }, inner);
    };
    table.replaceChildren(
      element("thead", {}, element("tr", {}, heading("Method", 0), ...columns.map((text, i) => heading(text, i + 1)))),
      element("tbody", {}, ...sorted.map((row) => element("tr", {}, element("th", { scope: "row" }, line(methodOf[row.method])),
        ...row.cells.map((cell, i) => element("td", { class: cell[1] === null ? "not" : null }, cell[0], i === 1 && row.mark ? mark(row.mark) : null))))));
  }

  const mark = (text) => element("span", { class: text === "best" ? "mark best" : "mark" }, text);

  function chosenTable() {
    const rows = group().chosen;
    at("chosen-card").hidden = !rows.length;
    at("chosen-hint").textContent = unbroken(group().chosen_reading);
    at("chosen").replaceChildren(
      element("thead", {}, element("tr", {}, ...data.chosen.map((text, i) => element("th", { scope: "col", class: i ? "text" : null }, text)))),
      element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells.map((cell, i) => element(i ? "td" : "th", { scope: i ? null : "row", class: i ? "text" : null }, cell))))));
  }

  function comparedTables() {
    const tables = group().comparisons.filter((one) => one.rows.length);
    at("compared").replaceChildren(...(tables.length ? tables.map((one) => element("div", { class: "group-table" }, element("h3", {}, one.title[0].toUpperCase() + one.title.slice(1)),
      element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": one.title }, element("table", {},
        element("thead", {}, element("tr", {}, ...data.compared.map((text, i) => element("th", { scope: "col", class: i === 1 || i === data.compared.length - 1 ? "text" : null }, text)))),
        element("tbody", {}, ...one.rows.map((cells) => element("tr", {}, ...cells.map((cell, i) => element(i ? "td" : "th", { scope: i ? null : "row", class: i === 1 ? "text" : i === cells.length - 1 ? "text words" : null }, cell[0]))))))))) : [element("p", { class: "hint" }, "Nothing to compare: a comparison needs a baseline and another method in the same group.")]));
  }

  function costTables() {
    const found = group().table_one;
    at("costs-card").hidden = found === null;
    if (found === null) return;
    list("costs-findings", found.findings);
    const table = (name, kind, headings, rows, cell) => element("div", { class: "scroll group-table", tabindex: "0", role: "region", "aria-label": name },
      element("table", { class: kind, role: "table" },  // roles: a phone shows the rows as blocks, which would lose them
        element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...["Method", ...headings].map((text) => element("th", { scope: "col", role: "columnheader" }, text)))),
        element("tbody", { role: "rowgroup" }, ...rows.map((row) => element("tr", { role: "row" }, element("th", { scope: "row", role: "rowheader" }, line(methodOf[row.method])),
          ...row.cells.map((one, i) => element("td", { role: "cell", "data-heading": headings[i] }, ...cell(one))))))));
    const claimCell = ([text, claim, verdict]) => [element("span", {}, unbroken(text)),
      claim ? element("small", {}, `The paper says “${claim}”: `, element("span", { class: verdict === "holds" ? "verdict" : "verdict not-so" }, verdict)) : null];
    at("costs").replaceChildren(table("Table 1, measured", "costs claims", found.aspects, found.claims, claimCell),
      ...(found.columns.length ? [table("Costs in numbers", "costs", found.columns, found.numbers, (text) => [unbroken(text)])] : []));
  }

  function winsTable() {
    at("wins-card").hidden = data.groups.length < 2;
    at("wins-hint").textContent = `Final ${data.score} of the students alone, mean ± half of the 95 % interval. “≈ best”: the paired difference to the best of the column is not significant (Holm’s adjustment for all pairs of the column; no mark where it cannot be tested).${data.ranked ? " Average rank: over the columns, 1 is best, for methods that are in all of them." : ""}`;
    at("wins").replaceChildren(
      element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Method"), ...data.groups.map((one) => element("th", { scope: "col" }, one.name)), data.ranked ? element("th", { scope: "col" }, "Average rank") : null)),
      element("tbody", {}, ...data.methods.map((method) => element("tr", {}, element("th", { scope: "row" }, line(method)), ...data.groups.map((one) => {
        const win = one.wins[method.id];
        const cell = element("td", { class: win ? null : "gone" }, win ? win.text : "–", win && win.mark ? mark(win.mark) : null);
        if (win) cell.style.setProperty("--shade", win.shade);
        return cell;
      }), data.ranked ? element("td", { class: "gone" }, method.rank) : null))));
  }

  function controls() {
    const select = at("group");
    select.replaceChildren(...data.groups.map((one, i) => element("option", { value: i }, one.name)));
    at("group-field").hidden = data.groups.length < 2;
    select.addEventListener("change", () => { state.group = Number(select.value); state.sites = {}; refresh(); });
    at("axis").replaceChildren(...["epoch", "seconds", "flops"].map((axis) => button(AXES[axis].name, axis === state.axis, (event) => {
      state.axis = axis;
      for (const one of at("axis").children) one.setAttribute("aria-pressed", String(one === event.currentTarget));
      drawFigures();
    }, "")));
  }

  function chips() {
    const focused = document.activeElement?.dataset?.chip;
    const shown = present().map((method) => {
      const chip = element("button", { type: "button", "aria-pressed": String(!state.hidden.has(method.id)), "data-chip": method.id, title: method.label }, swatch(method, colour(method)), element("span", {}, method.label));
      chip.addEventListener("click", () => {
        if (!state.hidden.delete(method.id)) state.hidden.add(method.id);
        chips();
        drawFigures();
      });
      return chip;
    });
    const every = visible().length === present().length;
    const all = element("button", { type: "button", class: "plain", "data-chip": "" }, every ? "Hide all" : "Show all");
    all.addEventListener("click", () => {
      state.hidden = new Set(every ? present().map((method) => method.id) : []);
      chips();
      drawFigures();
    });
    at("methods").replaceChildren(...shown, ...(shown.length > 1 ? [all] : []));
    if (focused !== undefined) [...at("methods").children].find((one) => one.dataset.chip === focused)?.focus();
  }

  function runList() {
    at("runs").replaceChildren(...data.methods.map((method) => {
      const runs = data.runs.filter((run) => run.method === method.id);
      const box = element("details", {}, element("summary", {}, `${method.label} (${runs.length} ${runs.length === 1 ? "run" : "runs"})`));
      box.append(...runs.map((run) => {
        const one = element("details", { class: "run" }, element("summary", {}, `${run.name}: ${run.group}, seed ${run.seed}`));
        one.addEventListener("toggle", () => {
          if (one.open && one.children.length === 1) one.append(element("p", { class: "what" }, `${run.facts.join(" · ")} · configuration ${run.hash}`),
            element("h3", {}, "Configuration"), element("pre", { tabindex: "0" }, JSON.stringify(run.config, null, 2)), element("h3", {}, "Versions and hardware"), element("pre", { tabindex: "0" }, JSON.stringify(run.meta, null, 2)));
        });
        return one;
      }));
      return box;
    }));
  }

  const cards = FIGURES.map(figureCard);
  function drawFigures() {
    for (const card of cards) card.refill();
  }

  const unbroken = (text) => text.replace(/([\d±=<]) (?=[\d±%])/g, "$1\u00a0");
  const list = (id, lines) => at(id).replaceChildren(...lines.map((text) => element("li", {}, unbroken(text))));

  function refresh() {
    const facts = [[`Teacher’s ${data.score}`, group().teacher], ...data.facts];
    at("facts").replaceChildren(...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
    at("findings-title").textContent = data.groups.length > 1 ? `Findings: ${group().name}` : "Findings";
    list("findings", group().findings);
    list("notes", [...data.notes, ...group().notes]);
    chips();
    drawFigures();
    methodTable();
    comparedTables();
    chosenTable();
    costTables();
  }

  list("overview", data.findings);
  winsTable();
  controls();
  at("figures").replaceChildren(...cards.filter((_, i) => !FIGURES[i].costs));
  at("cost-figures").replaceChildren(...cards.filter((_, i) => FIGURES[i].costs));
  at("costs-reading").textContent = unbroken(data.reading);
  at("compared-hint").textContent = unbroken(data.compared_reading);
  at("table-hint").textContent = `± is the half width of a 95 % interval over seeds (Student’s t). ${data.targets} Select a heading to sort.`;
  at("files").replaceChildren(...(data.files || []).map((path) => element("li", {}, element("a", { href: path }, path))));
  runList();
  refresh();
  document.addEventListener("themechange", () => { winsTable(); refresh(); });
})();
