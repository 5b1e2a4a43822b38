"use strict";

const element = (id) => document.getElementById(id);
const SPACE = "\u202f";

function grouped(count) {
  if (count < 10000) return String(count);
  return String(count).replace(/\B(?=(\d{3})+$)/g, SPACE);
}

// p / q rounded half up to so many decimals, exactly: doubles would round the quotient before it is rounded here.
function decimals(p, q, digits) {
  const scale = 10n ** BigInt(digits);
  const rounded = (2n * BigInt(p) * scale + BigInt(q)) / (2n * BigInt(q));
  return `${rounded / scale}.${String(rounded % scale).padStart(digits, "0")}`;
}

// A virtual request is a branch with the rows of its S tokens, a branch with its last row, or a node with its row.
// Of each: its first row, how many rows, and which draft slots it reads, first and number.
function virtualRequests(topk, S, by) {
  const found = [];
  for (let b = 0; b < topk; b++) {
    if (by === "node") {
      for (let d = 0; d < S; d++) {
        found.push({ name: `node ${b + 1}.${d + 1}`, first: b * S + d, rows: 1, slot: b * S, path: d + 1 });
      }
    } else {
      const rows = by === "leaf" ? 1 : S;
      found.push({ name: `${by} ${b + 1}`, first: b * rows, rows, slot: b * S, path: S });
    }
  }
  return found;
}

// Each plan is a list of programs: which rows, how much of the prefix and which draft slots they read, in which pass.
function plans(L, topk, S, by) {
  const virtual = virtualRequests(topk, S, by);
  const rows = virtual.reduce((sum, one) => sum + one.rows, 0);
  const all = { first: 0, rows, slot: 0 };
  return {
    naive: virtual.map((one) => ({ ...one, step: "all", prefix: L, causal: true })),
    cascade: [
      { ...all, name: "prefix", step: "prefix", prefix: L, path: 0, causal: false },
      ...virtual.map((one) => ({ ...one, step: "draft", prefix: 0, causal: true })),
    ],
    fused: [{ ...all, name: "all rows", step: "all", prefix: L, path: topk * S, causal: false }],
  };
}

// Keys that tiles of so many rows load: each tile once those that one of its rows sees.
function tileReads({ rows, keys, causal }, block) {
  const tiles = Math.ceil(rows / block);
  if (!causal) return tiles * keys;
  let loaded = 0;
  for (let tile = 0; tile < tiles; tile++) {
    const last = Math.min(rows, (tile + 1) * block) - 1;
    loaded += Math.min(keys, Math.max(0, last + keys - rows + 1));
  }
  return loaded;
}

function reads(program, count, block) {
  const keys = program.prefix + program.path;
  return count === "tile" ? tileReads({ ...program, keys }, block) : keys;
}

function verify(L, topk, S, by, count, block) {
  const made = plans(L, topk, S, by);
  const unique = L + topk * S;
  const depths = (topk * S * (S + 1)) / 2;
  const rows = made.fused[0].rows;
  const totals = { rows, unique, virtual: made.naive.length, pairs: rows * L + (by === "leaf" ? topk * S : depths) };
  for (const [plan, programs] of Object.entries(made)) {
    totals[plan] =
      count === "distinct" ? unique : programs.reduce((sum, program) => sum + reads(program, count, block), 0);
  }
  return totals;
}

function prefill(N, thousandths) {
  const H = Math.min(N - 1, Math.floor((N * thousandths) / 1000));
  const triangle = (n) => (n * (n + 1)) / 2;
  return { H, M: N - H, all: triangle(N), saved: triangle(H), left: triangle(N) - triangle(H) };
}

function show(id, text) {
  element(id).textContent = text;
}

