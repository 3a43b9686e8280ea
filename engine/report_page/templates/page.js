"use strict";
// Shows the values of each chart at the step under the pointer, or at the one that the arrow keys choose.
for (const figure of document.querySelectorAll("figure.chart")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot");
  const cursor = plot.querySelector(".cursor");
  const stepOutput = figure.querySelector(".step");
  const outputs = [...figure.querySelectorAll(".value")];
  const atRest = [stepOutput.textContent, ...outputs.map((output) => output.textContent)];
  const steps = [...new Set(data.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  let chosen = steps.length - 1;

  const nearest = (xs, x) => {
    let low = 0;
    let high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle + 1;
      else high = middle;
    }
    return low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low;
  };
  const show = (step) => {
    cursor.setAttribute("x1", `${(100 * step) / data.last}%`);
    cursor.setAttribute("x2", `${(100 * step) / data.last}%`);
    cursor.classList.add("on");
    stepOutput.textContent = step.toLocaleString("en-US");
    data.lines.forEach((line, index) => {
      const value = line.x.length && step <= line.x[line.x.length - 1] ? line.y[nearest(line.x, step)] : null;
      outputs[index].textContent = value === null ? "–" : String(value);
    });
  };
  const rest = () => {
    cursor.classList.remove("on");
    [stepOutput, ...outputs].forEach((output, index) => (output.textContent = atRest[index]));
  };
  if (!steps.length) continue;
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    chosen = nearest(steps, ((event.clientX - box.left) / box.width) * data.last);
    show(steps[chosen]);
  });
  plot.addEventListener("pointerleave", rest);
  plot.addEventListener("blur", rest);
  plot.addEventListener("keydown", (event) => {
    const far = Math.max(1, Math.round(steps.length / 20));
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageDown: -far, PageUp: far, Home: -steps.length, End: steps.length };
    if (!(event.key in moves)) return;
    event.preventDefault();
    chosen = Math.min(steps.length - 1, Math.max(0, chosen + moves[event.key]));
    show(steps[chosen]);
  });
}
