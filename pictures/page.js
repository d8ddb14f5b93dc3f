// SPDX-License-Identifier: MIT
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const element = id => document.getElementById(id);
const make = (tag, text, parent) => {
  const made = document.createElement(tag);
  made.textContent = text;
  parent.append(made);
  return made;
};
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
const floats = text => new Float32Array(bytes(text).buffer);
const unpacked = new Map();  // numbers of a panel, once they were needed

function numbers(panel) {
  if (!unpacked.has(panel)) unpacked.set(panel, {
    values: floats(panel.values),
    blocked: bytes(data.masks[panel.mask]),
  });
  return unpacked.get(panel);
}

const state = {layer: 0, item: 0, panel: 0, mask: true, view: "map", row: -1, column: -1,
               pinned: null};
const layer = () => data.layers[state.layer];
const item = () => layer().items[state.item];
const panel = () => item().panels[state.panel];
const several = data.layers.length > 1;
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const font = "12px system-ui, sans-serif";

// ---- Colours ----------------------------------------------------------------

// The colours are those of the other pictures: by the root of a value.
function share(value, of = item()) {
  return Math.sign(value) * Math.sqrt(Math.abs(value) / of.high);
}

function shade(value, of = item()) {
  if (!Number.isFinite(value)) return data.not_finite;
  const along = of.signed ? (share(value, of) + 1) / 2 : Math.max(share(value, of), 0);
  const table = of.signed ? data.diverging : data.sequential;
  return table[Math.round(Math.min(along, 1) * (table.length - 1))];
}

// One pixel for each cell; what the mask hides is transparent.
function pixels(shown, canvas, of = item()) {
  const {rows, columns} = shown, {values, blocked} = numbers(shown);
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  values.forEach((value, i) => {
    const rgb = shade(value, of), hidden = state.mask && blocked[i] && value === 0;
    image.data.set([...rgb, hidden ? 0 : 255], 4 * i);
  });
  context.putImageData(image, 0, 0);
  return canvas;
}

