// A question with one answer, or a number to enter; and a slider with a real label.
function question({model, el}) {
  const name = uid('q'), options = model.get('options'), said = h('div', {className: 'wb-note', role: 'status'});
  const send = value => { model.set('answer', value); model.save_changes(); };
  const field = options.length
    ? options.map(([key, text]) => h('label', {}, h('input', {type: 'radio', name, value: key, onchange: () => send(key)}), h('span', {}, text)))
    : [h('label', {}, 'Your number', h('input', {type: 'text', inputMode: 'decimal', size: 14, onchange: event => send(event.target.value.trim())}))];
  const box = h('fieldset', {}, h('legend', {}, model.get('ask')), ...field, said);
  const draw = () => {
    const answer = model.get('answer');
    for (const input of box.querySelectorAll('input')) {
      if (input.type === 'radio') input.checked = input.value === answer; else input.value = answer;
    }
    said.textContent = answer ? 'Recorded. A cell below compares it with what the code does.' : 'Not answered yet. A guess is enough.';
  };
  el.classList.add('wb');
  el.replaceChildren(box);
  draw();
  return draw;
}
// One slider with a label: [its row, a function that shows limits, value and the value's name].
function slider(label, act) {
  const id = uid('range'), shown = h('output', {htmlFor: id}), input = h('input', {type: 'range', id, oninput: () => act(+input.value)});
  return [h('div', {className: 'wb-row'}, h('label', {htmlFor: id}, label), input, shown), (min, max, step, names, value) => {
    Object.assign(input, {min, max, step});
    input.value = value;
    shown.textContent = names[value - min] ?? String(value);
    input.setAttribute('aria-valuetext', shown.textContent);
  }];
}
function range({model, el}) {
  const change = value => { model.set('value', value); model.save_changes(); };
  const knobs = () => model.get('kind') === 'knobs' ? model.get('knobs') : [[model.get('label'), model.get('min'), model.get('max'), model.get('names')]];
  const sliders = knobs().map(([label], i) => slider(label, model.get('kind') !== 'knobs' ? change : value => {
    model.set('values', model.get('values').with(i, value));
    model.save_changes();
  }));
  const picture = h('div', {className: 'wb-below'});
  let below = '';
  const draw = () => {
    const values = model.get('values') ?? [model.get('value')];
    knobs().forEach(([, min, max, names], i) => sliders[i][1](min, max, model.get('step') ?? 1, names ?? [], values[i]));
    if (below !== model.get('below')) picture.innerHTML = below = model.get('below');    // made by workbench.views, which escapes every text
  };
  el.classList.add('wb');
  const rows = sliders.map(([row]) => row), several = rows.length > 1 ? `wb-knobs${rows.length > 4 ? ' wb-many' : ''}` : '';
  el.replaceChildren(h('div', {className: several}, ...rows), picture);
  draw();
  return draw;
}
export default { render({model, el, signal}) {
  keepKeys(el);
  const asks = model.get('kind') === 'question';
  return follow(model, asks ? ['answer'] : ['value', 'values', 'below', 'min', 'max', 'names'], asks ? question({model, el}) : range({model, el}), signal);
} };
