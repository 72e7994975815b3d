// How often each expert of each layer was chosen, as a map: layers from top to bottom, experts from left to right.

const MOST = 4; // times the layer's mean: the end of the colours; the root puts the mean in their middle

export class HeatMap {
  constructor(canvas, legend, cell, told) {
    Object.assign(this, { canvas, legend, cell, told, base: null, counts: null, at: null });
    canvas.addEventListener("keydown", (event) => this.move(event));
    canvas.addEventListener("pointermove", (event) => this.point(event));
  }

  /** Show counts [layers][experts], less those from which it counts. */
  show(counts) {
    this.canvas.parentElement.hidden = false;
    const fell = this.base?.some((row, l) => row.some((value, e) => value > counts[l][e])); // the engine began anew
    if (!this.base || fell) this.base = fell ? counts.map((row) => row.map(() => 0)) : counts;
    this.raw = counts;
    this.counts = counts.map((row, l) => row.map((value, e) => value - this.base[l][e]));
    this.draw();
    this.tell();
    this.cell.ariaLive = "off"; // said aloud when the reader moves, not each second
    if (this.at) this.name();
  }

  restart() {
    this.base = this.raw ?? null;
    if (this.raw) this.show(this.raw);
  }

  /** An expert's share, in means of its layer. */
  load(l, e) {
    const sum = this.counts[l].reduce((a, b) => a + b, 0);
    return sum ? (this.counts[l][e] * this.counts[l].length) / sum : 0;
  }

  draw() {
    const rows = this.counts.length;
    const columns = this.counts[0].length;
    const { canvas } = this;
    const scale = devicePixelRatio;
    const height = Math.max(4, Math.min(22, Math.round(360 / rows)));
    canvas.style.height = `${rows * height}px`;
    canvas.width = Math.max(columns, Math.round(canvas.clientWidth * scale));
    canvas.height = rows * height * scale;
    const brush = canvas.getContext("2d");
    const colours = ramp();
    const gap = canvas.width / columns > 6 * scale ? scale : 0;
    const edge = (e) => Math.round((e * canvas.width) / columns);
    this.counts.forEach((row, l) => {
      const sum = row.reduce((a, b) => a + b, 0);
      row.forEach((value, e) => {
        brush.fillStyle = colours(sum ? Math.sqrt((value * columns) / sum / MOST) : 0);
        brush.fillRect(edge(e), l * height * scale, edge(e + 1) - edge(e) - gap, height * scale - gap);
      });
    });
    if (this.at) {
      brush.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--ink");
      brush.lineWidth = 2 * scale;
      brush.strokeRect(edge(this.at[1]), this.at[0] * height * scale, edge(this.at[1] + 1) - edge(this.at[1]), height * scale);
    }
    const key = this.legend.getContext("2d");
    for (let x = 0; x < this.legend.width; x++) {
      key.fillStyle = colours(x / this.legend.width);
      key.fillRect(x, 0, 1, this.legend.height);
    }
  }

  /** The map in a sentence. */
  tell() {
    const chosen = this.counts[0].reduce((a, b) => a + b, 0);
    if (!chosen) {
      this.told.textContent = "Nothing has been chosen since counting began.";
      return;
    }
    let [most, layer, expert, unused] = [0, 0, 0, 0];
    this.counts.forEach((row, l) => {
      const sum = row.reduce((a, b) => a + b, 0);
      row.forEach((value, e) => {
        if (!value) unused++;
        if (sum && (value * row.length) / sum > most) [most, layer, expert] = [(value * row.length) / sum, l, e];
      });
    });
    const busiest = `The busiest is expert ${expert} of layer ${layer} with ${most.toFixed(1)} x the mean`;
    const cells = this.counts.length * this.counts[0].length;
    this.told.textContent = `${busiest}; ${unused} of ${cells} were never chosen. Each layer chose ${chosen.toLocaleString("en")} times.`;
  }

  name() {
    const [l, e] = this.at;
    const text = `Layer ${l}, expert ${e}: chosen ${this.counts[l][e].toLocaleString("en")} times, ${this.load(l, e).toFixed(2)} x the mean.`;
    if (this.cell.textContent !== text) this.cell.textContent = text;
  }

  go(l, e) {
    const within = (value, size) => Math.max(0, Math.min(size - 1, value));
    this.at = [within(l, this.counts.length), within(e, this.counts[0].length)];
    this.draw();
    this.cell.ariaLive = "polite";
    this.name();
  }

  move(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const step = steps[event.key];
    if (!step || !this.counts) return;
    event.preventDefault();
    const [l, e] = this.at ?? [0, 0];
    if (this.at) this.go(l + step[0], e + step[1]);
    else this.go(0, 0);
  }

  point(event) {
    if (!this.counts) return;
    const box = this.canvas.getBoundingClientRect();
    const place = (value, size, count) => Math.floor((value / size) * count);
    this.go(
      place(event.clientY - box.top, box.height, this.counts.length),
      place(event.clientX - box.left, box.width, this.counts[0].length),
    );
  }
}

/** The page's three colours as a function of 0 .. 1. */
function ramp() {
  const style = getComputedStyle(document.documentElement);
  const colours = [0, 1, 2].map((i) => {
    const hex = style.getPropertyValue(`--heat-${i}`).trim();
    return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  });
  return (share) => {
    const x = 2 * Math.max(0, Math.min(1, share));
    const i = x < 1 ? 0 : 1;
    const mixed = colours[i].map((value, c) => Math.round(value + (colours[i + 1][c] - value) * (x - i)));
    return `rgb(${mixed})`;
  };
}
