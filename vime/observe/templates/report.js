"use strict";
for (const chart of document.querySelectorAll("svg.chart")) {
  const { x, s } = JSON.parse(chart.dataset.hover);
  const cross = chart.querySelector(".cross");
  const tip = document.getElementById("tip");
  chart.addEventListener("mousemove", (event) => {
    const box = chart.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
    const [step, px] = x.reduce((best, next) => (Math.abs(next[1] - at) < Math.abs(best[1] - at) ? next : best));
    for (const [name, value] of [["x1", px], ["x2", px], ["y1", chart.dataset.top], ["y2", chart.dataset.bottom]]) cross.setAttribute(name, value);
    cross.setAttribute("visibility", "visible");
    const line = (colour, name, value) => {
      const row = document.createElement("div"), label = document.createElement("span");
      if (colour) { const mark = document.createElement("i"); mark.className = colour; label.append(mark); }
      label.append(name); row.append(label, value); return row;
    };
    tip.replaceChildren(line("", "step", String(step)), ...s.map((one) => line(one.c, one.n, one.v[step] ?? "-")));
    tip.hidden = false;
    const left = event.clientX + 16 + tip.offsetWidth > innerWidth ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16;
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8)}px`;
  });
  chart.addEventListener("mouseleave", () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); });
}
