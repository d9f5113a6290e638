"use strict";

(() => {
  const { draw, element, swatch, trimmed } = Chart;
  const { speed } = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  let clips = 0;

  function speedFigure() {
    const series = speed.series.map((one) => ({
      name: one.name, style: one, colour: one[Theme.current()], points: one.points.map(([tokens, times]) => [Math.log2(tokens), times, null]),
    }));
    const panel = {
      axis: "tokens", name: "Times faster than the teacher", percent: false, log: "always", low: null, reference: 1, named: true,
      read: (value) => `${trimmed(value, 2)} ×`, series,
    };
    at("figure-speed").replaceChildren(draw(panel, `clip-${(clips += 1)}`));
    at("legend").replaceChildren(...series.map((one) => element("span", {}, swatch(one.style, one.colour), one.name)), element("span", {}, "dashed: the teacher"));
  }

  for (const cell of document.querySelectorAll("[data-shade]")) cell.style.setProperty("--shade", cell.dataset.shade);
  if (speed) {
    speedFigure();
    document.addEventListener("themechange", speedFigure);
  }
})();
