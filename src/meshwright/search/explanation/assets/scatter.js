// A scatter of plans: every point says what it is, by shape as well as by colour; the line joins those worth having.
const SHAPES = {
  best: ["#c4622d", (x, y) => `M${x},${y - 9}L${x + 9},${y}L${x},${y + 9}L${x - 9},${y}Z`],
  runner: ["#3b6ea8", (x, y) => `M${x - 6},${y - 6}h12v12h-12Z`],
  other: ["#6b6b6b", (x, y) => `M${x - 5},${y}a5,5 0 1,0 10,0a5,5 0 1,0 -10,0Z`],
};
function scatter(target, plot, tip) {
  const wide = 760, high = 330, left = 78, right = 24, top = 14, foot = 46, space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const put = (tag, facts, text) => {
    const e = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(facts)) e.setAttribute(name, value);
    if (text !== undefined) e.textContent = text;
    return svg.appendChild(e);
  };
  const range = (values) => {
    const low = Math.min(...values), high = Math.max(...values), pad = (high - low || Math.abs(high) || 1) * .1;
    return [Math.max(low - pad, 0), high + pad];
  };
  const [x0, x1] = range(plot.points.map((p) => p.x)), [y0, y1] = range(plot.points.map((p) => p.y));
  const x = (v) => left + (v - x0) / (x1 - x0) * (wide - left - right);
  const y = (v) => high - foot - (v - y0) / (y1 - y0) * (high - top - foot);
  const round = (v, span) => v.toLocaleString("en", { maximumFractionDigits: span < 1 ? 3 : span < 20 ? 1 : 0 });
  svg.setAttribute("viewBox", `0 0 ${wide} ${high}`); svg.setAttribute("class", "scatter"); svg.setAttribute("role", "img");
  for (let i = 0; i <= 4; i++) {
    const vx = x0 + (x1 - x0) * i / 4, vy = y0 + (y1 - y0) * i / 4;
    put("line", { x1: left, x2: wide - right, y1: y(vy), y2: y(vy), class: "grid" });
    put("text", { x: left - 8, y: y(vy) + 4, "text-anchor": "end" }, round(vy, y1 - y0));
    put("text", { x: x(vx), y: high - foot + 18, "text-anchor": "middle" }, round(vx, x1 - x0));
  }
  put("text", { x: (left + wide - right) / 2, y: high - 8, "text-anchor": "middle" }, plot.x);
  put("text", { transform: `translate(14 ${(high - foot) / 2}) rotate(-90)`, "text-anchor": "middle" }, plot.y);
  const front = plot.points.filter((p) => p.front).sort((a, b) => a.x - b.x);
  put("polyline", { points: front.map((p) => `${x(p.x)},${y(p.y)}`).join(" "), class: "front" });
  for (const p of plot.points) {
    const [colour, shape] = SHAPES[p.kind];
    const mark = put("path", { d: shape(x(p.x), y(p.y)), fill: colour, class: "point", tabindex: 0 });
    const title = document.createElementNS(space, "title"); title.textContent = p.label; mark.append(title);
    mark.addEventListener("mousemove", (e) => {
      tip.style.display = "block"; tip.textContent = p.label;
      tip.style.left = e.clientX + 14 + "px"; tip.style.top = e.clientY + 14 + "px";
    });
    mark.addEventListener("mouseleave", () => { tip.style.display = "none"; });
  }
  target.append(svg);
}