function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Each ledger is drawn on a scale of its own, so that what moves and what stays can be compared.
function bars(id, ledgers) {
  const parts = [];
  let y = 14;
  for (const [ledger, entries] of ledgers) {
    const most = Math.max(1, ...entries.map(([, count]) => count));
    parts.push(svg("text", { x: 0, y, class: "ledger" }, ledger));
    for (const [name, count] of entries) {
      y += 26;
      const width = (178 * count) / most;
      parts.push(svg("text", { x: 58, y: y + 1, "text-anchor": "end" }, name));
      parts.push(svg("rect", { x: 66, y: y - 13, width, height: 18, class: ledger }));
      parts.push(svg("text", { x: 72 + width, y: y + 1 }, grouped(count)));
    }
    y += 36;
  }
  const drawn = ledgers.map(([ledger, entries]) => `${ledger}: ${entries.map(([n, c]) => `${n} ${c}`).join(", ")}`);
  element(id).setAttribute("aria-label", `Bars. ${drawn.join(". ")}.`);
  element(id).replaceChildren(...parts);
}

// Queries downwards, keys to the right: the cached rows are the small triangle on top, and what is left below them is
// a rectangle over the cached keys and a triangle over the own ones.
function triangle({ H, M, saved, left }) {
  const side = 180;
  const cut = (side * H) / (H + M);
  const [x, y] = [24, 4];
  const shape = (points, kind) => svg("polygon", { points: points.map((p) => p.join(",")).join(" "), class: kind });
  const parts = [
    shape([[x, y], [x, y + cut], [x + cut, y + cut]], "saved"),
    shape([[x, y + cut], [x + cut, y + cut], [x + cut, y + side], [x, y + side]], "pairs"),
    shape([[x + cut, y + cut], [x + cut, y + side], [x + side, y + side]], "pairs"),
    svg("text", { x: x + side / 2, y: y + side + 16, "text-anchor": "middle" }, "keys"),
    svg("text", { x: 14, y: y + side / 2, transform: `rotate(-90 14 ${y + side / 2})`, "text-anchor": "middle" }, "queries"),
    svg("rect", { x: 146, y: 18, width: 12, height: 12, class: "saved" }),
    svg("text", { x: 166, y: 29 }, `saved ${grouped(saved)}`),
    svg("rect", { x: 190, y: 62, width: 12, height: 12, class: "pairs" }),
    svg("text", { x: 210, y: 73 }, `left ${grouped(left)}`),
  ];
  const label = `Triangle of query-key pairs cut below query ${H}: ${saved} saved above, ${left} left below.`;
  element("triangle").setAttribute("aria-label", label);
  element("triangle").replaceChildren(...parts);
}

const COUNTS = { request: "reads per request", distinct: "distinct keys", tile: "reads per row tile" };

function chosen(name) {
  return document.querySelector(`input[name="${name}"]:checked`).value;
}

function numbers(...ids) {
  return ids.map((id) => Number(element(id).value));
}

function updateVerify() {
  const [L, topk, S, block] = numbers("L", "topk", "S", "block");
  const [by, count] = [chosen("rows"), chosen("count")];
  const counts = verify(L, topk, S, by, count, block);
  show("count-name", COUNTS[count]);
  for (const plan of ["naive", "cascade", "fused"]) {
    show(`${plan}-reads`, grouped(counts[plan]));
    show(`live-${plan}`, grouped(counts[plan]));
    show(`${plan}-ratio`, decimals(counts.naive, counts[plan], 3));
    show(`${plan}-pairs`, grouped(counts.pairs));
  }
  show("rows", grouped(counts.rows));
  show("unique", grouped(counts.unique));
  show("limit", grouped(counts.virtual));
  bars("verify-bars", [
    ["reads", [["naive", counts.naive], ["cascade", counts.cascade], ["fused", counts.fused]]],
    ["pairs", [["naive", counts.pairs], ["cascade", counts.pairs], ["fused", counts.pairs]]],
  ]);
  show("verify-reading", `${reading(L, S, by, count, counts)} Pairs stay at ${grouped(counts.pairs)}.`);
  updateSteps();
}

