// The scheduler's decisions over a graph: a row for each backend, the graph, the table of stages, questions. The state at step k is
// `workbench.views.schedule_steps`' fold, line by line. All state of the page is in traits, so it works without a kernel.
START.schedule = trace => {
  const s = {stage: -1, now: -1, of: trace.graph.data.tensors.map(() => -1), table: {}, splits: [], copies: [], rewrites: [], failed: false};
  for (const event of trace.before) FOLD.schedule(s, event);
  return s;
};
FOLD.schedule = (s, [kind, ...rest]) => {
  s.now = -1;
  if (kind === 'stage') s.stage = rest[0];
  else if (kind === 'assign') {
    const [t, b, stage, cause] = rest;
    s.now = t;
    s.of[t] = b;
    (s.table[t] ??= {})[stage] = [b, cause];
  } else if (kind === 'split') s.splits.push([rest[0], rest[1], []]);
  else if (kind === 'copy') { s.now = rest[0]; s.copies.push(rest); }
  else if (kind === 'input') { s.now = rest[0]; s.splits[rest[1]][2].push(rest[0]); }
  else if (kind === 'rewrite') { s.now = rest[0]; s.rewrites.push(rest); }
  else s.failed = true;
};
const subject = (trace, k) => {                     // the tensor that a step is about
  const event = trace.steps[k].event;
  return event[0] === 'split' ? trace.order[event[2]] : event[0] === 'stage' || event[0] === 'fail' ? -1 : event[1];
};
// Where a box is scrolled to and how large it is, kept by its own events: asking the page in each step would lay it out each time.
function measured(node) {
  const at = {x: 0, y: 0, w: 0, h: 0};
  node.addEventListener('scroll', () => { at.x = node.scrollLeft; at.y = node.scrollTop; });
  new ResizeObserver(() => { at.w = node.clientWidth; at.h = node.clientHeight; }).observe(node);
  return at;
}
// ---- the graph in layers: only the layer at hand is open
function layers(trace, model, pick) {
  const {graph} = trace, {tensors} = graph.data, home = new Map(), kept = new Map();
  graph.blocks.forEach((b, k) => {
    for (const [i] of b.boxes) home.set(i, k);
    for (const chips of Object.values(b.chips)) for (const c of chips) if (!home.has(c)) home.set(c, k);
  });
  const canvas = h('div', {className: 'wb-scroll wb-layers', tabIndex: 0, role: 'region', 'aria-label': `${trace.title}: the graph, top to bottom`});
  let made = null, key = '', view = null, scale = 0, looks = new Map(), bars = new Map(), badges = new Map(), marked = [];
  const box = measured(canvas);
  const zoom = to => { scale = Math.max(0.15, Math.min(2, to)); size(); };
  const size = () => {
    if (!view) return;
    for (const [name, value] of Object.entries({viewBox: `-8 -8 ${made.width + 16 / scale} ${made.height + 16 / scale}`, width: made.width * scale + 16, height: made.height * scale + 16})) view.setAttribute(name, value);
  };
  const fitting = () => Math.max(0.6, Math.min(1, ((canvas.clientWidth || 560) - 30) / made.width));
  const build = (s, opened) => {
    const shownAs = {...graph, data: {...graph.data, channels: {backend: {...graph.data.channels.backend, of: s.of.map(b => b < 0 ? trace.backends.length : b)}}}};
    made = scene(shownAs, opened, 'backend');
    [looks, bars, badges] = [new Map(), new Map(), new Map()];
    for (const [i, nodes] of made.boxes) {
      looks.set(i, s.of[i]);
      const card = nodes[0].querySelector(':scope > .wb-card');
      if (card) { const text = label(+card.getAttribute('x') + +card.getAttribute('width') - 3, +card.getAttribute('y') - 7, '', 11, 'wb-badge'); nodes[0].append(text); badges.set(i, text); }
    }
    made.frames.forEach((frame, b) => {
      if (!frame || !frame.classList.contains('wb-folded')) return;
      frame.querySelectorAll('.wb-strip, .wb-code').forEach(node => node.remove());
      const bar = svg('g');
      frame.append(bar);
      bars.set(b, {bar, key: ''});
    });
    if (!scale) {
      scale = fitting();
      requestAnimationFrame(() => {                  // the page gives it its width now
        scale = fitting();
        size();
        if (!graph.blocks.some(b => b.name)) canvas.style.height = `${Math.min(made.height * scale + 40, 480)}px`;
        if (!canvas.scrollLeft) canvas.scrollLeft = box.x = Math.max(0, (made.width * scale + 16 - canvas.clientWidth) / 2);
      });
    }
    view = svg('svg', {'aria-hidden': 'true'}, made.root);
  };
  const show = (s, opened) => {                      // every pass comes through the same layers: their pictures are kept, the last dozen
    const name = opened.join();
    if (kept.has(name)) ({made, view, looks, bars, badges} = kept.get(name));
    else build(s, opened);
    kept.delete(name);
    kept.set(name, {made, view, looks, bars, badges});
    if (kept.size > 12) kept.delete(kept.keys().next().value);
    size();
    canvas.replaceChildren(view);
  };
  const recolour = s => {
    for (const [i, nodes] of made.boxes) {
      if (looks.get(i) === s.of[i]) continue;
      looks.set(i, s.of[i]);
      const look = backendLook(trace, s.of[i]);
      for (const node of nodes) {
        node.querySelector(':scope > .wb-strip').setAttribute('fill', look.fill);
        const code = node.querySelector(':scope > .wb-code');
        code.textContent = look.code;
        code.setAttribute('fill', look.ink);
      }
    }
    for (const [b, folded] of bars) {
      const counts = new Map();
      for (const [i] of graph.blocks[b].boxes) if (tensors[i].op) counts.set(s.of[i], (counts.get(s.of[i]) ?? 0) + 1);
      const parts = [...counts].sort((p, q) => (p[0] < 0) - (q[0] < 0) || p[0] - q[0]), text = parts.join();
      if (folded.key === text) continue;
      folded.key = text;
      const [px, py, w] = made.places[b], total = parts.reduce((n, p) => n + p[1], 0);
      let at = px + 12;
      folded.bar.replaceChildren(...parts.flatMap(([k, n]) => {
        const wide = (w - 24) * n / total, look = backendLook(trace, k), from = at;
        at += wide;
        return [svg('rect', {x: from, y: py + 32, width: wide, height: 22, fill: look.fill, class: 'wb-strip'}),
          label(from + wide / 2, py + 43, wide > 30 ? `${look.code} ${n}` : wide > 10 ? look.code : '', 11, 'wb-code', {fill: look.ink})];
      }));
    }
  };
  canvas.addEventListener('click', event => {
    const part = event.target.closest('[data-t], [data-b]');
    if (!part) return;
    if (part.dataset.t !== undefined) return pick(+part.dataset.t);
    const b = +part.dataset.b, opened = model.get('opened');
    put(model, 'opened', opened.includes(b) ? opened.filter(k => k !== b) : [...opened, b]);
  });
  return {canvas, zoom: by => zoom(scale * by), fit: () => made && zoom(Math.min((canvas.clientWidth - 30) / made.width, (canvas.clientHeight - 20) / made.height)),
    draw(s, now, by) {
      const at = home.get(now), opened = [...new Set([...model.get('opened'), ...(at === undefined ? [] : [at])])].filter(b => graph.blocks[b]?.name).sort((a, b) => a - b);
      if (!made || at !== undefined || key === '' || key.split('|')[1] !== model.get('opened').join()) {
        const wanted = `${opened.join()}|${model.get('opened').join()}`;
        if (wanted !== key) { key = wanted; show(s, opened); }
      }
      recolour(s);
      for (const [node, kind] of marked) node.classList.remove(kind);
      marked = [];
      const mark = (t, kind) => (made.boxes.get(t) ?? (made.covers.has(t) ? [made.frames[made.covers.get(t)]] : [])).forEach(node => { node.classList.add(kind); marked.push([node, kind]); });
      if (by !== undefined && by >= 0) mark(by, 'wb-source');
      if (now >= 0) mark(now, 'wb-on');
      const copied = new Set(s.rewrites.map(([node, , t]) => `${t} ${node}`)), starts = new Map(s.splits.map(([, first], k) => [trace.order[first], `split ${k}`]));
      for (const [a, b, node] of made.lines) node.classList.toggle('wb-copied', copied.has(`${a} ${b}`));
      for (const [t, text] of badges) if (text.textContent !== (starts.get(t) ?? '')) text.textContent = starts.get(t) ?? '';
      const part = made.boxes.get(now)?.[0] ?? made.frames[made.covers.get(now)], card = part?.querySelector('rect');
      if (card) {
        const [cx, cy] = [(+card.getAttribute('x') + 8) * scale, (+card.getAttribute('y') + 8) * scale], tall = box.h || 400, w = box.w || 560;
        if (cy < box.y + 40 || cy > box.y + tall - 90) canvas.scrollTop = box.y = Math.max(0, cy - tall / 2);
        if (cx < box.x + 20 || cx > box.x + w - 150) canvas.scrollLeft = box.x = Math.max(0, cx - w / 2 + 60);
      }
    }};
}
const reached = (trace, s, k) => k >= trace.steps.length - 1 ? Infinity : Math.max(s.splits.at(-1)?.[1] ?? -1, s.rewrites.length ? trace.order.indexOf(s.rewrites.at(-1)[0]) : -1);
function splitOf(trace, s, upTo, t) {                 // the number of a node's split, once pass 5 came to the node
  const at = trace.order.indexOf(t);
  return at < 0 || at > upTo ? '' : String(s.splits.findLastIndex(p => p[1] <= at));
}
// ---- the table: a row for each tensor, a column for each stage; only the rows in sight exist
const ROW = 25;
function stages(trace, pick) {
  const {tensors} = trace.graph.data, inOrder = new Set(trace.order), rest = tensors.keys().filter(t => !inOrder.has(t)), rows = [...trace.order, ...rest];
  const columns = trace.stages.map(([, short], i) => [short, i]).filter(([, i]) => i < trace.stages.length - 1 && (i > 0 || trace.before.concat(trace.steps.map(s => s.event)).some(e => e[0] === 'assign' && e[3] === 0)));
  const body = h('tbody', {}), box = h('div', {className: 'wb-scroll wb-stages', tabIndex: 0, role: 'region', 'aria-label': `${trace.title}: backend after each stage, a row for each tensor`},
    h('table', {className: 'wb-table', 'aria-rowcount': rows.length + 1},
      h('colgroup', {}, h('col', {style: 'width:30%'}), ...columns.map(() => h('col', {})), h('col', {})),
      h('thead', {}, h('tr', {}, ...['node', ...columns.map(c => c[0]), 'split'].map(c => h('th', {scope: 'col', title: c}, c.replace('pass ', '').replace('by hand', 'usr'))))), body));
  let last = null, top = 0, sight = '', keys = [];
  const at = measured(box), facts = (t, i) => {      // of a cell: backend, cause, what the other run has if that differs
    const {s, other} = last, mine = s.table[t]?.[i], theirs = other ? other.table(t, i) : undefined, differs = other && (mine === undefined || theirs === undefined ? mine !== theirs : !other.same(mine[0], theirs));
    return [mine ?? null, differs ? (theirs === undefined ? '–' : other.code(theirs)) : null];
  };
  const cell = ([mine, apart]) => {
    const look = mine ? backendLook(trace, mine[0]) : null;
    return h('td', {className: apart !== null ? 'wb-differs' : '', title: mine ? `${look.name}: ${trace.causes[mine[1]]}` : ''},
      mine ? h('span', {className: 'wb-key', style: `background:${look.fill};color:${look.ink}`}, look.code) : '', apart !== null ? `≠${apart}` : '');
  };
  const splitText = t => {
    const mine = splitOf(trace, last.s, last.upTo, t), theirs = last.other ? last.other.split(t) : mine;
    return mine === theirs ? mine : `${mine || '–'}≠${theirs || '–'}`;
  };
  const row = ([t, i, current, cells, split]) => h('tr', {'aria-rowindex': i + 2, className: current ? 'wb-current' : '', onclick: () => pick(t), ...(current ? {'aria-current': 'true'} : {})},
    h('td', {title: said(tensors[t])}, nameOf(trace, t)), ...cells.map(cell), h('td', {className: split.includes('≠') ? 'wb-differs' : ''}, split));
  const fill = () => {
    const {now} = last, tall = at.h || 340, from = Math.max(0, Math.min(rows.length - 1, Math.floor(top / ROW) - 3)), to = Math.min(rows.length, from + Math.ceil(tall / ROW) + 6);
    const filler = n => h('tr', {'aria-hidden': 'true'}, h('td', {colSpan: columns.length + 2, style: `height:${n * ROW}px;padding:0;border:0`}));
    const lines = rows.slice(from, to).map((t, k) => [t, from + k, t === now, columns.map(([, i]) => facts(t, i)), splitText(t)]), wanted = lines.map(line => JSON.stringify(line));
    if (sight === `${from} ${to}`) lines.forEach((line, k) => { if (keys[k] !== wanted[k]) body.children[k + (from ? 1 : 0)].replaceWith(row(line)); });   // only what differs is made anew
    else body.replaceChildren(...(from ? [filler(from)] : []), ...lines.map(row), ...(to < rows.length ? [filler(rows.length - to)] : []));
    [sight, keys] = [`${from} ${to}`, wanted];
  };
  box.addEventListener('scroll', () => { if (last && Math.abs(box.scrollTop - top) > ROW) { top = box.scrollTop; fill(); } });
  return {box, draw(s, now, other, upTo) {
    last = {s, now, other, upTo};
    const row = rows.indexOf(now), tall = at.h || 340, away = row >= 0 && (row * ROW < top || (row + 2) * ROW > top + tall);
    if (away) top = Math.max(0, Math.min(row * ROW - tall / 2, (rows.length + 2) * ROW - tall));
    fill();
    if (away) box.scrollTop = top;
  }};
}
const plural = (n, what) => `${n} ${what}${n === 1 ? '' : 's'}`;
function splitsTable(trace, s, over) {
  const rows = s.splits.map(([b, first, inputs], k) => {
    const end = k + 1 < s.splits.length ? s.splits[k + 1][1] : trace.order.length, look = backendLook(trace, b);
    return [String(k), h('span', {}, h('span', {className: 'wb-key', style: `background:${look.fill};color:${look.ink}`}, look.code), ` ${look.name}`),
      `${nameOf(trace, trace.order[first])}${!over && k === s.splits.length - 1 ? ' …' : end - first > 1 ? ` … ${nameOf(trace, trace.order[end - 1])} (${end - first})` : ''}`,
      inputs.map(t => `${nameOf(trace, t)} ${number(trace.graph.data.tensors[t].bytes)} B`).join(', ')];
  }), bytes = s.splits.flatMap(p => p[2]).reduce((n, t) => n + trace.graph.data.tensors[t].bytes, 0);
  return tableOf(['', 'backend', 'nodes', 'inputs, copied in'], rows, `${plural(s.splits.length, 'split')}${over ? '' : ' so far'}, ${number(bytes)} bytes to copy in each run`, rows.length - 1);
}
// ---- a question before each decision
function quiz(model, draw) {
  const box = h('div', {className: 'wb-quiz'}), name = uid('quiz');
  let shown = null;
  const ask = (trace, k) => {
    const {ask} = trace.steps[k], chosen = {};
    const group = (legend, texts, key) => h('fieldset', {}, h('legend', {}, legend), ...texts.map((text, i) => h('label', {},
      h('input', {type: 'radio', name: `${name}-${key}-${k}`, onchange: () => { chosen[key] = i; check.disabled = chosen.b === undefined || chosen.c === undefined; }}), h('span', {}, text))));
    const check = h('button', {type: 'submit', className: 'wb-main', disabled: true}, 'Check (Enter)');
    return h('form', {onsubmit: event => {
      event.preventDefault();
      if (check.disabled) return;
      put(model, 'answers', {...model.get('answers'), [k]: [ask.choices[chosen.b][1], chosen.c]});
    }}, h('div', {className: 'wb-two wb-ask'}, group('Which?', ask.choices.map(c => c[0]), 'b'), group('Because …', ask.options.map(o => o[0]), 'c')),
      h('div', {className: 'wb-row'}, check, h('button', {type: 'button', onclick: () => put(model, 'answers', {...model.get('answers'), [k]: null})}, 'Show without answering')));
  };
  const judge = (trace, k, [b, c]) => {
    const {options, right, choices, is} = trace.steps[k].ask, good = b === is, text_ = v => choices.find(c => c[1] === v)?.[0];
    const [text, misconception, why] = options[c];
    return h('div', {className: 'wb-judged'}, h('div', {}, `${good ? '✓' : '✗'} ${good ? text_(is) : `you said ${text_(b)}: it is ${text_(is)}`}`),
      h('div', {}, c === right ? `✓ because ${text}` : `✗ because: you said “${text}”. ${misconception ? `That is “${misconception}”: ` : ''}${why}`));
  };
  return {box, open: (trace, k) => model.get('predict') && !!trace.steps[k].ask && !(k in model.get('answers')), draw(trace, k, opened) {
    const answers = model.get('answers'), key = `${k} ${opened} ${JSON.stringify(answers[k])}`;
    if (!model.get('predict') || key === shown) return;
    const focus = shown !== null && box.contains(box.getRootNode().activeElement);
    shown = key;
    box.replaceChildren(...(opened ? [ask(trace, k)] : answers[k] ? [judge(trace, k, answers[k])] : []));
    if (focus && !opened) draw.focus();
  }};
}
const scoreOf = (trace, answers) => {
  const given = Object.entries(answers).filter(([k, a]) => a && trace.steps[k]?.ask);
  return [given.length, given.filter(([k, a]) => a[0] === trace.steps[k].ask.is).length, given.filter(([k, a]) => a[1] === trace.steps[k].ask.right).length];
};
// ---- all of it
function render({model, el, signal}) {
  const get = name => model.get(name), ids = {pass: uid('pass'), cause: uid('cause'), node: uid('node'), names: uid('names')};
  let run = null;                                    // the run that is stepped through, with its parts
  const main = () => get('side') === 'B' ? get('other') : get('trace'), beside = () => get('side') === 'B' ? get('trace') : get('other');
  const pair = () => get('pairs')[get('side')], two = () => !!get('other').steps;
  const last = () => main().steps.length - 1, now = () => Math.max(0, Math.min(get('k'), last()));
  const go = k => put(model, 'k', Math.max(0, Math.min(last(), k)));
  const jump = (way, test) => { const {steps} = main(); for (let k = now() + way; k >= 0 && k < steps.length; k += way) if (test(steps[k], k)) return go(k); };
  const turn = (test, way = 1) => {                  // the next one that fits, from the start again after the last
    const {steps} = main(), n = steps.length;
    for (let i = 1; i <= n; i++) { const k = (now() + way * i + 2 * n) % n; if (test(steps[k], k)) return go(k); }
  };
  const change = way => jump(way, s => s.change), pass = way => {
    const {steps} = main(), stage = steps[now()].stage;
    const start = k => { while (k > 0 && steps[k - 1].stage === steps[k].stage) k--; return k; };
    if (way > 0) return jump(1, s => s.stage !== stage);
    const first = start(now());
    go(first < now() ? first : first > 0 ? start(first - 1) : 0);
  };
  const matches = way => { const c = cause.value, t = node.value.trim(); if (c || t) turn((s, k) => (!c || s.cause === c) && (!t || (subject(main(), k) >= 0 && nameOf(main(), subject(main(), k)) === t)), way); };
  const pick = t => { const name = nameOf(main(), t); node.value = name; cause.value = ''; matches(1); };
  const button = (text, name, act) => h('button', {type: 'button', 'aria-label': name, title: name, onclick: act}, text);
  const first = button('|◀', 'first step (Home)', () => go(0)), back = button('◀', 'one step back (left arrow)', () => go(now() - 1));
  const on = button('▶', 'one step on (right arrow)', () => go(now() + 1)), end = button('▶|', 'last step (End)', () => go(last()));
  const place = h('span', {className: 'wb-place'}), score = h('span', {className: 'wb-note', role: 'status'});
  const bar = h('div', {className: 'wb-row wb-bar', tabIndex: 0, role: 'toolbar'}, first, back, on, end, button('⇤ change', 'previous change (p)', () => change(-1)),
    button('change ⇥', 'next change (n)', () => change(1)), button('⇤ pass', 'previous pass (Page Up)', () => pass(-1)), button('pass ⇥', 'next pass (Page Down)', () => pass(1)), place, score);
  const passes = h('select', {id: ids.pass, onchange: () => { const k = main().steps.findIndex(s => s.stage === passes.value); if (k >= 0) go(k); }});
  const cause = h('select', {id: ids.cause, onchange: () => matches(1)}), node = h('input', {type: 'search', id: ids.node, size: 16, onchange: () => matches(1)}), names = h('datalist', {id: ids.names});
  node.setAttribute('list', ids.names);
  const find = h('div', {className: 'wb-row'}, h('label', {htmlFor: ids.pass}, 'Pass'), passes, h('label', {htmlFor: ids.cause}, 'Cause'), cause, h('label', {htmlFor: ids.node}, 'Node'), node, names,
    button('⇤ match', 'previous step with this cause and node (b)', () => matches(-1)), button('match ⇥', 'next step with this cause and node (m)', () => matches(1)));
  const swap = button('', 'step through the other run (x)', () => exchange()), apart = h('span', {className: 'wb-note'});
  const differing = way => { const {differs} = pair(); const k = way > 0 ? differs.find(k => k > now()) : differs.findLast(k => k < now()); if (k !== undefined) go(k); };
  const versus = h('div', {className: 'wb-row'}, swap, button('⇤ difference', 'previous difference (D)', () => differing(-1)), button('difference ⇥', 'next difference (d)', () => differing(1)), apart);
  const exchange = () => { if (two()) { const k = pair().at[now()]; model.set('side', get('side') === 'A' ? 'B' : 'A'); put(model, 'k', k); } };
  const say = h('div', {className: 'wb-say', role: 'status', 'aria-live': 'polite'}), also = h('div', {className: 'wb-note'});
  const rolls = h('div', {className: 'wb-rolls'}), left = h('div', {}), right = h('div', {}), splits = h('div', {className: 'wb-scroll wb-splits', tabIndex: 0, role: 'region', 'aria-label': `${get('trace').title}: splits so far`});
  const questions = quiz(model, {focus: () => bar.focus()});
  const setUp = () => {
    const trace = main(), other = beside(), counts = new Map();
    for (const s of trace.steps) if (s.cause !== 'stage' && s.cause !== 'stage empty') counts.set(s.cause, (counts.get(s.cause) ?? 0) + 1);
    passes.replaceChildren(...trace.stages.filter(([s]) => trace.steps.some(step => step.stage === s)).map(([s, short]) => h('option', {value: s}, short)));
    cause.replaceChildren(h('option', {value: ''}, 'any'), ...[...counts].map(([c, n]) => h('option', {value: c}, `${c} (${n})`)));
    names.replaceChildren(...[...new Set(trace.steps.map((_, k) => subject(trace, k)).filter(t => t >= 0))].map(t => h('option', {value: nameOf(trace, t)})));
    run = {trace, roll: roll(trace, pick), table: stages(trace, pick), graph: layers(trace, model, pick), other: two() ? {trace: other, roll: roll(other, () => {})} : null};
    const title = (letter, t) => h('div', {className: 'wb-note'}, `${letter}: ${t.title}`), letter = get('side');
    rolls.replaceChildren(...(run.other ? [title(letter, trace), run.roll.view, title(letter === 'A' ? 'B' : 'A', other), run.other.roll.view] : [run.roll.view]));
    const {canvas, zoom, fit} = run.graph;
    left.replaceChildren(h('div', {className: 'wb-row wb-tools'}, button('−', 'zoom out', () => zoom(0.8)), button('+', 'zoom in', () => zoom(1.25)), button('fit', 'show all of the graph', fit)), canvas);
    right.replaceChildren(run.table.box, splits);
  };
  const compared = k => {                            // what the other run had decided by then
    const {match, at} = pair(), b = stateAt(run.other.trace, at[k]), upTo = reached(run.other.trace, b, at[k]), name = c => backendLook(run.other.trace, c).name;
    const reverse = new Map(match.map((t, i) => [t, i]));
    return {state: b, name, match, split: t => match[t] < 0 ? '' : splitOf(run.other.trace, b, upTo, match[t]), code: c => backendLook(run.other.trace, c).code, table: (t, i) => match[t] < 0 ? undefined : b.table[match[t]]?.[i]?.[0], reverse};
  };
  const draw = () => {
    if (!run || run.trace !== main() || (run.other?.trace ?? null) !== (two() ? beside() : null)) setUp();
    const {trace} = run, k = now(), step = trace.steps[k], asks = questions.open(trace, k) && get('side') === 'A';
    const s = asks && k > 0 ? stateAt(trace, k - 1) : asks ? START.schedule(trace) : stateAt(trace, k), about = subject(trace, k), other = run.other ? compared(k) : null, upTo = reached(trace, s, asks ? k - 1 : k), over = upTo === Infinity;
    bar.setAttribute('aria-label', `${trace.title}: arrow keys step, n and p jump to a change, Page Up and Page Down to a pass, Home and End`);
    say.textContent = asks ? `${step.ask.question} (Press a to answer.)` : step.sentence;
    place.textContent = `step ${k + 1} of ${last() + 1} · ${trace.stages.find(([name]) => name === step.stage)[1]}`;
    first.disabled = back.disabled = k === 0;
    on.disabled = end.disabled = k === last();
    if (passes.value !== step.stage) passes.value = step.stage;
    versus.hidden = also.hidden = !other;
    const mine = b => backendLook(trace, b).name;
    run.roll.draw(s, about, other && (t => other.match[t] < 0 || other.name(other.state.of[other.match[t]]) !== mine(s.of[t])));
    if (other) {
      const from = t => other.reverse.get(t);
      run.other.roll.draw(other.state, other.match[about] ?? -1, t => from(t) === undefined || mine(s.of[from(t)]) !== other.name(other.state.of[t]));
      const apartNow = trace.order.filter(t => other.match[t] < 0 || other.name(other.state.of[other.match[t]]) !== mine(s.of[t])).length;
      swap.textContent = `stepping ${get('side')}: switch to ${get('side') === 'A' ? 'B' : 'A'}`;
      apart.textContent = `${apartNow} of ${trace.order.length} nodes differ now`;
      const same = pair().same[k];
      also.textContent = asks ? '' : `${get('side') === 'A' ? 'B' : 'A'}: ${same >= 0 ? run.other.trace.steps[same].sentence : 'no such step in this run.'}`;
    }
    run.table.draw(s, about, other && {table: other.table, code: other.code, split: other.split, same: (b, c) => mine(b) === other.name(c)}, upTo);
    run.graph.draw(s, about, asks ? -1 : step.by ?? -1);
    splits.hidden = !s.splits.length;
    splits.replaceChildren(...(s.splits.length ? [splitsTable(trace, s, over)] : []));
    questions.draw(trace, k, asks);
    const [n, b, c] = scoreOf(get('trace'), get('answers'));
    score.textContent = get('predict') ? `answered ${n}: ${b} right, with ${c} right reasons` : '';
  };
  const act = {ArrowLeft: () => go(now() - 1), ArrowRight: () => go(now() + 1), Home: () => go(0), End: () => go(last()), ' ': () => go(now() + 1), n: () => change(1), p: () => change(-1),
    PageDown: () => pass(1), PageUp: () => pass(-1), m: () => matches(1), b: () => matches(-1), a: () => questions.box.querySelector('input')?.focus(), d: () => two() && differing(1), D: () => two() && differing(-1), x: () => exchange()};
  el.addEventListener('keydown', event => {
    event.stopPropagation();                         // JupyterLab would move to another cell
    const near = event.target.closest('input, select, [role=region]');
    const field = near && el.contains(near) && !['a', 'n', 'p', 'm', 'b', 'd', 'D', 'x'].includes(event.key);
    const typing = event.target.matches('input[type=search], select'), onButton = event.key === ' ' && event.target.tagName === 'BUTTON';
    if (act[event.key] && !field && !typing && !onButton && !event.ctrlKey && !event.altKey && !event.metaKey) { event.preventDefault(); act[event.key](); }
  });
  el.classList.add('wb', 'wb-schedule');
  el.replaceChildren(bar, find, versus, say, also, questions.box, rolls, h('div', {className: 'wb-two'}, left, right));
  draw();
  return follow(model, ['trace', 'other', 'k', 'side', 'opened', 'answers', 'predict'], draw, signal);
}
export default { render };
