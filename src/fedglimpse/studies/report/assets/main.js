// Putting it together.

function fill(select, pairs) {
  select.replaceChildren(...pairs.map(([value, text]) => el("option", { value }, text)));
}

function chooseRun() {
  const setting = byId("run-setting").value;
  const there = study.runs.filter((r) => r.setting === setting);
  const before = byId("run-variant").value;
  fill(byId("run-variant"), there.map((r) => [r.variant, r.variant]));
  const thinker = there.find((r) => r.moments.length);
  const keep = there.find((r) => r.variant === before) || thinker || there[0];
  byId("run-variant").value = keep.variant;
  drawRun();
}

function drawRun() {
  if (!study.runs.length) return;
  const [setting, variant] = [byId("run-setting").value, byId("run-variant").value];
  run = study.runs.find((r) => r.setting === setting && r.variant === variant);
  drawRaster();
  drawAgent();
  drawTheory();
}

function drawAll() {
  drawCurves();
  drawRun();
}

function changed() {
  applyFilters();
  drawCurves();
}

function start() {
  setTheme(isDark() ? "dark" : "light");
  paintNames();
  chips("variants", study.variants, true, changed);
  chips("settings", study.settings, false, changed);
  if (study.variants.length < 2 && study.settings.length < 2) document.querySelector(".filters").hidden = true;
  fill(byId("axis"), AXES.map((a) => [a.key, a.name]));
  fill(byId("measure"), AXES.map((a) => [a.key, a.name]));
  byId("verdict").hidden = !study.control;
  byId("measure").value = "uplink_bytes";
  chooseMeasure();
  copyButtons();
  byId("search").addEventListener("input", applyFilters);
  byId("verdict").addEventListener("change", applyFilters);
  byId("measure").addEventListener("change", chooseMeasure);
  byId("axis").addEventListener("change", drawCurves);
  byId("smooth").addEventListener("change", drawCurves);
  byId("theme").addEventListener("click", () => { setTheme(isDark() ? "light" : "dark"); drawAll(); });
  for (const id of ["run-variant", "run-order"]) byId(id).addEventListener("change", drawRun);
  byId("run-setting").addEventListener("change", chooseRun);
  const settings = [...new Set(study.runs.map((r) => r.setting))];
  fill(byId("run-setting"), settings.map((s) => [s, s]));
  drawCurves();
  if (settings.length) chooseRun();
  else byId("inside").hidden = true;
  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { resizeCharts(); drawRun(); }, 150);
  });
  let before = null;
  addEventListener("beforeprint", () => { before = isDark() ? "dark" : "light"; setTheme("light"); drawAll(); });
  addEventListener("afterprint", () => { setTheme(before); drawAll(); });
  document.documentElement.dataset.ready = "true";
}

start();