function reading(L, S, by, count, counts) {
  const [before, after] = [grouped(counts.naive), grouped(counts.cascade)];
  if (count === "distinct") return `Every plan needs the same ${before} distinct keys: a cascade saves repeated reads alone.`;
  const name = count === "tile" ? "Reads per row tile" : "Reads per request";
  if (counts.virtual === 1) {
    const rows = counts.rows === 1 ? "row" : `${counts.rows} rows`;
    return `One branch has nobody to share with: one causal call of its ${rows} over L + S = ${grouped(L + S)} keys is all. ${name} stay at ${before}.`;
  }
  if (L === 0) return `Without a prefix there is nothing to share. ${name} stay at ${before}.`;
  const factor = decimals(counts.naive, counts.cascade, 3);
  if (counts.naive > counts.cascade) return `${name} fall from ${before} to ${after}, by a factor of ${factor}.`;
  if (counts.naive === counts.cascade) return `${name} stay at ${before}: in tiles of so few rows the prefix is read as often as before.`;
  return `${name} rise from ${before} to ${after}.`;
}

// Pages as runs, 0 … 124, of a table that maps tokens in order.
function run(first, count) {
  if (count === 0) return "none";
  return count === 1 ? String(first) : `${first} … ${first + count - 1}`;
}

function pagesOf(plan, program, L, page) {
  const joined = [];
  if (plan === "fused" || program.step === "prefix") {
    return [page, run(0, Math.ceil((program.prefix + program.path) / page))];
  }
  if (program.prefix > 0) joined.push(run(0, L));
  joined.push(run(L + program.slot, program.path));
  return [1, joined.join(", ")];
}

function many(n, what) {
  return `${grouped(n)} ${what}${n === 1 ? "" : "s"}`;
}

function updateSteps() {
  const [L, topk, S, block, page] = numbers("L", "topk", "S", "block", "page");
  const [by, count, plan] = [chosen("rows"), chosen("count"), chosen("plan")];
  for (const step of ["prefix", "draft", "merge"]) element(`step-${step}`).disabled = plan !== "cascade";
  const step = plan === "cascade" ? chosen("step") : "all";
  const programs = plans(L, topk, S, by)[plan].filter((one) => step === "all" || one.step === step);
  const rows = virtualRequests(topk, S, by);
  const total = rows.reduce((sum, one) => sum + one.rows, 0);
  const loaded = programs.reduce((sum, one) => sum + reads(one, count === "tile" ? "tile" : "request", block), 0);
  const said = {
    all: {
      naive: `${many(programs.length, "virtual request")} of ${many(rows[0].rows, "row")} each read prefix and path: ${grouped(loaded)} tokens.`,
      cascade: `One prefix pass with all ${many(total, "row")}, then ${many(rows.length, "draft request")}, then a merge: ${grouped(loaded)} tokens.`,
      fused: `One request with all ${many(total, "row")} and a tree mask reads prefix and drafts: ${grouped(loaded)} tokens.`,
    },
    prefix: { cascade: `Step 1 of 3: all ${many(total, "row")} see the whole prefix, which is read once: ${grouped(loaded)} tokens.` },
    draft: { cascade: `Step 2 of 3: each of ${many(rows.length, "virtual request")} reads the drafts of its own path: ${grouped(loaded)} tokens.` },
    merge: { cascade: `Step 3 of 3: each of ${many(total, "row")} has two states, (o, lse) of the prefix and of its path. They merge into one, and no cached token is read.` },
  };
  show("step-reading", said[step][plan]);
  drawReads({ L, topk, S, by, count, block, step, programs });
  const lines = programs.slice(0, 16).map((one) => {
    const [size, pages] = pagesOf(plan, one, L, page);
    const which = one.rows === 1 ? `row ${one.first}` : `rows ${one.first} to ${one.first + one.rows - 1}`;
    return `${one.name}: ${which}, ${one.prefix + one.path} tokens in pages of ${size}: ${pages}`;
  });
  if (programs.length > 16) lines.push(`and ${programs.length - 16} more`);
  if (step === "merge") lines.push("no page table: lse = ln(e^lse_prefix + e^lse_path), and o is weighted alike");
  element("page-tables").textContent = lines.join("\n");
}

