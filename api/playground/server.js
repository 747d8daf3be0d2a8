// The server over plain HTTP: its model, how it stands, and what it says of a refusal.

const AWAY = "The server does not answer. Is it running?";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Server {
  constructor() {
    this.key = ""; // in memory only: never stored
    this.model = null; // an entry of /v1/models
  }

  /** Raises an Error with words for the user. */
  setKey(key) {
    if (!/^[\x21-\x7e]*$/.test(key)) throw new Error("An API key has only letters, digits and signs, and no spaces: check what you have pasted.");
    this.key = key;
  }

  async #ask(path, signal) {
    let answer;
    try {
      answer = await fetch(path, { headers: authorization(this.key), signal });
    } catch {
      throw new Refused(0, AWAY);
    }
    if (answer.ok) return answer;
    const body = await answer.json().catch(() => null);
    if (answer.status === 401) throw new Refused(401, this.key ? "The server does not know this API key." : "This server asks for an API key.");
    throw new Refused(answer.status, body?.error?.message ?? `The server answered with ${answer.status}.`);
  }

  /** Raises Refused. */
  async loadModel() {
    const answer = await this.#ask("v1/models");
    this.model = (await answer.json()).data[0];
    return this.model;
  }

  /** The server's status again and again, until `signal` or the server ends it. Raises Refused. */
  async *watch(seconds, signal) {
    const answer = await this.#ask(`v1/status/watch?interval=${seconds}`, signal);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    while (true) {
      const { done, value } = await reader.read().catch(() => ({ done: true }));
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) yield JSON.parse(event.replace(/^data: /, ""));
    }
  }
}

function authorization(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Why a WebSocket to this address was refused, from what the same address says over HTTP. */
export async function explain(address, key) {
  try {
    const answer = await fetch(address, { headers: authorization(key) });
    if (answer.status === 401) return key ? "The server does not know this API key." : "This server asks for an API key.";
    const onlyForSockets = answer.status === 400 || answer.status === 426;
    return onlyForSockets ? unexplained(key) : (await answer.json()).error.message;
  } catch {
    return AWAY;
  }
}

/** HTTP sees no fault: what is left is the page's origin, which browsers name for sockets only; where there are keys, any will do. */
function unexplained(key) {
  const { hostname, origin } = window.location;
  const own = key || hostname === "localhost" || /^[\d.]+$|^\[/.test(hostname);
  return own
    ? "The server did not accept the connection. Try again in a moment."
    : `The server does not seem to take pages of this address: list ${origin} in api.cors_origins.`;
}
