// What the agent thought: Q-values and attention of chosen rounds; then the theory's terms.

const theoryCharts = [];

function momentRow(moment, i, scale, counts) {
  const id = moment.clients[i], chosen = moment.chosen.includes(id);
  const width = (100 * (moment.q[i] - scale.low)) / (scale.high - scale.low || 1);
  const cells = [
    el("span", { class: chosen ? "is" : "" }, `client ${id}`),
    counts ? mixBar(counts[id]) : el("span"),
    el("span", { class: chosen ? "q chosen" : "q" }, el("i", { style: `width:${Math.max(2, width)}%` })),
    el("span", {}, moment.q[i].toFixed(3)),
  ];
  const strip = el("span", { class: "attention" });
  const weights = moment.attention ? moment.attention[i] : [];
  const most = Math.max(...weights, 1e-9);
  weights.forEach((w, age) =>
    strip.append(el("i", { style: `opacity:${(0.08 + (0.92 * w) / most).toFixed(2)}`, title: `${weights.length - 1 - age} rounds ago: ${(100 * w).toFixed(0)} %` })));
  return [...cells, strip];
}

function drawMoment(box, moment, counts) {
  const order = moment.q.map((q, i) => [q, i]).sort((a, b) => b[0] - a[0]).map(([, i]) => i);
  // Bars start a little below the smallest Q: only the order and the gaps mean something.
  const high = Math.max(...moment.q), least = Math.min(...moment.q);
  const scale = { high, low: least - 0.15 * (high - least || 1) };
  const head = ["client", counts ? "classes" : "", "Q (bars start just below the lowest)", "Q"].map((t) => el("span", { class: "head" }, t));
  head.push(el("span", { class: "head att" }, moment.attention ? "attention to past models, newest right" : ""));
  const eps = moment.epsilon == null ? "" : `, ε = ${moment.epsilon.toFixed(2)}`;
  const grid = el("div", { class: "moment" }, ...head, ...order.flatMap((i) => momentRow(moment, i, scale, counts)));
  box.replaceChildren(el("p", { class: "note" }, `Round ${moment.round}${moment.behaviour ? `: ${moment.behaviour}` : ""}${eps}. Bold: chosen.`), grid);
}

function drawAgent() {
  const holder = byId("agent");
  holder.replaceChildren();
  if (!run.moments.length) return;
  const counts = (study.partitions[run.setting] || {}).counts;
  const slider = el("input", { type: "range", min: 0, max: run.moments.length - 1, value: run.moments.length - 1, "aria-label": "Round" });
  const box = el("div");
  slider.addEventListener("input", () => drawMoment(box, run.moments[slider.value], counts));
  holder.append(el("h3", {}, "What the agent thought"), el("div", { class: "tools" }, el("label", {}, "Round", slider)), box);
  drawMoment(box, run.moments[run.moments.length - 1], counts);
}

function shortNumber(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  return size && (size >= 1e5 || size < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

// "printed.total" belongs to the group "printed"; figures without a group come first.
function figureGroups(figures) {
  const groups = new Map();
  for (const [name, value] of Object.entries(figures)) {
    const [first, ...rest] = name.split(".");
    const group = rest.length ? first : "";
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push([rest.join(".") || first, value]);
  }
  return [...groups].sort((a, b) => (a[0] ? 1 : 0) - (b[0] ? 1 : 0));
}

function drawFigures(holder, figures) {
  for (const [group, pairs] of figureGroups(figures)) {
    const facts = el("dl", { class: "facts small" });
    if (group) facts.append(el("div", { class: "group-name" }, words(group)));
    for (const [name, value] of pairs)
      facts.append(el("div", {}, el("dt", {}, words(name)), el("dd", {}, shortNumber(value))));
    holder.append(facts);
  }
}

function drawTheory() {
  theoryCharts.splice(0).forEach((chart) => chart.destroy());
  const holder = byId("theory");
  holder.replaceChildren();
  const { rounds, series, figures, notes } = run.theory;
  const moving = Object.keys(series).filter((name) => new Set(series[name]).size > 1);
  if (!moving.length && !Object.keys(figures).length) return;
  holder.append(el("h3", {}, "Terms of the convergence bound, measured"));
  for (const note of notes) holder.append(el("p", { class: "aside" }, note));
  drawFigures(holder, figures);
  const grid = el("div", { class: "grid small" });
  holder.append(grid);
  for (const name of moving) theoryCharts.push(drawSeries(grid, words(name), series[name], rounds));
}