// On top the tree: the prefix, then one line of nodes per branch. Below, one line per program: the keys that it reads.
function drawReads({ L, topk, S, by, count, block, step, programs }) {
  const [left, middle, right] = [84, 196, 350];
  const parts = [svg("text", { x: 0, y: 14, class: "ledger" }, "tree")];
  const readsPrefix = programs.some((one) => one.prefix > 0);
  const readsDrafts = programs.some((one) => one.path > 0);
  const high = 12 * topk;
  const y = (b) => 16 + 12 * b;
  const x = (d) => middle + 10 + (d * (right - middle - 16)) / Math.max(1, S - 1);
  if (L > 0) {
    parts.push(svg("rect", { x: left, y: 10, width: middle - left - 16, height: high, class: readsPrefix ? "reads" : "idle" }));
    parts.push(svg("text", { x: left, y: high + 24 }, `prefix of ${many(L, "token")}`));
  }
  for (let b = 0; b < topk; b++) {
    parts.push(svg("path", { d: `M${middle - 16} ${10 + high / 2}L${x(0)} ${y(b)}H${x(S - 1)}`, class: "edge" }));
    for (let d = 0; d < S; d++) {
      const asks = by !== "leaf" || d === S - 1;
      const kind = (readsDrafts ? "reads" : "idle") + (asks ? " asks" : "");
      parts.push(svg("circle", { cx: x(d), cy: y(b), r: 4, class: kind }));
    }
  }
  let line = 10 + high + 42;
  parts.push(svg("text", { x: 0, y: line, class: "ledger" }, step === "merge" ? "states" : "reads"));
  const seen = new Set();
  const shown = step === "merge" ? [] : programs.slice(0, 16);
  const cell = (right - middle) / (topk * S);
  for (const one of shown) {
    line += 20;
    parts.push(svg("text", { x: left - 6, y: line, "text-anchor": "end" }, one.name));
    // where keys are counted once, those that another program has read already are pale
    const kind = (key) => {
      const again = count === "distinct" && seen.has(key);
      seen.add(key);
      return again ? "again" : "reads";
    };
    if (one.prefix > 0) {
      parts.push(svg("rect", { x: left, y: line - 11, width: middle - left - 16, height: 12, class: kind("prefix") }));
    }
    for (let slot = one.slot; slot < one.slot + one.path; slot++) {
      const at = middle + slot * cell;
      parts.push(svg("rect", { x: at, y: line - 11, width: Math.max(0.4, cell - 0.6), height: 12, class: kind(slot) }));
    }
    const loaded = reads(one, count === "tile" ? "tile" : "request", block);
    parts.push(svg("text", { x: 400, y: line, "text-anchor": "end" }, grouped(loaded)));
  }
  if (programs.length > shown.length && step !== "merge") {
    line += 20;
    parts.push(svg("text", { x: left, y: line }, `and ${programs.length - shown.length} more`));
  }
  if (step === "merge") {
    for (const [from, to] of [["prefix", left], ["path", middle]]) {
      parts.push(svg("rect", { x: to, y: line + 12, width: 90, height: 22, class: "state" }));
      parts.push(svg("text", { x: to + 45, y: line + 28, "text-anchor": "middle" }, `o, lse ${from}`));
      parts.push(svg("path", { d: `M${to + 45} ${line + 34}L${(left + middle + 90) / 2} ${line + 54}`, class: "edge" }));
    }
    line += 54;
    parts.push(svg("rect", { x: (left + middle) / 2, y: line, width: 90, height: 22, class: "state" }));
    parts.push(svg("text", { x: (left + middle + 90) / 2, y: line + 16, "text-anchor": "middle" }, "o, lse"));
    line += 20;
  }
  const picture = element("reads-picture");
  picture.setAttribute("viewBox", `0 0 400 ${line + 10}`);
  const told = shown.map((one) => `${one.name} reads ${one.prefix} of the prefix and ${one.path} drafts`);
  const tree = `Tree of ${topk} branches of ${S} tokens on a prefix of ${L}.`;
  picture.setAttribute("aria-label", `${tree} ${step === "merge" ? "Two states of each row merge into one" : told.join(", ")}.`);
  picture.replaceChildren(...parts);
}

