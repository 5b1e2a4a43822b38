// Returns what is wrong with the open page for a reader who sees little, uses no mouse or holds a phone: one line each.
() => {
  const problems = [];
  const describe = (node) => {
    const text = (node.textContent || "").trim().replace(/\s+/g, " ").slice(0, 40);
    return `<${node.tagName.toLowerCase()}${node.id ? ` id=${node.id}` : ""}> ${text}`;
  };

  if (!document.documentElement.lang) problems.push("language: none");
  if (!document.title.trim()) problems.push("title: none");
  if (document.querySelectorAll("main").length !== 1) problems.push("main: expected one");

  let level = 0;
  for (const heading of document.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    const next = Number(heading.tagName[1]);
    if (next > level + 1) problems.push(`heading: level ${next} after ${level}: ${describe(heading)}`);
    if (!heading.textContent.trim()) problems.push(`heading: empty ${describe(heading)}`);
    level = next;
  }
  if (document.querySelectorAll("h1").length !== 1) problems.push("heading: expected one h1");

  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  for (const id of new Set(ids.filter((id, i) => ids.indexOf(id) !== i))) problems.push(`id: used twice: ${id}`);

  for (const image of document.querySelectorAll("img")) {
    if (!(image.getAttribute("alt") || "").trim()) problems.push(`alternative text: none ${image.src.slice(0, 40)}`);
    if (!image.complete || image.naturalWidth === 0) problems.push(`image: not shown ${image.src.slice(0, 40)}`);
  }
  for (const drawing of document.querySelectorAll("svg")) {
    const named = drawing.getAttribute("role") === "img" && (drawing.getAttribute("aria-label") || "").trim();
    if (!named) problems.push(`alternative text: none ${describe(drawing)}`);
  }
  for (const field of document.querySelectorAll("input, select, textarea")) {
    const label = field.getAttribute("aria-label") || [...(field.labels || [])].map((l) => l.textContent).join("");
    if (!label.trim()) problems.push(`label: none ${describe(field)}`);
  }
  for (const link of document.querySelectorAll("a[href], button")) {
    const name = link.getAttribute("aria-label") || link.textContent || "";
    if (!name.trim()) problems.push(`link: without a name ${link.outerHTML.slice(0, 60)}`);
  }

  const width = document.documentElement.clientWidth;
  if (document.scrollingElement.scrollWidth > width) {
    const wide = [...document.querySelectorAll("main *")].filter((node) => {
      const inBox = node.parentElement.closest(".scroll, pre, .equation, .formula, svg");
      return !inBox && node.getBoundingClientRect().right > width + 1;
    });
    problems.push(`overflow: ${document.scrollingElement.scrollWidth} > ${width}: ${wide.slice(0, 3).map(describe).join("; ")}`);
  }

  const parse = (text) => {
    const parts = text.match(/[\d.]+/g).map(Number);
    return parts.length === 3 ? [...parts, 1] : parts;
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const luminance = (color) => {
    const [r, g, b] = color.slice(0, 3).map((v) => {
      const c = v / 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const seen = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility({ visibilityProperty: true }) || node.closest("script, style, annotation"))
      continue;
    const style = getComputedStyle(node);
    const below = background(node);
    const paint = node.closest("svg") ? style.fill : style.color;
    const color = over(parse(paint), below);
    const [high, low] = [luminance(color), luminance(below)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const key = `${paint} on ${below.slice(0, 3)}`;
    if (ratio < (large ? 3 : 4.5) && !seen.has(key)) {
      seen.add(key);
      problems.push(`contrast: ${ratio.toFixed(2)}, ${key}: ${describe(node)}`);
    }
  }
  return problems;
}
