// Reads values out under the pointer or by arrow keys, and shows a range of steps in all charts.
(() => {
  const charts = [...document.querySelectorAll("figure[data-last]")].map((figure) => ({
    figure,
    plot: figure.querySelector(".plot"),
    svg: figure.querySelector("svg"),
    ticks: figure.querySelector(".x"),
    values: figure.querySelector(".y"),
    labels: [...figure.querySelector(".y").children],
    low: Number(figure.dataset.low),
    high: Number(figure.dataset.high),
    isLog: "log" in figure.dataset,
    last: Number(figure.dataset.last),
    lines: JSON.parse(figure.querySelector("script").textContent),
  }));
  if (!charts.length) return;
  const whole = charts[0].last;
  let from = 0, to = whole;
  const make = (parent, name, kind = "div") => {
    const made = document.createElement(kind);
    made.className = name;
    made.hidden = true;
    parent.append(made);
    return made;
  };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle + 1; else high = middle;
    }
    return low && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
  };
  const show = (step, only) => {
    for (const chart of charts) {
      const place = (step - from) / (to - from);
      chart.cross.hidden = chart.tip.hidden = step === null;
      if (step === null) continue;
      chart.cross.style.left = `${place * 100}%`;
      chart.tip.hidden = chart !== only;
      if (chart !== only) continue;
      const title = document.createElement("b");
      title.textContent = `step ${Math.round(step).toLocaleString("en")}`;
      const rows = chart.lines.map((line) => {
        const row = document.createElement("div"), swatch = document.createElement("i");
        swatch.className = `swatch ${line.style}`;
        row.append(swatch, `${line.label} ${line.y[nearest(line.x, step)]}`);
        return row;
      });
      chart.tip.replaceChildren(title, ...rows);
      chart.tip.style.left = place > 0.5 ? "" : `calc(${place * 100}% + 10px)`;
      chart.tip.style.right = place > 0.5 ? `calc(${100 - place * 100}% + 10px)` : "";
    }
  };
  const round = (every) => {
    const power = 10 ** Math.floor(Math.log10(every));
    return [1, 2, 5, 10].find((digit) => digit * power >= every * 0.999) * power;
  };
  const fit = (chart) => {  // the range of values that the curves have in the range of steps
    if (from === 0 && to === whole) {
      chart.values.replaceChildren(...chart.labels);
      return [chart.low, chart.high];
    }
    const of = (y) => (chart.isLog ? Math.log10(y) : y);
    const seen = chart.lines.flatMap((line) => line.y.filter((_, i) => line.x[i] >= from && line.x[i] <= to).map(of));
    if (!seen.length) return [chart.low, chart.high];
    const [least, most] = [Math.min(...seen), Math.max(...seen)];
    const pad = (most - least) * 0.3 || Math.abs(most) * 0.1 || 1;
    const [low, high] = [Math.max(chart.low, least - pad), Math.min(chart.high, most + pad)];
    const step = round((high - low) / 4);
    chart.values.replaceChildren();
    for (let at = Math.ceil(low / step) * step; at <= high; at += step) {
      const label = document.createElement("span");
      label.style.top = `${(high - at) / (high - low) * 100}%`;
      label.textContent = String(Number((chart.isLog ? 10 ** at : at).toPrecision(4)));
      chart.values.append(label);
    }
    return [low, high];
  };
  const zoom = (a, b) => {
    [from, to] = [Math.max(0, a), Math.min(whole, b)];
    const step = Math.max(1, round((to - from) / 6));
    for (const chart of charts) {
      const [low, high] = fit(chart);
      const scale = 1000 / whole, tall = 100 / (chart.high - chart.low);
      const top = (chart.high - high) * tall;
      chart.svg.setAttribute("viewBox", `${from * scale} ${top} ${(to - from) * scale} ${(high - low) * tall}`);
      chart.figure.classList.toggle("zoomed", from > 0 || to < whole);
      chart.ticks.replaceChildren();
      for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
        const tick = document.createElement("span");
        tick.style.left = `${(at - from) / (to - from) * 100}%`;
        tick.textContent = at.toLocaleString("en");
        chart.ticks.append(tick);
      }
    }
    back.hidden = from === 0 && to === whole;
    show(null);
  };
  const back = make(document.getElementById("curves-title"), "", "button");
  back.textContent = "whole run";
  back.onclick = () => zoom(0, whole);
  for (const chart of charts) {
    const plot = chart.plot;
    chart.cross = make(plot, "cross");
    chart.tip = make(plot, "tip", "output");
    const range = make(plot, "range");
    let start = null, key = null;
    const at = (event) => {
      const box = plot.getBoundingClientRect();
      return from + Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * (to - from);
    };
    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", `${chart.figure.querySelector("b").textContent}: arrow keys read it`);
    plot.onkeydown = (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1, PageUp: 10, PageDown: -10 }[event.key];
      if (event.key === "Escape") return show(null);
      if (!by) return;
      event.preventDefault();
      key = Math.min(to, Math.max(from, (key ?? from) + by * Math.max(1, (to - from) / 100)));
      show(key, chart);
    };
    plot.onblur = () => show(null);
    plot.onpointermove = (event) => {
      show(at(event), chart);
      if (start === null) return;
      const [a, b] = [Math.min(start, at(event)), Math.max(start, at(event))];
      range.style.left = `${(a - from) / (to - from) * 100}%`;
      range.style.width = `${(b - a) / (to - from) * 100}%`;
    };
    plot.onpointerleave = () => start === null && show(null);
    plot.onpointerdown = (event) => {
      if (event.pointerType !== "mouse") return;
      start = at(event);
      plot.setPointerCapture(event.pointerId);
      range.style.width = 0;
      range.hidden = false;
    };
    plot.onpointerup = (event) => {
      if (start === null) return;
      const [a, b] = [Math.min(start, at(event)), Math.max(start, at(event))];
      start = null;
      range.hidden = true;
      if (b - a > (to - from) / 100) zoom(a, b);
    };
    plot.ondblclick = () => zoom(0, whole);
  }
})();
