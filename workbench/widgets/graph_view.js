// A graph: boxes and lines where Python put them, with search, folding and an inspector. All state is in traits, so it works without a kernel.
// ---- words
function inspect(graph, chosen, go) {
  const {tensors} = graph.data, table = h('table', {className: 'wb-table wb-facts'}), body = h('tbody');
  const row = (name, ...kids) => body.append(h('tr', {}, h('th', {scope: 'row'}, name), h('td', {}, ...kids)));
  const link = i => h('button', {type: 'button', className: 'wb-link', onclick: () => go(`t${i}`)}, said(tensors[i]));
  const links = (ids, none) => ids.length ? [...ids.slice(0, 30).map(link), ids.length > 30 ? ` and ${ids.length - 30} more` : ''] : [none];
  if (chosen[0] === 'b') {
    const block = graph.blocks[+chosen.slice(1)];
    table.append(h('caption', {}, block.name), body);
    row('holds', block.folded);
    for (const [letter, n] of block.counts) row(letter, `${n} × ${graph.classes[letter].label}`);
    row('open', 'Enter opens and folds it');
    return table;
  }
  if (!chosen) return h('p', {className: 'wb-note'}, 'Choose a tensor: click it, or use the arrow keys. ↑ its first source, ↓ its first user, ← → along the order, Home, End.');
  const r = tensors[+chosen.slice(1)];
  table.append(h('caption', {}, said(r)), body);
  row('why here', r.why);
  row('op', [r.op || 'none: a leaf holds data', ...Object.entries(r.params).map(([k, v]) => `${k}=${v}`)].join('  '));
  row('type', r.type);
  row('ne', r.ne.join(', '));
  row('nb', r.nb.join(', '));
  row('bytes', r.bytes.toLocaleString('en'));
  row('sources', ...links(r.src.filter(s => s !== null), 'none'));
  row('users', ...links(r.users, 'none'));
  row('storage', r.storage || (r.view ? 'that of its owner: none yet' : 'none yet'));
  if (r.view) row('view of', link(r.view[0]), ` + ${r.view[1].toLocaleString('en')} bytes`);
  row('flags', r.flags.join(', ') || 'none');
  if (r.layer !== null) row('layer', String(r.layer));
  return table;
}
const COLUMNS = ['order', 'name', 'op', 'type', 'ne', 'bytes', 'sources'];
const cells = (r, tensors) => [r.tag, r.name, r.op || 'leaf', r.type, dims(r), r.bytes.toLocaleString('en'),
  r.src.map(s => s === null ? '·' : tensors[s].tag).join(', ')];
