// Steps of anything: a trace and a position. `draw(trace, k)` reads trace.steps[0..k] and nothing beyond.
function raster(trace, k, looks) {
  const cells = Array.from({length: trace.steps.length}, (_, x) => x <= k ? trace.steps[x] : null);
  const head = h('tr', {}, h('td', {}), ...cells.map((s, x) => h('th', {scope: 'col', className: x === k ? 'wb-now' : ''}, h('span', {}, s ? visible(s.label).slice(0, 13) : ''))));
  const body = trace.lanes.map((name, lane) => h('tr', {}, h('th', {scope: 'row'}, name), ...cells.map((s, x) => {
    const mark = s && s.marks.find(m => m[0] === lane);
    const td = h('td', {className: (mark ? 'wb-mark ' : '') + (s && s.change ? 'wb-change ' : '') + (x === k ? 'wb-now' : '')}, mark ? mark[1] : '');
    return mark ? paint(td, looks, lane) : td;
  })));
  return h('table', {'aria-label': `${trace.title}, steps 1 to ${k + 1}`}, h('thead', {}, head), h('tbody', {}, ...body));
}
function render({model, el, signal}) {
  el.classList.add('wb');
  el.classList.toggle('wb-wide', model.get('trace').kind === 'run');
  const say = h('div', {className: 'wb-say', role: 'status', 'aria-live': 'polite'}), picture = h('div', {className: 'wb-raster', tabIndex: 0, role: 'region'});
  const beside = h('div', {className: 'wb-scroll wb-sheet-table', tabIndex: 0, role: 'region'});
  const last = () => model.get('trace').steps.length - 1;
  const go = k => put(model, 'k', Math.max(0, Math.min(last(), k)));
  const jump = way => {
    const steps = model.get('trace').steps;
    for (let k = model.get('k') + way; k >= 0 && k < steps.length; k += way) if (steps[k].change) return go(k);
  };
  const button = (text, label, act) => h('button', {type: 'button', 'aria-label': label, title: label, onclick: act}, text);
  const first = button('|◀', 'first step (Home)', () => go(0)), back = button('◀', 'one step back (left arrow)', () => go(model.get('k') - 1));
  const on = button('▶', 'one step on (right arrow)', () => go(model.get('k') + 1)), end = button('▶|', 'last step (End)', () => go(last()));
  const less = button('⇤ change', 'previous change (p)', () => jump(-1)), more = button('change ⇥', 'next change (n)', () => jump(1));
  const place = h('span', {}), more_tools = [];
  let zoom = model.get('trace').zoom ?? 0;
  const near = zoom, seek = (field, same, way) => {                  // the next step where a field differs, or is the same again
    const steps = model.get('trace').steps, here = steps[model.get('k')][field];
    for (let k = model.get('k') + way; k >= 0 && k < steps.length; k += way) if ((steps[k][field] === here) === same) return go(k);
  };
  const chooser = (text, field, key) => {                            // on to the next step with the chosen value, from the end to the start
    const found = [...new Set(model.get('trace').steps.map(s => s[field]))], pick = event => {
      const steps = model.get('trace').steps, k = model.get('k'), at = steps.map((_, i) => (k + 1 + i) % steps.length).find(i => steps[i][field] === event.target.value);
      event.target.value = '';
      if (at !== undefined) go(at);
    };
    return h('select', {'aria-label': `jump to the next ${text}; ${key} for the kind of this one`, onchange: pick}, h('option', {value: ''}, `jump to …`),
      ...found.map(value => h('option', {value}, value.replaceAll('_', ' '))));
  };
  const act = {ArrowLeft: () => go(model.get('k') - 1), ArrowRight: () => go(model.get('k') + 1), Home: () => go(0), End: () => go(last()),
    ' ': () => go(model.get('k') + 1), n: () => jump(1), p: () => jump(-1)};
  for (const [key, text, field, same] of model.get('trace').jumps ?? []) {
    const away = key.toUpperCase(), back = () => seek(field, same, -1), ahead = () => seek(field, same, 1);
    act[key] = ahead;
    act[away] = back;
    more_tools.push(...same ? [chooser(text, field, key)] : [button(`⇤ ${text}`, `previous ${text} (${away})`, back), button(`${text} ⇥`, `next ${text} (${key})`, ahead)]);
  }
  if (model.get('trace').zoom !== undefined) {
    const scale = by => () => { zoom = Math.max(0, Math.min(near + 5, zoom + by)); draw(); };
    act['+'] = act['='] = scale(1);
    act['-'] = scale(-1);
    more_tools.push(button('−', 'show more time (-)', act['-']), button('+', 'show less time (+)', act['+']));
  }
  const bar = h('div', {className: 'wb-row wb-bar', tabIndex: 0, role: 'toolbar'}, first, back, on, end, less, more, ...more_tools, place);
  el.addEventListener('keydown', event => {
    event.stopPropagation();                       // JupyterLab would move to another cell
    const onButton = event.key === ' ' && event.target.tagName === 'BUTTON' || event.target.tagName === 'SELECT';
    if (act[event.key] && !onButton && !event.ctrlKey && !event.altKey && !event.metaKey) { event.preventDefault(); act[event.key](); }
  });
  const inSight = () => {
    const now = picture.querySelector('.wb-now'), scroll = picture.scrollLeft;
    if (now && (now.offsetLeft < scroll || now.offsetLeft > scroll + picture.clientWidth - 40)) picture.scrollLeft = now.offsetLeft - picture.clientWidth / 2;
  };
  const draw = () => {
    const trace = model.get('trace'), k = Math.min(model.get('k'), last()), step = trace.steps[k];
    bar.setAttribute('aria-label', `${trace.title}: arrow keys step, Home and End, n and p jump to a change`);
    picture.setAttribute('aria-label', trace.title);
    beside.setAttribute('aria-label', `State at step ${k + 1}`);
    say.textContent = step.sentence;
    place.textContent = `step ${k + 1} of ${last() + 1}`;
    first.disabled = back.disabled = k === 0;
    on.disabled = end.disabled = k === last();
    const scroll = picture.scrollLeft;
    picture.replaceChildren(pictureAt(trace, k, model.get('looks'), zoom));
    picture.scrollLeft = scroll;
    inSight();
    const [columns, rows, caption] = tableAt(trace, k);
    beside.replaceChildren(tableOf(columns, rows, caption));
  };
  el.replaceChildren(bar, say, h('div', {className: 'wb-two'}, picture, beside));
  draw();
  requestAnimationFrame(inSight);                  // once more when the page has given it its width
  return follow(model, ['trace', 'k'], draw, signal);
}
export default { render };
