"use strict";
(() => {
  const svgElement = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  // Each writes a value with this many significant digits.
  const number = (x, n = 4) => (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e4) || x === 0 ? +x.toPrecision(n) + ""
    : x.toExponential(n - 1);
  const inUnit = (units) => (x, n = 3) => {
    const [name, size] = units.findLast(([, size]) => Math.abs(x) >= size) || units[0];
    return +(x / size).toPrecision(n) + name;
  };
  const units = {
    count: [["", 1], ["k", 1e3], ["M", 1e6], ["G", 1e9]],
    bytes: [" B", " KiB", " MiB", " GiB", " TiB"].map((name, n) => [name, 1024 ** n]),
    time: [[" s", 1], [" min", 60], [" h", 3600], [" d", 86400]],
  };
  const duration = inUnit(units.time), count = inUnit(units.count);
  const formats = {
    number, percent: (x, n) => number(x, n) + " %", rate: count, bytes: inUnit(units.bytes), time: duration,
    step: (x, n) => count(Math.round(x), n), samples: (x, n) => count(Math.round(x), n),
  };
  // Round values inside a range, at most `most` of them, as [value, label]; bytes and times are round in their unit.
  const roundTicks = ([low, high], format, most) => {
    const unit = units[format]?.findLast(([, size]) => high >= size)?.[1] ?? 1;
    const least = (high - low) / most / unit, power = 10 ** Math.floor(Math.log10(least));
    const step = Math.max([1, 2, 5, 10].find((m) => m * power >= least) * power * unit, format in { step: 0, samples: 0 } ? 1 : 0);
    const digits = Math.ceil(Math.log10(Math.max(Math.abs(low), Math.abs(high)) / step)) + 1;
    const ticks = [];
    for (let n = Math.ceil(low / step); n * step <= high; n++) {
      ticks.push([n * step, formats[format](n * step, Math.min(Math.max(digits, 3), 15))]);
    }
    return ticks;
  };
  const state = { axis: "step", smooth: 0, hidden: new Set() };

  const charts = [...document.querySelectorAll("figure.chart")].map((figure) => {
    const svg = figure.querySelector("svg"), data = JSON.parse(figure.querySelector("script").textContent);
    const [left, top, right, bottom] = data.rect;
    const isTick = (line) => { const { width, height } = line.getBBox(); return width + height < 10; };
    const chart = {
      svg, data, left, top, right, bottom, zoom: null,
      lines: [...svg.querySelectorAll("polyline.s")], labels: [...svg.querySelectorAll("text.label")],
      marks: [...svg.querySelectorAll(".mark")],
      // The ticks and the grid, as long as nothing has moved.
      mesh: [...svg.querySelectorAll(":scope > :is(text:not(.label), line)"),
        ...[...svg.querySelectorAll(":scope > polyline:not(.s)")].filter(isTick)],
      x: data.x, y: data.y,
    };
    chart.cursor = svg.appendChild(svgElement("line", { class: "cursor hidden", y1: top, y2: bottom }));
    chart.band = svg.appendChild(svgElement("rect", { class: "band hidden", y: top, height: bottom - top }));
    return chart;
  });

  const isShown = (item) => !state.hidden.has(item.run);
  const px = (c, x) => c.left + (x - c.x[0]) / (c.x[1] - c.x[0]) * (c.right - c.left);
  const py = (c, y) => c.bottom - (y - c.y[0]) / (c.y[1] - c.y[0]) * (c.bottom - c.top);
  const smoothed = (values) => {
    let mean = 0, weight = 0;
    return values.map((value) => {
      mean = state.smooth * mean + (1 - state.smooth) * value;
      weight = state.smooth * weight + (1 - state.smooth);
      return mean / weight;
    });
  };
  const range = (values, otherwise) => {
    let low = Infinity, high = -Infinity;
    for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
    return low <= high ? [low, high] : otherwise;
  };

  function draw(c) {
    const shown = c.data.series.filter(isShown);
    c.x = c.zoom || range(shown.flatMap((s) => s[state.axis]), [0, 1]);
    if (c.x[0] === c.x[1]) c.x = [c.x[0], c.x[0] + 1];
    const inside = (x) => x >= c.x[0] && x <= c.x[1];
    const visible = shown.flatMap((s) => s.value.filter((_, i) => inside(s[state.axis][i])));
    const [low, high] = range(visible, c.y);
    const margin = high > low ? 0.04 * (high - low) : Math.max(Math.abs(high) * 0.1, 1e-12);
    c.y = [c.data.zero ? 0 : low - margin, high + margin];
    const ends = [];
    c.data.series.forEach((series, n) => {
      const line = c.lines[n], label = c.labels[n], show = isShown(series), xs = series[state.axis];
      const points = (values) => values.map((v, i) => [xs[i], v]).filter(([x]) => inside(x))
        .map(([x, v]) => px(c, x).toFixed(1) + "," + py(c, v).toFixed(1)).join(" ");
      line.classList.toggle("hidden", !show);
      line.setAttribute("points", points(series.value));
      const smooth = series.smooth && state.smooth > 0, values = smooth ? smoothed(series.value) : series.value;
      line.classList.toggle("raw", smooth);
      if (smooth && !line.over) line.over = line.after(svgElement("polyline", { fill: "none" })) || line.nextSibling;
      if (line.over) {
        line.over.setAttribute("class", smooth && show ? "smooth " + line.getAttribute("class").match(/\bc\d+/)[0] : "hidden");
        if (smooth) line.over.setAttribute("points", points(values));
      }
      const last = xs.findLastIndex(inside);
      label.classList.toggle("hidden", !show || last < 0);
      if (show && last >= 0) ends.push([py(c, values[last]), label]);
    });
    ends.sort((a, b) => a[0] - b[0]);
    let next = c.top;
    for (const end of ends) { end[0] = Math.max(end[0], next); next = end[0] + 28; }
    let limit = c.bottom;
    for (const end of ends.reverse()) { end[0] = Math.min(end[0], limit); limit = end[0] - 28; end[1].setAttribute("y", end[0]); }
    c.data.marks.forEach((mark, n) => {
      const x = mark[state.axis];
      c.marks[n].classList.toggle("hidden", !isShown(mark) || !inside(x));
      c.marks[n].setAttribute("transform", `translate(${px(c, x).toFixed(1)},0)`);
    });
    c.mesh.forEach((element) => element.remove());
    const text = (attributes, label) => {
      const element = svgElement("text", attributes);
      element.textContent = label;
      return element;
    };
    c.mesh = roundTicks(c.x, state.axis, 5).flatMap(([value, label]) => {
      const x = px(c, value);
      return [text({ x, y: c.bottom + 10, dy: "0.76em", "text-anchor": "middle" }, label),
        svgElement("line", { x1: x, x2: x, y1: c.bottom, y2: c.bottom + 5 })];
    }).concat(roundTicks(c.y, c.data.unit, 5).flatMap(([value, label]) => {
      const y = py(c, value);
      return [text({ x: c.left - 10, y, dy: "0.5ex", "text-anchor": "end" }, label),
        svgElement("line", { x1: c.left - 5, x2: c.right, y1: y, y2: y })];
    }));
    c.svg.prepend(...c.mesh);
  }
  const drawAll = () => charts.forEach(draw);

  const tip = document.getElementById("tip");
  function point(c, event) {
    const box = c.svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * c.svg.viewBox.baseVal.width;
    return Math.min(Math.max(x, c.left), c.right);
  }
  function hover(c, event) {
    const at = point(c, event), rows = [];
    let place = null;
    for (const series of c.data.series.filter(isShown)) {
      if (series.holds) {
        const inForce = Math.max(0, series[state.axis].findLastIndex((x) => px(c, x) <= at));
        rows.push(`${series.label}  ${formats[c.data.unit](series.value[inForce])}`);
        continue;
      }
      let nearest = -1, distance = Infinity;
      series[state.axis].forEach((x, i) => {
        const away = Math.abs(px(c, x) - at);
        if (away < distance) [nearest, distance] = [i, away];
      });
      if (nearest < 0 || distance > (c.right - c.left) / 4) continue;
      const value = series.value[nearest];
      rows.push(`${series.label || "value"}  ${formats[c.data.unit](value)}  at step ${series.step[nearest]}`);
      if (!place || distance < place[0]) place = [distance, series, nearest];
    }
    for (const mark of c.data.marks.filter(isShown)) if (Math.abs(px(c, mark[state.axis]) - at) < 12) rows.push(mark.text);
    if (!place) return leave(c);
    const [, series, i] = place, x = px(c, series[state.axis][i]);
    c.cursor.setAttribute("x1", x);
    c.cursor.setAttribute("x2", x);
    c.cursor.classList.remove("hidden");
    tip.textContent = `step ${series.step[i]} · ${series.samples[i]} samples · ${duration(series.time[i])}\n` + rows.join("\n");
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4)) + "px";
    tip.style.top = (event.clientY + 18 + height < innerHeight ? event.clientY + 18 : event.clientY - height - 12) + "px";
  }
  function leave(c) {
    tip.hidden = true;
    c.cursor.classList.add("hidden");
  }
  for (const c of charts) {
    let from = null;
    const invert = (x) => c.x[0] + (x - c.left) / (c.right - c.left) * (c.x[1] - c.x[0]);
    c.svg.addEventListener("pointerdown", (event) => { from = point(c, event); });
    c.svg.addEventListener("pointermove", (event) => {
      hover(c, event);
      if (from === null || !event.buttons) return;
      const to = point(c, event);
      c.band.setAttribute("x", Math.min(from, to));
      c.band.setAttribute("width", Math.abs(to - from));
      c.band.classList.toggle("hidden", Math.abs(to - from) < 10);
    });
    const end = (event, keep) => {
      const to = from === null ? null : point(c, event), start = from;
      from = null;
      c.band.classList.add("hidden");
      if (!keep || to === null || Math.abs(to - start) < 10) return;
      c.zoom = [invert(Math.min(start, to)), invert(Math.max(start, to))];
      draw(c);
    };
    c.svg.addEventListener("pointerup", (event) => end(event, true));
    c.svg.addEventListener("pointercancel", (event) => end(event, false));
    c.svg.addEventListener("pointerleave", (event) => { end(event, false); leave(c); });
    c.svg.addEventListener("dblclick", () => { c.zoom = null; draw(c); });
  }

  const controls = document.querySelector(".controls");
  controls.addEventListener("submit", (event) => event.preventDefault());
  controls.addEventListener("input", (event) => {
    if (event.target.name === "smooth") state.smooth = +event.target.value;
    if (event.target.name === "axis") {
      state.axis = event.target.value;
      for (const c of charts) c.zoom = null;
    }
    drawAll();
  });
  for (const box of document.querySelectorAll("input[data-run]")) box.addEventListener("input", () => {
    state.hidden[box.checked ? "delete" : "add"](+box.dataset.run);
    drawAll();
  });

  // A click opens a box over the whole width; a click on an open one that others are hidden beside closes it again.
  for (const icicle of document.querySelectorAll(".icicle")) icicle.addEventListener("click", (event) => {
    const box = event.target.closest("button")?.parentElement;
    if (!box) return;
    const wasOpen = box.parentElement.classList.contains("into");
    for (const inner of box.querySelectorAll(".into")) inner.classList.remove("into");
    for (let at = box; at !== icicle; at = at.parentElement) {
      if (!at.classList.contains("box")) continue;
      const row = at.parentElement;
      for (const sibling of row.children) sibling.classList.toggle("open", sibling === at);
      row.classList.toggle("into", row !== icicle && !(wasOpen && at === box));
    }
  });

  addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details")) part.open = true; });
})();
