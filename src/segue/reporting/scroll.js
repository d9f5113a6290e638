
"use strict";

// Tables that are wider than their place say so: the last column fades, and a line above names the way.
(() => {
  const watched = new WeakSet();
  const mark = (box) => {
    const hidden = box.scrollWidth - box.clientWidth;
    box.classList.toggle("sideways", hidden > 4);
    box.classList.toggle("more", hidden - box.scrollLeft > 4);
  };
  const sizes = new ResizeObserver((entries) => entries.map((entry) => entry.target.closest(".scroll")).forEach((box) => box && mark(box)));
  const watch = () => {
    for (const box of document.querySelectorAll(".scroll")) {
      if (watched.has(box)) continue;
      watched.add(box);
      sizes.observe(box);
      for (const inside of box.children) sizes.observe(inside);
      box.addEventListener("scroll", () => mark(box), { passive: true });
    }
  };
  new MutationObserver(watch).observe(document.body, { childList: true, subtree: true });
  watch();
})();
