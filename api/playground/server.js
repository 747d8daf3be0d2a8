// The server over plain HTTP: its model, how it stands, and what it says of a refusal.

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

  async #get(path) {
    let answer;
    try {
      answer = await fetch(path, { headers: authorization(this.key) });
    } catch {
      throw new Refused(0, "The server does not answer. Is it running?");
    }
    const body = await answer.json().catch(() => null);
    if (answer.status === 401) throw new Refused(401, this.key ? "The server does not know this API key." : "This server asks for an API key.");
    if (!answer.ok) throw new Refused(answer.status, body?.error?.message ?? `The server answered with ${answer.status}.`);
    return body;
  }

  /** Raises Refused. */
  async loadModel() {
    this.model = (await this.#get("v1/models")).data[0];
    return this.model;
  }

  /** Raises Refused. */
  status() {
    return this.#get("v1/status");
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
    return "The server does not answer. Is it running?";
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
