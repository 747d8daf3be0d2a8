// The Server panel: every replica with its host, state, queue, batch and memory, and what listeners noticed of the last answers.

import { element } from "./dom.js";

export class ServerPanel {
  /** `figures`: a <dl> for the server as a whole; `rows`: the <tbody> of the replicas. */
  constructor({ figures, rows }) {
    Object.assign(this, { figures, rows });
    this.before = null; // the last status: shares of time are between two
  }

  show(status) {
    const before = this.before;
    this.before = status;
    this.figures.replaceChildren(...serverFigures(status).flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]));
    this.rows.replaceChildren(...status.stages.flatMap((stage) => stageRows(stage, before, status)));
  }
}

function serverFigures({ ready, missing, stopping, uptime_s, requests, waiting, ended, recent }) {
  const state = stopping ? "draining" : ready ? "ready" : `not ready: ${missing.join(", ")}`;
  const { ttfp_s: ttfp, rtf, underrun } = recent;
  const silence = underrun.count ? `, ${underrun.seconds.toFixed(2)} s` : "";
  return [
    ["State", `${state}, up ${duration(uptime_s)}`],
    ["Requests now", counts(requests)],
    ["Waiting for their start", counts(waiting ?? {})],
    ["Ended", counts(ended)],
    [`TTFP, p50 · p95`, ttfp ? `${Math.round(ttfp.p50 * 1e3)} · ${Math.round(ttfp.p95 * 1e3)} ms` : "–"],
    [`RTF, p50 · p95`, rtf ? `${rtf.p50.toFixed(2)} · ${rtf.p95.toFixed(2)}` : "–"],
    ["Underruns", `${underrun.count}${silence}`],
  ];
}

function counts(found) {
  const parts = Object.entries(found).filter(([, count]) => count);
  return parts.map(([name, count]) => `${count} ${name}`).join(", ") || "none";
}

function duration(seconds) {
  const two = (value) => String(Math.floor(value)).padStart(2, "0");
  return `${Math.floor(seconds / 3600)}:${two((seconds / 60) % 60)}:${two(seconds % 60)}`;
}

function stageRows({ name, replicas }, before, status) {
  if (!replicas.length) {
    const row = element("tr");
    const head = element("th", "", name);
    head.scope = "row";
    head.append(element("span", "lost", "no replica"));
    row.append(head);
    return [row];
  }
  return replicas.map((replica) => replicaRow(replica, share(replica, before, status)));
}

/** Of the time since the last status, what the replica spent in steps. */
function share({ stage, worker, pid, load }, before, { uptime_s }) {
  const known = before?.stages.flatMap(({ replicas }) => replicas).find((one) => one.stage === stage && one.worker === worker && one.pid === pid);
  const seconds = uptime_s - (before?.uptime_s ?? uptime_s);
  if (!load || !known?.load || seconds <= 0) return null;
  return Math.min(1, Math.max(0, (load.busy_s - known.load.busy_s) / seconds));
}

function replicaRow({ stage, worker, host, device, state, progress, restarts, load }, busy) {
  const row = element("tr");
  const shared = worker.startsWith(`${stage}.`) || worker.startsWith(`${stage}@`) ? worker : `${stage} in ${worker}`;
  const head = element("th", "", shared);
  head.scope = "row";
  const loading = state === "loading" ? ` ${Math.round(progress * 100)} %` : "";
  head.append(element("span", state, `${state}${loading} · ${device} · ${host}`));
  const { waiting = 0, running = 0, batch = 0, kv_blocks_used: used = 0, kv_blocks_total: total = 0 } = load ?? {};
  const percent = (part) => `${Math.round(part * 100)} %`;
  const lead = load?.lead_s ?? null;
  const cells = [waiting, running, batch, busy === null ? "–" : percent(busy), total ? percent(used / total) : "–", lead === null ? "–" : `${lead.toFixed(1)} s`, restarts];
  row.append(head, ...cells.map((text) => element("td", "", text)));
  return row;
}
