// Pictures of steps that are a fold over events: `stateAt(trace, k)` is `workbench.views.steps.state`, line by line; a test compares them.
const START = {
  expand: trace => ({stack: [], visited: [], nodes: [...trace.old.nodes], leafs: [...trace.old.leafs], now: -1, user: -1}),
  backward: trace => ({stack: [], needs: [], grads: [], nodes: [...trace.old.nodes], leafs: [...trace.old.leafs], now: -1, user: -1}),
  packing: () => ({live: {}, gone: [], high: [], alone: 0, now: -1, at: -1}),
  plan: () => ({tasks: [], job: -1}),
  list: () => ({events: []}),
};
const FOLD = {
  expand(s, [kind, t, ...rest]) {
    s.now = t;
    s.user = -1;
    if (kind === 'enter') { s.stack.push(t); s.visited.push(t); }
    if (kind === 'enter' || kind === 'seen') s.user = rest[0];
    else { s.stack.pop(); s[kind + 's'].push(t); }
  },
  backward(s, [kind, t, ...rest]) {                 // grads: [tensor, its gradient], the latest last
    s.now = t;
    s.user = -1;
    if (kind === 'needs') s.needs.push(t);
    else if (kind === 'seed') { s.leafs.push(rest[0]); s.grads.push([t, rest[0]]); }
    else if (kind === 'grad') {
      const [grad, node, ...made] = rest;
      s.user = node;
      s.nodes.push(...made);
      s.grads = [...s.grads.filter(g => g[0] !== t), [t, grad]];
    }
  },
  packing(s, [kind, t, ...more]) {                  // live: tensor -> [chunk, offset, bytes, first node]
    const at = more.pop();
    s.now = t;
    s.at = at;
    if (kind === 'place') {
      const [chunk, offset, size] = more;
      s.live[t] = [chunk, offset, size, at];
      while (s.high.length <= chunk) s.high.push(0);
      s.high[chunk] = Math.max(s.high[chunk], offset + size);
      s.alone += size;
    } else if (kind === 'reuse') {
      const [chunk, offset, size, first] = s.live[more[0]];
      delete s.live[more[0]];
      s.gone.push([more[0], chunk, offset, size, first, at]);
      s.live[t] = [chunk, offset, more[1], at];
      s.alone += more[1];
    } else if (kind === 'free') {
      s.gone.push([t, ...s.live[t], at + 1]);
      delete s.live[t];
    }
  },
  plan(s, [, ...task]) { s.job = task[0]; s.tasks.push(task); },
  list(s, event) { s.events.push(event); },
};
function stateAt(trace, k) {
  const s = START[trace.kind](trace);
  for (let i = 0; i <= k; i++) FOLD[trace.kind](s, trace.steps[i].event);
  return s;
}
// ---- pictures
const scenes = new WeakMap();
const sheet = (w, h, ...kids) => svg('svg', {viewBox: `0 0 ${w} ${h}`, class: 'wb-sheet', 'aria-hidden': 'true', style: `aspect-ratio: ${w} / ${h}`}, ...kids);
const number = n => n.toLocaleString('en');
function expandPicture(trace, k) {
  if (!scenes.has(trace)) {
    const made = scene(trace.graph, trace.graph.blocks.map((_, b) => b), 'op'), badges = new Map();
    for (const [i, nodes] of made.boxes) for (const g of nodes) {
      const card = g.querySelector(':scope > .wb-card');
      if (!card) continue;
      const [x, y, w] = ['x', 'y', 'width'].map(a => +card.getAttribute(a));
      badges.set(i, label(x + w - 3, y - 7, '', 11, 'wb-badge'));
      g.append(badges.get(i));
    }
    const large = made.height > 900 || made.width > 1300;
    const view = svg('svg', {class: 'wb-sheet', 'aria-hidden': 'true', viewBox: `-8 -8 ${made.width + 16} ${made.height + 16}`,
      style: `aspect-ratio: ${large ? '4 / 3' : `${made.width + 16} / ${made.height + 16}`}`}, made.root);
    scenes.set(trace, {...made, view, badges, large, looks: new Map(), kinds: new Map([...made.boxes.values()].flat().map(g => [g, g.getAttribute('class')]))});
  }
  const made = scenes.get(trace), s = stateAt(trace, k), place = new Map();
  s.stack.forEach((t, i) => place.set(t, ['wb-stacked', `stack ${i + 1}`]));
  s.leafs.forEach((t, i) => place.set(t, ['wb-recorded', `leaf ${i}`]));
  s.nodes.forEach((t, i) => place.set(t, ['wb-recorded', `node ${i}`]));
  for (const [t, nodes] of made.boxes) {
    const [kind, text] = place.get(t) ?? ['wb-ahead', ''], look = `${kind} ${text} ${t === s.now}`;
    if (made.looks.get(t) === look) continue;      // only what differs from the picture before is touched
    made.looks.set(t, look);
    for (const g of nodes) g.setAttribute('class', `${made.kinds.get(g)} ${kind}${t === s.now ? ' wb-on' : ''}`);
    if (made.badges.has(t)) made.badges.get(t).textContent = text;
  }
  for (const [a, b, node] of made.lines) node.setAttribute('class', a === s.now && b === s.user ? 'wb-line wb-out' : 'wb-line');
  if (made.large) {
    const card = made.boxes.get(s.now)?.[0]?.querySelector('rect'), w = Math.min(made.width + 16, 900);
    if (card) made.view.setAttribute('viewBox', `${+card.getAttribute('x') + 95 - w / 2} ${+card.getAttribute('y') - w * 0.375} ${w} ${w * 0.75}`);
  }
  return made.view;
}
function packingPicture(trace, k, looks) {
  const s = stateAt(trace, k), W = 720, H = 380, left = 64, top = 8, high = H - 34, total = trace.chunks.reduce((a, b) => a + b, 0) || 1;
  const bases = trace.chunks.map((_, c) => trace.chunks.slice(0, c).reduce((a, b) => a + b, 0));
  const x = n => left + (n + 1) * (W - left - 6) / (trace.n_nodes + 1), y = bytes => high - bytes * (high - top) / total;
  const out = [];
  const rect = (t, chunk, offset, size, from, to, alive) => {
    const base = bases[chunk] + offset, x0 = x(from), w = Math.max(x(to) - x0, 0.8), y0 = y(base + size), tall = y(base) - y0, fill = look(looks, t);
    out.push(svg('rect', {x: x0, y: y0, width: w, height: Math.max(tall, 0.6), fill: fill.fill, class: `wb-piece${alive ? '' : ' wb-gone'}${t === s.now ? ' wb-on' : ''}`}));
    const name = [trace.names[t], trace.tags[t].replace(/(.)\D* /, '$1')].find(text => text.length * 6.4 + 6 < w);
    if (name && tall > 11) out.push(label(x0 + w / 2, y0 + tall / 2, name, 11, alive ? 'wb-code' : 'wb-middle', {fill: fill.ink}));
  };
  for (const [t, ...r] of s.gone) rect(t, ...r, false);
  for (const [t, [chunk, offset, size, from]] of Object.entries(s.live)) rect(+t, chunk, offset, size, from, Math.max(s.at, from) + 1, true);
  s.high.forEach((bytes, c) => out.push(svg('path', {d: `M${left} ${y(bases[c] + bytes)}H${W - 6}`, class: 'wb-high'}),
    label(left - 6, Math.max(y(bases[c] + bytes), 8), number(bytes), 11, 'wb-tick'), label(left - 6, y(bases[c]) - 2, '0', 11, 'wb-tick')));
  out.push(svg('path', {d: `M${x(s.at + 1)} ${top}V${high}`, class: 'wb-time'}), svg('path', {d: `M${left} ${top}V${high}H${W - 6}`, class: 'wb-axis'}),
    label(Math.max(left + 40, Math.min(x(s.at + 0.5), W - 60)), high + 12, s.at < 0 ? 'before the run' : `node ${s.at}`, 12, 'wb-middle'), label(W / 2 + 20, H - 7, 'time: the node being computed → (up: address in bytes)', 11, 'wb-middle'));
  return sheet(W, H, ...out);
}
function planPicture(trace, k, looks) {
  const s = stateAt(trace, k), first = Math.max(0, s.job - 5), seen = s.tasks.filter(t => t[0] >= first), W = 720, left = 74, lane = 34, top = 26;
  const from = Math.min(...seen.map(t => t[5])), to = Math.max(...seen.map(t => t[6]), from + 1), x = ns => left + (ns - from) * (W - left - 8) / (to - from);
  const bottom = top + trace.threads * lane, out = [];
  for (let i = 0; i < trace.threads; i++) out.push(label(left - 8, top + (i + 0.5) * lane, `thread ${i}`, 12, 'wb-tick'), svg('path', {d: `M${left} ${top + (i + 1) * lane}H${W - 8}`, class: 'wb-line'}));
  for (const job of new Set(seen.map(t => t[0]))) {
    const mine = seen.filter(t => t[0] === job), start = x(Math.min(...mine.map(t => t[5]))), end = x(Math.max(...mine.map(t => t[6])));
    out.push(svg('path', {d: `M${end} ${top - 4}V${bottom}`, class: 'wb-time'}));
    if (trace.nodes[job].name.length * 6.6 < end - start + 4) out.push(label((start + end) / 2, 12, trace.nodes[job].name, 11.5, 'wb-middle'));
  }
  for (const [job, part, thread, , , start, end] of seen) {
    const fill = look(looks, job), w = Math.max(x(end) - x(start), 1.5), latest = part === trace.steps[k].event[2] && job === s.job;
    out.push(svg('rect', {x: x(start), y: top + thread * lane + 4, width: w, height: lane - 8, fill: fill.fill, class: 'wb-piece' + (latest ? ' wb-on' : '')}));
    if (w > 18) out.push(label(x(start) + w / 2, top + (thread + 0.5) * lane, `${part + 1}/${trace.nodes[job].parts.length}`, 11, 'wb-code', {fill: fill.ink}));
  }
  const node = trace.nodes[s.job], rows = node.parts.at(-1)[1] || 1, taken = new Map(seen.filter(t => t[0] === s.job).map(t => [t[1], t[2]])), y = bottom + 34;
  out.push(label(left, bottom + 20, `rows of ${node.name} = ${node.op}, and the thread that took them:`, 12, 'wb-left'));
  node.parts.forEach(([a, b], part) => {
    const x0 = left + a * (W - left - 8) / rows, w = (b - a) * (W - left - 8) / rows, fill = taken.has(part) ? look(looks, taken.get(part)) : null;
    out.push(svg('rect', {x: x0, y, width: Math.max(w, 1), height: 26, class: fill ? 'wb-piece' : 'wb-empty', fill: fill ? fill.fill : 'none'}));
    if (w > 14) out.push(label(x0 + w / 2, y + 13, taken.has(part) ? `t${taken.get(part)}` : '?', 11, fill ? 'wb-code' : 'wb-middle', fill ? {fill: fill.ink} : {}));
  });
  return sheet(W, y + 34, ...out);
}
const listPicture = (trace, k) => h('ol', {className: 'wb-said'}, ...trace.steps.slice(Math.max(0, k - 11), k + 1).map((step, i, all) =>
  h('li', {value: k - all.length + i + 2, className: i === all.length - 1 ? 'wb-now' : ''}, step.sentence)));
