"use strict";
// Colours of methods and classes, and the light or dark theme.

const study = JSON.parse(document.getElementById("study").textContent);
const byId = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const PALETTE = [
  "#3f74bd", "#d2752c", "#3d9a66", "#bb4766", "#7d62b6",
  "#2a9da3", "#a08a1f", "#c163a8", "#8b6c50", "#5b8f2f",
];
const CONTROL_COLOUR = "#868c94";
const DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4]];

// The control is grey, so that everything else is seen against it.
const styles = new Map();
study.variants.forEach((name) => {
  const i = [...styles.keys()].filter((other) => other !== study.control).length;
  const own = { colour: PALETTE[i % PALETTE.length], dash: DASHES[Math.floor(i / PALETTE.length) % 4] };
  styles.set(name, name === study.control ? { colour: CONTROL_COLOUR, dash: [] } : own);
});
const colourOf = (variant) => styles.get(variant).colour;

const CLASS_COLOURS = [
  "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1",
  "#edc948", "#76b7b2", "#9c755f", "#ff9da7", "#8c8c8c",
];
const classColour = (c) =>
  c < CLASS_COLOURS.length ? CLASS_COLOURS[c] : `hsl(${(c * 137.5) % 360} 45% 58%)`;

const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "Light" : "Dark";
}

function paintNames() {
  for (const dot of document.querySelectorAll("[data-dot]")) dot.style.background = colourOf(dot.dataset.dot);
  for (const fill of document.querySelectorAll("[data-fill]")) {
    const colour = colourOf(fill.dataset.fill);
    if (fill.classList.contains("exact")) fill.style.background = colour;
    else fill.style.setProperty("--faint", colour);
  }
}

const smallCount = (value) => value.toLocaleString("en").replaceAll(",", " ");

function amount(value, unit) {
  if (!unit) return smallCount(Math.round(value));
  const power = value >= 1 ? Math.min(Math.floor(Math.log10(value) / 3), 6) : 0;
  const scaled = value / 1000 ** power;
  const digits = scaled >= 100 || power === 0 ? 0 : scaled >= 10 ? 1 : 2;
  return `${scaled.toFixed(digits)} ${["", "k", "M", "G", "T", "P", "E"][power]}${unit}`;
}
