// Learning curves: one uPlot chart for each setting, with a band over seeds for each method.

const charts = [];

const AXES = Object.entries(study.measures).map(([key, [name, unit]]) => ({ key, name, unit }));

function axisLook() {
  return { stroke: token("--faint"), grid: { stroke: token("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
}

// Tables of one method each, [x, mean, low, high], joined over all x that occur.
function columnsOf(setting, axis, smooth) {
  const curves = study.curves[setting].filter((c) => shown.variants.has(c.variant) && c.rounds.length);
  const tables = curves.map((c) => {
    const x = axis.key === "rounds" ? c.rounds : c.costs[axis.key];
    return [x, ...(smooth ? c.smooth : c.raw).map((row) => row.map((v) => (100 * v) / study.scale))];
  });
  return { curves, data: tables.length ? uPlot.join(tables) : [[]] };
}

function drawTarget(u, target) {
  const y = u.valToPos(100 * target, "y", true);
  if (y < u.bbox.top || y > u.bbox.top + u.bbox.height) return;
  u.ctx.save();
  u.ctx.strokeStyle = token("--faint");
  u.ctx.setLineDash([3 * devicePixelRatio, 4 * devicePixelRatio]);
  u.ctx.beginPath();
  u.ctx.moveTo(u.bbox.left, y);
  u.ctx.lineTo(u.bbox.left + u.bbox.width, y);
  u.ctx.stroke();
  u.ctx.restore();
}

function nearest(column, index) {
  for (let d = 0; d < column.length; d++) {
    if (column[index - d] != null) return column[index - d];
    if (column[index + d] != null) return column[index + d];
  }
  return null;
}

function curveTip(u, curves, axis) {
  const { idx, left, top } = u.cursor;
  if (idx == null || left < 0) return hideTip();
  const lines = curves
    .map((c, i) => [c, nearest(u.data[1 + 3 * i], idx), nearest(u.data[2 + 3 * i], idx), nearest(u.data[3 + 3 * i], idx)])
    .sort((a, b) => b[1] - a[1])
    .map(([c, mean, low, high]) =>
      el("div", { class: "line" }, el("i", { class: "dot", style: `background:${colourOf(c.variant)}` }), c.variant,
        el("b", {}, `${mean.toFixed(1)}${c.seeds > 1 ? ` (${low.toFixed(1)}–${high.toFixed(1)})` : ""}`)));
  const box = u.over.getBoundingClientRect();
  const head = axis.key === "rounds" ? `round ${u.data[0][idx]}` : `${axis.name} ${amount(u.data[0][idx], axis.unit)}`;
  showTip(box.left + left, box.top + top, [el("div", { class: "note" }, head), ...lines]);
}

function drawChart(holder, setting, axis, smooth) {
  const { curves, data } = columnsOf(setting, axis, smooth);
  const series = [{}], bands = [];
  curves.forEach((c, i) => {
    const { colour, dash } = styles.get(c.variant);
    const line = { stroke: colour, width: 2, dash, spanGaps: true, points: { show: false } };
    const edge = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
    series.push(line, edge, edge);
    if (c.seeds > 1) bands.push({ series: [3 + 3 * i, 2 + 3 * i], fill: `${colour}26` });
  });
  const show = (u, ticks) => ticks.map((v) => amount(v, axis.unit));
  const options = {
    width: holder.clientWidth, height: 280, series, bands,
    legend: { show: false },
    scales: { x: { time: false }, y: { range: (u, low, high) => [Math.max(0, low - 2), Math.min(100, high + 2)] } },
    axes: [{ ...axisLook(), values: show, size: 30, space: 70, label: axis.name, labelSize: 18, labelFont: "12px system-ui" }, { ...axisLook(), size: 44, values: (u, t) => t.map((v) => `${v} %`) }],
    cursor: { points: { show: false }, y: false },
    hooks: {
      setCursor: [(u) => curveTip(u, curves, axis)],
      draw: [(u) => setting in study.targets && drawTarget(u, study.targets[setting])],
    },
  };
  const chart = new uPlot(options, data, holder);
  chart.over.addEventListener("mouseleave", hideTip);
  return chart;
}

function drawCurves() {
  charts.splice(0).forEach((chart) => chart.destroy());
  const axis = AXES.find((a) => a.key === byId("axis").value);
  const grid = byId("charts");
  grid.replaceChildren();
  for (const setting of study.settings) {
    if (!shown.settings.has(setting)) continue;
    const holder = el("div", { class: "chart", "data-chart": setting }, el("h3", {}, setting));
    grid.append(holder);
    charts.push(drawChart(holder, setting, axis, byId("smooth").checked));
  }
}

function resizeCharts() {
  for (const chart of charts) chart.setSize({ width: chart.root.parentElement.clientWidth, height: 280 });
}

// A generic drawing of any series over rounds, for the terms of the theory.
function drawSeries(grid, name, values, rounds) {
  const holder = el("div", { class: "chart" }, el("h4", {}, name));
  grid.append(holder);
  const options = {
    width: holder.clientWidth, height: 140, legend: { show: false },
    scales: { x: { time: false } },
    series: [{}, { stroke: token("--accent"), width: 1.5, spanGaps: true, points: { show: false } }],
    axes: [{ ...axisLook(), size: 30 }, { ...axisLook(), size: 54, space: 28, values: (u, t) => t.map(shortNumber) }],
    cursor: { points: { show: false }, y: false },
  };
  const x = rounds && rounds.length === values.length ? rounds : values.map((_, i) => i + 1);
  return new uPlot(options, [x, values], holder);
}