const exact = text => text.toLowerCase().replace(/\b(layer|node|leaf)\s+(\d+)/g, '$1=$2;');   // "layer 3" is not layer 13
const wordsOf = r => exact([r.tag, r.name, r.op || 'leaf', r.type, dims(r), r.layer === null ? '' : `layer ${r.layer}`, r.storage, ...r.flags].join(' '));
function render({model, el, signal}) {
  const graph = model.get('graph'), {tensors} = graph.data, words = tensors.map(wordsOf);
  const get = name => model.get(name);
  const view = {x: 0, y: 0, k: 1}, ids = {search: uid('find'), colour: uid('colour'), say: uid('say')};
  let now, marked = [], hits = null;
  // ---- parts of the page
  const search = h('input', {type: 'search', id: ids.search, size: 18, oninput: () => put(model, 'query', search.value)});
  const found = h('span', {className: 'wb-note', role: 'status'});
  const colour = h('select', {id: ids.colour, onchange: () => put(model, 'channel', colour.value)},
    ...Object.keys(graph.data.channels).map(c => h('option', {value: c}, c)));
  const button = (text, name, act) => h('button', {type: 'button', 'aria-label': name, title: name, onclick: act}, text);
  const layered = graph.blocks.some(b => b.name);
  const bar = h('div', {className: 'wb-row'}, h('label', {htmlFor: ids.search}, 'Search'), search, found, h('label', {htmlFor: ids.colour}, 'Colour by'), colour,
    button('−', 'zoom out (-)', () => zoom(0.8)), button('+', 'zoom in (+)', () => zoom(1.25)), button('fit', 'show everything (0)', () => fit()),
    ...(layered ? [button('open all', 'open all layers', () => put(model, 'opened', graph.blocks.map((_, i) => i))), button('fold all', 'fold all layers', () => put(model, 'opened', []))] : []));
  const legend = h('div', {className: 'wb-row wb-keys'}), say = h('div', {className: 'wb-say', role: 'status', 'aria-live': 'polite', id: ids.say});
  const picture = svg('svg', {'aria-hidden': 'true', width: '100%', height: '100%'});
  const canvas = h('div', {className: 'wb-canvas', tabIndex: 0, role: 'application', 'aria-label':
    `${graph.data.title}: ${graph.data.n_nodes} nodes. Up and down follow sources and users, left and right the order, Enter opens, plus, minus and 0 zoom.`}, picture);
  const facts = h('div', {className: 'wb-scroll wb-inspector', tabIndex: 0, role: 'region', 'aria-label': 'The chosen tensor'});
  const rows = tensors.map((r, i) => h('tr', {onclick: () => go(`t${i}`)}, ...cells(r, tensors).map(c => h('td', {}, c))));
  const list = h('div', {className: 'wb-scroll wb-list', tabIndex: 0, role: 'region', 'aria-label': 'All tensors; up and down choose one'}, h('table', {className: 'wb-table'},
    h('caption', {}, `${graph.data.n_leafs} leafs and ${graph.data.n_nodes} nodes in order`),
    h('thead', {}, h('tr', {}, ...COLUMNS.map(c => h('th', {scope: 'col'}, c)))), h('tbody', {}, ...rows)));
  // ---- where things are
  const placeOf = key => {
    if (key[0] === 'b') return now.places[+key.slice(1)];
    const i = +key.slice(1), b = graph.blocks.findIndex(block => block.boxes.some(box => box[0] === i));
    if (b < 0) { const users = tensors[i].users.map(u => `t${u}`); return users.length ? placeOf(users[0]) : null; }
    if (now.covers.has(i)) return now.places[b];
    const [, x, y, w, bh] = graph.blocks[b].boxes.find(box => box[0] === i);
    return [x + now.places[b][0], y + now.places[b][1], w, bh];
  };
  const size = () => ({w: canvas.clientWidth || 520, h: canvas.clientHeight || 480});
  const move = () => { now.root.setAttribute('transform', `translate(${view.x} ${view.y}) scale(${view.k})`); picture.classList.toggle('wb-far', view.k < 0.42); };
  const fit = () => {
    const s = size();
    view.k = Math.min(1.2, (s.w - 16) / now.width, (s.h - 16) / now.height);
    view.x = (s.w - now.width * view.k) / 2;
    view.y = (s.h - now.height * view.k) / 2;
    move();
  };
  const zoom = (by, x = size().w / 2, y = size().h / 2) => {
    const k = Math.max(0.03, Math.min(4, view.k * by));
    view.x = x - (x - view.x) * k / view.k;
    view.y = y - (y - view.y) * k / view.k;
    view.k = k;
    move();
  };
  const reveal = key => {
    const place = key && placeOf(key), s = size();
    if (!place) return;
    const [x, y, w, bh] = [place[0] * view.k + view.x, place[1] * view.k + view.y, place[2] * view.k, Math.min(place[3], 300) * view.k];
    view.x += Math.max(0, 40 - x) - Math.max(0, x + w + 40 - s.w);
    if (y < 30 || y + bh > s.h - 30) view.y += s.h / 2 - y - bh / 2;
    const within = (at, length, room) => length > room ? Math.max(room - length - 24, Math.min(24, at)) : at;   // no empty half of a picture
    view.x = within(view.x, now.width * view.k, s.w);
    view.y = within(view.y, now.height * view.k, s.h);
    move();
  };
  // ---- drawing
  const build = () => {
    now = scene(graph, get('opened'), get('channel'));
    picture.replaceChildren(now.root);
    colour.value = get('channel');
    legend.replaceChildren(...graph.data.channels[get('channel')].cats.map(c => h('span', {}, h('span', {className: 'wb-key', style: `background:${c.fill};color:${c.ink}`}, c.code), ' ', c.label)));
    move();
  };
  const mark = (node, kind) => { node.classList.add(kind); marked.push([node, kind]); };
  const show = () => {
    for (const [node, kind] of marked) node.classList.remove(kind);
    marked = [];
    const chosen = get('chosen'), i = chosen[0] === 't' ? +chosen.slice(1) : -1, r = tensors[i];
    if (chosen[0] === 'b') mark(now.frames[+chosen.slice(1)], 'wb-on');
    if (r) {
      const nodes = k => now.covers.has(k) ? [now.frames[now.covers.get(k)]] : now.boxes.get(k) ?? [];
      nodes(i).forEach(n => mark(n, 'wb-on'));
      for (const s of r.src) if (s !== null && s !== i) nodes(s).forEach(n => mark(n, 'wb-source'));
      for (const u of r.users) nodes(u).forEach(n => mark(n, 'wb-user'));
      for (const [s, u, node] of now.lines) if (s === i || u === i) mark(node, u === i && s !== i ? 'wb-in' : 'wb-out');
    }
    rows.forEach((row, k) => { if (row.className || k === i) row.className = k === i ? 'wb-current' : ''; });
    if (r && !rows[i].hidden) keep(list, rows[i]);
    facts.replaceChildren(inspect(graph, chosen, go));
    const block = graph.blocks[+chosen.slice(1)];
    say.textContent = r ? `${said(r)}${r.op ? ` = ${r.op}` : ''}, ${r.type} ${dims(r)}: ${r.why}` : chosen[0] === 'b' ? `${block.name}: ${block.folded}. Enter ${isOpen(graph, get('opened'), +chosen.slice(1)) ? 'folds' : 'opens'} it.` : 'Nothing chosen yet.';
  };
  const find = () => {
    const query = get('query'), terms = exact(query).split(/\s+/).filter(Boolean);
    if (search.value !== query) search.value = query;
    hits = terms.length ? new Set(tensors.keys().filter(i => terms.every(t => words[i].includes(t)))) : null;
    rows.forEach((row, i) => { row.hidden = !!hits && !hits.has(i); });
    for (const [i, nodes] of now.boxes) for (const n of nodes) n.classList.toggle('wb-dim', !!hits && !hits.has(i) && !(graph.blocks.some(b => (b.chips[i] ?? []).some(c => hits.has(c)))));
    now.frames.forEach((frame, b) => frame.classList.toggle('wb-dim', !!hits && !graph.blocks[b].boxes.some(box => hits.has(box[0]))));
    found.textContent = hits ? `${hits.size} of ${tensors.length} match; Enter goes to the next` : '';
  };
  // ---- moving
  const blockOf = i => graph.blocks.findIndex(b => b.boxes.some(box => box[0] === i));
  const seen = i => { const b = blockOf(i); return b >= 0 && !isOpen(graph, get('opened'), b) ? `b${b}` : `t${i}`; };
  const go = key => { if (key) { if (key[0] === 't' && now.covers.has(+key.slice(1))) put(model, 'opened', [...get('opened'), now.covers.get(+key.slice(1))]); put(model, 'chosen', key); reveal(key); } };
  const stops = () => {                             // what Left and Right walk along
    const keys = [];
    tensors.forEach((r, i) => { const key = seen(i); if ((blockOf(i) >= 0 || r.op) && keys[keys.length - 1] !== key) keys.push(key); });
    return keys.filter((key, k) => keys.indexOf(key) === k);
  };
  const step = by => {
    const keys = stops(), chosen = get('chosen'), first = graph.data.n_leafs;
    let at = keys.indexOf(chosen);
    if (at < 0) at = chosen[0] === 't' ? keys.indexOf(seen(tensors[+chosen.slice(1)].users[0] ?? first)) - (by > 0 ? 1 : 0) : by > 0 ? -1 : keys.length;
    return keys[Math.max(0, Math.min(keys.length - 1, at + by))];
  };
  const along = side => {
    const chosen = get('chosen');
    if (!chosen) return stops()[0];
    const members = chosen[0] === 't' ? [+chosen.slice(1)] : graph.blocks[+chosen.slice(1)].boxes.map(b => b[0]), own = new Set(members);
    for (const i of side === 'users' ? members.toReversed() : members)
      for (const computed of [true, false])        // a leaf only where no source is computed: the way up ends there
        for (const k of tensors[i][side]) if (k !== null && !own.has(k) && !!tensors[k].op === computed && (computed || chosen[0] === 't')) return seen(k);
    return chosen;
  };
  const fold = b => {
    const opened = get('opened');
    put(model, 'opened', opened.includes(b) ? opened.filter(k => k !== b) : [...opened, b]);
    put(model, 'chosen', `b${b}`);
    reveal(`b${b}`);
  };
  const next = by => {
    if (!hits || !hits.size) return;
    const all = [...hits], at = all.indexOf(get('chosen')[0] === 't' ? +get('chosen').slice(1) : -1);
    go(`t${all[(at + by + all.length) % all.length]}`);
  };
  const enter = () => {
    const chosen = get('chosen');
    if (chosen[0] === 'b') fold(+chosen.slice(1)); else if (chosen) facts.focus(); else go(stops()[0]);
  };
  const act = {ArrowUp: () => go(along('src')), ArrowDown: () => go(along('users')), ArrowLeft: () => go(step(-1)), ArrowRight: () => go(step(1)),
    Home: () => go(stops()[0]), End: () => go(stops().at(-1)), Enter: enter, '+': () => zoom(1.25), '=': () => zoom(1.25), '-': () => zoom(0.8), 0: fit,
    c: () => { const b = get('chosen')[0] === 't' ? blockOf(+get('chosen').slice(1)) : -1; if (b >= 0 && graph.blocks[b].name) fold(b); },
    '/': () => search.focus()};
  keepKeys(el);
  canvas.addEventListener('keydown', event => {
    if (act[event.key] && !event.ctrlKey && !event.altKey && !event.metaKey) { event.preventDefault(); act[event.key](); }
  });
  facts.addEventListener('keydown', event => { if (event.key === 'Escape') canvas.focus(); });
  search.addEventListener('keydown', event => {
    if (event.key === 'Enter') next(event.shiftKey ? -1 : 1);
    if (event.key === 'Escape') { put(model, 'query', ''); canvas.focus(); }
  });
  list.addEventListener('keydown', event => {
    const by = {ArrowUp: -1, ArrowDown: 1}[event.key];
    if (!by) return;
    event.preventDefault();
    let k = get('chosen')[0] === 't' ? +get('chosen').slice(1) : by > 0 ? -1 : tensors.length;
    do k += by; while (rows[k] && rows[k].hidden);
    if (rows[k]) go(`t${k}`);
  });
  let drag = null;
  canvas.addEventListener('pointerdown', event => { if (event.button === 0) drag = {x: event.clientX, y: event.clientY, moved: false, target: event.target}; });
  canvas.addEventListener('pointermove', event => {
    if (!drag || !(event.buttons & 1)) return;
    const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
    if (!drag.moved && Math.hypot(dx, dy) < 4) return;
    if (!drag.moved) canvas.setPointerCapture(event.pointerId);
    view.x += dx;
    view.y += dy;
    Object.assign(drag, {x: event.clientX, y: event.clientY, moved: true});
    move();
  });
  canvas.addEventListener('pointerup', () => {
    const part = drag && !drag.moved && drag.target.closest('[data-t], [data-b]');
    drag = null;
    if (part) part.dataset.t !== undefined ? go(`t${part.dataset.t}`) : fold(+part.dataset.b);
  });
  canvas.addEventListener('wheel', event => {       // the page scrolls on, unless the picture has the focus
    if (!event.ctrlKey && document.activeElement !== canvas && el.getRootNode().activeElement !== canvas) return;
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY / 400), event.clientX - box.left, event.clientY - box.top);
  }, {passive: false});
  el.classList.add('wb', 'wb-graph');
  el.replaceChildren(bar, legend, say, h('div', {className: 'wb-two'}, canvas, facts), list);
  const redraw = () => { build(); find(); show(); };
  redraw();
  const start = () => {                             // readable text first; 0 shows everything
    const s = size();
    fit();
    if (view.k < 0.6) { view.k = Math.max(0.62, Math.min(0.8, (s.w - 16) / now.width)); view.x = (s.w - now.width * view.k) / 2; view.y = 8; move(); }
    if (get('chosen')) reveal(get('chosen'));
  };
  start();
  const watch = new ResizeObserver(() => { if (canvas.clientWidth) { watch.disconnect(); start(); } });
  watch.observe(canvas);
  const undo = [follow(model, ['opened', 'channel'], redraw, signal), follow(model, ['chosen'], show, signal), follow(model, ['query'], () => { find(); }, signal)];
  return () => { watch.disconnect(); undo.forEach(f => f()); };
}
function keep(box, part) {                          // scroll inside the box only, never the page
  const top = part.offsetTop, head = 24;
  if (top < box.scrollTop + head || top + part.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = top - box.clientHeight / 2;
}
export default { render };
