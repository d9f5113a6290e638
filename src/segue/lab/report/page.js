
"use strict";

// The page: its figures in the order of the story, the controls above them, and what changes when a reader chooses.
const Page = (() => {
  const { AXES, draw, element, swatch } = Chart;
  const { state, group, present, visible, colour } = View;
  const { list, unbroken } = Tables;
  const at = (id) => document.getElementById(id);
  let clips = 0;

  function button(text, pressed, act, kind = "toggle") {
    const node = element("button", { type: "button", class: kind, "aria-pressed": pressed === null ? null : String(pressed) }, text);
    node.addEventListener("click", act);
    return node;
  }

  function figureCard(figure) {
    const box = element("div", { class: figure.heat ? "panels maps" : "panels" });
    const controls = element("div", { class: "row" });
    const title = element("h3", { id: `title-${figure.id}`, class: "figure-title" });
    const details = element("details", {}, element("summary", {}, "Data as a table"));
    const files = element("div", { class: "downloads", role: "group", "aria-label": "Download this figure" }, "Download ");
    const card = element("section", { class: "card figure", id: `figure-${figure.id}`, "aria-labelledby": `title-${figure.id}` },
      element("div", { class: "figure-head" }, title, controls), element("p", { class: "hint" }, figure.hint), box, element("div", { class: "below" }, details, files));
    let shown = [];
    const legend = () => (figure.heat ? [] : visible().map((method) => ({ name: method.label, style: method, colour: colour(method) })));
    files.append(...["SVG", "PNG", "CSV"].map((kind) => button(kind, null, () => Download.file(kind, { title: title.textContent, box, legend: legend(), rows: () => asRows(figure, shown) }, `segue-${figure.id}`), "plain")));
    const fillTable = () => {
      details.querySelectorAll(".scroll").forEach((old) => old.remove());
      if (details.open) details.append(...shown.map(figure.heat ? Tables.mapTable : Tables.dataTable));
    };
    const refill = () => {
      title.textContent = figure.title();
      controls.replaceChildren(...figureControls(figure, refill));
      if (figure.heat) {
        shown = Figures.maps();
        const scale = Heat.scale(shown);
        box.replaceChildren(...(shown.length ? [element("div", { class: "scale" }, Heat.bar(scale)), ...shown.map((map) => Heat.draw(map, scale))] : [element("p", { class: "nothing" }, "Nothing to show: every method is hidden.")]));
      } else {
        shown = Figures.panels(figure);
        box.replaceChildren(...shown.map((panel) => draw(panel, `clip-${(clips += 1)}`)));
      }
      fillTable();
    };
    details.addEventListener("toggle", fillTable);
    card.refill = () => { card.hidden = !Figures.drawable(figure); if (!card.hidden) refill(); };
    return card;
  }

  // What a figure shows, as rows of a CSV file.
  function asRows(figure, shown) {
    if (figure.heat) return [["map", "site", "step", "value"], ...shown.flatMap((map) => map.rows.flatMap((values, i) => values.map((value, j) => [map.name, map.sites[i], map.steps[j], value])))];
    return [["panel", "line", shown[0]?.axis ?? "x", "mean", "half_width_95"],
      ...shown.flatMap((panel) => panel.series.flatMap((one) => one.points.map(([x, mean, half]) => [panel.title || panel.name, one.name, panel.axis === "site" ? panel.sites[x] : x, mean, half])))];
  }

  function figureControls(figure, refill) {
    const again = (change) => (event) => {
      change();
      const name = event.currentTarget.textContent;
      refill();
      [...at(`figure-${figure.id}`).querySelectorAll("button")].find((one) => one.textContent === name)?.focus();
    };
    const choice = (id, name, options, value, act) => {
      const select = element("select", { id }, ...options.map(([key, text]) => element("option", { value: key }, text)));
      select.value = value;
      select.addEventListener("change", () => { act(select.value); refill(); at(id).focus(); });
      return element("label", {}, name, select);
    };
    const found = [];
    if (figure.id === "accuracy") {
      if (View.lines().some((one) => one.seeds.length)) found.push(button("Seeds", View.seeds(), again(() => { state.seeds = !View.seeds(); })));
      if (group().teacher_eval > 0 && View.data.percent) found.push(button("Zoom to the top", state.zoom, again(() => { state.zoom = !state.zoom; })));
    }
    if (figure.heat) found.push(choice("quantity", "Quantity", Figures.mapped().map((one) => [one, Figures.QUANTITIES[one].title]), Figures.quantity(), (value) => { state.quantity = value; }));
    if (figure.other) found.push(button("Students alone", Boolean(state[figure.id]), again(() => { state[figure.id] = !state[figure.id]; })));
    if ((figure.sites || figure.id === "alphas") && group().sites.length > 1) {
      const sites = [["", "first, middle, last"], ...group().sites.map((site, i) => [i, site])];
      const chosen = state.sites[figure.id];
      found.push(choice(`site-${figure.id}`, "Site", sites, chosen === undefined ? "" : String(chosen), (value) => { state.sites[figure.id] = value === "" ? undefined : Number(value); }));
    }
    return found;
  }

  function controls() {
    const select = at("group");
    select.replaceChildren(...View.data.groups.map((one, i) => element("option", { value: i }, one.name)));
    select.value = String(state.group);
    at("group-field").hidden = View.data.groups.length < 2;
    at("axis").replaceChildren(...View.axes().map((axis) => button(AXES[axis].name, axis === View.axis(), (event) => {
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
    at("methods-shown").textContent = every ? `Methods (${present().length})` : `Methods (${visible().length} of ${present().length})`;
    if (focused !== undefined) [...at("methods").children].find((one) => one.dataset.chip === focused)?.focus();
  }

  const cards = Figures.ALL.map(figureCard);
  for (const card of cards) at(`figures-${Figures.ALL[cards.indexOf(card)].place}`).append(card);

  function drawFigures() {
    for (const card of cards) card.refill();
    for (const place of ["course", "gradients", "alignment"]) at(place).hidden = !at(place).querySelector(".figure:not([hidden]), .part:not([hidden])");
    at("cost").hidden = group().table_one === null && !at("cost").querySelector(".figure:not([hidden])");
    at("quality").hidden = at("figure-pareto").hidden;
    for (const link of document.querySelectorAll("#contents a")) link.parentNode.hidden = at(link.hash.slice(1)).hidden;
  }

  const named = (pairs) => pairs.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));

  function refresh() {
    const known = View.data.groups.length > 0;
    at("story").hidden = at("contents").hidden = !known;
    list("answer", View.data.answer);
    at("provenance").replaceChildren(...named(View.data.provenance));
    if (!known) return;
    at("facts").replaceChildren(...named([[`Teacher’s ${View.data.score}`, group().teacher], ...View.data.facts]));
    at("findings-title").textContent = View.data.groups.length > 1 ? `Findings: ${group().name}` : "Findings";
    list("overview", View.data.findings);
    list("findings", group().findings);
    list("notes", [...View.data.notes, ...group().notes]);
    at("costs-reading").textContent = unbroken(View.data.reading);
    at("compared-hint").textContent = group().one_seed ? "" : unbroken(View.data.compared_reading);
    at("table-hint").textContent = unbroken(`${group().hint} Select a heading to sort.`);
    controls();
    chips();
    Tables.refill();
    drawFigures();
  }

  function openTarget() {
    const target = location.hash.length > 1 ? at(location.hash.slice(1)) : null;
    if (target?.tagName !== "DETAILS") return;
    target.open = true;
    target.scrollIntoView();  // while it was folded, the page was too short for it to come to the top
  }

  const narrow = matchMedia("(max-width: 640px)");  // there the names fold into a bar at the bottom
  const foldNames = () => { document.querySelector(".legend-box").open = !narrow.matches; };
  narrow.addEventListener("change", foldNames);
  foldNames();
  at("group").addEventListener("change", () => { state.group = Number(at("group").value); state.sites = {}; refresh(); });
  at("files").replaceChildren(...(View.data.files || []).map((path) => element("li", {}, element("a", { href: path }, path))));
  at("files-section").hidden = !(View.data.files || []).length;
  document.addEventListener("themechange", refresh);
  window.addEventListener("hashchange", openTarget);
  document.querySelectorAll("#contents a").forEach((link) => link.addEventListener("click", () => setTimeout(openTarget)));
  refresh();
  openTarget();

  return { update: (data) => { View.data = data; refresh(); } };
})();
