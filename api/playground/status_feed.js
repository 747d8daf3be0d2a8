// The server's status as it changes, while the page is seen: one stream of events, asked for anew when it has ended.

const INTERVAL_S = 1; // between two events while nothing changes
const AGAIN_MS = 1000; // before the server is asked again
const SILENT_MS = 15000; // a server that says nothing for so long is away

export class StatusFeed {
  /** `show` gets each status, as /v1/status has it; `fail` an Error with words for the user. */
  constructor(server, { show, fail }) {
    Object.assign(this, { server, show, fail });
    this.ending = null; // ends the stream that runs
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
  }

  stop() {
    this.ending?.abort();
    this.ending = null;
  }

  /** From now on, until `stop`, or until the server asks for another key. */
  async start() {
    this.stop();
    if (document.hidden) return;
    const ending = (this.ending = new AbortController());
    while (!ending.signal.aborted) {
      try {
        await this.#read(ending.signal);
      } catch (error) {
        if (ending.signal.aborted) return;
        this.fail(error);
        if (error.status === 401) return;
      }
      await new Promise((done) => setTimeout(done, AGAIN_MS));
    }
  }

  async #read(ended) {
    const silent = new AbortController();
    let timer;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silent.abort(), SILENT_MS);
    };
    heard();
    try {
      for await (const status of this.server.watch(INTERVAL_S, AbortSignal.any([ended, silent.signal]))) {
        heard();
        if (ended.aborted) return;
        if (status.error) this.fail(new Error(status.error.message));
        else this.show(status);
      }
    } finally {
      clearTimeout(timer);
    }
  }
}
