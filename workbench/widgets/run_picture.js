// A run on its own clock: what is done is solid, what was asked for and is not done yet is pale; the line is where the host is.
START.run = trace => ({now: 0, split: -1, spans: [], call: 0, marks: [], moved: trace.ways.map(() => 0), experts: [], hazards: []});
FOLD.run = (s, [, clock, split, spans, marks, moved, experts, hazards]) => {
  if (split !== s.split || (experts.length && s.experts.length && experts[0] !== s.experts[0][0])) s.experts = [];
  s.now = clock;
  s.split = split;
  s.call = s.spans.length;
  s.spans.push(...spans);
  s.marks.push(...marks);
  s.hazards.push(...hazards);
  if (moved.length) s.moved[moved[0]] += moved[1];
  if (experts.length) s.experts.push(experts);
};
const LANE = 34, NAMES = 92, RUN_WIDTH = 900;
const timeOf = ns => { const [size, unit] = ns >= 2e6 ? [1e6, 'ms'] : ns >= 2e3 ? [1e3, 'µs'] : [1, 'ns']; return `${+(ns / size).toPrecision(4)} ${unit}`; };
const bytesOf = n => { const [size, unit] = n >= 2 ** 20 ? [2 ** 20, 'MiB'] : n >= 2 ** 10 ? [2 ** 10, 'KiB'] : [1, 'B']; return `${+(n / size).toPrecision(3)} ${unit}`; };
function stepOf(width) {                            // round distances of the ticks: 1, 2 or 5 times a power of ten
  const power = 10 ** Math.floor(Math.log10(width / 4));
  return [1, 2, 5, 10].map(n => n * power).find(n => width / n <= 5);
}
function runPicture(trace, k, looks, zoom = 0) {
  const s = stateAt(trace, k), width = Math.max(trace.end / 2 ** zoom, 1), from = Math.max(0, Math.min(s.now - 0.55 * width, trace.end - width)), to = from + width;
  const top = 26, bottom = top + trace.lanes.length * LANE, x = ns => NAMES + (ns - from) * (RUN_WIDTH - NAMES - 8) / width, out = [], inside = x0 => x0 >= NAMES && x0 <= RUN_WIDTH - 8;
  trace.lanes.forEach((name, lane) => out.push(label(NAMES - 8, top + (lane + 0.5) * LANE, name, 12, 'wb-tick'),
    svg('path', {d: `M${NAMES} ${top + (lane + 1) * LANE}H${RUN_WIDTH - 8}`, class: 'wb-line'})));
  for (let t = Math.ceil(from / stepOf(width)) * stepOf(width); t <= to; t += stepOf(width))
    out.push(svg('path', {d: `M${x(t)} ${bottom}v5`, class: 'wb-axis'}), label(x(t), bottom + 14, timeOf(t), 11, 'wb-middle'));
  const begins = new Map();
  s.spans.forEach(([lane, kind, name, start, end, bytes, split], i) => {
    if (end < from || start > to) return;
    const [key, letter, , fill, ink] = trace.kinds[kind], copy = ['weights', 'activations', 'inputs'].includes(key), tall = key === 'wait' ? 8 : copy ? LANE - 15 : LANE - 6;
    const y = top + (lane + 0.5) * LANE - tall / 2, done = Math.min(Math.max(s.now, start), end), on = i >= s.call ? ' wb-on' : '';
    const bar = (a, b, pale) => { const x0 = Math.max(x(a), NAMES), x1 = Math.min(x(b), RUN_WIDTH - 8);
      if (x1 >= x0) out.push(svg('rect', {x: x0, y, width: Math.max(x1 - x0, 0.7), height: tall, fill: key === 'wait' ? 'none' : fill, class: `wb-piece${pale ? ' wb-asked' : ''}${on}`})); };
    if (done > start || end === start) bar(start, done, false);
    if (done < end) bar(done, end, true);
    const x0 = Math.max(x(start), NAMES), x1 = Math.min(x(end), RUN_WIDTH - 8), short = trace.names[name].replace(/^blk\.|\.weight$/g, '');
    const text = [copy ? `${letter} ${short} ${bytesOf(bytes)}` : short, copy ? letter : short.slice(0, 6), letter].find(t => t && t.length * 6.3 + 5 < x1 - x0);
    if (text && key !== 'wait') out.push(label((x0 + x1) / 2, y + tall / 2, text, 11, done < end ? 'wb-middle' : 'wb-code', done < end ? {} : {fill: ink}));
    if (split >= 0 && !begins.has(split)) begins.set(split, start);
  });
  let free = NAMES;
  for (const [split, start] of begins) if (inside(x(start))) {
    out.push(svg('path', {d: `M${x(start)} ${top - 6}V${bottom}`, class: 'wb-line'}));
    if (x(start) >= free) { out.push(label(x(start) + 2, top - 12, `split ${split}`, 10.5, 'wb-left')); free = x(start) + 48; }
  }
  for (const [lane, mark, time] of s.marks) if (inside(x(time))) {
    const [key, text] = Object.entries(trace.marks)[mark], y = top + lane * LANE;
    out.push(label(x(time), key === 'recorded' ? y + LANE - 4 : key === 'left out' ? y + LANE / 2 : y + 5, text[0], key === 'left out' ? 18 : 11, `wb-middle${key === 'left out' ? ' wb-wrong' : ''}`));
  }
  for (const [lane, time, ready] of s.hazards) if (time <= to && ready >= from) {
    const y = top + (lane + 0.5) * LANE, a = Math.max(x(time), NAMES), b = Math.min(x(ready), RUN_WIDTH - 8);
    out.push(svg('path', {d: `M${a} ${y}H${b}m-5 -4l5 4l-5 4`, class: 'wb-early'}), label(a, y, '!', 20, 'wb-middle wb-wrong'));
  }
  if (inside(x(s.now))) out.push(svg('path', {d: `M${x(s.now)} ${top - 18}V${bottom + 5}`, class: 'wb-cursor'}));
  const strip = trace.strip ? 86 : 0;
  if (s.experts.length) out.push(...expertStrip(s.experts, bottom + 44));
  const met = new Set(s.spans.map(span => span[1])), seen = new Set(s.marks.map(m => m[1])), notes = Object.entries(trace.marks).filter(([key], i) => seen.has(i) || (key === 'early' && s.hazards.length));
  const swatch = (style, text) => h('span', {}, h('i', {style}), text);
  return h('div', {}, sheet(RUN_WIDTH, bottom + 28 + strip, ...out), h('div', {className: 'wb-legend'},
    ...trace.kinds.flatMap(([, letter, text, fill], i) => met.has(i) ? [swatch(`background:${letter || fill !== '#FFFFFF' ? fill : 'none'}`, `${letter} ${text}`.trim())] : []),
    swatch('border:1px dashed', 'pale: asked for, not done'), h('span', {}, '┃ the host is here'), ...notes.map(([, text]) => h('span', {}, text))));
}
// The experts of a weight: the runs that are copied, each with its padding, which lies in the expert behind it.
function expertStrip(runs, y) {
  const [name, n, size] = runs[0], w = (RUN_WIDTH - NAMES - 8) / n, out = [], at = e => NAMES + e * w, used = new Set(runs.flatMap(([, , , a, b]) => Array.from({length: b - a + 1}, (_, i) => a + i)));
  out.push(label(NAMES, y - 10, `${name}: ${n} experts of ${number(size)} bytes; copied so far:`, 12, 'wb-left'));
  for (let e = 0; e < n; e++) {
    out.push(svg('rect', {x: at(e), y, width: Math.max(w - 1, 0.5), height: 24, class: used.has(e) ? 'wb-piece wb-used' : 'wb-empty'}));
    if (w > 15) out.push(label(at(e) + w / 2, y + 12, String(e), 11, 'wb-middle'));
  }
  for (const [, , , first, last, padding] of runs) {
    const x0 = at(first), x1 = at(last + 1), text = `${number(size * (last - first + 1))}${padding ? ` + ${padding}` : ''}`;
    if (padding) out.push(svg('rect', {x: x1 - 1, y: y + 1, width: Math.max(w * padding / size, 3), height: 22, class: 'wb-piece wb-padding'}));
    out.push(svg('path', {d: `M${x0 + 1} ${y + 28}v5H${x1 - 2}v-5`, class: 'wb-cursor wb-bracket'}));
    if (text.length * 6.2 < Math.max(x1 - x0 + w, 40)) out.push(label((x0 + x1) / 2, y + 42, text, 11, 'wb-middle'));
  }
  return out;
}
FOLDED.run = runPicture;
