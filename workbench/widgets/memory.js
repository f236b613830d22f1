// Memory as rows of cells, the address of each row at its left. Reads the cells and trace.steps[0..k], nothing beyond.
function memory(trace, k, looks) {
  const cells = trace.cells.map(text => [text, '', -1, false]);
  for (const step of trace.steps.slice(0, k + 1))
    for (const [cell, ...mark] of step.marks) cells[cell] = mark[2] < 0 ? [trace.cells[cell], '', -1, false] : mark;
  const now = new Set(trace.steps[k].marks.map(mark => mark[0]));
  const notes = trace.steps.some(step => step.marks.some(mark => mark[2]));
  const cell = ([text, note, look, pale], i) => {
    const name = (trace.legend.find(entry => entry[0] === look) ?? ['', ''])[1];
    const td = h('td', {className: now.has(i) ? 'wb-now wb-mark' : 'wb-mark', title: `byte ${i * trace.unit}${name && `: ${name}`}`}, text, notes ? h('small', {}, note || '\u00a0') : null);
    if (pale) { td.classList.add('wb-pale'); td.style.setProperty('--fill', looks[look % looks.length][0]); }
    return look < 0 || pale ? td : paint(td, looks, look);
  };
  const rows = [];
  for (let a = 0; a < cells.length; a += trace.per_row)
    rows.push(h('tr', {}, h('th', {scope: 'row'}, String(a * trace.unit)), ...cells.slice(a, a + trace.per_row).map((c, x) => cell(c, a + x))));
  const met = new Set(trace.steps.slice(0, k + 1).flatMap(step => step.marks.map(mark => mark[3])));
  const legend = trace.legend.filter(entry => met.has(entry[0])).map(([look, text]) => h('span', {}, paint(h('i', {}), looks, look), text));
  return h('div', {className: notes ? 'wb-memory wb-noted' : 'wb-memory'},
    h('table', {'aria-label': `${trace.title}: memory after step ${k + 1}, one cell is ${trace.unit} bytes`}, h('tbody', {}, ...rows)),
    h('div', {className: 'wb-legend'}, ...legend));
}
