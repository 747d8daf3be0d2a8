// The microphone's samples as PCM16 blocks of 40 ms at 24 kHz, while its gate is open.
//
// In: {open: true}, {open: false}.  Out: {samples: Int16Array, level: 0…1}; after a gate has closed, {closed: true} behind the last block.

const RATE = 24000;
const BLOCK = 960;
const TAPS = 32; // of the resampler, on each side of a sample's place

/** Windowed-sinc interpolation, for browsers that do not resample a microphone themselves. */
class Resampler {
  constructor(from) {
    this.step = from / RATE;
    this.cutoff = Math.min(1, RATE / from) * 0.95;
    this.history = new Float32Array(0);
    this.at = TAPS; // place of the next output sample in `history`
  }

  *push(input) {
    const samples = new Float32Array(this.history.length + input.length);
    samples.set(this.history);
    samples.set(input, this.history.length);
    for (; this.at + TAPS + 1 < samples.length; this.at += this.step) {
      const first = Math.floor(this.at) - TAPS + 1;
      let sum = 0;
      for (let i = first; i < first + 2 * TAPS; i++) {
        const x = this.at - i;
        const phase = Math.PI * x * this.cutoff;
        const sinc = phase === 0 ? this.cutoff : (Math.sin(phase) / phase) * this.cutoff;
        sum += samples[i] * sinc * (0.5 + 0.5 * Math.cos((Math.PI * x) / TAPS)); // Hann window
      }
      yield sum;
    }
    const used = Math.floor(this.at) - TAPS;
    this.history = samples.slice(used);
    this.at -= used;
  }
}

class Capture extends AudioWorkletProcessor {
  constructor() {
    super();
    this.open = false;
    this.block = new Int16Array(BLOCK);
    this.filled = 0;
    this.peak = 0;
    this.resampler = sampleRate === RATE ? null : new Resampler(sampleRate);
    this.port.onmessage = ({ data }) => {
      this.open = data.open;
      if (!data.open) {
        this.send();
        this.port.postMessage({ closed: true });
      }
    };
  }

  process([input]) {
    if (this.open && input.length) {
      for (const sample of this.resampler ? this.resampler.push(input[0]) : input[0]) this.take(sample);
    }
    return true;
  }

  take(sample) {
    const clipped = Math.max(-1, Math.min(1, sample));
    this.peak = Math.max(this.peak, Math.abs(clipped));
    this.block[this.filled++] = Math.round(clipped * 32767);
    if (this.filled === BLOCK) this.send();
  }

  send() {
    if (!this.filled) return;
    const samples = this.block.slice(0, this.filled);
    this.port.postMessage({ samples, level: this.peak }, [samples.buffer]);
    this.filled = 0;
    this.peak = 0;
  }
}

registerProcessor("capture", Capture);