function hatch(context) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour("--line");
  pen.beginPath();
  for (const shift of [-6, 0, 6]) {
    pen.moveTo(shift, 6);
    pen.lineTo(shift + 6, 0);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

const short = text => [...text].length > 16 ? [...text].slice(0, 15).join("") + "…" : text;
// A word of any script in a sentence whose words stand from left to right.
const kFromRight = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;
const inLine = text => kFromRight.test(text) ? `\u2066${text}\u2069` : text;
const keysOf = entropy => {
  const keys = Math.exp(entropy);
  return keys.toFixed(keys < 99.5 ? 1 : 0);
};

// A canvas of that size on the page, sharp on any screen.
function pen_of(canvas, width, height) {
  const density = window.devicePixelRatio || 1;
  canvas.width = Math.ceil(width * density);
  canvas.height = Math.ceil(height * density);
  canvas.style.width = `${Math.ceil(width)}px`;
  canvas.style.height = `${Math.ceil(height)}px`;
  const pen = canvas.getContext("2d");
  pen.scale(density, density);
  pen.font = font;
  return pen;
}

const widest = labels => {
  const context = element("map").getContext("2d");
  context.font = font;
  return Math.max(...labels.map(l => context.measureText(short(l)).width));
};

// The width that the large picture may take.
function room() {
  const wide = document.documentElement.clientWidth;
  return Math.min(wide - 60 - (wide < (several ? 1000 : 640) ? 0 : 222), 760);
}

// ---- The map ----------------------------------------------------------------

// Where the cells lie on the canvas.
function measure() {
  const {rows, columns} = panel();
  const left = widest(item().queries.labels) + 10, above = 0.72 * widest(item().keys.labels) + 16;
  const wide = Math.min(room() - left - above, 620);
  const high = Math.max(document.documentElement.clientHeight - above - 330, 320);  // of the window
  const cell = Math.max(2, Math.min(36, Math.floor(wide / columns), Math.floor(high / rows)));
  return {left, above, cell, width: left + cell * columns + above, height: above + cell * rows};
}

function draw() {
  if (state.view === "lines") return drawLines();
  if (state.view === "features") return drawFeatures();
  if (state.view !== "map") return;
  const shown = panel(), place = measure(), {left, above, cell} = place;
  const pen = pen_of(element("map"), place.width, place.height);
  pen.imageSmoothingEnabled = false;
  const cells = pixels(shown, document.createElement("canvas"));
  pen.drawImage(cells, left, above, cell * shown.columns, cell * shown.rows);
  if (state.mask) {
    pen.fillStyle = hatch(pen);
    numbers(shown).blocked.forEach((blocked, i) => blocked && pen.fillRect(
      left + cell * (i % shown.columns), above + cell * Math.floor(i / shown.columns), cell, cell));
  }
  label(pen, place);
  if (state.row >= 0) {
    pen.strokeStyle = colour("--accent");
    pen.lineWidth = 2;
    pen.strokeRect(left + cell * state.column, above, cell, cell * shown.rows);
    pen.strokeRect(left, above + cell * state.row, cell * shown.columns, cell);
  }
}

function label(pen, {left, above, cell}) {
  const pooled = item().pooling ? 2 : 1;
  const every = room => Math.max(1, Math.ceil(pooled * room / cell));
  const write = (text, near) => {
    pen.fillStyle = colour(near ? "--accent" : "--text");
    pen.fillText(short(text), 0, 0);
  };
  item().keys.labels.forEach((text, i) => {
    if (i % every(17) && i !== state.column) return;
    pen.save();
    pen.translate(left + (i + 0.5) * cell + 4, above - 6);
    pen.rotate(-Math.PI / 4);
    write(text, i === state.column);
    pen.restore();
  });
  pen.textAlign = "right";
  item().queries.labels.forEach((text, i) => {
    if (i % every(13) && i !== state.row) return;
    pen.save();
    pen.translate(left - 6, above + (i + 0.5) * cell + 4);
    write(text, i === state.row);
    pen.restore();
  });
  pen.textAlign = "left";
}

// ---- Lines from queries to keys ---------------------------------------------

const kLine = 19;  // from a token to the next

// Where the tokens stand: queries on the left, keys on the right.
function columnsOfTokens() {
  const {queries, keys} = item();
  const left = widest(queries.labels) + 12;
  const right = widest(keys.labels) + 60;
  const width = Math.max(Math.min(room(), 620), left + right + 140);
  return {left, right: width - right, width,
          height: kLine * Math.max(queries.labels.length, keys.labels.length) + 10};
}

// The query or key whose lines alone are drawn, if there is one.
const chosen = () => state.near ?? state.pinned;

function drawLines() {
  const shown = panel(), {values} = numbers(shown), place = columnsOfTokens();
  const pen = pen_of(element("lines"), place.width, place.height);
  const only = chosen(), middle = i => kLine * (i + 0.5) + 4;
  const rest = document.documentElement.dataset;  // what a test may ask for
  rest.lines = 0;
  for (let i = 0; i < shown.rows; ++i)
    for (let j = 0; j < shown.columns; ++j) {
      if (only && (only.side === "query" ? only.at !== i : only.at !== j)) continue;
      const value = values[i * shown.columns + j];
      const strength = Math.min(Math.abs(value) / item().high, 1);
      if (!(strength > 0.01)) continue;
      rest.lines = +rest.lines + 1;
      pen.globalAlpha = strength;
      pen.strokeStyle = colour(value < 0 ? "--less" : "--more");
      pen.lineWidth = only ? 2.5 : 2;
      pen.beginPath();
      pen.moveTo(place.left, middle(i));
      const half = (place.left + place.right) / 2;
      pen.bezierCurveTo(half, middle(i), half, middle(j), place.right, middle(j));
      pen.stroke();
    }
  pen.globalAlpha = 1;
  const write = (labels, side, x) => labels.forEach((text, i) => {
    const near = only && only.side === side && only.at === i;
    pen.fillStyle = colour(near ? "--accent" : "--text");
    pen.fillText(short(text), x, middle(i) + 4);
    if (!only || only.side === side) return;
    const row = side === "query" ? i : only.at, column = side === "query" ? only.at : i;
    const weight = values[row * shown.columns + column];
    if (Math.abs(weight) < 0.005) return;
    pen.fillStyle = colour("--dim");
    const shift = side === "query" ? -8 - pen.measureText(short(text)).width
                                   : 8 + pen.measureText(short(text)).width;
    pen.fillText(`${Math.round(100 * weight)} %`, x + shift, middle(i) + 4);
  });
  pen.textAlign = "right";
  write(item().queries.labels, "query", place.left - 6);
  pen.textAlign = "left";
  write(item().keys.labels, "key", place.right + 6);
}

// The token under the pointer.
function tokenAt(event) {
  const place = columnsOfTokens(), at = Math.floor((event.offsetY - 4) / kLine);
  const side = event.offsetX < (place.left + place.right) / 2 ? "query" : "key";
  const labels = side === "query" ? item().queries.labels : item().keys.labels;
  return at >= 0 && at < labels.length ? {side, at} : null;
}

// ---- Queries and keys, feature by feature -----------------------------------

const hasFeatures = () => panel().features !== null;

// The pair that is shown: the one under the pointer last, else the strongest.
function pair() {
  const {columns} = panel(), {values} = numbers(panel());
  if (state.row >= 0) return [state.row, state.column];
  const most = values.reduce((best, value, i) => value > values[best] ? i : best, 0);
  return [Math.floor(most / columns), most % columns];
}

function drawFeatures() {
  const {width, queries, keys} = panel().features, [i, j] = pair();
  const q = floats(queries).subarray(i * width, (i + 1) * width);
  const k = floats(keys).subarray(j * width, (j + 1) * width);
  const products = q.map((x, f) => x * k[f]);
  const score = products.reduce((sum, x) => sum + x, 0);
  const total = Math.min(room(), 680), bar = Math.max(1, (total - 90) / width), high = 74;
  const pen = pen_of(element("features"), total, 3 * high + 30);
  const row = (numbers, name, top) => {
    const most = Math.max(...numbers.map(Math.abs)) || 1, middle = top + high / 2;
    pen.fillStyle = colour("--text");
    pen.fillText(name, 0, middle + 4);
    numbers.forEach((x, f) => {
      pen.fillStyle = colour(x < 0 ? "--less" : "--more");
      const tall = Math.abs(x) / most * (high / 2 - 4);
      pen.fillRect(84 + f * bar, x < 0 ? middle : middle - tall, Math.max(bar - 1, 1), tall);
    });
    pen.fillStyle = colour("--line");
    pen.fillRect(84, middle, width * bar, 1);
  };
  row(q, "q · scale", 0);
  row(k, "k", high);
  row(products, "product", 2 * high);
  pen.fillStyle = colour("--dim");
  pen.fillText(`feature 0 to ${width - 1}`, 84, 3 * high + 18);
  element("query").value = i;
  element("key").value = j;
  element("score").textContent =
    `score ${+score.toPrecision(4)}: the sum of the products, before masks and softcap`;
}

// ---- Entropies of all layers ------------------------------------------------

const hasEntropies = at => at.items[0].panels.some(p => p.entropy !== null);

function drawEntropies() {
  const layers = data.layers.map((at, i) => [at, i]).filter(([at]) => !at.path);
  const rows = layers.map(([at, i]) => {
    const row = document.createElement("tr");
    make("th", at.name || at.group || "layer", row);
    const panels = at.items[0].panels, most = Math.log(panels[0].columns) || 1;
    const own = panels.map((p, number) => [p, number]).filter(([p]) => p.entropy !== null);
    for (const [p, number] of own) {
      const cell = make("td", keysOf(p.entropy), row);
      const rgb = data.sequential[Math.round(255 * Math.min(p.entropy / most, 1))];
      cell.style.background = `rgb(${rgb})`;
      cell.style.color = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] > 140 ? "#000" : "#fff";
      cell.title = `${at.name} ${p.name}: entropy ${p.entropy.toFixed(2)}`;
      cell.onclick = () => choose(i, number);
    }
    const mean = own.reduce((sum, [p]) => sum + p.entropy, 0) / own.length;
    make("td", own.length ? keysOf(mean) : "", row).className = "mean";
    return row;
  });
  const most = Math.max(...layers.map(([at]) => at.items[0].panels.length));
  const heads = document.createElement("tr");
  const several = most > 1;  // heads, and then their mean in front of them
  make("th", "head", heads);
  for (let head = 0; head < most - several; ++head) make("th", head, heads);
  make("th", "mean", heads);
  element("entropies").tHead.replaceChildren(heads);
  element("entropies").tBodies[0].replaceChildren(...rows);
}

