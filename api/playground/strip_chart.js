// One lane of a strip chart: a figure over the last minutes, newest at the right edge.

const WINDOW_S = 180;
const MOTION_MS = 250;
const CALM_MS = 1000; // for whoever wants less motion

export class Strip {
  /** `canvas` takes the colours of its CSS; `value` is where the newest figure is written. `form`: "dots", or "area" for one that flows. */
  constructor(canvas, value, { name, unit, form, digits = 2, atLeast = 1, guide = null }) {
    Object.assign(this, { canvas, value, name, unit, form, digits, atLeast, guide });
    this.points = []; // [seconds, figure]
    this.dirty = true;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  add(figure) {
    this.points.push([performance.now() / 1000, figure]);
    this.value.textContent = this.#text(figure);
    this.canvas.setAttribute("aria-label", `${this.name} over the last three minutes, now ${this.#text(figure)}`);
  }

  #text(figure) {
    return `${figure.toFixed(this.digits)}${this.unit}`;
  }

  draw() {
    const { canvas } = this;
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width) return;
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const colours = getComputedStyle(canvas);
    const now = performance.now() / 1000;
    const begin = this.points.findIndex(([at]) => at >= now - WINDOW_S);
    // One that has left stays, for the line that comes in from the left.
    if (begin !== 0) this.points = begin < 0 ? this.points.slice(-1) : this.points.slice(Math.max(0, begin - 1));
    const top = Math.max(this.atLeast, ...this.points.map(([, figure]) => figure)) * 1.2;
    const x = (at) => width - 5 - ((now - at) / WINDOW_S) * (width - 5);
    const y = (figure) => height - 3 - (figure / top) * (height - 8);

    context.strokeStyle = colours.borderColor;
    context.lineWidth = 1;
    for (let minute = 1; minute * 60 < WINDOW_S; minute++) line(context, x(now - minute * 60), 0, x(now - minute * 60), height);
    line(context, 0, height - 2.5, width, height - 2.5);
    if (this.guide !== null) {
      context.setLineDash([3, 3]);
      line(context, 32, y(this.guide), width, y(this.guide));
      context.setLineDash([]);
    }
    context.fillStyle = colours.getPropertyValue("--muted");
    context.font = `11px ${colours.fontFamily}`;
    context.fillText(`${top.toFixed(top < 3 ? 1 : 0)}${this.unit}`, 2, 11);
    context.strokeStyle = context.fillStyle = colours.color;
    if (this.form === "dots") this.#dots(context, x, y, height);
    else this.#area(context, x, y, height, now);
  }

  #dots(context, x, y, height) {
    context.lineWidth = 2;
    for (const [at, figure] of this.points) {
      line(context, x(at), height - 3, x(at), y(figure));
      context.beginPath();
      context.arc(x(at), y(figure), 3.5, 0, 2 * Math.PI);
      context.fill();
    }
  }

  #area(context, x, y, height, now) {
    if (!this.points.length) return;
    context.beginPath();
    context.moveTo(x(this.points[0][0]), height - 3);
    let before = 0;
    for (const [at, figure] of this.points) {
      if (before === 0) context.lineTo(x(at), height - 3); // it begins anew, and did not grow over the pause
      context.lineTo(x(at), y(figure));
      before = figure;
    }
    context.lineTo(x(now), y(before));
    context.lineTo(x(now), height - 3);
    context.globalAlpha = 0.18;
    context.fill();
    context.globalAlpha = 1;
    context.lineWidth = 1.5;
    context.stroke();
  }
}

function line(context, fromX, fromY, toX, toY) {
  context.beginPath();
  context.moveTo(fromX, fromY);
  context.lineTo(toX, toY);
  context.stroke();
}

/** Keeps strips moving while the page is seen and there is something to move. */
export function animate(strips) {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  setInterval(() => {
    if (document.hidden) return;
    for (const strip of strips) if (strip.points.length) strip.draw();
  }, calm ? CALM_MS : MOTION_MS);
}
