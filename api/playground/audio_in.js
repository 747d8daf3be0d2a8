// The microphone: opened once it is needed, and silent to the server unless its gate is open.

import { RATE } from "./pcm.js";

const WHY = {
  NotAllowedError: "The browser does not let this page use the microphone. Allow it in the address bar, then try again.",
  NotFoundError: "No microphone was found. Connect one, or write instead.",
  NotReadableError: "The microphone is in use by another program. Close that one, then try again.",
};

/** An error whose message can be shown to the user as it is. */
export class MicrophoneError extends Error {}

export class Microphone {
  /** `onBlock(Int16Array)` gets 40 ms at 24 kHz; `onLevel(0…1)` their peak. */
  constructor(onBlock, onLevel) {
    this.onBlock = onBlock;
    this.onLevel = onLevel;
    this.context = null;
    this.opening = null;
    this.closed = null;
  }

  /** Raises MicrophoneError. Must first be called while a key or button is pressed. */
  async open() {
    this.opening ??= this.#open();
    try {
      await this.opening;
    } catch (error) {
      this.opening = null;
      throw error;
    }
    if (this.context.state !== "running") await this.context.resume();
  }

  async #open() {
    if (!navigator.mediaDevices) {
      throw new MicrophoneError("The microphone works only on a secure page: open this one by https, or on the server's own machine.");
    }
    try {
      const audio = { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true };
      this.stream = await navigator.mediaDevices.getUserMedia({ audio });
    } catch (error) {
      throw new MicrophoneError(WHY[error.name] ?? "The microphone cannot be used.");
    }
    for (const track of this.stream.getTracks()) track.addEventListener("ended", () => this.close());
    const source = this.#source();
    await this.context.audioWorklet.addModule(new URL("capture_worklet.js", import.meta.url));
    this.node = new AudioWorkletNode(this.context, "capture", {
      numberOfOutputs: 0,
      channelCount: 1,
      channelCountMode: "explicit",
    });
    this.node.port.onmessage = ({ data }) => {
      if (data.closed) {
        this.closed?.();
      } else {
        this.onBlock(data.samples);
        this.onLevel(data.level);
      }
    };
    source.connect(this.node);
  }

  /** A context of 24 kHz resamples what it gets; a browser that cannot do so gets one of its own rate, and the worklet resamples. */
  #source() {
    this.context = new AudioContext({ sampleRate: RATE });
    try {
      return this.context.createMediaStreamSource(this.stream);
    } catch (error) {
      if (error.name !== "NotSupportedError") throw error;
      this.context.close();
      this.context = new AudioContext();
      return this.context.createMediaStreamSource(this.stream);
    }
  }

  /** Blocks flow from now on. */
  start() {
    this.node.port.postMessage({ open: true });
  }

  /** No block comes after this has resolved. */
  async stop() {
    if (!this.node || this.context.state !== "running") return;
    await new Promise((resolve) => {
      this.closed = resolve;
      this.node.port.postMessage({ open: false });
    });
    this.onLevel(0);
  }

  /** Gives the microphone back; `open` takes it again. */
  close() {
    for (const track of this.stream?.getTracks() ?? []) track.stop();
    this.context?.close();
    this.closed?.();
    this.opening = this.stream = this.context = this.node = null;
    this.onLevel(0);
  }
}