function updatePrefill() {
  const [N, block] = numbers("N", "tile");
  const counts = prefill(N, Math.round(Number(element("h").value) * 1000));
  const tiles = { all: [N, N], left: [counts.M, N] };
  for (const [which, [rows, keys]] of Object.entries(tiles)) tiles[which] = tileReads({ rows, keys, causal: true }, block);
  show("pairs-all", grouped(counts.all));
  show("pairs-left", grouped(counts.left));
  show("pairs-fraction", decimals(counts.left, counts.all, 6));
  show("limit-fraction", decimals(BigInt(N) ** 2n - BigInt(counts.H) ** 2n, BigInt(N) ** 2n, 6));
  show("rows-all", grouped(N));
  show("rows-left", grouped(counts.M));
  show("rows-fraction", decimals(counts.M, N, 6));
  show("reads-all", grouped(N));
  show("reads-left", grouped(N));
  show("reads-fraction", decimals(N, N, 6));
  show("tiles-all", grouped(tiles.all));
  show("tiles-left", grouped(tiles.left));
  show("tiles-fraction", decimals(tiles.left, tiles.all, 6));
  show("hit-tokens", grouped(counts.H));
  show("live-pairs", `${decimals(100 * counts.left, counts.all, 2)} %`);
  show("live-rows", `${decimals(100 * counts.M, N, 2)} %`);
  bars("prefill-bars", [
    ["reads", [["no hit", N], ["hit", N]]],
    ["pairs", [["no hit", counts.all], ["hit", counts.left]]],
  ]);
  triangle(counts);
  show(
    "prefill-reading",
    `Pairs fall from ${grouped(counts.all)} to ${grouped(counts.left)}, ` +
      `to ${decimals(100 * counts.left, counts.all, 2)} %. Distinct keys and reads per request stay at ${grouped(N)}; ` +
      `a kernel's reads per row tile fall from ${grouped(tiles.all)} to ${grouped(tiles.left)}.`,
  );
}

// A slider and the number beside it are one value; what is typed outside the range is taken back when it is left.
function couple(id, update) {
  const slider = element(id);
  const number = element(`${id}-number`);
  slider.addEventListener("input", () => {
    number.value = slider.value;
    update();
  });
  number.addEventListener("input", () => {
    if (number.value === "" || !number.checkValidity()) return;
    slider.value = number.value;
    update();
  });
  number.addEventListener("change", () => {
    if (number.value !== "") slider.value = number.value;
    number.value = slider.value;
    update();
  });
}

// The address after # says what differs from how the page opens: L=1000&rows=node.
const fields = [...document.querySelectorAll(".explorer input[type=range], .explorer input[type=radio]")];

function remember() {
  const parts = fields
    .filter((field) => (field.type === "radio" ? field.checked && !field.defaultChecked : field.value !== field.defaultValue))
    .map((field) => `${field.type === "radio" ? field.name : field.id}=${field.value}`);
  const here = location.href.split("#")[0];
  history.replaceState(null, "", parts.length ? `${here}#${parts.join("&")}` : here);
}

function recall() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (location.hash && ![...given.keys()].some((key) => fields.some((f) => key === f.id || key === f.name))) return;
  for (const field of fields) {
    if (field.type === "radio") {
      const value = given.get(field.name);
      const known = fields.some((other) => other.name === field.name && other.value === value);
      field.checked = known ? field.value === value : field.defaultChecked;
    } else {
      const value = given.get(field.id);
      field.value = value === null || value === "" || Number.isNaN(Number(value)) ? field.defaultValue : value;
      element(`${field.id}-number`).value = field.value;
    }
  }
  for (const update of updates) update();
}

const updates = [];
const sections = [
  ["verify", ["L", "topk", "S", "block", "page"], ["rows", "count", "plan", "step"], updateVerify],
  ["prefill", ["N", "h", "tile"], [], updatePrefill],
];
for (const [id, sliders, choices, update] of sections) {
  if (!element(id)) continue;
  const changed = () => {
    update();
    remember();
  };
  updates.push(update);
  for (const slider of sliders) couple(slider, changed);
  for (const field of fields) if (choices.includes(field.name)) field.addEventListener("change", changed);
}
for (const form of document.querySelectorAll(".explorer form")) form.addEventListener("submit", (event) => event.preventDefault());
window.addEventListener("hashchange", recall);
recall();
for (const update of updates) update();
