const q=document.getElementById('q'),choices=[...document.querySelectorAll('select')];
function show(){const words=q.value.toLowerCase().split(/\s+/).filter(Boolean);let n=0;
for(const r of document.querySelectorAll('tr[id]')){const ok=words.every(w=>r.dataset.words.includes(w))&&
choices.every(s=>!s.value||r.dataset[s.id]===s.value);r.hidden=!ok;n+=ok}
for(const s of document.querySelectorAll('section'))s.hidden=!s.querySelector('tr[id]:not([hidden])');
document.getElementById('n').textContent=n+' rows'}
q.addEventListener('input',show);for(const s of choices)s.addEventListener('change',show);show()