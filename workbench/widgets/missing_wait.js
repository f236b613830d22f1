// Two runs on one clock: with all waits, and without the chosen one. What was tried already needs no kernel.
function render({model, el, signal}) {
  el.classList.add('wb', 'wb-wide');
  keepKeys(el);
  const id = uid('range'), shown = h('output', {htmlFor: id}), input = h('input', {type: 'range', id, min: 1, oninput: () => put(model, 'value', +input.value)});
  const say = h('div', {className: 'wb-say', role: 'status', 'aria-live': 'polite'}), table = h('div', {className: 'wb-below'}), runs = h('div', {});
  const part = (trace, end) => h('figure', {style: 'margin: 0.5em 0'}, h('figcaption', {}, trace.title),
    h('div', {role: 'img', 'aria-label': trace.steps.map(step => step.sentence).join(' ')}, runPicture({...trace, end}, trace.steps.length - 1, model.get('looks'), 0)));
  const draw = () => {
    const names = model.get('names'), n = model.get('value'), cut = model.get('cuts')[n], whole = model.get('whole');
    Object.assign(input, {max: names.length});
    input.value = n;
    shown.textContent = names[n - 1];
    input.setAttribute('aria-valuetext', names[n - 1]);
    say.textContent = cut ? cut.said : 'Running it …';
    if (!cut) return;
    table.replaceChildren(...cut.rows.length ? [tableOf(model.get('columns'), cut.rows, 'results that differ')] : []);
    const end = Math.max(whole.end, cut.steps.end);
    runs.replaceChildren(part(whole, end), part(cut.steps, end));
  };
  el.replaceChildren(h('div', {className: 'wb-row'}, h('label', {htmlFor: id}, 'leave out wait'), input, shown), say, table, runs);
  draw();
  return follow(model, ['value', 'cuts'], draw, signal);
}
export default { render };
