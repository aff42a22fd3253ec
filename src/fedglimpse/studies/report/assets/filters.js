// Which methods and settings are shown; every section follows.

const shown = { variants: new Set(study.variants), settings: new Set(study.settings) };

function chips(kind, names, withDot, changed) {
  const group = byId(kind);
  for (const name of names) {
    const chip = el("button", { type: "button", class: "chip", "aria-pressed": "true", "data-value": name });
    if (withDot) chip.append(el("i", { class: "dot", style: `background:${colourOf(name)}` }));
    chip.append(name);
    chip.addEventListener("click", () => {
      toggle(shown[kind], name, names);
      for (const other of group.querySelectorAll(".chip"))
        other.setAttribute("aria-pressed", String(shown[kind].has(other.dataset.value)));
      changed();
    });
    group.append(chip);
  }
  if (names.length < 2) group.hidden = true;
}

// From "all", a click keeps only that one; the last one off brings all back.
function toggle(chosen, name, names) {
  if (chosen.size === names.length && names.length > 1) {
    chosen.clear();
    chosen.add(name);
  } else if (chosen.has(name)) {
    chosen.delete(name);
    if (!chosen.size) names.forEach((n) => chosen.add(n));
  } else chosen.add(name);
}

function applyFilters() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const verdict = byId("verdict").value;
  for (const node of document.querySelectorAll("main [data-variant]")) {
    const { variant, setting } = node.dataset;
    let keep = shown.variants.has(variant) && (!setting || shown.settings.has(setting));
    if (keep && node.closest("#results")) {
      const text = `${variant} ${setting}`.toLowerCase();
      keep = words.every((w) => text.includes(w)) && (!verdict || node.dataset.verdict === verdict);
    }
    node.classList.toggle("off", !keep);
  }
  for (const block of document.querySelectorAll("main div.setting")) {
    const rows = [...block.querySelectorAll("[data-variant]")];
    const some = rows.some((row) => !row.classList.contains("off"));
    block.classList.toggle("off", !shown.settings.has(block.dataset.setting) || !some);
  }
  const blocks = [...document.querySelectorAll("#results div.setting")];
  document.querySelector("#results .empty").hidden = blocks.some((b) => !b.classList.contains("off"));
}

function chooseMeasure() {
  const chosen = byId("measure").value;
  for (const group of document.querySelectorAll("#costs .bars"))
    group.classList.toggle("off", group.dataset.measure !== chosen);
}

function copyButtons() {
  for (const item of document.querySelectorAll(".commands li")) {
    const button = el("button", { type: "button" }, "Copy");
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(item.querySelector("code").textContent);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    item.append(button);
  }
}
