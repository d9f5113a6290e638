
"use strict";

// What the page shows now: its data, the reader's choices, and what follows from both.
const View = (() => {
  const view = { data: JSON.parse(document.getElementById("data").textContent) };
  const state = { group: 0, axis: null, hidden: new Set(), sites: {}, zoom: false, seeds: null, quantity: null, sort: null };
  view.state = state;
  view.group = () => view.data.groups[Math.min(state.group, view.data.groups.length - 1)];
  view.methodOf = (id) => view.data.methods.find((method) => method.id === id);
  view.present = () => view.data.methods.filter((method) => method.id in view.group().lines);
  view.visible = () => view.present().filter((method) => !state.hidden.has(method.id));
  view.colour = (method) => method[Theme.current()];
  view.lines = () => Object.values(view.group().lines);
  view.axes = () => ["flops", "seconds", "step", "epoch"].filter((axis) => view.lines().some((one) => one.x[axis].some((value) => value > 0)));
  view.axis = () => (view.axes().includes(state.axis) ? state.axis : view.axes()[0] || "step");
  view.few = (id) => view.group().lines[id].seeds.length < 3;  // an interval over two seeds would cover the figure
  view.seeds = () => state.seeds ?? (view.present().length <= 3 || view.present().every((method) => view.few(method.id)));  // else they hide the means
  return view;
})();

