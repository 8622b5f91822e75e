"use strict";
// Draws the charts of the report. Runs differ by mark and by dash, test from training by hollow marks and short dashes,
// phases by their order: colour only helps.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const COLOURS = { light: ["#0b62c4", "#b3440a", "#157a3c", "#8a2fb0", "#8a6500", "#b01b52"], dark: ["#6db3ff", "#ff9f66", "#6fdc94", "#d79bf5", "#f0c84a", "#ff85ae"] };
  const PHASES = { light: ["#e0a100", "#2f8f57", "#3572c6", "#9aa1aa", "#b3440a", "#4a4f57"], dark: ["#d9a520", "#57b87f", "#6ca0ec", "#767d86", "#ff9f66", "#c3c8cf"] };
  const DASHES = [[], [12, 3], [12, 3, 3, 3], [20, 6], [20, 4, 3, 4, 3, 4], [28, 3]];
  const SHORT = [[4, 4], [2, 3], [6, 3, 2, 3], [4, 8], [2, 7], [6, 3, 2, 3, 2, 3]];
  const SHAPES = [["circle", 0], ["rect", 0], ["triangle", 0], ["rectRot", 0], ["triangle", 180], ["triangle", 90]]; // and degrees
  const MARKS = 12; // about so many on a line
  const MOMENTS = {
    start: ["triangle", 6], restart: ["triangle", 9], resumed: ["triangle", 7], checkpoint: ["rect", 4], "checkpoint failed": ["crossRot", 8],
    preempted: ["rectRot", 9], "rank lost": ["crossRot", 7], "rank joined": ["cross", 7], nonfinite: ["star", 9], "corrupt checkpoint": ["crossRot", 9], done: ["circle", 7],
  };
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const drawn = [];

  function line(chart, item, number, theme, panel) {
    const timeline = chart.kind === "timeline";
    const colour = COLOURS[theme][item.number % 6];
    const round = Math.floor(item.number / 6); // from the seventh run on, marks come with another dash
    const dash = (item.dashed ? SHORT : DASHES)[(item.number + (timeline ? 0 : round)) % 6];
    const [shape, turned] = SHAPES[item.number % 6];
    // Marks of lines that run together stand beside one another.
    const every = Math.max(1, Math.round(item.points.length / MARKS));
    const first = Math.floor((every * number) / chart.lines.length);
    const mark = (point, index) => (timeline ? (MOMENTS[point[2]] || [false, 0]) : [shape, index % every === first ? 4.5 : 0]);
    return {
      label: item.label, data: item.points.map(([x, y]) => ({ x, y })), borderColor: colour, backgroundColor: item.dashed ? panel : colour,
      borderDash: dash, borderWidth: timeline ? 1.5 + 1.5 * round : item.dashed ? 1.5 : 2, tension: 0, stepped: chart.stepped, rotation: timeline ? 0 : turned,
      pointStyle: item.points.map((p, i) => mark(p, i)[0]), pointRadius: item.points.map((p, i) => mark(p, i)[1]), pointBorderColor: colour, pointBorderWidth: 1.5,
      moments: item.points.map((p) => [p[2] || "", p[3] || ""]),
    };
  }

  function settings(chart) {
    const theme = dark.matches ? "dark" : "light";
    const style = getComputedStyle(document.documentElement);
    const [ink, soft, rule, panel] = ["--ink", "--soft", "--rule", "--panel"].map((name) => style.getPropertyValue(name).trim());
    const stack = chart.kind === "stack";
    const axis = (text) => ({ title: { display: Boolean(text), text, color: soft }, ticks: { color: soft, maxRotation: 0 }, grid: { color: rule }, border: { color: soft } });
    const [x, y] = [axis(chart.x), axis(chart.y)];
    if (!stack) { x.type = "linear"; }
    x.beginAtZero = stack || chart.kind === "timeline";
    y.beginAtZero = Boolean(chart.from_zero);
    if (chart.log) { y.type = "logarithmic"; y.beginAtZero = false; }
    x.stacked = y.stacked = stack;
    const labels = stack ? chart.lines[0].points.map(([name]) => name) : undefined;
    const datasets = chart.lines.map((item, number) => (stack
      ? { label: item.label, data: item.points.map(([, value]) => value), backgroundColor: PHASES[theme][item.number], borderColor: panel, borderWidth: 1, maxBarThickness: 30 }
      : line(chart, item, number, theme, panel)));
    return {
      type: stack ? "bar" : "line", data: { labels, datasets },
      options: {
        animation: false, responsive: true, maintainAspectRatio: false, indexAxis: stack ? "y" : "x", color: ink,
        font: { family: getComputedStyle(document.body).fontFamily }, interaction: { mode: stack ? "index" : "nearest", axis: stack ? "y" : "xy", intersect: false },
        scales: { x, y },
        plugins: {
          legend: { position: "bottom", labels: { color: ink, boxWidth: 34, boxHeight: 8, usePointStyle: chart.kind === "line" } },
          tooltip: { callbacks: { afterLabel: (at) => (at.dataset.moments ? at.dataset.moments[at.dataIndex].filter(Boolean) : []) } },
        },
      },
    };
  }

  function draw() {
    drawn.splice(0).forEach((chart) => chart.destroy());
    charts.forEach((chart, number) => drawn.push(new Chart(document.getElementById(`chart-${number}`), settings(chart))));
    document.documentElement.dataset.drawn = String(drawn.length);
    document.documentElement.dataset.scheme = dark.matches ? "dark" : "light";
  }

  dark.addEventListener("change", draw);
  draw();
})();
