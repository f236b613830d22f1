// A case of the scheduler to play with. The page only says what it wishes; the kernel runs the passes and sends what came of it.
function render({model, el, signal}) {
  const get = name => model.get(name), controls = () => get('run').controls;
  const wish = (...what) => put(model, 'wish', [(get('wish')[0] ?? 0) + 1, ...what]);
  const choice = (label, act) => { const select = h('select', {'aria-label': label, onchange: () => act(select.value)}); return [h('label', {}, h('span', {}, label), select), select]; };
  const fill = (select, options, value) => {                 // options: [value, text]; the choice stays while it is there
    const key = JSON.stringify(options);
    if (select.dataset.key !== key) { select.replaceChildren(...options.map(([v, text]) => h('option', {value: v}, text))); select.dataset.key = key; }
    select.value = value;
  };
  const tick = (label, act) => { const box = h('input', {type: 'checkbox', onchange: () => act(box.checked)}); return [h('label', {}, box, h('span', {}, label)), box]; };
  const [weightOf, weight] = choice('Weight', () => show()), [homeOf, home] = choice('lies on', device => wish('weight', weight.value, device));
  const [opOf, op] = choice('Op', () => show()), [deviceOf, device] = choice('on', () => show());
  const [hasOf, has] = tick('has a kernel', on => wish(on ? 'allow' : 'deny', op.value, device.value));
  const [nodeOf, node] = choice('Node', () => show()), [byHandOf, byHand] = choice('is assigned to', b => wish('assign', node.value, b));
  const batch = h('input', {type: 'number', min: 1, max: 4096, size: 5, onchange: () => wish('batch', '', Math.round(+batch.value))});
  const batchOf = h('label', {}, h('span', {}, 'Batch'), batch);
  const [offloadOf, offload] = tick('op_offload', on => wish('op_offload', '', on)), [slotsOf, slots] = tick('4 pipeline slots (n_copies)', on => wish('parallel', '', on));
  const back = h('button', {type: 'button', onclick: () => wish('back')}, '⇄ last run (A)'), first = h('button', {type: 'button', onclick: () => wish('first')}, 'start over');
  const row = (...kids) => h('div', {className: 'wb-row'}, ...kids);
  const weights = row(weightOf, homeOf), bar = h('fieldset', {className: 'wb-whatif-bar'}, h('legend', {}, 'What if …'),
    weights, row(opOf, deviceOf, hasOf), row(nodeOf, byHandOf), row(batchOf, offloadOf, slotsOf, back, first));
  const say = h('div', {className: 'wb-say', role: 'status', 'aria-live': 'polite'});
  const runs = h('div', {className: 'wb-rolls', tabIndex: 0, role: 'region', 'aria-label': 'Nodes in order, a row for each backend'});
  const borders = h('div', {className: 'wb-row', role: 'group', 'aria-label': 'Why is there a border?'});
  const answer = h('div', {className: 'wb-answer', role: 'region', 'aria-live': 'polite', 'aria-label': 'Why not?'});
  const facts = h('div', {className: 'wb-scroll', tabIndex: 0, role: 'region', 'aria-label': 'Both runs in numbers'});

  const keep = (select, options, fallback) => { const v = select.value; fill(select, options, options.some(o => o[0] === v) ? v : fallback ?? options[0]?.[0]); };
  const show = () => {                                       // the controls say what holds now
    const c = controls();
    weights.hidden = !c.weights.length;
    keep(weight, c.weights.map(([w, on]) => [w, `${w} (${on})`]));
    fill(home, c.memories.map(b => [b, b]), c.weights.find(w => w[0] === weight.value)?.[1]);
    keep(op, c.ops.map(([o, lacking]) => [o, lacking.length ? `${o} (not on ${lacking.join(', ')})` : o]));
    keep(device, c.devices.map(b => [b, b]));
    has.checked = !(c.ops.find(o => o[0] === op.value)?.[1] ?? []).includes(device.value);
    keep(node, c.nodes.map(n => [n, c.assigned[n] ? `${n} (${c.assigned[n]})` : n]));
    fill(byHand, [['', 'whom the passes choose'], ...c.devices.map(b => [b, b])], c.assigned[node.value] ?? '');
    batchOf.hidden = !c.batch;
    batch.value = c.batch;
    offload.checked = c.op_offload;
    slots.checked = c.parallel;
    back.disabled = !get('last').graph;
  };
  const ask = k => wish('ask', k);
  const picture = (run, title, differs) => {
    const place = new Map(run.order.map((t, i) => [t, i]));
    const drawn = roll(run, t => { const name = nameOf(run, t); if (controls().nodes.includes(name)) { node.value = name; show(); node.focus(); } });
    drawn.view.addEventListener('click', event => { const k = +event.target.dataset?.k; if (k > 0 && run === get('run')) ask(k); });
    drawn.draw(run, -1, t => place.has(t) && differs(place.get(t)));
    return [h('div', {className: 'wb-place'}, title), drawn.view];
  };
  const onWhich = run => (run.order ?? []).map(t => run.of[t]);
  const draw = () => {
    const run = get('run'), last = get('last'), before = Boolean(last.order), was = onWhich(last), now = onWhich(run);
    show();
    say.textContent = get('note');
    runs.replaceChildren(
      ...(before ? picture(last, 'A: last run', () => false) : []),
      ...picture(run, before ? 'B: this run (dashed: on another backend than in A)' : 'this run', i => was.length === now.length && was[i] !== now[i]));
    const held = borders.contains(document.activeElement) ? [...borders.children].indexOf(document.activeElement) : -1;
    const gone = new Set((last.cuts ?? []).slice(1).map(c => `${c[1]} | ${c[0]}`));
    borders.replaceChildren(h('span', {}, run.cuts.length > 1 ? 'Why not in one split?' : 'One split: no border to ask about.'),
      ...run.cuts.slice(1).map(([name, left, cause, inputs], i) => h('button', {type: 'button', title: cause, onclick: () => ask(i + 1),
        'aria-label': `Why does split ${i + 1} begin at ${name}? ${cause}`}, `${left} | ${name}${before && !gone.has(`${left} | ${name}`) ? ' (new)' : ''}`)));
    if (held > 0) borders.children[Math.min(held, borders.children.length - 1)]?.focus();
    facts.replaceChildren(before
      ? tableOf(['', 'A: last run', 'B: this run', ''], run.facts.map(([what, b], i) => [what, last.facts[i][1], b, last.facts[i][1] === b ? '' : '≠']), 'Both runs')
      : tableOf(['', 'this run'], run.facts, 'This run'));
    const a = get('answer');
    answer.hidden = !a.title;
    answer.replaceChildren(...(a.title ? [h('p', {className: 'wb-place'}, a.title),
      ...a.lines.map(([what, text]) => h('div', {}, h('b', {}, `${what}: `), text)),
      ...(a.rows.length ? [h('div', {className: 'wb-scroll', tabIndex: 0, role: 'region', 'aria-label': 'Changes that take the border away'},
        tableOf(['try', ...a.columns], a.rows.map((r, i) => [h('button', {type: 'button', 'aria-label': `Try: ${r[0]}`, onclick: () => wish(...a.ways[i])}, 'try it'), ...r]),
          'What takes it away, smallest first'))] : [])] : []));
  };
  keepKeys(el);
  el.classList.add('wb', 'wb-schedule', 'wb-whatif');
  el.replaceChildren(bar, say, runs, borders, answer, facts);
  draw();
  let due = false;                                           // several traits change with one message: one redraw
  const soon = () => { if (!due) { due = true; queueMicrotask(() => { due = false; draw(); }); } };
  return follow(model, ['run', 'note', 'answer'], soon, signal);
}
export default { render };
