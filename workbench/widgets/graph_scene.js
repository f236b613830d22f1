// The picture of a graph: boxes and lines where Python put them, as one group of SVG with indexes from tensors to what shows them.
const svg = (tag, attributes = {}, ...kids) => {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...kids);
  return node;
};
const cut = (text, n) => text.length <= n ? text : text.slice(0, n - 1) + '…';
const dims = r => r.ne.slice(0, r.dims).join('×');
const said = r => r.name === r.tag.replace(' ', '_') ? r.tag : `${r.tag} ${r.name}`;
const isOpen = (graph, opened, b) => !graph.blocks[b].name || opened.includes(b);
function stack(graph, opened) {
  const [fw, fh] = graph.sizes.folded, sizes = graph.blocks.map((b, i) => isOpen(graph, opened, i) ? [b.w, b.h] : [fw, fh]);
  const width = Math.max(...sizes.map(s => s[0]));
  let y = 0;
  const places = sizes.map(([w, h]) => { const place = [(width - w) / 2, y, w, h]; y += h + graph.sizes.gap; return place; });
  return {places, width, height: y - graph.sizes.gap};
}
function curve(points, dx = 0, dy = 0) {
  let path = `M${points[0] + dx} ${points[1] + dy}`;
  for (let i = 2; i < points.length; i += 2) {
    const [x0, y0, x1, y1] = [points[i - 2] + dx, points[i - 1] + dy, points[i] + dx, points[i + 1] + dy], m = (y0 + y1) / 2;
    path += x0 === x1 ? `L${x1} ${y1}` : `C${x0} ${m} ${x1} ${m} ${x1} ${y1}`;
  }
  return path;
}
// ---- the scene: one group of SVG, with indexes from tensors and blocks to what shows them
function label(x, y, text, size, kind = '', extra = {}) {
  const node = svg('text', {x, y, 'font-size': size, class: kind, ...extra});
  node.textContent = text;
  return node;
}
function strip(x, y, w, h, cat, size) {
  return [svg('rect', {x, y, width: w, height: h, fill: cat.fill, class: 'wb-strip'}),
    label(x + w / 2, y + h / 2, cat.code, cat.code.length > 3 ? size - 2 : size, 'wb-code', {fill: cat.ink})];
}
function scene(graph, opened, channel) {
  const {data, blocks, sizes} = graph, {places, width, height} = stack(graph, opened), looks = data.channels[channel];
  const cat = i => looks.cats[looks.of[i]], boxes = new Map(), lines = [], covers = new Map(), frames = [];
  const note = (i, node) => { if (!boxes.has(i)) boxes.set(i, []); boxes.get(i).push(node); };
  const root = svg('g'), under = svg('g'), over = svg('g');
  root.append(under, over);
  const line = (path, s, i) => { const node = svg('path', {d: path, class: 'wb-line'}); lines.push([s, i, node]); return node; };
  const home = new Map(blocks.flatMap((b, k) => b.boxes.map(box => [box[0], k])));
  const port = (b, side, t) => {
    const [x, y, w, h] = places[b];
    return [isOpen(graph, opened, b) ? x + blocks[b][side][t] : x + w / 2, side === 'ins' ? y : y + h];
  };
  const between = new Set();
  for (const [i, b] of home) for (const s of data.tensors[i].src) if (home.has(s) && home.get(s) !== b) between.add(`${s} ${home.get(s)} ${b}`);
  for (const key of between) {
    const [s, a, b] = key.split(' ').map(Number);
    under.append(line(curve([...port(a, 'outs', s), ...port(b, 'ins', s)]), s, s));
  }
  blocks.forEach((block, b) => {
    const [x, y, w, h] = places[b];
    if (!isOpen(graph, opened, b)) {
      const g = svg('g', {class: 'wb-folded', 'data-b': b}, svg('rect', {x, y, width: w, height: h, rx: 8, class: 'wb-card'}),
        label(x + 12, y + 20, `▸ ${block.name}: ${block.folded}`, 12.5, 'wb-name'));
      const total = block.counts.reduce((n, c) => n + c[1], 0);
      let at = x + 12;
      for (const [letter, n] of block.counts) {
        const wide = (w - 24) * n / total, look = graph.classes[letter];
        g.append(svg('rect', {x: at, y: y + 32, width: wide, height: 22, fill: look.fill, class: 'wb-strip'}));
        if (wide > 12) g.append(label(at + wide / 2, y + 43, wide > 30 ? `${letter} ${n}` : letter, 11, 'wb-code', {fill: look.ink}));
        at += wide;
      }
      over.append(g);
      frames[b] = g;
      for (const [i] of block.boxes) covers.set(i, b);
      return;
    }
    if (block.name) {
      under.append(svg('rect', {x, y, width: w, height: h, rx: 8, class: 'wb-frame'}));
      over.append(frames[b] = svg('g', {'data-b': b, class: 'wb-title'}, svg('rect', {x: x + 4, y: y + 3, width: 380, height: 22, fill: 'transparent'}),
        label(x + 12, y + 19, `▾ ${block.name}: ${block.folded}`, 12.5, 'wb-name')));
    }
    for (const [s, i, , points] of block.lines) under.append(line(curve(points, x, y), s, i));
    for (const [i, bx, by, bw, bh] of block.boxes) {
      const r = data.tensors[i], chips = block.chips[i] ?? [], px = bx + x, py = by + y, top = py + chips.length * sizes.chip;
      const g = svg('g', {class: r.class === 'V' ? 'wb-box wb-slim' : 'wb-box', 'data-t': i}, svg('rect', {x: px, y: py, width: bw, height: bh, class: 'wb-card'}));
      chips.forEach((c, k) => {
        const cy = py + k * sizes.chip;
        const chip = svg('g', {'data-t': c, class: 'wb-chip'}, svg('rect', {x: px, y: cy, width: bw, height: sizes.chip, class: 'wb-back'}),
          ...strip(px, cy, sizes.strip, sizes.chip, cat(c), 10), label(px + sizes.strip + 6, cy + sizes.chip / 2, cut(data.tensors[c].name, 27), 10.5));
        g.append(chip);
        note(c, chip);
      });
      g.append(...strip(px, top, sizes.strip, py + bh - top, cat(i), 12));
      const tx = px + sizes.strip + 6;
      if (r.class === 'V') g.append(label(tx, (top + py + bh) / 2, cut(`${r.op.toLowerCase()} ${dims(r)}`, 27), 11, 'wb-view'));
      else g.append(label(tx, top + 11, cut(r.name, 23), 12, 'wb-name'), label(tx, top + 27, cut(`${r.op || 'leaf'} ${r.type} ${dims(r)}`, 27), 10.5));
      over.append(g);
      note(i, g);
    }
  });
  return {root, boxes, lines, covers, frames, places, width, height};
}
