// The timeline. Data: report/packed.py. Only rows in sight are drawn; activities of less than a pixel are drawn once.

(() => {
  const data = JSON.parse(byId("timeline").textContent);
  const chart = byId("chart"), overview = byId("overview"), rowsBox = byId("rows");
  const AXIS = 28, MANY = 40, COMPUTE = 18, OTHER = 9, GROUP = 44, SMALL = 560;
  const SENDS = new Set([1, 2, 5]); // lanes: send, sync, relay

  // ---- data ----

  const decodeLane = ([lane, what, gaps, lengths, tails, bytes]) => {
    const count = what.length;
    const start = new Float64Array(count), sent = new Float64Array(count);
    let now = 0;
    for (let i = 0; i < count; i++) {
      start[i] = now + gaps[i];
      now = sent[i] = start[i] + lengths[i];
    }
    return { lane, count, what, start, sent, tails, bytes };
  };
  const tracks = data.tracks.map(([name, lanes]) => ({ name, lanes: lanes.map(decodeLane) }));
  const groups = data.groups.map(([name, members]) => ({ name, members, open: false }));
  const grouped = tracks.length > MANY;
  const jobs = [...new Set(data.what.map((row) => row[1]))];
  const view = { from: 0, to: data.ticks };
  let byJob = false, rows = [], hovered = null, colours = {};

  const seconds = (ticks) => (ticks / data.ticks) * data.step;
  const trim = (value) => String(Number(value.toPrecision(4)));
  const scaled = (value, units) => {
    for (const [size, unit] of units) if (Math.abs(value) >= size * 0.99995) return `${trim(value / size)} ${unit}`;
    const [size, unit] = units[units.length - 1];
    return `${trim(value / size)} ${unit}`;
  };
  const TIMES = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]];
  const SIZES = [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
  const formatTime = (ticks) => scaled(seconds(ticks), TIMES);

  // ---- colours ----

  const readColours = () => {
    const probe = document.createElement("span");
    document.body.append(probe);
    const read = (name) => {
      probe.style.color = `var(--${name})`;
      return getComputedStyle(probe).color;
    };
    colours = Object.fromEntries(["ink", "muted", "line", "soft", "card", "paper", "accent"].map((name) => [name, read(name)]));
    colours.kinds = data.kinds.map((kind) => read(kind.replace(" ", "-")));
    colours.jobs = jobs.map((_, index) => read(`job${index % 8}`));
    colours.dark = read("ink").match(/\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) > 384;
    probe.remove();
  };
  const colourOf = (what) => {
    const [kind, job] = data.what[what];
    return byJob ? colours.jobs[jobs.indexOf(job)] : colours.kinds[kind];
  };
  const drawKeys = () => {
    const kinds = [...new Set(data.what.map((row) => row[0]))].sort((a, b) => a - b);
    const used = byJob ? jobs : kinds.map((kind) => data.kinds[kind]);
    const shades = byJob ? colours.jobs : kinds.map((kind) => colours.kinds[kind]);
    byId("keys").replaceChildren(...used.slice(0, 12).map((name, index) => {
      const key = document.createElement("span"), swatch = document.createElement("i");
      key.className = "swatch";
      swatch.style.background = shades[index];
      key.append(swatch, name);
      return key;
    }));
  };

  // ---- rows ----

  const counted = (group) => `${group.members.length} ${group.name === "hosts" ? "hosts" : "devices"}`;
  const narrow = () => rowsBox.clientWidth < SMALL;
  const gutter = () => (narrow() ? 0 : 216);
  const trackHeight = (track) => track.lanes.reduce((sum, lane) => sum + (lane.lane === 0 ? COMPUTE : OTHER) + 1, 0) + 9 + (narrow() ? 18 : 0);
  const layRows = () => {
    rows = [];
    let y = AXIS + 4;
    const add = (row, height) => { rows.push({ ...row, y, height }); y += height; };
    for (const group of groups) {
      if (grouped && group.members.length > 1) add({ group }, GROUP + (narrow() ? 16 : 0));
      if (!grouped || group.members.length === 1 || group.open) for (const index of group.members) add({ track: tracks[index], inside: group.open }, trackHeight(tracks[index]));
    }
    const shown = Math.min(y + 4, 640);
    byId("height").style.height = `${Math.max(0, y + 4 - shown)}px`;
    chart.style.height = `${shown}px`;
  };
  const rowAt = (y) => {
    let low = 0, high = rows.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (rows[middle].y <= y) low = middle; else high = middle - 1;
    }
    return rows[low] && y >= rows[low].y && y < rows[low].y + rows[low].height ? rows[low] : null;
  };
  const lanesOf = (row) => {
    let y = row.y + 4 + (narrow() ? 18 : 0);
    return row.track.lanes.map((lane) => {
      const height = lane.lane === 0 ? COMPUTE : OTHER, place = { lane, y, height };
      y += height + 1;
      return place;
    });
  };

  // ---- shares: the part of some tracks that is busy, pixel by pixel ----

  const share = (members, sends, from, to, bins) => {
    const inner = new Float64Array(bins + 1), change = new Float64Array(bins + 2);
    const scale = bins / (to - from);
    for (const index of members) for (const lane of tracks[index].lanes) {
      if (sends ? !SENDS.has(lane.lane) : lane.lane !== 0) continue;
      for (let i = firstAt(lane, from); i < lane.count && lane.start[i] < to; i++) {
        const a = Math.max(0, (lane.start[i] - from) * scale), b = Math.min(bins, (lane.sent[i] - from) * scale);
        const p = Math.floor(a), q = Math.floor(b);
        if (p === q) { inner[p] += b - a; continue; }
        inner[p] += p + 1 - a;
        inner[q] += b - q;
        change[p + 1] += 1;
        change[q] -= 1;
      }
    }
    let running = 0;
    for (let x = 0; x < bins; x++) { running += change[x]; inner[x] = Math.min(1, (inner[x] + running) / members.length); }
    return inner;
  };
  const firstAt = (lane, tick) => { // the first activity that ends after the tick
    let low = 0, high = lane.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (lane.sent[middle] > tick) high = middle; else low = middle + 1;
    }
    return low;
  };
  const cache = new Map();
  const shareOf = (group, sends, bins) => {
    const key = `${groups.indexOf(group)} ${sends} ${view.from} ${view.to} ${bins}`;
    if (!cache.has(key)) {
      if (cache.size > 400) cache.clear();
      cache.set(key, share(group.members, sends, view.from, view.to, bins));
    }
    return cache.get(key);
  };

  // ---- drawing ----

  const sized = (canvas, width, height) => {
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, -apple-system, 'Segoe UI', sans-serif";
    context.textBaseline = "middle";
    return context;
  };
  const niceStep = (span, count) => {
    const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
  };
  const marks = (width, left) => { // round times in sight: [x, text]
    const span = seconds(view.to - view.from), step = niceStep(span, Math.max(2, (width - left) / 110));
    const [size, unit] = TIMES.find(([one]) => seconds(view.to) >= one) || TIMES[3];
    const digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9) + Math.round(Math.log10(size)));
    const found = [];
    for (let k = Math.ceil(seconds(view.from) / step - 1e-9); k * step <= seconds(view.to) * (1 + 1e-9); k++) {
      const x = Math.round(left + ((k * step - seconds(view.from)) / span) * (width - left)) + 0.5;
      found.push([x, `${((k * step) / size).toFixed(digits)} ${unit}`]);
    }
    return found;
  };
  const drawAxis = (context, width, left) => {
    context.clearRect(0, 0, width, AXIS);
    context.font = "12px system-ui, -apple-system, 'Segoe UI', sans-serif";
    context.fillStyle = colours.muted;
    for (const [x, text] of marks(width, left)) {
      const wide = context.measureText(text).width;
      context.fillText(text, Math.min(Math.max(left + 2, x - wide / 2), width - wide - 4), 12);
    }
  };
  const drawGrid = (context, width, height, left) => { // under all that is drawn already
    context.globalCompositeOperation = "destination-over";
    context.strokeStyle = colours.line;
    context.beginPath();
    for (const [x] of marks(width, left)) {
      context.moveTo(x, AXIS - 6);
      context.lineTo(x, height);
    }
    context.stroke();
    context.globalCompositeOperation = "source-over";
  };
  const clipped = (context, text, room) => {
    if (context.measureText(text).width <= room) return text;
    let low = 0, high = text.length;
    const form = (kept) => `${text.slice(0, kept >> 1)}…${text.slice(text.length - kept + (kept >> 1))}`;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (context.measureText(form(middle)).width <= room) low = middle; else high = middle - 1;
    }
    return low > 2 ? form(low) : "";
  };
  const drawLane = (context, { lane, y, height }, left, width) => {
    const scale = (width - left) / (view.to - view.from);
    let last = -1, shade = null;
    for (let i = firstAt(lane, view.from); i < lane.count && lane.start[i] < view.to; i++) {
      const a = Math.max(left, left + (lane.start[i] - view.from) * scale);
      const b = Math.min(width, left + (lane.sent[i] - view.from) * scale);
      const colour = colourOf(lane.what[i]);
      if (b <= last && colour === shade) continue;
      const wide = Math.max(1, b - a - (b - a > 4 ? 1 : 0));
      context.fillStyle = shade = colour;
      context.fillRect(a, y, wide, height);
      last = a + wide;
      if (lane.tails[i] && lane.tails[i] * scale > 1) {
        context.globalAlpha = 0.35;
        context.fillRect(b, y + height / 2 - 0.5, Math.min(width - b, lane.tails[i] * scale), 1);
        context.globalAlpha = 1;
      }
      if (wide > 26 && height >= COMPUTE) drawLabel(context, data.what[lane.what[i]][2], a + 5, y + height / 2 + 0.5, wide - 10);
    }
  };
  const drawLabel = (context, label, x, y, room) => {
    context.fillStyle = colours.dark ? "#0d1116" : "#ffffff";
    const turn = label.slice(label.lastIndexOf("#"));
    const text = [label, turn.startsWith("#") ? turn : ""].find((form) => context.measureText(form).width <= room);
    if (text) context.fillText(text, x, y);
  };
  const drawShare = (context, values, left, base, height, colour) => {
    context.fillStyle = colour;
    context.beginPath();
    context.moveTo(left, base);
    for (let x = 0; x < values.length - 1; x++) {
      context.lineTo(left + x, base - values[x] * height);
      context.lineTo(left + x + 1, base - values[x] * height);
    }
    context.lineTo(left + values.length - 1, base);
    context.fill();
  };
  const drawName = (context, text, x, y, room, strong) => {
    context.font = `${strong ? "600 " : ""}12px system-ui, -apple-system, 'Segoe UI', sans-serif`;
    context.fillStyle = strong ? colours.ink : colours.muted;
    context.fillText(clipped(context, text, room), x, y);
  };
  const drawRow = (context, row, left, width) => {
    const top = narrow() ? 18 : 0;
    if (row.group) {
      const bins = Math.max(1, Math.floor(width - left));
      const name = `${row.group.open ? "▾" : "▸"} ${row.group.name}`;
      drawName(context, name, 10, row.y + (top ? 10 : 16), (top ? width - 90 : left - 20), true);
      const number = counted(row.group);
      if (top) { context.fillStyle = colours.muted; context.font = "12px system-ui, sans-serif"; context.fillText(number, width - context.measureText(number).width - 10, row.y + 10); } else drawName(context, `    ${number}`, 10, row.y + 32, left - 20);
      drawShare(context, shareOf(row.group, false, bins), left, row.y + top + 24, 21, colours.kinds[0]);
      drawShare(context, shareOf(row.group, true, bins), left, row.y + top + 38, 12, colours.kinds[5]);
    } else {
      const indent = row.inside && grouped ? 22 : 10;
      drawName(context, row.track.name, indent, top ? row.y + 12 : row.y + 14, (top ? width - 20 : left - indent - 8), !row.inside);
      for (const place of lanesOf(row)) drawLane(context, place, left, width);
    }
    context.strokeStyle = colours.line;
    context.globalAlpha = 0.6;
    context.beginPath();
    context.moveTo(0, row.y + row.height - 0.5);
    context.lineTo(width, row.y + row.height - 0.5);
    context.stroke();
    context.globalAlpha = 1;
  };
  const outline = (context, left, width) => {
    if (!hovered) return;
    const { lane, index, y, height } = hovered, scale = (width - left) / (view.to - view.from);
    const a = Math.max(left, left + (lane.start[index] - view.from) * scale), b = Math.min(width, left + (lane.sent[index] - view.from) * scale);
    context.strokeStyle = colours.ink;
    context.lineWidth = 1.5;
    context.strokeRect(a - 0.5, y - 0.5, Math.max(2, b - a), height + 1);
    context.lineWidth = 1;
  };
  const draw = () => {
    const width = rowsBox.clientWidth, height = parseFloat(chart.style.height), left = gutter(), top = rowsBox.scrollTop;
    const context = sized(chart, width, height);
    const seen = rows.filter((row) => row.y + row.height > top + AXIS && row.y < top + height);
    context.save();
    context.translate(0, -top);
    for (const row of seen) drawRow(context, row, left, width);
    outline(context, left, width);
    context.restore();
    drawAxis(context, width, left);
    drawGrid(context, width, height, left);
    if (selection) {
      context.fillStyle = colours.accent;
      context.globalAlpha = 0.18;
      context.fillRect(Math.min(selection.from, selection.to), AXIS, Math.abs(selection.to - selection.from), height);
      context.globalAlpha = 1;
    }
    drawOverview();
  };
  let total = null;
  const drawOverview = () => {
    const width = overview.parentElement.clientWidth, height = 56, left = gutter(), bins = Math.max(1, Math.floor(width - left));
    const context = sized(overview, width, height);
    const everyone = tracks.map((_, index) => index);
    if (!total || total.bins !== bins) total = { bins, computing: share(everyone, false, 0, data.ticks, bins), sending: share(everyone, true, 0, data.ticks, bins) };
    if (left) {
      drawName(context, "all devices", 10, 16, left - 20, true);
      drawName(context, "computing, sending", 10, 34, left - 20);
    }
    context.fillStyle = colours.soft;
    context.fillRect(left, 0, bins, height);
    drawShare(context, total.computing, left, 36, 34, colours.kinds[0]);
    drawShare(context, total.sending, left, 55, 17, colours.kinds[5]);
    const a = left + (view.from / data.ticks) * bins, b = left + (view.to / data.ticks) * bins;
    context.fillStyle = colours.card;
    context.globalAlpha = 0.7;
    context.fillRect(left, 0, a - left, height);
    context.fillRect(b, 0, width - b, height);
    context.globalAlpha = 1;
    context.strokeStyle = colours.accent;
    context.lineWidth = 2;
    context.strokeRect(a + 1, 1, Math.max(2, b - a - 2), height - 2);
    context.lineWidth = 1;
  };
  let asked = false;
  const redraw = () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; draw(); });
  };

  // ---- moving about ----

  const SMALLEST = 20; // ticks
  const look = (from, to) => {
    const span = Math.min(Math.max(to - from, SMALLEST), data.ticks);
    const middle = (from + to) / 2;
    view.from = Math.min(Math.max(0, middle - span / 2), data.ticks - span);
    view.to = view.from + span;
    redraw();
  };
  const tickAt = (x) => view.from + ((x - gutter()) / (rowsBox.clientWidth - gutter())) * (view.to - view.from);
  const zoom = (factor, at = (view.from + view.to) / 2) => look(at - (at - view.from) * factor, at + (view.to - at) * factor);
  const move = (part) => { const by = (view.to - view.from) * part; look(view.from + by, view.to + by); };
  const whole = () => look(0, data.ticks);

  chart.addEventListener("wheel", (event) => {
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      move((event.deltaX || event.deltaY) / 1000);
    } else if (event.ctrlKey || event.metaKey || (document.activeElement === rowsBox && event.offsetX > gutter())) {
      event.preventDefault();
      zoom(Math.exp(event.deltaY * 0.0022), tickAt(event.offsetX));
    }
  }, { passive: false });

  let selection = null, drag = null;
  const fingers = new Map();
  chart.addEventListener("pointerdown", (event) => {
    rowsBox.focus({ preventScroll: true });
    chart.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, event.offsetX);
    drag = { x: event.offsetX, y: event.offsetY, from: view.from, to: view.to, top: rowsBox.scrollTop, moved: false };
    if (event.shiftKey) selection = { from: event.offsetX, to: event.offsetX };
  });
  chart.addEventListener("pointermove", (event) => {
    if (fingers.size === 2 && fingers.has(event.pointerId)) return pinch(event);
    if (!drag) return point(event);
    const dx = event.offsetX - drag.x, dy = event.offsetY - drag.y;
    drag.moved ||= Math.abs(dx) + Math.abs(dy) > 4;
    if (selection) { selection.to = event.offsetX; return redraw(); }
    if (!drag.moved) return;
    chart.classList.add("moving");
    tooltip.hide();
    const by = (-dx / (rowsBox.clientWidth - gutter())) * (drag.to - drag.from);
    if (event.pointerType === "mouse") rowsBox.scrollTop = drag.top - dy;
    look(drag.from + by, drag.to + by);
  });
  const pinch = (event) => {
    const before = [...fingers.values()];
    fingers.set(event.pointerId, event.offsetX);
    const after = [...fingers.values()];
    const factor = Math.abs(before[0] - before[1]) / Math.max(8, Math.abs(after[0] - after[1]));
    zoom(factor, tickAt((after[0] + after[1]) / 2));
    drag = null;
  };
  const release = (event) => {
    if (selection && Math.abs(selection.to - selection.from) > 4) look(...[tickAt(selection.from), tickAt(selection.to)].sort((a, b) => a - b));
    else if (drag && !drag.moved && event.type === "pointerup") press(event);
    fingers.delete(event.pointerId);
    selection = drag = null;
    chart.classList.remove("moving");
    redraw();
  };
  chart.addEventListener("pointerup", release);
  chart.addEventListener("pointercancel", release);
  chart.addEventListener("dblclick", whole);
  chart.addEventListener("pointerleave", () => { if (!drag) { hovered = null; tooltip.hide(); redraw(); } });
  const press = (event) => {
    const row = rowAt(event.offsetY + rowsBox.scrollTop);
    if (!row?.group || event.offsetY < AXIS) return point(event);
    row.group.open = !row.group.open;
    layRows();
  };

  const near = (lane, tick, slack) => {
    let i = firstAt(lane, tick);
    if (i < lane.count && lane.start[i] <= tick) return i;
    const ahead = i < lane.count ? lane.start[i] - tick : Infinity, behind = i > 0 ? tick - lane.sent[i - 1] : Infinity;
    if (Math.min(ahead, behind) > slack) return -1;
    return ahead < behind ? i : i - 1;
  };
  const point = (event) => {
    const y = event.offsetY + rowsBox.scrollTop, row = event.offsetY > AXIS ? rowAt(y) : null;
    const before = hovered;
    hovered = null;
    let text = "";
    if (row?.track && event.offsetX >= gutter()) {
      const place = lanesOf(row).find((one) => y >= one.y - 1 && y <= one.y + one.height + 1);
      const slack = (3 * (view.to - view.from)) / (rowsBox.clientWidth - gutter());
      const index = place ? near(place.lane, tickAt(event.offsetX), slack) : -1;
      if (index >= 0) { hovered = { ...place, index }; text = describe(row.track, place.lane, index); }
    } else if (row?.track) text = row.track.name;
    else if (row?.group) text = describeGroup(row.group, event.offsetX);
    if (text) tooltip.show(text, event.clientX, event.clientY); else tooltip.hide();
    if (before?.lane !== hovered?.lane || before?.index !== hovered?.index) redraw();
  };
  const describe = (track, lane, index) => {
    const [, job, label] = data.what[lane.what[index]], size = data.bytes[lane.bytes[index]];
    const start = lane.start[index], sent = lane.sent[index], end = sent + lane.tails[index];
    const lines = [label, `${track.name}, ${data.lanes[lane.lane]}`, `job ${job}`, `${formatTime(start)} to ${formatTime(end)}: ${formatTime(end - start)}`];
    if (size) lines.push(`${scaled(size, SIZES)}, the last byte leaves at ${formatTime(sent)}`);
    return lines.join("\n");
  };
  const describeGroup = (group, x) => {
    const bins = Math.max(1, Math.floor(rowsBox.clientWidth - gutter())), bin = Math.floor(x - gutter());
    const lines = [group.name, `${counted(group)}; a click ${group.open ? "folds them away" : "shows each"}`];
    if (bin >= 0 && bin < bins) lines.push(`at ${formatTime(tickAt(x))}: ${Math.round(100 * shareOf(group, false, bins)[bin])} % compute, ${Math.round(100 * shareOf(group, true, bins)[bin])} % send`);
    return lines.join("\n");
  };

  let brush = null;
  const overviewTick = (x) => Math.min(Math.max(0, ((x - gutter()) / (overview.clientWidth - gutter())) * data.ticks), data.ticks);
  overview.addEventListener("pointerdown", (event) => { overview.setPointerCapture(event.pointerId); brush = overviewTick(event.offsetX); });
  overview.addEventListener("pointermove", (event) => { if (brush !== null) look(...[brush, overviewTick(event.offsetX)].sort((a, b) => a - b)); });
  overview.addEventListener("pointerup", (event) => {
    const tick = overviewTick(event.offsetX);
    if (brush !== null && Math.abs(tick - brush) < data.ticks / 200) { const half = Math.min(view.to - view.from, data.ticks / 4) / 2; look(tick - half, tick + half); }
    brush = null;
  });
  overview.addEventListener("dblclick", whole);

  rowsBox.addEventListener("scroll", redraw, { passive: true });
  rowsBox.addEventListener("keydown", (event) => {
    const actions = { ArrowLeft: () => move(-0.1), ArrowRight: () => move(0.1), "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), 0: whole };
    if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  });
  byId("zoom-in").addEventListener("click", () => zoom(0.5));
  byId("zoom-out").addEventListener("click", () => zoom(2));
  byId("reset").addEventListener("click", whole);
  byId("colour").hidden = jobs.length < 2;
  byId("colour").addEventListener("click", () => {
    byJob = !byJob;
    byId("colour").setAttribute("aria-pressed", String(byJob));
    drawKeys();
    redraw();
  });

  const restart = () => { readColours(); drawKeys(); layRows(); redraw(); };
  onTheme.push(restart);
  new ResizeObserver(() => { layRows(); redraw(); }).observe(rowsBox);
  restart();
})();