// The figures of the page: what each shows, as panels for Chart or maps for Heat.
const Figures = (() => {
  const { trimmed, percent } = Chart;
  const { state, group, present, visible, colour, lines } = View;

  const number = (mean, half) => (half === null || half === undefined ? trimmed(mean, 3) : `${trimmed(mean, 3)} ± ${trimmed(half, 2)}`);
  const score = (mean, half) => (!View.data.percent ? number(mean, half)
    : half === null || half === undefined ? percent(mean) : `${(100 * mean).toFixed(1)} ± ${(100 * half).toFixed(1)} %`);

  // Quantities by site, for heat maps: log says whether colours follow the logarithm.
  const QUANTITIES = {
    cosine: { title: "Interface cosine", log: false },
    relative_error: { title: "Relative error of the student", log: true },
    gradient_norm: { title: "Gradient norm", log: true },
    drift_blend: { title: "Drift of the residual stream, blend", log: true },
    drift_students: { title: "Drift of the residual stream, students alone", log: true },
    alphas: { title: "Alpha, the teacher’s share", log: false },
    weights: { title: "Drawn gate weights, the student’s share", log: false },
  };
  const LOSSES = { task: "Of the task", guidance: "Guidance, at the sites", distill: "Distillation, at the output" };

  const ALL = [
    { id: "accuracy", place: "scores", read: score,
      title: () => `Validation ${View.data.score}: the students alone, and the blend`,
      hint: "The same evaluations twice: of the model without teachers, and of the model as it trains, teachers included. A replacement that breaks nothing keeps the blend at the teacher’s dashed line. Bands are 95 % intervals over seeds; with two seeds thin lines show both." },
    { id: "pareto", place: "quality", read: score, title: () => `Final ${View.data.score} against work`,
      hint: "Each mark is a method: what its training cost, and where its students alone end (bars: 95 % interval over seeds). On the line are methods that none beats in both." },
    { id: "cosine", place: "alignment", sites: "cosine", read: number, yName: "cosine", title: () => "Interface cosine",
      hint: "Cosine similarity of the outputs of teacher and student at a site, on the students’ own activations. 1 is the same direction." },
    { id: "heat", place: "alignment", heat: true, read: number, title: () => `Every site, every evaluation: ${QUANTITIES[quantity()].title.toLowerCase()}`,
      hint: "Rows are sites, from the first to the last; columns are evaluations. One scale for all methods." },
    { id: "gate_variance", place: "cost", costs: true, log: true, read: number, yName: "variance", title: () => "Gradient variance caused by the gates",
      hint: "Variance of the students’ gradients, summed over the sites, while any alpha is above 0: what the gates alone cause for a given minibatch. Thin and dotted: what the choice of the minibatch causes." },
    { id: "variance_depth", place: "cost", costs: true, log: true, read: number, yName: "variance", title: () => "Gate-induced variance along the depth",
      depth: { gate_variance: "Mean over the handover" }, hint: "What the gates alone cause in the gradient of every student." },
    { id: "bounds", place: "cost", costs: true, log: true, read: number, yName: "share of the bound", reference: { at: 1, name: "bound" },
      title: () => "Curvature bias and loss path relative to their bounds", depth: { curvature: "Curvature bias / bound", path: "Rise along the path / bound" },
      hint: "Propositions 3 and 4 of the paper at every site, mean over the evaluations of the handover, relative to the bound: 1 is the most that the paper allows." },
    { id: "schedules", place: "course", read: number, title: () => "Schedules", hint: "Alpha, the teacher’s share, mean over the sites. Ticks at the bottom: the guard has restored a good state." },
    { id: "alphas", place: "course", read: number, title: () => "Alpha and gates by site",
      hint: "The student’s share at a site as its gate drew it, mean since the previous evaluation; thin and dotted, 1 − alpha, which the schedule asks for. Runs without recorded gates show 1 − alpha alone." },
    { id: "losses", place: "course", read: number, yName: "loss", title: () => "Training loss, part by part",
      hint: "Means since the previous evaluation. Guidance and distillation end when their schedules do." },
    { id: "lr", place: "course", read: number, yName: "learning rate", title: () => "Learning rate", hint: "Of new parameters, in the step after each evaluation, the guard’s slowdown included." },
    { id: "gradient_norm", place: "gradients", sites: "gradient_norm", log: true, read: number, yName: "gradient norm", title: () => "Gradient norm by site",
      hint: "Of each student, mean since the previous evaluation, before clipping. Gates that starve a student of gradient would lower it." },
    { id: "drift", place: "gradients", sites: "drift_blend", other: "drift_students", log: true, read: number, yName: "drift", title: () => "Drift of the residual stream",
      hint: "Relative squared distance from the original model’s residual stream after the block of a site: how far the next block’s input is from what it was trained on." },
    { id: "depth", place: "gradients", read: number, log: true, yName: "mean", title: () => "Along the depth",
      depth: { early_gradient: "Gradient norm, first fifth", early_drift: "Drift of the blend, first fifth", last_drift: "Drift of the students alone, at the end" },
      hint: "All sites at once: means over the first fifth of the training, when the teachers fade out, and at the end." },
  ];

  const measured = (byMethod) => Object.values(byMethod).some((one) => one !== null);
  const bySite = (quantity) => lines().some((one) => one.sites[quantity]);
  const ownAlphas = () => lines().some((one) => new Set((one.sites.alphas ?? []).map((curve) => JSON.stringify(curve?.[0]))).size > 1);
  const mapped = () => Object.keys(QUANTITIES).filter((quantity) => quantity === "alphas" ? ownAlphas() : bySite(quantity));
  const lossNames = () => [...new Set(lines().flatMap((one) => Object.keys(one.losses)))];

  function drawable(figure) {
    if (figure.heat) return mapped().length > 0;
    if (figure.id === "alphas") return ownAlphas() || bySite("weights");
    if (figure.id === "pareto") return present().length > 1 && Object.values(group().ends).some((end) => end !== null && end[0] > 0);
    if (figure.id === "losses") return lines().some((one) => one.overall.loss !== null);
    if (figure.id === "lr") return lines().some((one) => one.overall.lr !== null);
    if (figure.sites) return bySite(figure.sites);
    if (figure.depth) return Object.keys(figure.depth).some((key) => measured(group().depth[key]));
    return !figure.costs || lines().some((one) => one.overall[figure.id] !== null);
  }

  function points(xs, curve, steps = []) {
    return curve === null || curve === undefined ? [] : xs.map((x, i) => [x, curve[0][i], curve[1]?.[i] ?? null, steps[i]]).filter((point) => point[1] !== null);
  }

  function series(read, axis, faint = "") {
    return visible().map((method) => ({
      name: faint ? `${method.label}, ${faint}` : method.label,
      style: method, colour: colour(method), faint: Boolean(faint), bare: View.few(method.id), points: points(group().lines[method.id].x[axis], read(group().lines[method.id]), group().lines[method.id].x.step),
      marks: faint ? [] : group().lines[method.id].marks[axis],
    }));
  }

  function seeds(quantity, axis) {
    return visible().flatMap((method) => group().lines[method.id].seeds.map((one) => ({
      name: `${method.label}, seed ${one.seed}`, style: method, colour: colour(method), thin: true, points: points(one.x[axis], [one[quantity]]),
    })));
  }

  function chosenSites(figure) {
    const chosen = state.sites[figure.id];
    return chosen === undefined || chosen >= group().sites.length ? group().shown : [chosen];
  }

  const onOneScale = (found, low = null) => {
    const shared = found.flatMap((panel) => panel.series.flatMap((one) => one.points.map((point) => point[1])));
    return found.map((panel) => ({ ...panel, shared, low: low ?? 1.04 * Math.min(0, ...shared) }));
  };

  function scores(base) {
    const low = state.zoom ? 0.85 * (group().teacher_eval ?? 0) : View.data.percent ? 0 : null;
    const found = ["students", "blend"].map((side) => {
      const title = side === "students" ? "Students alone" : "Blend, teachers included";
      const own = series((one) => one.overall[side], base.axis);
      return { ...base, title, name: `Validation ${View.data.score}, ${title.toLowerCase()}`, percent: View.data.percent, yName: View.data.score, reference: group().teacher_eval,
        series: View.seeds() ? [...seeds(side, base.axis), ...own] : own };
    });
    const shared = found.flatMap((panel) => panel.series.flatMap((one) => one.points.map((point) => point[1])));
    return found.map((panel) => ({ ...panel, shared, low }));
  }

  function pareto(base) {
    const ends = visible().filter((method) => group().ends[method.id]).map((method) => [method, group().ends[method.id]]);
    const front = ends.map(([, end]) => end).sort((a, b) => a[0] - b[0] || b[1] - a[1]);
    const best = front.filter((end, i) => front.slice(0, i).every((other) => other[1] < end[1]));
    return [{ ...base, axis: "flops", scatter: true, front: best.map((end) => [end[0], end[1]]), percent: View.data.percent, yName: View.data.score,
      reference: group().teacher_score, low: null,
      series: ends.map(([method, end]) => ({ name: method.label, style: method, colour: colour(method), bare: View.few(method.id), points: [[end[0], end[1], end[2]]] })) }];
  }

  function gates(figure, base) {
    const share = (curve) => curve && [curve[0].map((alpha) => (alpha === null ? null : 1 - alpha))];
    return onOneScale(chosenSites(figure).map((site) => {
      const drawn = series((one) => one.sites.weights?.[site], base.axis);
      const asked = series((one) => share(one.sites.alphas?.[site]), base.axis, "1 − alpha");
      const known = new Set(drawn.filter((one) => one.points.length).map((one) => one.style.id));
      for (const one of asked) if (!known.has(one.style.id)) Object.assign(one, { faint: false, name: one.style.label });
      return { ...base, title: group().sites[site], name: `${base.name}, ${group().sites[site]}`, yName: "student’s share", series: [...drawn, ...asked] };
    }), 0);
  }

  function losses(base) {
    const parts = [...Object.keys(LOSSES).filter((name) => lossNames().includes(name)), ...lossNames().filter((name) => !(name in LOSSES))];
    const found = parts.map((name) => ({ ...base, title: LOSSES[name] ?? name, name: `${base.name}, ${LOSSES[name] ?? name}`, log: "always", series: series((one) => one.losses[name] ?? null, base.axis) }));
    const whole = { ...base, title: "All parts together", name: `${base.name}, all parts together`, log: "always", series: series((one) => one.overall.loss, base.axis) };
    const all = parts.length === 1 && lines().every((one) => "task" in one.losses) ? found : [...found, whole];
    const xs = all.flatMap((panel) => panel.series.flatMap((one) => one.points.map((point) => point[0])));
    return all.map((panel) => ({ ...panel, xs }));
  }

  function panels(figure) {
    const base = { axis: View.axis(), percent: false, log: false, low: null, reference: null, read: figure.read, name: figure.title(), yName: figure.yName };
    if (figure.id === "accuracy") return scores(base);
    if (figure.id === "pareto") return pareto(base);
    if (figure.id === "alphas") return gates(figure, base);
    if (figure.id === "losses") return losses(base);
    if (figure.sites) {
      const quantity = figure.other && state[figure.id] ? figure.other : figure.sites;
      const found = chosenSites(figure).map((site) => ({
        ...base, title: group().sites[site], name: `${figure.title()}, ${group().sites[site]}`, log: figure.log || false, low: figure.log ? 0 : null,
        series: series((one) => one.sites[quantity]?.[site], base.axis),
      }));
      return figure.log ? found : onOneScale(found);
    }
    if (figure.depth) {
      return Object.entries(figure.depth).filter(([key]) => measured(group().depth[key])).map(([key, title]) => ({
        ...base, title, name: title, axis: "site", log: true, low: 0, sites: group().sites, reference: figure.reference?.at ?? null, referenceName: figure.reference?.name,
        series: visible().map((method) => ({ name: method.label, style: method, colour: colour(method), bare: View.few(method.id), points: points(group().sites.map((_, i) => i), group().depth[key][method.id]) })),
      }));
    }
    if (figure.id === "gate_variance") {
      const both = [...series((one) => one.overall.gate_variance, "progress"), ...series((one) => one.overall.data_variance, "progress", "minibatches")];
      for (const one of both) one.points = one.points.filter((point) => point[0] <= group().anneal_end);
      return [{ ...base, axis: "progress", log: true, low: 0, series: both }];
    }
    const quantity = figure.id === "lr" ? "lr" : "alpha";
    return [{ ...base, axis: "progress", low: 0, yName: quantity === "lr" ? "learning rate" : "alpha", series: series((one) => one.overall[quantity], "progress") }];
  }

  const quantity = () => (mapped().includes(state.quantity) ? state.quantity : mapped()[0]);

  function maps() {
    const what = QUANTITIES[quantity()];
    return visible().filter((method) => group().lines[method.id].sites[quantity()]).map((method) => {
      const line = group().lines[method.id];
      return { title: method.label, name: `${what.title}, ${method.label}`, log: what.log, read: number, sites: group().sites, steps: line.x.step,
        rows: line.sites[quantity()].map((curve) => curve?.[0] ?? line.x.step.map(() => null)) };
    });
  }

  return { ALL, QUANTITIES, drawable, panels, maps, mapped, quantity };
})();
