// Plays what is pushed, in order, and counts every sample that has been handed to the loudspeaker.
//
// In: {push: item, samples: Float32Array}; {flush: id}.
// Out: {state: {played, audible, queued}} while something plays; {flushed: id, played: [[item, samples], …]}: how far each item came
// that had begun, or was still waiting. Samples of a flush's fade are counted: they are heard.

const REPORT = 12; // quanta of 128 samples between two reports: 64 ms
const AUDIBLE = 0.002;

class Playback extends AudioWorkletProcessor {
  constructor() {
    super();
    this.queue = [];
    this.at = 0; // in the first of the queue
    this.queued = 0;
    this.item = null; // the last that sounded
    this.itemPlayed = 0;
    this.played = 0;
    this.audible = 0;
    this.flushes = [];
    this.quanta = 0;
    this.idle = true;
    this.port.onmessage = ({ data }) => {
      if ("flush" in data) {
        this.flushes.push(data.flush);
      } else {
        this.queue.push(data);
        this.queued += data.samples.length;
      }
    };
  }

  process(_inputs, [[out]]) {
    const filled = this.fill(out);
    if (this.flushes.length) {
      for (let i = 0; i < filled; i++) out[i] *= 1 - (i + 1) / filled; // a cut without a click
      this.drop();
    }
    for (let i = 0; i < filled; i++) if (Math.abs(out[i]) > AUDIBLE) this.audible++;
    this.quanta++;
    const idle = !this.queue.length;
    if (idle ? !this.idle : this.quanta % REPORT === 0) this.report();
    this.idle = idle;
    return true;
  }

  /** Returns how many samples there were. */
  fill(out) {
    let filled = 0;
    while (filled < out.length && this.queue.length) {
      const { push: item, samples } = this.queue[0];
      if (item !== this.item) {
        this.item = item;
        this.itemPlayed = 0;
      }
      const count = Math.min(out.length - filled, samples.length - this.at);
      out.set(samples.subarray(this.at, this.at + count), filled);
      filled += count;
      this.at += count;
      this.itemPlayed += count;
      if (this.at === samples.length) {
        this.queue.shift();
        this.at = 0;
      }
    }
    this.played += filled;
    this.queued -= filled;
    return filled;
  }

  drop() {
    const played = new Map(this.queue.map(({ push }) => [push, 0]));
    if (this.item !== null) played.set(this.item, this.itemPlayed);
    for (const id of this.flushes) this.port.postMessage({ flushed: id, played: [...played] });
    this.flushes = [];
    this.queue = [];
    this.at = 0;
    this.queued = 0;
    this.item = null;
    this.report();
  }

  report() {
    const { played, audible, queued } = this;
    this.port.postMessage({ state: { played, audible, queued } });
  }
}

registerProcessor("playback", Playback);
