"use strict";
// Shows the data of the page. All text goes into text nodes, so that nothing in it is interpreted as HTML.
(() => {
  const D = JSON.parse(document.getElementById("data").textContent);
  const ROW = 64, MARGIN = 6;
  const $ = id => document.getElementById(id);
  const p = D.p.map(x => x / D.scale);
  const percent = (x, digits = 0) => (100 * x).toFixed(digits) + "%";

  // ---- risk and coverage: sums over the most certain queries, so that a move of the slider costs two lookups ----
  const byCertainty = Uint32Array.from(p.keys()).sort((a, b) => D.p[b] - D.p[a] || a - b);
  const sorted = byCertainty.map(row => D.p[row]);
  const expectedWrong = new Float64Array(D.n + 1), judgedWrong = new Float64Array(D.n + 1);
  byCertainty.forEach((row, i) => {
    expectedWrong[i + 1] = expectedWrong[i] + 1 - p[row];
    judgedWrong[i + 1] = judgedWrong[i] + (D.right && !D.right[row] ? 1 : 0);
  });
  function answered(threshold) { // how many probabilities are at least the threshold
    const least = threshold * D.scale - 1e-6;
    let low = 0, high = D.n;
    while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] >= least) low = middle + 1; else high = middle; }
    return low;
  }

  const box = $("risk").dataset, now = $("risk-now"), slider = $("slider");
  const span = { left: +box.left, right: +box.right, above: +box.above, below: +box.below, top: +box.top };
  const bold = words => { const b = document.createElement("b"); b.textContent = words; return b; };
  let threshold = 0.5, refresh = 0;
  function moveTo(value) {
    threshold = value;
    const count = answered(value), coverage = D.n ? count / D.n : 0, risk = count ? expectedWrong[count] / count : 0;
    $("threshold").textContent = value.toFixed(3).replace(/^0/, "");
    const parts = ["Answers ", bold(percent(coverage, 1)), ` of the queries (${count.toLocaleString("en")}); `,
      bold(percent(risk, 1)), " of the answers are expected to be wrong"];
    if (D.right && count) {
      const spread = Math.sqrt(judgedWrong[count] * (count - judgedWrong[count]) / count) / count;
      parts.push(", ", bold(percent(judgedWrong[count] / count, 1)), ` were (± ${percent(1.96 * spread, 1)})`);
    }
    parts.push(".");
    const rule = D.certified;
    if (rule && !D.holds) parts.push(` ${percent(rule.max_error)} were certified at ${rule.threshold.toFixed(3)}, but these queries are no longer like those.`);
    else if (rule) parts.push(value === rule.threshold
      ? ` The certified point: at most ${percent(rule.max_error)} wrong, guaranteed at ${percent(rule.confidence)} confidence.`
      : ` ${value > rule.threshold ? "Stricter" : "Looser"} than the certified point, ${rule.threshold.toFixed(3)}: only that one was certified.`);
    $("outcome").replaceChildren(...parts);
    const x = span.left + (span.right - span.left) * coverage;
    const y = span.below - (span.below - span.above) * Math.min(risk, span.top) / span.top;
    now.children[0].setAttribute("x1", x); now.children[0].setAttribute("x2", x);
    now.children[1].setAttribute("cx", x); now.children[1].setAttribute("cy", y);
    for (const row of $("spacer").children) mark(row);
    if ((view === "answered" || view === "turned away") && !refresh) // the list follows once for each picture
      refresh = requestAnimationFrame(() => { refresh = 0; if (view === "answered" || view === "turned away") choose(view); });
  }

  // ---- which queries ----
  const identity = Uint32Array.from(p.keys());
  const views = [
    ["all", "all", "", () => identity],
    ["most certain", "most certain", "", () => byCertainty],
    ["least certain", "least certain", "", () => byCertainty.slice().reverse()],
    ["answered", "answered", "Queries that are answered at this threshold, most certain first.", () => byCertainty.slice(0, answered(threshold))],
    ["turned away", "turned away", "Queries that are not answered at this threshold, most certain first.", () => byCertainty.slice(answered(threshold))],
  ];
  if (D.right) views.push(["sure but wrong", "sure but wrong", "The first hit was judged wrong; most certain first.", () => byCertainty.filter(row => !D.right[row])]);
  for (const each of D.marked) views.push([each.name, `${each.name} (${each.rows.length})`, each.why, () => each.rows]);
  const marks = new Map(); // by query: why it is marked
  for (const each of D.marked) for (const row of each.rows) marks.set(row, [...(marks.get(row) || []), `${each.name}: ${each.why}`]);
  let view = "all", shown = identity, chosen = 0; // `chosen` is a place in `shown`
  const haystack = identity.length ? D.captions.map((words, row) => `${D.ids[row]}\n${words}`.toLowerCase()) : [];
  function choose(name) {
    view = name;
    const words = $("search").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const [, , why, rows] = views.find(each => each[0] === name);
    const every = rows();
    const keep = shown[chosen];
    shown = words.length ? Array.from(every).filter(row => words.every(word => haystack[row].includes(word))) : every;
    for (const button of $("tabs").children) button.setAttribute("aria-pressed", button.dataset.view === name);
    $("count").textContent = `${shown.length.toLocaleString("en")} of ${D.n.toLocaleString("en")} queries. ${why}`;
    chosen = Math.max(0, shown.indexOf(keep));
    $("spacer").style.height = `${shown.length * ROW}px`;
    for (const row of [...$("spacer").children]) row.remove();
    scrollTo(chosen);
    draw();
    detail();
  }
  for (const [number, [name, title]] of views.entries()) {
    const button = document.createElement("button");
    button.type = "button"; button.dataset.view = name; button.textContent = title;
    if (number < 9) button.title = `Key ${number + 1}`;
    button.addEventListener("click", () => { choose(name); select(0); });
    $("tabs").append(button);
  }

  // ---- the list: only the rows in sight exist ----
  const list = $("list");
  function element(tag, className, words) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (words !== undefined) { made.textContent = words; made.dir = "auto"; }
    return made;
  }
  function bar(share) {
    const outer = element("span", "bar"), inner = element("i");
    inner.style.width = `${Math.min(100, 100 * share)}%`;
    outer.append(inner);
    return outer;
  }
  function mark(row) {
    const query = +row.dataset.query;
    row.classList.toggle("quiet", p[query] < threshold - 5e-5);
    row.classList.toggle("chosen", +row.dataset.place === chosen);
    row.setAttribute("aria-selected", +row.dataset.place === chosen);
  }
  const short = words => words.length > 300 ? `${words.slice(0, 300)}…` : words;
  function made(place) {
    const query = shown[place], row = element("div", "row"), sure = element("span", "sure", percent(p[query]));
    row.id = `place-${place}`; row.dataset.place = place; row.dataset.query = query; row.style.top = `${place * ROW}px`;
    row.setAttribute("role", "option");
    row.setAttribute("aria-setsize", shown.length); row.setAttribute("aria-posinset", place + 1);
    const first = D.hits[query * D.k], under = element("span", "under", D.captions[query] ? D.ids[query] : "");
    if (first >= 0) under.append(`${under.textContent ? " · " : ""}finds ${short(nameOf(first))}`);
    if (D.right) under.prepend(element("span", D.right[query] ? "right" : "wrong", D.right[query] ? "right · " : "wrong · "));
    sure.append(bar(p[query]));
    row.append(element("span", "words", short(D.captions[query] || D.ids[query])), under, sure);
    mark(row);
    return row;
  }
  function draw() {
    const from = Math.max(0, Math.floor(list.scrollTop / ROW) - MARGIN);
    const to = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + MARGIN);
    const present = new Set();
    for (const row of [...$("spacer").children]) {
      const place = +row.dataset.place;
      if (place < from || place >= to) row.remove(); else present.add(place);
    }
    for (let place = from; place < to; place++) if (!present.has(place)) $("spacer").append(made(place));
  }
  function scrollTo(place) {
    if (place * ROW < list.scrollTop) list.scrollTop = place * ROW;
    else if ((place + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (place + 1) * ROW - list.clientHeight;
  }
  function select(place) {
    if (!shown.length) return;
    chosen = Math.max(0, Math.min(shown.length - 1, place));
    scrollTo(chosen);
    draw();
    for (const row of $("spacer").children) mark(row);
    list.setAttribute("aria-activedescendant", `place-${chosen}`);
    detail();
  }
  list.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
  list.addEventListener("click", event => {
    const row = event.target.closest(".row");
    if (!row) return;
    select(+row.dataset.place);
    if (matchMedia("(max-width: 820px)").matches) $("detail").scrollIntoView({ block: "start" });
  });

  // ---- one query ----
  const nameOf = item => D.itemCaptions[item] || D.items[item];
  const titles = { cosine: "cosine", hub: "hub correction", head: "head", head_hub: "head's hub correction", flow: "flow" };
  function hit(query, rank) {
    const item = D.hits[query * D.k + rank], share = D.prob[query * D.k + rank] / D.scale;
    const picture = D.thumbnails[item], line = element("li", picture ? "" : "plain");
    if (picture) {
      const image = element("img");
      image.src = picture; image.alt = nameOf(item); image.loading = "lazy"; image.width = image.height = 72;
      line.append(image);
    }
    const words = element("span"), name = element("span", "name", nameOf(item));
    words.append(name, bar(share));
    if (D.meant && D.meant[query] === item) { line.classList.add("meant"); name.prepend(element("b", "right", "meant · ")); }
    line.append(words, element("span", "number", percent(share, share < .1 ? 1 : 0)));
    return line;
  }
  function evidence(query) {
    const rungs = D.evidenceNames.length, deep = Math.min(D.evidenceHits, D.k, 5);
    const table = element("table", "told"), head = element("tr");
    head.append(element("th", "", "hit"), ...D.evidenceNames.map(name => element("th", "number", titles[name] || name)), element("th", "number", "sum"));
    table.append(head);
    for (let rank = 0; rank < deep; rank++) {
      if (D.hits[query * D.k + rank] < 0) break;
      const line = element("tr"), start = (query * D.evidenceHits + rank) * rungs;
      const values = Array.from({ length: rungs }, (_, i) => D.evidence[start + i] / D.nats);
      const sum = values.reduce((a, b) => a + b, 0);
      line.append(element("th", "", `${rank + 1}. ${nameOf(D.hits[query * D.k + rank]).slice(0, 40)}`),
        ...[...values, sum].map(x => element("td", "", (x >= 0 ? "+" : "") + x.toFixed(2))));
      table.append(line);
    }
    const scroll = element("div", "scroll");
    scroll.append(table);
    return scroll;
  }
  function detail() {
    const place = $("detail");
    if (!shown.length) { place.replaceChildren(element("p", "", "No query fits.")); return; }
    const query = shown[chosen], caption = D.captions[query];
    const facts = [caption ? D.ids[query] : "", `${percent(p[query], 1)} probability that the first hit is right`];
    if (D.right) facts.push(D.right[query] ? "judged right" : "judged wrong");
    for (const [name, values] of Object.entries(D.facts)) if (values[query] !== null) facts.push(`${name} ${values[query]}`);
    const parts = [element("h3", "", caption || D.ids[query]), element("p", "facts", facts.filter(Boolean).join(" · "))];
    for (const why of marks.get(query) || []) parts.push(element("p", "why", why));
    const hits = element("ol", "hits");
    for (let rank = 0; rank < D.k; rank++) if (D.hits[query * D.k + rank] >= 0) hits.append(hit(query, rank));
    parts.push(element("h4", "", "Hits, with the probability of each"), hits);
    if (D.evidenceNames.length) parts.push(element("h4", "", "What each rung of evidence said, in nats"), evidence(query));
    place.replaceChildren(...parts);
  }

  // ---- keys ----
  const step = p => Math.min(1000, Math.round(1000 * p));
  slider.addEventListener("input", () => { // the step next to the certified point is that point
    const rule = D.certified;
    moveTo(rule && +slider.value === step(rule.threshold) ? rule.threshold : slider.value / 1000);
  });
  const certify = () => { if (D.certified) { slider.value = step(D.certified.threshold); moveTo(D.certified.threshold); } };
  $("certified")?.addEventListener("click", certify);
  let waiting = 0;
  $("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => choose(view), 60); });
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target === $("search"), sliding = event.target === slider;
    if (event.key === "Escape") { list.focus(); event.preventDefault(); return; }
    if (typing) { if (event.key === "Enter" || event.key === "ArrowDown") { list.focus(); event.preventDefault(); } return; }
    const page = Math.max(1, Math.floor(list.clientHeight / ROW) - 1);
    const steps = { j: 1, k: -1, ...(sliding ? {} : { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -D.n, End: D.n }) };
    if (event.key in steps) { if (event.key.length > 1 && event.target !== list) return; select(chosen + steps[event.key]); }
    else if (event.key === "/") { $("search").focus(); $("search").select(); }
    else if (event.key === "t") slider.focus();
    else if (event.key === "c") certify();
    else if (/^[1-9]$/.test(event.key) && views[event.key - 1]) { choose(views[event.key - 1][0]); select(0); }
    else return;
    event.preventDefault();
  });

  const begin = D.certified ? D.certified.threshold : 0.5;
  slider.value = step(begin);
  choose("all");
  moveTo(begin);
})();