// ---- What is chosen ---------------------------------------------------------

const kViews = ["map", "lines", "features", "entropies"];

function showView() {
  const possible = {map: true, lines: true, features: hasFeatures(),
                    entropies: several && data.layers.some(hasEntropies)};
  if (!possible[state.view]) state.view = "map";
  for (const view of kViews) {
    element(`view-${view}`).hidden = view !== state.view;
    element(`tab-${view}`).hidden = !possible[view];
    element(`tab-${view}`).setAttribute("aria-selected", view === state.view);
  }
  element("scale").hidden = state.view === "features" || state.view === "entropies";
  if (state.view === "entropies") drawEntropies();
  if (state.view === "features") {
    const options = labels => labels.map((text, i) => new Option(text, i));
    element("query").replaceChildren(...options(item().queries.labels));
    element("key").replaceChildren(...options(item().keys.labels));
  }
  draw();
}

function show() {
  element("name").textContent = (layer().name ? `${inLine(layer().name)}, ` : "") + panel().name +
    (panel().entropy === null ? "" : `: entropy ${panel().entropy.toFixed(2)}, ` +
                                     `as of ${Math.exp(panel().entropy).toFixed(1)} keys`);
  showView();
  for (const button of element("heads").querySelectorAll("button"))
    button.setAttribute("aria-pressed",
                        +button.dataset.layer === state.layer && +button.dataset.panel === state.panel);
  element("item").value = state.item;
  element("head").value = state.panel;
  element("layer").value = state.layer;
  element("mask").checked = state.mask;
  const rows = panel().links.map(([query, key, weight]) => {
    const row = document.createElement("tr");
    make("td", query, row);
    make("td", "→", row);
    make("td", key, row);
    make("td", weight.toFixed(3), row);
    return row;
  });
  element("links").tBodies[0].replaceChildren(...rows);
  element("links").hidden = rows.length === 0;
  remember();
  fit();
}

