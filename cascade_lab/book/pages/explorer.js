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
function verify(L, topk, S, by) {
  const depths = (topk * S * (S + 1)) / 2;
  const virtual = by === "node" ? topk * S : topk;
  const paths = by === "node" ? depths : topk * S;
  const rows = by === "leaf" ? topk : topk * S;
  return {
    rows,
    virtual,
    pairs: rows * L + (by === "leaf" ? topk * S : depths),
    naive: virtual * L + paths,
    cascade: L + paths,
    fused: L + topk * S,
    unique: L + topk * S,
  };
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

function updateVerify() {
  const [L, topk, S] = ["L", "topk", "S"].map((id) => Number(element(id).value));
  const by = ["branch", "leaf", "node"].find((kind) => element(`rows-${kind}`).checked);
  const counts = verify(L, topk, S, by);
  for (const plan of ["naive", "cascade", "fused"]) {
    show(`${plan}-reads`, grouped(counts[plan]));
    show(`${plan}-ratio`, decimals(counts.naive, counts[plan], 3));
    show(`${plan}-pairs`, grouped(counts.pairs));
  }
  show("rows", grouped(counts.rows));
  show("unique", grouped(counts.unique));
  show("limit", grouped(counts.virtual));
  const change =
    counts.naive === counts.cascade
      ? `stay at ${grouped(counts.naive)}: no prefix is read twice`
      : `fall from ${grouped(counts.naive)} to ${grouped(counts.cascade)}, by a factor of ` +
        decimals(counts.naive, counts.cascade, 3);
  bars("verify-bars", [
    ["reads", [["naive", counts.naive], ["cascade", counts.cascade], ["fused", counts.fused]]],
    ["pairs", [["naive", counts.pairs], ["cascade", counts.pairs], ["fused", counts.pairs]]],
  ]);
  show(
    "verify-reading",
    `Reads per request ${change}. Pairs stay at ${grouped(counts.pairs)}.`,
  );
}

function updatePrefill() {
  const N = Number(element("N").value);
  const counts = prefill(N, Math.round(Number(element("h").value) * 1000));
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
  show("hit-tokens", grouped(counts.H));
  bars("prefill-bars", [
    ["reads", [["no hit", N], ["hit", N]]],
    ["pairs", [["no hit", counts.all], ["hit", counts.left]]],
  ]);
  triangle(counts);
  show(
    "prefill-reading",
    `Pairs fall from ${grouped(counts.all)} to ${grouped(counts.left)}, ` +
      `to ${decimals(100 * counts.left, counts.all, 2)} %. Distinct keys and reads per request stay at ${grouped(N)}.`,
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

for (const id of ["L", "topk", "S"]) couple(id, updateVerify);
for (const id of ["N", "h"]) couple(id, updatePrefill);
for (const id of ["rows-branch", "rows-leaf", "rows-node"]) element(id).addEventListener("change", updateVerify);
for (const id of ["verify", "prefill"]) element(id).addEventListener("submit", (event) => event.preventDefault());
updateVerify();
updatePrefill();
