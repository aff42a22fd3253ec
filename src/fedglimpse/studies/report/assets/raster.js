// One run from inside: the partition, who was visible and who was chosen.

let run = null;
const AXIS = 20; // pixels below the raster for round numbers

function unpackBits(index, rounds, clients) {
  const bytes = atob(study.bitmaps[index]);
  return (round, client) => {
    const bit = round * clients + client;
    return (bytes.charCodeAt(bit >> 3) >> (7 - (bit & 7))) & 1;
  };
}

function rowOrder(r, order, counts) {
  const ids = Array.from({ length: r.clients }, (_, i) => i);
  if (order === "chosen") {
    const times = ids.map((id) => {
      let n = 0;
      for (let t = 0; t < r.rounds; t++) n += r.isSelected(t, id);
      return n;
    });
    ids.sort((a, b) => times[b] - times[a]);
  } else if (order === "class" && counts) {
    const main = counts.map((row) => row.indexOf(Math.max(...row)));
    ids.sort((a, b) => main[a] - main[b] || counts[b][main[b]] - counts[a][main[a]]);
  }
  return ids;
}

function canvasOf(id, width, height) {
  const canvas = byId(id);
  const ratio = Math.min(devicePixelRatio || 1, 2);
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  return ctx;
}

function drawMix(order, counts, rowHeight) {
  const width = counts ? 84 : 0;
  const ctx = canvasOf("mix", Math.max(width, 1), order.length * rowHeight);
  if (!counts) return;
  order.forEach((id, line) => {
    const total = counts[id].reduce((a, b) => a + b, 0) || 1;
    let x = 0;
    counts[id].forEach((count, c) => {
      const w = (width * count) / total;
      ctx.fillStyle = classColour(c);
      ctx.fillRect(x, line * rowHeight, w, rowHeight - 1);
      x += w;
    });
  });
}

function drawRounds(r, order, rowHeight) {
  const room = document.querySelector(".raster .scroll").clientWidth;
  r.step = Math.max(2, Math.min(12, room / r.rounds));
  const ctx = canvasOf("rounds", Math.ceil(r.step * r.rounds), order.length * rowHeight + AXIS);
  const gap = r.step > 4 ? 1 : 0;
  const pale = token("--visible"), strong = colourOf(r.variant);
  order.forEach((id, line) => {
    for (let t = 0; t < r.rounds; t++) {
      if (!r.isVisible(t, id)) continue;
      ctx.fillStyle = r.isSelected(t, id) ? strong : pale;
      ctx.fillRect(t * r.step, line * rowHeight, r.step - gap, rowHeight - 1);
    }
  });
  labelRounds(ctx, r, order.length * rowHeight + AXIS - 4);
}

function labelRounds(ctx, r, y) {
  const every = [5, 10, 20, 50, 100, 200, 500].find((n) => n * r.step >= 70) || 1000;
  ctx.fillStyle = token("--faint");
  ctx.font = "11px system-ui";
  ctx.fillText("round 1", 0, y);
  ctx.textAlign = "center";
  for (let n = every; n <= r.rounds; n += every)
    if ((n - 0.5) * r.step > 60 && n * r.step < r.step * r.rounds - 10) ctx.fillText(String(n), (n - 0.5) * r.step, y);
}

function clientTip(event, r, counts) {
  const box = event.currentTarget.getBoundingClientRect();
  const id = r.order[Math.floor((event.clientY - box.top) / r.rowHeight)];
  if (id === undefined) return hideTip();
  const lines = [el("div", {}, el("b", {}, `client ${id}`))];
  if (event.currentTarget.id === "rounds") {
    const t = Math.min(r.rounds - 1, Math.floor((event.clientX - box.left) / r.step));
    const what = r.isSelected(t, id) ? "chosen" : r.isVisible(t, id) ? "visible, not chosen" : "not visible";
    lines.push(el("div", { class: "note" }, `round ${t + 1}: ${what}`));
  }
  if (counts) lines.push(mixBar(counts[id]), ...mixLines(counts[id]));
  showTip(event.clientX, event.clientY, lines);
}

function drawRaster() {
  const counts = (study.partitions[run.setting] || {}).counts;
  run.isVisible = unpackBits(run.visible, run.rounds, run.clients);
  run.isSelected = unpackBits(run.selected, run.rounds, run.clients);
  run.order = rowOrder(run, byId("run-order").value, counts);
  run.rowHeight = run.clients > 120 ? 5 : run.clients > 60 ? 7 : 11;
  drawMix(run.order, counts, run.rowHeight);
  drawRounds(run, run.order, run.rowHeight);
  const legend = byId("classes");
  legend.replaceChildren();
  if (counts)
    counts[0].forEach((_, c) => legend.append(el("span", {}, el("i", { style: `background:${classColour(c)}` }), `class ${c}`)));
  else legend.append("The data is not on this machine, so what clients hold is not shown.");
  byId("run-seed").textContent = `seed ${run.seed}`;
  for (const id of ["mix", "rounds"]) {
    byId(id).onpointermove = byId(id).onpointerdown = (event) => clientTip(event, run, counts);
    byId(id).onpointerleave = hideTip;
  }
}