// In the address; inside of another page there is none.
function remember() {
  if (location.protocol === "about:") return;
  const more = (several ? `&layer=${state.layer}` : "") + (state.view === "map" ? "" : `&view=${state.view}`);
  history.replaceState(
    null, "", `#item=${state.item}&panel=${state.panel}&mask=${+state.mask}${more}`);
}

// In a notebook the frame is as high as what it shows.
function fit() {
  if (window.frameElement?.dataset.multihead !== undefined)
    window.frameElement.style.height = `${document.documentElement.scrollHeight + 4}px`;
}

function card(parent, p, place) {
  const button = make("button", "", parent);
  button.type = "button";
  Object.assign(button.dataset, place);
  const line = make("span", "", button);
  make("b", p.name.replace(/^mean.*/, "mean"), line);
  if (p.entropy !== null) make("small", `${keysOf(p.entropy)} keys`, line);
  const at = data.layers[place.layer];
  button.append(pixels(p, document.createElement("canvas"), at.items[state.item] ?? at.items[0]));
  button.onclick = () => choose(place.layer, place.panel);
  button.title = (at.name ? `${at.name}, ` : "") + p.name;
}

// All heads of this layer, or, a row for each, of all layers.
function drawHeads() {
  const heads = element("heads");
  heads.replaceChildren();
  heads.className = several ? "model" : "";
  if (!several) {
    if (item().panels.length > 1)
      item().panels.forEach((p, i) => card(heads, p, {layer: 0, panel: i}));
    return;
  }
  data.layers.forEach((at, i) => {
    const before = data.layers[i - 1];
    if (at.group && at.group !== before?.group) make("h3", at.group, heads);
    make("p", at.name, heads);
    const row = make("div", "", heads);
    const shown = at.items[state.item] ?? at.items[0];
    shown.panels.forEach((p, number) => card(row, p, {layer: i, panel: number}));
  });
}

function choose(layerNumber, panelNumber) {
  const same = layerNumber === state.layer;
  state.layer = layerNumber;
  state.panel = panelNumber;
  if (same) return show();
  state.row = state.column = -1;
  state.near = state.pinned = null;
  showLayer();
}

// Everything that is the same for all heads of an item of a layer.
function showLayer() {
  state.item = Math.min(state.item, layer().items.length - 1);
  const {panels, remarks, pooling, signed, high, open} = item();
  state.panel = Math.min(state.panel, panels.length - 1);
  element("head").replaceChildren(...panels.map((p, i) => new Option(p.name, i)));
  element("item").replaceChildren(...layer().items.map((it, i) => new Option(it.index, i)));
  element("item-label").hidden = layer().items.length === 1;
  element("sizes").textContent = layer().sizes;
  element("meaning").textContent = layer().meaning;
  const percent = value => `${+(100 * value).toPrecision(2)} %`;
  element("low").textContent = percent(signed ? -high : 0);
  element("high").textContent = (open ? "≥ " : "") + percent(high);
  const bar = element("bar").getContext("2d"), image = bar.createImageData(220, 1);
  const table = signed ? data.diverging : data.sequential;
  for (let i = 0; i < 220; ++i)
    image.data.set([...table[Math.round(i / 219 * (table.length - 1))], 255], 4 * i);
  bar.putImageData(image, 0, 0);
  element("pooling").textContent = pooling;
  element("remarks").replaceChildren();
  for (const remark of remarks) make("p", remark, element("remarks")).className = "warning";
  showStages();
  show();
}

