// One tooltip for all drawings.

const tip = byId("tip");

function showTip(x, y, children) {
  tip.replaceChildren(...children);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
  const top = y + 16 + box.height > innerHeight ? y - 16 - box.height : y + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

const words = (name) => name.replaceAll("_", " ").replaceAll(".", ": ");

function hideTip() {
  tip.hidden = true;
}

function mixBar(counts) {
  const bar = el("div", { class: "mixbar" });
  const total = counts.reduce((a, b) => a + b, 0);
  counts.forEach((count, c) => {
    if (count) bar.append(el("i", { style: `width:${(100 * count) / total}%;background:${classColour(c)}` }));
  });
  return bar;
}

function mixLines(counts) {
  const total = counts.reduce((a, b) => a + b, 0);
  return counts
    .map((count, c) => [count, c])
    .filter(([count]) => count)
    .sort((a, b) => b[0] - a[0])
    .slice(0, 5)
    .map(([count, c]) =>
      el("div", { class: "line" }, el("i", { style: `width:.7em;height:.7em;border-radius:2px;background:${classColour(c)}` }),
        `class ${c}`, el("b", {}, `${Math.round((100 * count) / total)} %`)));
}
