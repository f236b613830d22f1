// Helpers of all widgets. Text reaches the page through textContent only: names and tokens come from files of strangers.
function h(tag, props = {}, ...kids) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
    else if (key === 'style') node.style.cssText = value;
    else if (key in node && !key.startsWith('aria')) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...kids.filter(kid => kid !== null && kid !== undefined));
  return node;
}
let serial = 0;
const uid = prefix => `${prefix}-${Date.now().toString(36)}-${serial++}`;
const look = (looks, i) => ({fill: looks[i % looks.length][0], ink: looks[i % looks.length][1]});
const paint = (node, looks, i) => { const s = look(looks, i); node.style.background = s.fill; node.style.color = s.ink; return node; };
const visible = text => text.replace(/\n/g, '⏎').replace(/\t/g, '⇥').replace(/[\u0000-\u001f\u007f]/g, '�') || '∅';
// JupyterLab's own shortcuts (arrows, Home, Ctrl+Enter) must not fire while a widget has the focus.
const keepKeys = el => el.addEventListener('keydown', event => event.stopPropagation());
// A stored page has no kernel to tell: the state of the page is enough there.
const put = (model, name, value) => { model.set(name, value); try { model.save_changes(); } catch { /* no kernel */ } };
function follow(model, names, draw, signal) {
  const undo = names.map(name => { model.on(`change:${name}`, draw); return () => model.off(`change:${name}`, draw); });
  const off = () => undo.forEach(f => f());
  if (signal) signal.addEventListener('abort', off);
  return off;
}
function tableOf(columns, rows, caption, current = -1) {
  return h('table', {className: 'wb-table'},
    h('caption', {}, caption),
    h('thead', {}, h('tr', {}, ...columns.map(c => h('th', {scope: 'col'}, c)))),
    h('tbody', {}, ...rows.map((row, i) => h('tr', i === current ? {className: 'wb-current', 'aria-current': 'true'} : {},
      ...row.map(cell => h('td', {}, cell))))));
}
