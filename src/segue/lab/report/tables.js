
"use strict";

// The tables of the page.
const Tables = (() => {
  const { AXES, element, swatch, trimmed } = Chart;
  const { state, group, methodOf, colour } = View;
  const at = (id) => document.getElementById(id);
  const unbroken = (text) => text.replace(/([\d±=<]) (?=[\d±%])/g, "$1\u00a0");
  const line = (method) => element("span", { class: "line" }, swatch(method, colour(method)), element("span", { title: method.label }, method.label));
  const mark = (text) => element("span", { class: text === "best" ? "mark best" : "mark" }, text);
  const region = (name, table, kind = "scroll") => element("div", { class: kind, tabindex: "0", role: "region", "aria-label": name }, table);

  // The values of a figure's panels, as a table each. Methods that spend unlike work for a step share rows by the step.
  function dataTable(panel) {
    const shown = panel.series.filter((one) => one.points.length && !one.thin);
    const place = (value) => (panel.axis === "site" ? panel.sites[value] : AXES[panel.axis].read(value));
    const different = (at) => [...new Set(shown.flatMap((one) => one.points.map((point) => point[at])))].sort((a, b) => a - b);
    const steps = !panel.scatter && panel.axis !== "site" && different(0).length > Math.max(0, ...shown.map((one) => one.points.length));
    const read = (point) => [panel.read(point[1], point[2]), steps ? element("small", {}, place(point[0])) : null];
    const values = shown.map((one) => new Map(one.points.map((point) => [point[steps ? 3 : 0], read(point)])));
    const rows = panel.scatter ? shown.map((one) => [one.name, ...one.points.flatMap((point) => [[place(point[0])], read(point)])])
      : different(steps ? 3 : 0).map((at) => [steps ? AXES.step.read(at) : place(at), ...values.map((of) => of.get(at) ?? ["–"])]);
    const headings = panel.scatter ? [panel.title || "Method", AXES[panel.axis].label, panel.yName] : [panel.title || AXES[steps ? "step" : panel.axis].label, ...shown.map((one) => one.name)];
    return region(panel.name, element("table", {}, element("caption", { class: "unseen" }, panel.name),
      element("thead", {}, element("tr", {}, ...headings.map((text) => element("th", { scope: "col" }, text)))),
      element("tbody", {}, ...rows.map(([name, ...cells]) => element("tr", {}, element("th", { scope: "row" }, name), ...cells.map((cell) => element("td", {}, ...cell)))))), "scroll tall");
  }

  function mapTable(map) {
    return region(map.name, element("table", {}, element("caption", { class: "unseen" }, map.name),
      element("thead", {}, element("tr", {}, element("th", { scope: "col" }, map.title), ...map.steps.map((step) => element("th", { scope: "col" }, `step ${trimmed(step, 4)}`)))),
      element("tbody", {}, ...map.rows.map((values, i) => element("tr", {}, element("th", { scope: "row" }, map.sites[i]), ...values.map((value) => element("td", {}, value === null ? "–" : map.read(value, null))))))), "scroll tall");
  }

  function methodTable() {
    const { columns, rows } = group();
    const table = at("table");
    const sorted = [...rows];
    if (state.sort !== null && state.sort.column <= columns.length) {
      const { column, down } = state.sort;
      const key = (row) => (column === 0 ? methodOf(row.method).label.toLowerCase() : row.cells[column - 1][1]);
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
      element("tbody", {}, ...sorted.map((row) => element("tr", {}, element("th", { scope: "row" }, line(methodOf(row.method))),
        ...row.cells.map((cell, i) => element("td", { class: cell[1] === null ? "not" : null }, cell[0], i === 1 && row.mark ? mark(row.mark) : null))))));
  }

  function chosenTable() {
    const rows = group().chosen;
    at("chosen-card").hidden = !rows.length;
    at("chosen-hint").textContent = unbroken(group().chosen_reading);
    at("chosen").replaceChildren(
      element("thead", {}, element("tr", {}, ...View.data.chosen.map((text, i) => element("th", { scope: "col", class: i ? "text" : null }, text)))),
      element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells.map((cell, i) => element(i ? "td" : "th", { scope: i ? null : "row", class: i ? "text" : null }, cell))))));
  }

  function comparedTables() {
    const tables = group().comparisons.filter((one) => one.rows.length);
    at("compared").replaceChildren(...(tables.length ? tables.map((one) => element("div", { class: "group-table" }, element("h3", {}, one.title[0].toUpperCase() + one.title.slice(1)),
      element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": one.title }, element("table", {},
        element("thead", {}, element("tr", {}, ...View.data.compared.map((text, i) => element("th", { scope: "col", class: i === 1 || i === View.data.compared.length - 1 ? "text" : null }, text)))),
        element("tbody", {}, ...one.rows.map((cells) => element("tr", {}, ...cells.map((cell, i) => element(i ? "td" : "th", { scope: i ? null : "row", class: i === 1 ? "text" : i === cells.length - 1 ? "text words" : null }, cell[0]))))))))) : [element("p", { class: "hint" }, group().one_seed ? "One seed per method: any difference may be chance, so none is listed or called the best." : "Nothing to compare: that takes two methods in a group, one of which is not DCR.")]));
  }

  function costTables() {
    const found = group().table_one;
    at("costs-card").hidden = found === null;
    if (found === null) return;
    list("costs-findings", found.findings);
    const table = (name, kind, headings, rows, cell) => element("div", { class: "scroll group-table", tabindex: "0", role: "region", "aria-label": name },
      element("table", { class: kind, role: "table" },  // roles: a phone shows the rows as blocks, which would lose them
        element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...["Method", ...headings].map((text) => element("th", { scope: "col", role: "columnheader" }, text)))),
        element("tbody", { role: "rowgroup" }, ...rows.map((row) => element("tr", { role: "row" }, element("th", { scope: "row", role: "rowheader" }, line(methodOf(row.method))),
          ...row.cells.map((one, i) => element("td", { role: "cell", "data-heading": headings[i] }, ...cell(one))))))));
    const claimCell = ([text, claim, verdict]) => [element("span", {}, unbroken(text)),
      claim ? element("small", {}, `The paper says “${claim}”: `, element("span", { class: verdict === "holds" ? "verdict" : "verdict not-so" }, verdict)) : null];
    at("costs").replaceChildren(table("Table 1, measured", "costs claims", found.aspects, found.claims, claimCell),
      ...(found.columns.length ? [table("Costs in numbers", "costs", found.columns, found.numbers, (text) => [unbroken(text)])] : []));
  }

  function winsTable() {
    at("wins-card").hidden = View.data.groups.length < 2;
    at("wins-hint").textContent = `Final ${View.data.score} of the students alone, mean ± half of the 95 % interval. “≈ best”: the paired difference to the best of the column is not significant (Holm’s adjustment for all pairs of the column; no mark where it cannot be tested).${View.data.ranked ? " Average rank: over the columns, 1 is best, for methods that are in all of them." : ""}`;
    at("wins").replaceChildren(
      element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Method"), ...View.data.groups.map((one) => element("th", { scope: "col" }, one.name)), View.data.ranked ? element("th", { scope: "col" }, "Average rank") : null)),
      element("tbody", {}, ...View.data.methods.map((method) => element("tr", {}, element("th", { scope: "row" }, line(method)), ...View.data.groups.map((one) => {
        const win = one.wins[method.id];
        const cell = element("td", { class: win ? null : "gone" }, win ? win.text : "–", win && win.mark ? mark(win.mark) : null);
        if (win) cell.style.setProperty("--shade", win.shade);
        return cell;
      }), View.data.ranked ? element("td", { class: "gone" }, method.rank) : null))));
  }

  function differencesTable() {
    const rows = group().differences;
    at("unlike-card").hidden = !rows.length;
    at("unlike").replaceChildren(element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Method"), element("th", { scope: "col", class: "text" }, "Settings that are not the same for all methods"))),
      element("tbody", {}, ...rows.map(([label, pairs]) => element("tr", {}, element("th", { scope: "row" }, label),
        element("td", { class: "text settings" }, ...(pairs.length ? pairs.map(([path, value]) => element("code", {}, `${path} = ${value}`)) : ["as most"]))))));
  }

  function eventsTable() {
    const rows = group().events;
    at("events-card").hidden = !rows.length;
    at("events").replaceChildren(element("thead", {}, element("tr", {}, ...View.data.events.map((text) => element("th", { scope: "col", class: "text" }, text)))),
      element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells.map((cell, i) => element(i ? "td" : "th", { scope: i ? null : "row", class: "text" }, unbroken(cell)))))));
  }

  function runList() {
    at("runs").replaceChildren(...View.data.methods.map((method) => {
      const runs = View.data.runs.filter((run) => run.method === method.id);
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

  const list = (id, lines) => at(id).replaceChildren(...lines.map((text) => element("li", {}, unbroken(text))));

  function refill() {
    methodTable();
    comparedTables();
    chosenTable();
    costTables();
    differencesTable();
    eventsTable();
    winsTable();
    runList();
  }

  return { refill, dataTable, mapTable, list, unbroken };
})();
