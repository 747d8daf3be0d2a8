// The pipeline as /v1/status tells of it: each stage with its queue and replicas, and the edges between them, lit where chunks flow.

import { element } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const LANE = 9; // pixels between two edges that pass by stages
const SHOWN = 12; // requests drawn one by one

export class Pipeline {
  /** `list`: an <ol> of stages; `drawing`: an <svg> in the gutter to its left. */
  constructor({ list, drawing }) {
    Object.assign(this, { list, drawing });
    this.chunks = null; // edge → chunks so far
    this.status = null;
    new ResizeObserver(() => this.#drawEdges()).observe(list);
  }

  show(status) {
    const before = this.chunks;
    this.chunks = status.edge_chunks;
    this.flowing = new Set(Object.keys(this.chunks).filter((edge) => before && this.chunks[edge] > (before[edge] ?? 0)));
    this.status = status;
    const rows = [end("You", "speak, write, show"), ...status.stages.map(stageRow), end("You", "hear and read")];
    this.list.replaceChildren(...rows);
    this.#drawEdges();
  }

  #drawEdges() {
    if (!this.status) return;
    const rows = [...this.list.children];
    const names = this.status.stages.map((stage) => stage.name);
    const edges = this.status.edges.map((name) => {
      const [source, target] = name.split("->");
      return { name, from: source === "client" ? 0 : names.indexOf(source) + 1, to: target === "client" ? rows.length - 1 : names.indexOf(target) + 1 };
    });
    edges.sort((a, b) => a.to - a.from - (b.to - b.from));
    const gutter = this.drawing.clientWidth;
    let lane = 0;
    const paths = edges.map(({ name, from, to }) => {
      const path = document.createElementNS(SVG, "path");
      const [a, b] = [middle(rows[from]) + 5, middle(rows[to]) - 5];
      // Neighbours are joined straight; every other edge passes the stages between in a lane of its own.
      const x = to - from === 1 ? gutter - 10 : Math.max(3, gutter - 10 - LANE * ++lane);
      const r = Math.min(8, gutter - x);
      path.setAttribute("d", `M${gutter} ${a}H${x + r}Q${x} ${a} ${x} ${a + r}V${b - r}Q${x} ${b} ${x + r} ${b}H${gutter - 1}`);
      path.setAttribute("class", this.flowing.has(name) ? "edge flowing" : "edge");
      path.setAttribute("marker-end", this.flowing.has(name) ? "url(#tip-flowing)" : "url(#tip)");
      return path;
    });
    this.drawing.querySelectorAll("path.edge").forEach((path) => path.remove());
    this.drawing.append(...paths);
  }
}

function middle(row) {
  return row.offsetTop + row.offsetHeight / 2;
}

function end(who, does) {
  const row = element("li", "end");
  row.append(element("b", "", who), ` ${does}`);
  return row;
}

function stageRow({ name, ready, replicas }) {
  const row = element("li", "stage");
  const sum = (figure) => replicas.reduce((total, { load }) => total + (load?.[figure] ?? 0), 0);
  const [waiting, running] = [sum("waiting"), sum("running")];
  const head = element("div", "head");
  head.append(element("b", "", name), element("span", "load", `${waiting} waiting · ${running} running`));
  const queue = element("div", "queue");
  queue.ariaHidden = "true";
  for (let i = 0; i < Math.min(SHOWN, running + waiting); i++) queue.append(element("i", i < running ? "running" : "waiting"));
  head.append(queue);
  const list = element("ul", "replicas");
  list.append(...replicas.map(replicaChip));
  if (!ready && !replicas.length) list.append(element("li", "lost", "no replica"));
  row.append(head, list);
  return row;
}

function replicaChip({ worker, device, state, progress, restarts }) {
  const loading = state === "loading" ? ` ${Math.round(progress * 100)} %` : "";
  const again = restarts ? `, restarted ${restarts}×` : "";
  return element("li", state, `${worker} · ${device} · ${state}${loading}${again}`);
}
