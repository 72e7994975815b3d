// The status page: asks for the engine's counts each second, and shows them with their last minutes.
import { HeatMap } from "/pages/heatmap.js";

const SECONDS = 180;
const find = (id) => document.getElementById(id);
const whole = (value) => Math.round(value).toLocaleString("en");
const short = (value) => (value < 10 ? value.toFixed(1) : whole(value));
const percent = (value) => `${value.toFixed(value > 0 && value < 10 ? 1 : 0)} %`;

/** name, the value of a moment (null: nothing to say), how it is written, what is said below it, the chart's top */
const CARDS = [
  ["Running requests", ({ now }) => now.running, whole],
  ["Waiting requests", ({ now }) => now.waiting, whole],
  ["Tokens generated a second", ({ rate }) => rate("tokens_generated"), short, ({ now }) => `${whole(now.tokens_generated)} in all`],
  ["Tokens run a second", ({ rate }) => rate("tokens_run"), short, ({ now }) => `${whole(now.tokens_run)} in all, prompts included`],
  ["Time of a step", stepTime, (value) => `${short(value)} ms`, ({ now }) => `${whole(now.steps)} steps in all`],
  ["Pages in use", ({ now }) => (100 * (now.pages_used - now.pages_reusable)) / now.pages, percent,
    ({ now }) => `${whole(now.pages_used - now.pages_reusable)} held, ${whole(now.pages_reusable)} kept for reuse, of ${whole(now.pages)}`, 100],
  ["Slots in use", ({ now }) => (100 * now.slots_used) / now.slots, percent,
    ({ now }) => `${whole(now.slots_used)} of ${whole(now.slots)}, snapshots included`, 100],
  ["Prompt tokens from the cache", ({ now }) => (now.prompt_tokens ? (100 * now.cached_tokens) / now.prompt_tokens : null),
    percent, ({ now }) => `${whole(now.cached_tokens)} of ${whole(now.prompt_tokens)} in all`, 100],
  ["Preemptions a second", ({ rate }) => rate("preemptions"), short, ({ now }) => `${whole(now.preemptions)} in all`],
];

let last = null;
let paused = false;
const cards = CARDS.map(makeCard);
const heat = new HeatMap(find("heat"), find("legend"), find("cell"), find("experts-told"));

/** Milliseconds in steps over steps, since the moment before; null if there was none. */
function stepTime({ rate }) {
  return rate("steps") ? (1000 * rate("busy_seconds")) / rate("steps") : null;
}

function makeCard([name, value, written, more, top]) {
  const element = document.createElement("li");
  const [title, big, small] = ["name", "value", "more"].map((kind) => {
    const line = document.createElement("p");
    line.className = kind;
    return line;
  });
  const chart = document.createElement("canvas");
  chart.setAttribute("aria-hidden", "true");
  title.textContent = name;
  big.textContent = "-";
  element.append(title, big, small, chart);
  find("cards").append(element);
  return { value, written, more, top, big, small, chart, past: [] };
}

function showCard(card, moment) {
  const value = card.value(moment);
  card.past.push(value);
  if (card.past.length > SECONDS) card.past.shift();
  card.big.textContent = value === null ? "-" : card.written(value);
  card.small.textContent = card.more ? card.more(moment) : `${whole(Math.max(...card.past))} at most`;
  draw(card);
}

/** The past as a line, the present at the right edge. */
function draw({ chart, past, top }) {
  const scale = devicePixelRatio;
  const width = (chart.width = Math.round(chart.clientWidth * scale));
  const height = (chart.height = Math.round(chart.clientHeight * scale));
  const brush = chart.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const most = top ?? Math.max(1, ...past);
  const step = width / (SECONDS - 1);
  const place = (value, i) => [width - (past.length - 1 - i) * step, height - scale - (value / most) * (height - 3 * scale)];
  brush.strokeStyle = style.getPropertyValue("--line");
  brush.lineWidth = scale;
  brush.strokeRect(-2, height - scale / 2, width + 4, height);
  brush.strokeStyle = brush.fillStyle = style.getPropertyValue("--accent");
  brush.lineWidth = 1.75 * scale;
  brush.lineJoin = "round";
  for (const run of runs(past)) {
    const points = run.map((i) => place(past[i], i));
    brush.beginPath();
    brush.moveTo(points[0][0] - (points.length === 1 ? step : 0), points[0][1]); // a single moment is a dash
    for (const point of points) brush.lineTo(...point);
    brush.globalAlpha = 1;
    brush.stroke();
    brush.lineTo(points.at(-1)[0], height);
    brush.lineTo(points[0][0], height);
    brush.globalAlpha = 0.15;
    brush.fill();
  }
}

/** The places of values, as one list for each stretch without a null. */
function runs(past) {
  const found = [[]];
  past.forEach((value, i) => (value === null ? found.push([]) : found.at(-1).push(i)));
  return found.filter((run) => run.length);
}

function tell(text, kind) {
  const health = find("health");
  if (health.textContent !== text) health.textContent = text; // said aloud when it changes
  health.className = kind;
}

async function read(path) {
  const response = await fetch(path, { signal: AbortSignal.timeout(5000) });
  if (!response.ok) throw new Error(`status ${response.status}`);
  return response.json();
}

function show(numbers) {
  find("model").textContent = `${numbers.model}, Leadline ${numbers.version}`;
  if (!numbers.engine) {
    last = null;
    tell(`The engine does not answer: ${numbers.problem}.`, "bad");
    return;
  }
  const now = { ...numbers, ...numbers.engine };
  const before = last && last.steps <= now.steps ? last : now; // an engine that began anew counts from 0
  const rate = (name) => (now.seconds > before.seconds ? (now[name] - before[name]) / (now.seconds - before.seconds) : 0);
  for (const card of cards) showCard(card, { now, rate });
  last = now;
  tell("The engine is well.", "good");
}

async function refresh() {
  try {
    show(await read("/status/numbers"));
    if (last) heat.show((await read("/status/experts")).counts);
  } catch {
    last = null;
    tell("The server does not answer.", "bad");
  }
}

/** Once a second, however long the answer takes; not while nobody looks. */
async function run() {
  for (;;) {
    const begun = performance.now();
    if (!paused && !document.hidden) await refresh();
    await new Promise((wake) => setTimeout(wake, Math.max(100, 1000 - (performance.now() - begun))));
  }
}

find("pause").addEventListener("click", () => {
  paused = !paused;
  find("pause").setAttribute("aria-pressed", String(paused));
  if (paused) tell("Paused.", "");
});
find("anew").addEventListener("click", () => heat.restart());
run();
