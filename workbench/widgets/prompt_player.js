// Type a prompt, watch tokens arrive, each coloured by its first expert in the chosen layer. `paintAll(record, k)` draws the record alone.
function sentence(record, k, layer) {
  const t = record.tokens[k];
  if (!t) return '';
  const experts = t.experts[layer].join(', ');
  return `token ${k} ‘${visible(t.text)}’${t.given ? ' (from the prompt)' : ''} → experts ${experts} in layer ${record.layers[layer]}`;
}
function render({model, el, signal}) {
  el.classList.add('wb');
  const box = uid('prompt'), list = uid('tokens');
  const prompt = h('textarea', {id: box, rows: 2, style: 'width: 100%; box-sizing: border-box; font-family: var(--jp-code-font-family, monospace)',
    value: model.get('prompt'), oninput: () => { model.set('prompt', prompt.value); model.save_changes(); }});
  const layers = h('select', {onchange: () => { model.set('layer', +layers.value); model.save_changes(); }});
  const count = h('input', {type: 'number', min: 1, max: 200, style: 'width: 5em', onchange: () => { model.set('n_tokens', Math.max(1, Math.min(200, +count.value || 1))); count.value = model.get('n_tokens'); model.save_changes(); }});
  const generate = h('button', {type: 'button', className: 'wb-main', onclick: () => start()}, 'Generate (Ctrl+Enter)');
  const stop = h('button', {type: 'button', onclick: () => model.send({do: 'stop'})}, 'Stop');
  const say = h('div', {className: 'wb-say', role: 'status', 'aria-live': 'polite'});
  const note = h('div', {className: 'wb-note', role: 'status'});
  const text = h('div', {className: 'wb-tokens', tabIndex: 0, role: 'listbox', id: list, 'aria-label': 'Tokens; arrow keys choose one'});
  const table = h('div', {className: 'wb-scroll', tabIndex: 0, role: 'region', 'aria-label': 'Tokens with their experts'});
  let answered = true;
  const start = () => {
    if (model.get('running')) return;
    model.set('prompt', prompt.value); model.save_changes(); model.send({do: 'generate'});
    answered = false;                              // a restarted kernel knows nothing of this box
    setTimeout(() => { if (!answered) note.textContent = 'No answer: the kernel was restarted or is busy. Run the set-up cell and this one again.'; }, 4000);
  };
  const choose = k => { model.set('k', Math.max(0, Math.min(model.get('record').tokens.length - 1, k))); model.save_changes(); };
  el.addEventListener('keydown', event => {
    event.stopPropagation();                       // JupyterLab would run the cell, or move to another
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) { event.preventDefault(); start(); }
    if (event.key === 'Escape') model.send({do: 'stop'});
  });
  text.addEventListener('keydown', event => {
    const last = model.get('record').tokens.length - 1, k = current();
    const to = {ArrowLeft: k - 1, ArrowUp: k - 1, ArrowRight: k + 1, ArrowDown: k + 1, Home: 0, End: last}[event.key];
    if (to !== undefined) { event.preventDefault(); choose(to); }
  });
  const current = () => { const n = model.get('record').tokens.length; return model.get('k') < 0 ? n - 1 : Math.min(model.get('k'), n - 1); };
  const draw = () => {
    const record = model.get('record'), layer = model.get('layer'), k = current(), running = model.get('running');
    if (prompt.value !== model.get('prompt') && document.activeElement !== prompt) prompt.value = model.get('prompt');
    if (layers.options.length !== record.layers.length) layers.replaceChildren(...record.layers.map((n, i) => h('option', {value: i}, `${n}`)));
    layers.value = layer;
    if (document.activeElement !== count) count.value = model.get('n_tokens');   // not while somebody types
    answered ||= running;
    generate.disabled = running;
    stop.disabled = !running;
    say.textContent = sentence(record, k, layer);
    note.textContent = model.get('message');
    const tokens = record.tokens.flatMap((t, i) => [paint(h('span', {className: 'wb-token' + (t.given ? ' wb-given' : ''), role: 'option', id: `${list}-${i}`,
      'aria-selected': String(i === k), title: sentence(record, i, layer), onclick: () => choose(i)},
      visible(t.text), h('sub', {}, String(t.experts[layer][0]))), model.get('looks'), t.experts[layer][0]), t.text.includes('\n') ? h('br') : null]);
    text.replaceChildren(...tokens.filter(Boolean));
    const chosen = document.getElementById(`${list}-${k}`);
    if (chosen) { text.setAttribute('aria-activedescendant', chosen.id); keep(text, chosen); }
    const rows = record.tokens.map((t, i) => [String(i), visible(t.text), t.experts[layer].join(', '), t.weights[layer].map(w => w.toFixed(2)).join(', ')]);
    table.replaceChildren(tableOf(['token', 'text', 'experts', 'weights'], rows, `Layer ${record.layers[layer]}`, k));
    const row = table.querySelector('.wb-current');
    if (row) keep(table, row);
  };
  el.replaceChildren(h('label', {htmlFor: box}, 'Prompt'), prompt,
    h('div', {className: 'wb-row'}, generate, stop, h('label', {}, 'new tokens', count), h('label', {}, 'layer', layers), note),
    say, h('div', {className: 'wb-two'}, text, table));
  draw();
  return follow(model, ['record', 'layer', 'k', 'running', 'message', 'prompt', 'n_tokens'], draw, signal);
}
function keep(box, part) {                         // scroll inside the box only, never the page
  const top = part.offsetTop - box.offsetTop;
  if (top < box.scrollTop + 30 || top > box.scrollTop + box.clientHeight - 30) box.scrollTop = top - box.clientHeight / 2;
}
export default { render };
