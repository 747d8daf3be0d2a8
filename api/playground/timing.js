// What one answer measures of itself at the listener's end: TTFP, RTF and playback lead.
//
// TTFP: end of input (button released, text sent, speech found to have ended) → first audio received.
// RTF: seconds since the end of input ÷ seconds of audio received. The server holds speech back once it is far enough ahead of the
// loudspeaker, and from then on the quotient says nothing of its speed: the least one over the answer does.
// Lead: audio received and not yet played.

import { RATE } from "./pcm.js";

const ENOUGH_S = 0.5; // of audio, for an RTF

export class Timing {
  /** `onFigure(name, value)` with name "ttfp" | "rtf" | "lead", values in seconds (rtf: a ratio). */
  constructor(onFigure) {
    this.onFigure = onFigure;
    this.end = null; // of input, performance.now()
    this.answer = null;
  }

  inputEnded(at = performance.now()) {
    this.end = at;
  }

  audio(response, samples) {
    const now = performance.now();
    if (this.answer?.response !== response) {
      this.answer = { response, begin: this.end ?? now, samples: 0, rtf: Infinity };
      if (this.end !== null) this.onFigure("ttfp", (now - this.end) / 1000);
      this.end = null;
    }
    const answer = this.answer;
    answer.samples += samples;
    const audio = answer.samples / RATE;
    if (audio >= ENOUGH_S) answer.rtf = Math.min(answer.rtf, (now - answer.begin) / 1000 / audio);
  }

  /** No more audio of this response will come. */
  done(response) {
    if (this.answer?.response === response && this.answer.rtf < Infinity) this.onFigure("rtf", this.answer.rtf);
    if (this.answer?.response === response) this.answer = null;
  }

  lead(queued) {
    this.onFigure("lead", queued / RATE);
  }
}