function showStages() {
  element("stages").replaceChildren();
  element("groups").replaceChildren();
  for (const stage of layer().stages) {
    const line = make("li", "", element("stages"));
    make("b", stage.name, line);
    make("div", stage.shape, line).className = "dim";
    make("div", stage.what, line).className = "dim";
  }
  for (const group of layer().groups) {
    const box = make("div", "", element("groups"));
    box.className = "group";
    make("div", `query heads ${group.heads}`, box);
    make("div", `key/value head ${group.name}`, box).className = "dim";
  }
}

function showItem() {
  state.row = state.column = -1;
  drawHeads();
  showLayer();
}

function say(row, column) {
  const shown = panel(), inside = row >= 0 && row < shown.rows && column >= 0 && column < shown.columns;
  state.row = inside ? row : -1;
  state.column = inside ? column : -1;
  let text = "";
  if (inside) {
    const i = row * shown.columns + column, {values, blocked} = numbers(shown);
    const value = Number.isFinite(values[i]) ? +values[i].toPrecision(4) : String(values[i]);
    const [query, key] = [item().queries.labels[row], item().keys.labels[column]].map(inLine);
    text = `${query} → ${key}: ${value}` +
           (blocked[i] ? " (blocked)" : "");
  }
  element("said").textContent = text;
  draw();
  return text;
}

function start() {
  document.body.classList.toggle("several", several);
  element("title").textContent = document.title = data.title;
  element("mask-label").hidden = !data.masks.some(mask => bytes(mask).includes(1));
  element("layer-label").hidden = !several;
  element("layer").replaceChildren(...data.layers.map(
    (at, i) => new Option([at.group, at.name].filter(Boolean).join(" · "), i)));
  const asked = new URLSearchParams(location.hash.slice(1));
  const chosen = (name, count) => Math.min(Math.max(0, Math.trunc(asked.get(name)) || 0), count - 1);
  state.layer = chosen("layer", data.layers.length);
  state.item = chosen("item", layer().items.length);
  state.panel = chosen("panel", item().panels.length);
  state.mask = asked.get("mask") !== "0";
  state.view = kViews.includes(asked.get("view")) ? asked.get("view") : "map";
  showItem();
}

const map = element("map"), lines = element("lines"), tip = element("tip");
map.onpointermove = event => {
  const {left, above, cell} = measure();
  tip.textContent = say(Math.floor((event.offsetY - above) / cell),
                        Math.floor((event.offsetX - left) / cell));
  tip.hidden = tip.textContent === "";
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 18}px`;
};
map.onpointerleave = () => { tip.hidden = true; say(-1, -1); };
map.onkeydown = event => {
  const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
  if (!step) return;
  event.preventDefault();
  const {rows, columns} = panel(), clamp = (x, most) => Math.min(Math.max(x, 0), most - 1);
  say(clamp(state.row + step[0], rows), clamp(state.column + step[1], columns));
};
lines.onpointermove = event => { state.near = tokenAt(event); drawLines(); };
lines.onpointerleave = () => { state.near = null; drawLines(); };
lines.onclick = event => {
  const at = tokenAt(event), same = at?.side === state.pinned?.side && at?.at === state.pinned?.at;
  state.pinned = same ? null : at;
  drawLines();
};
lines.onkeydown = event => {
  const step = {ArrowUp: -1, ArrowDown: 1, Escape: 0}[event.key];
  if (step === undefined) return;
  event.preventDefault();
  const {rows} = panel(), at = state.pinned?.side === "query" ? state.pinned.at + step : 0;
  state.pinned = step === 0 ? null : {side: "query", at: Math.min(Math.max(at, 0), rows - 1)};
  drawLines();
};
for (const view of kViews)
  element(`tab-${view}`).onclick = () => { state.view = view; show(); };
element("query").onchange = element("key").onchange = () => {
  state.row = +element("query").value;
  state.column = +element("key").value;
  drawFeatures();
};
element("item").onchange = event => { state.item = +event.target.value; showItem(); };
element("layer").onchange = event => choose(+event.target.value, state.panel);
element("head").onchange = event => { state.panel = +event.target.value; show(); };
element("mask").onchange = event => { state.mask = event.target.checked; showItem(); };
matchMedia("(prefers-color-scheme: dark)").onchange = draw;
onresize = draw;
start();