// ---- the state as a table
const TABLES = {
  expand(trace, s) {
    const name = t => t === undefined ? '' : trace.graph.data.tensors[t].name, n = Math.max(s.stack.length, s.nodes.length, s.leafs.length);
    return [['', 'stack', 'nodes', 'leafs'], Array.from({length: n}, (_, i) => [String(i), name(s.stack[i]), name(s.nodes[i]), name(s.leafs[i])]),
      `visited ${s.visited.length} of ${trace.graph.data.tensors.length}; stack ${s.stack.length}, nodes ${s.nodes.length}, leafs ${s.leafs.length}`];
  },
  backward(trace, s) {
    const name = t => trace.graph.data.tensors[t].name, have = new Map(s.grads), all = [...new Set([...s.needs, ...have.keys()])];
    return [['needs a gradient', 'has'], all.map(t => [name(t), have.has(t) ? name(have.get(t)) : '']),
      `${all.length} need a gradient, ${have.size} have one; ${s.nodes.length - trace.old.nodes.length} nodes added`];
  },
  packing(trace, s) {
    const rows = Object.entries(s.live).map(([t, [chunk, offset, size, from]]) => [chunk, offset, size, +t, from]).sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    const used = rows.reduce((n, r) => n + r[2], 0), size = s.high.reduce((a, b) => a + b, 0);
    return [['address', 'bytes', 'tensor', 'nodes'], rows.map(([, offset, size, t, from]) => [number(offset), number(size), trace.names[t],
      `${from < 0 ? 'start' : from} – ${trace.last[t] ?? 'end'}`]), `in use ${number(used)}, buffer ${number(size)}, one place for each ${number(s.alone)} bytes`];
  },
  plan(trace, s) {
    const node = trace.nodes[s.job], done = new Map(s.tasks.filter(t => t[0] === s.job).map(t => [t[1], t]));
    return [['chunk', 'rows', 'thread', 'µs'], node.parts.map(([a, b], part) => {
      const t = done.get(part);
      return [String(part + 1), `${a} – ${b - 1}`, t ? String(t[2]) : '', t ? ((t[6] - t[5]) / 1000).toFixed(1) : ''];
    }), `${node.tag} ${node.name} = ${node.op}: ${node.parts.length} ${node.parts.length > 1 ? 'tasks' : 'task'}`];
  },
  list: (trace, s) => [trace.columns, s.events.map((e, i) => [String(i + 1), e.join(' '), trace.steps[i].cause]), trace.table],
};
const FOLDED = {expand: expandPicture, backward: expandPicture, packing: packingPicture, plan: planPicture, list: listPicture};
const pictureAt = (trace, k, looks, zoom) => (FOLDED[trace.kind] ?? (trace.kind === 'memory' ? memory : raster))(trace, k, looks, zoom);
const tableAt = (trace, k) => trace.kind in TABLES ? TABLES[trace.kind](trace, stateAt(trace, k)) : [trace.columns, trace.steps[k].table, trace.table];
