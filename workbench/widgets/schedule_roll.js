// The nodes of a schedule in order, a row for each backend, with splits: for the stepper and for what-if.
const OPEN = {name: 'none yet', code: '?', fill: '#FFFFFF', ink: '#000000'};
const backendLook = (trace, b) => b >= 0 ? trace.backends[b] : OPEN;
const nameOf = (trace, t) => trace.names?.[t] ?? trace.graph.data.tensors[t].name;
function roll(trace, pick) {
  const {tensors} = trace.graph.data, n = Math.max(trace.order.length, 6), W = 1000, left = 96, tall = 30, named = trace.order.length <= 26;
  const wide = (W - left - 6) / n, slanted = named && Math.max(...trace.order.map(t => nameOf(trace, t).length)) * 6.4 > wide;
  const top = !named ? 8 : slanted ? 96 : 22, rows = trace.backends.length + 1;
  const leafs = trace.order.map(t => named ? [...new Set(tensors[t].src)].filter(s => s !== null && !tensors[s].op).slice(0, 3) : []);
  const foot = top + rows * tall + 4, H = foot + 18 * Math.max(0, ...leafs.map(l => l.length)) + 32;
  const x = i => left + i * wide, y = b => top + (b < 0 ? rows - 1 : b) * tall;
  const cursor = svg('rect', {x: 0, y: top - 4, width: Math.max(wide, 3), height: H - top + 2, class: 'wb-cursor'}), cuts = svg('g'), cells = [], under = [];
  const view = sheet(W, H);
  for (let b = 0; b < rows; b++) {
    const look = backendLook(trace, b < rows - 1 ? b : -1);
    view.append(svg('rect', {x: left, y: top + b * tall, width: W - left, height: tall, class: b % 2 ? 'wb-lane wb-odd' : 'wb-lane'}),
      label(left - 8, top + (b + 0.5) * tall, cut(`${look.code}  ${look.name}`, 15), 12, 'wb-tick'));
  }
  view.append(cursor);
  trace.order.forEach((t, i) => {
    const slim = tensors[t].class === 'V', pad = named ? 2 : 0.15, h = slim ? 15 : 24;
    const box = svg('rect', {x: x(i) + pad, width: wide - 2 * pad, height: h, class: named ? 'wb-piece' : 'wb-thin', 'data-i': i});
    const code = named ? label(x(i) + wide / 2, 0, '', slim ? 10 : 13, 'wb-code') : null;
    cells.push({t, box, code, h});
    view.append(box, ...(code ? [code] : []));
    if (named) view.append(label(0, 0, cut(nameOf(trace, t), 22), 11, slanted ? 'wb-left' : 'wb-middle',
      {transform: slanted ? `translate(${x(i) + wide / 2} ${top - 6}) rotate(-40)` : `translate(${x(i) + wide / 2} ${top - 9})`}));
    leafs[i].forEach((s, k) => {
      const room = Math.floor((wide - 22) / 6), text = room > 2 ? cut(nameOf(trace, s).replace('.weight', ''), room) : '', at = x(i) + (wide - 18 - text.length * 6) / 2;
      const chip = svg('rect', {x: at, y: foot + 18 * k, width: 16, height: 15, class: 'wb-piece'}), letter = label(at + 8, foot + 18 * k + 8, '', 9.5, 'wb-code');
      under.push({t: s, box: chip, code: letter});
      view.append(chip, letter, label(at + 20, foot + 18 * k + 8, text, 10.5, 'wb-left'));
    });
  });
  view.append(cuts);
  view.addEventListener('click', event => { const i = event.target.dataset?.i; if (i !== undefined) pick(trace.order[i]); });
  let shown = '';
  return {view, draw(s, now, other) {
    for (const cell of [...cells, ...under]) {
      const b = s.of[cell.t], differs = other ? other(cell.t) : false, key = `${b} ${differs}`;
      if (cell.key === key) continue;                // only what differs from the picture before is touched
      cell.key = key;
      const look = backendLook(trace, b);
      cell.box.setAttribute('fill', look.fill);
      cell.box.classList.toggle('wb-differs', differs);
      if (cell.h) cell.box.setAttribute('y', y(b) + (tall - cell.h) / 2);
      if (cell.code) {
        cell.code.textContent = look.code;
        cell.code.setAttribute('fill', look.ink);
        if (cell.h) cell.code.setAttribute('y', y(b) + tall / 2);
      }
    }
    const at = trace.order.indexOf(now);
    cursor.style.display = at < 0 ? 'none' : '';
    cursor.setAttribute('x', at < 0 ? 0 : x(at) - (wide < 3 ? (3 - wide) / 2 : 0));
    const key = s.splits.map(p => `${p[1]} ${p[2].length}`).join();
    if (key === shown) return;
    shown = key;
    cuts.replaceChildren(...s.splits.flatMap(([b, first, inputs], k) => {
      const end = k + 1 < s.splits.length ? s.splits[k + 1][1] : trace.order.length, w = (end - first) * wide, look = backendLook(trace, b);
      const text = [`split ${k} · ${look.name} · inputs: ${inputs.length}`, `split ${k}`, `${k}`].find(t => t.length * 6.6 < w - 4) ?? '';
      return [svg('path', {d: `M${x(first)} ${top}V${H}`, class: k ? 'wb-border' : 'wb-axis', 'data-k': k}),
        svg('rect', {x: x(first) + 2, y: H - 26, width: Math.max(w - 4, 1), height: 22, fill: look.fill, class: 'wb-piece', 'data-k': k}),
        label(x(first) + w / 2, H - 15, text, 12, 'wb-code', {fill: look.ink})];
    }));
  }};
}
