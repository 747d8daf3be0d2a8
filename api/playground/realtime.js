// One /v1/realtime connection: events out, events in, and in plain words why it ended.

import { explain } from "./server.js";

const CLOSED = {
  1001: "The server has closed the connection.",
  1008: "The server has refused to go on.",
  1009: "Something sent was too large for the server.",
  1011: "The server met an internal error.",
  1012: "The server is being restarted. Try again in a moment.",
  1013: "The server is busy. Try again in a moment.",
};

export class Realtime {
  /** `onEvent(event)` for each server event; `onClose(message | null)` once, null where we closed it ourselves. */
  constructor({ onEvent, onClose }) {
    this.onEvent = onEvent;
    this.onClose = onClose;
    this.socket = null;
    this.opening = null;
  }

  get open() {
    return this.socket?.readyState === WebSocket.OPEN;
  }

  /** Resolves at session.created; raises an Error with words for the user. Connecting twice connects once. */
  connect(server) {
    this.opening ??= this.#connect(server).catch((error) => {
      this.opening = null;
      throw error;
    });
    return this.opening;
  }

  async #connect(server) {
    const address = new URL(`v1/realtime?model=${encodeURIComponent(server.model.id)}`, document.baseURI);
    const http = address.href;
    address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
    const protocols = ["realtime", ...(server.key ? [`openai-insecure-api-key.${server.key}`] : [])];
    try {
      this.socket = new WebSocket(address, protocols);
    } catch {
      throw new Error("This API key has characters that a browser cannot send.");
    }
    const socket = this.socket;
    const created = await new Promise((resolve) => {
      socket.onmessage = ({ data }) => resolve(JSON.parse(data));
      socket.onclose = () => resolve(null);
    });
    if (created === null) {
      this.socket = null;
      throw new Error(await explain(http, server.key)); // a browser does not tell why a socket was refused: HTTP does
    }
    socket.onmessage = ({ data }) => this.onEvent(JSON.parse(data));
    socket.onclose = ({ code, reason }) => {
      if (this.socket !== socket) return;
      this.opening = this.socket = null;
      this.onClose(reason || CLOSED[code] || "The connection to the server was lost.");
    };
    this.onEvent(created);
  }

  send(event) {
    if (this.open) this.socket.send(JSON.stringify(event));
  }

  close() {
    const socket = this.socket;
    this.opening = this.socket = null;
    if (socket) {
      socket.onmessage = null;
      socket.close(1000);
    }
    this.onClose(null);
  }
}
