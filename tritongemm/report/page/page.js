"use strict";

const figures = JSON.parse(document.getElementById("drawn").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const small = window.matchMedia("(max-width: 700px)");

// The colours of text and grid are those of the style sheet, which knows light and dark.
function template() {
  const style = getComputedStyle(document.documentElement);
  const [ground, ink, line] = ["--ground", "--ink", "--line"].map((name) => style.getPropertyValue(name).trim());
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, tickcolor: line, automargin: true };
  return {
    layout: {
      paper_bgcolor: ground,
      plot_bgcolor: ground,
      font: { color: ink, size: 12 },
      xaxis: axis,
      yaxis: axis,
      hoverlabel: { bgcolor: ground, bordercolor: line, font: { color: ink }, namelength: -1 },
      legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom" }, // the bar of buttons is above
      margin: { l: 60, r: 20, t: 30, b: 50 },
    },
  };
}

const theme = () => document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");

// On a small screen a row's name has two lines, its size and its kind, and what does not fit is left out.
function narrowed({ data, layout }) {
  const traces = data.map((trace) =>
    trace.type === "heatmap"
      ? { ...trace, colorbar: { ...trace.colorbar, thickness: 10 }, texttemplate: trace.x.length > 6 ? "" : trace.texttemplate }
      : trace,
  );
  if ((layout.yaxis || {}).type !== "category") return { data: traces, layout };
  const names = [...new Set(data.flatMap((trace) => trace.y))];
  const short = (text) => (text.length > 16 ? `${text.slice(0, 15)}…` : text);
  const lines = names.map((name) => name.replace("_", "\n").split("\n").map(short).join("<br>"));
  const yaxis = { ...layout.yaxis, tickmode: "array", tickvals: names, ticktext: lines, tickfont: { size: 9 } };
  return { data: traces, layout: { ...layout, yaxis } };
}

async function draw() {
  const themed = template();
  for (const element of document.querySelectorAll("[data-figure]")) {
    const figure = figures[element.dataset.figure];
    const { data, layout } = small.matches ? narrowed(figure) : figure;
    const options = { displaylogo: false, responsive: true };
    await Plotly.react(element, data, { ...layout, template: themed }, options);
  }
  document.documentElement.dataset.drawn = theme();
}

function turn() {
  document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
  draw();
}

// Numbers are sorted as numbers; those that are not there stay behind, whichever way.
function compare(one, other, down) {
  if (one.dataset.order === undefined || other.dataset.order === undefined) {
    return (down ? -1 : 1) * one.textContent.localeCompare(other.textContent, "en", { numeric: true });
  }
  const [a, b] = [one, other].map((cell) => (cell.dataset.order === "inf" ? NaN : Number(cell.dataset.order)));
  if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
  return down ? b - a : a - b;
}

function sort(head) {
  const table = head.closest("table");
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => compare(a.cells[head.cellIndex], b.cells[head.cellIndex], down));
  table.tBodies[0].append(...rows);
}

function filter(input) {
  const words = input.value.toLowerCase().split(" ");
  for (const row of document.getElementById(input.dataset.filters).tBodies[0].rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
  }
}

for (const button of document.querySelectorAll("table[data-sortable] th button")) {
  button.addEventListener("click", () => sort(button.parentElement));
}
for (const input of document.querySelectorAll("input[data-filters]")) {
  input.addEventListener("input", () => filter(input));
}
document.getElementById("theme").addEventListener("click", turn);
dark.addEventListener("change", draw);
small.addEventListener("change", draw);
draw();
