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
    said.textContent = answer ? 'Recorded. The next cell compares it with what the code does.' : 'Not answered yet. A guess is enough.';
  };
  el.classList.add('wb');
  el.replaceChildren(box);
  draw();
  return draw;
}
function range({model, el}) {
  const id = uid('range'), shown = h('output', {htmlFor: id});
  const input = h('input', {type: 'range', id, oninput: () => { model.set('value', +input.value); model.save_changes(); }});
  const picture = h('div', {className: 'wb-below'});
  let below = '';
  const draw = () => {
    Object.assign(input, {min: model.get('min'), max: model.get('max'), step: model.get('step')});
    input.value = model.get('value');
    const name = model.get('names')[model.get('value') - model.get('min')];
    shown.textContent = name ?? String(model.get('value'));
    input.setAttribute('aria-valuetext', shown.textContent);
    if (below !== model.get('below')) picture.innerHTML = below = model.get('below');    // made by workbench.views, which escapes every text
  };
  el.classList.add('wb');
  el.replaceChildren(h('div', {className: 'wb-row'}, h('label', {htmlFor: id}, model.get('label')), input, shown), picture);
  draw();
  return draw;
}
export default { render({model, el, signal}) {
  keepKeys(el);
  const draw = model.get('kind') === 'range' ? range({model, el}) : question({model, el});
  return follow(model, model.get('kind') === 'range' ? ['value', 'below', 'min', 'max', 'names'] : ['answer'], draw, signal);
} };
