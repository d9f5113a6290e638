
"use strict";

// Figures as files, made in the browser from what the page holds: a page that was mailed can do it too.
const Download = (() => {
  const { svg, swatch } = Chart;
  const KEPT = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "paint-order", "font-size", "font-weight", "font-family", "visibility"];
  const COLUMN = 290;  // pixels for the name of a line
  const FORMULA = /^[=+\-@\t\r\n＝＋－＠]/;  // a spreadsheet would compute it

  function save(name, blob) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  function styled(node) {
    const copy = node.cloneNode(true);
    const from = [node, ...node.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
    from.forEach((one, i) => {
      const style = getComputedStyle(one);
      for (const name of KEPT) if (style.getPropertyValue(name)) to[i].setAttribute(name, style.getPropertyValue(name));
      for (const name of ["style", "class", "tabindex", "role", "aria-label"]) to[i].removeAttribute(name);
    });
    return copy;
  }

  const words = (text, x, y, size, weight, colour) => {
    const node = svg("text", { x, y, "font-size": size, "font-weight": weight, fill: colour, "font-family": "system-ui, DejaVu Sans, sans-serif" });
    node.textContent = text;
    return node;
  };

  // One picture of all panels of a figure, where they stand on the page, with its title and the names of the lines.
  function picture(figure) {
    const plots = [...figure.box.querySelectorAll("svg.plot")], frame = figure.box.getBoundingClientRect();
    const ink = getComputedStyle(document.body).color, soft = getComputedStyle(figure.box.querySelector("h3, .plot text") || figure.box).color;
    const width = Math.ceil(frame.width) + 32, rows = Math.ceil(figure.legend.length / Math.max(1, Math.floor(width / COLUMN)));
    const height = Math.ceil(frame.height) + 64 + 22 * rows;
    const whole = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
    whole.append(svg("rect", { width, height, fill: getComputedStyle(figure.box.closest(".card")).backgroundColor }), words(figure.title, 16, 28, 16, 600, ink));
    for (const head of figure.box.querySelectorAll("h3")) {
      const place = head.getBoundingClientRect();
      whole.append(words(head.textContent, 16 + place.left - frame.left, 44 + place.bottom - frame.top - 6, 13, 600, soft));
    }
    for (const plot of plots) {
      const place = plot.getBoundingClientRect(), copy = styled(plot);
      for (const [name, value] of Object.entries({ x: 16 + place.left - frame.left, y: 44 + place.top - frame.top, width: place.width, height: place.height })) copy.setAttribute(name, value);
      whole.append(copy);
    }
    figure.legend.forEach((one, i) => {
      const columns = Math.max(1, Math.floor(width / COLUMN)), x = 16 + COLUMN * (i % columns), y = 56 + frame.height + 22 * Math.floor(i / columns);
      const mark = swatch(one.style, one.colour);
      for (const [name, value] of Object.entries({ x, y: y - 7, width: 30, height: 12 })) mark.setAttribute(name, value);
      whole.append(mark, words(one.name.length > 36 ? `${one.name.slice(0, 35)}…` : one.name, x + 36, y + 4, 12, 400, ink));
    });
    return { text: new XMLSerializer().serializeToString(whole), width, height };
  }

  async function png(figure, name) {
    const { text, width, height } = picture(figure);
    const image = new Image();
    image.width = width;
    image.height = height;
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [2 * width, 2 * height];
    canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
    canvas.toBlob((blob) => save(name, blob), "image/png");
  }

  const quoted = (value) => {
    const text = value === null || value === undefined ? "" : typeof value === "string" && FORMULA.test(value) ? `'${value}` : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };

  function file(kind, figure, name) {
    if (kind === "SVG") save(`${name}.svg`, new Blob([picture(figure).text], { type: "image/svg+xml" }));
    if (kind === "PNG") png(figure, `${name}.png`);
    if (kind === "CSV") save(`${name}.csv`, new Blob([figure.rows().map((row) => row.map(quoted).join(",")).join("\n"), "\n"], { type: "text/csv" }));
  }

  return { file };
})();
