// The loudspeaker: plays items' samples in order, can be silenced at once, and knows how much of each was heard.

import { RATE } from "./pcm.js";

const INSECURE =
  "A browser plays and hears sound only on a secure page: open this one by https, or on the server's own machine. " +
  "Or choose “Text only” as the answer in the settings, and write.";

export class Player {
  /** `onState({played, audible, queued})`, in samples: several times a second while something plays, and when it ends. */
  constructor(onState) {
    this.onState = onState;
    this.node = null;
    this.starting = null;
    this.flushes = new Map();
    this.flushCount = 0;
    this.pushed = new Map(); // item → samples
    this.queued = 0;
  }

  /** Raises an Error with words for the user. Must first be called while a key or button is pressed: browsers let a page sound only then. */
  async start() {
    this.starting ??= this.#open();
    try {
      await this.starting;
    } catch (error) {
      this.starting = null;
      throw error;
    }
    if (this.context.state !== "running") await this.context.resume();
  }

  async #open() {
    if (!window.isSecureContext) throw new Error(INSECURE);
    this.context = new AudioContext({ sampleRate: RATE, latencyHint: "interactive" });
    await this.context.audioWorklet.addModule(new URL("playback_worklet.js", import.meta.url));
    this.node = new AudioWorkletNode(this.context, "playback", { numberOfInputs: 0, outputChannelCount: [1] });
    this.node.port.onmessage = ({ data }) => this.#heard(data);
    this.node.connect(this.context.destination);
  }

  #heard(data) {
    if ("flushed" in data) {
      this.flushes.get(data.flushed)(new Map(data.played));
      this.flushes.delete(data.flushed);
    } else {
      this.queued = data.state.queued;
      this.onState(data.state);
    }
  }

  get playing() {
    return this.queued > 0;
  }

  push(item, samples) {
    if (!this.node || !samples.length) return;
    this.pushed.set(item, this.samplesOf(item) + samples.length);
    this.queued += samples.length;
    this.node.port.postMessage({ push: item, samples }, [samples.buffer]);
  }

  /** All samples of the item that were ever pushed. */
  samplesOf(item) {
    return this.pushed.get(item) ?? 0;
  }

  /** Silence now. Resolves to item → samples heard of it. */
  flush() {
    if (!this.node || this.context.state !== "running") return Promise.resolve(new Map());
    this.queued = 0;
    const id = this.flushCount++;
    return new Promise((resolve) => {
      this.flushes.set(id, resolve);
      this.node.port.postMessage({ flush: id });
    });
  }
}
