// A conversation with the server: what the user does becomes client events, and server events become words, sound and figures.

import { decodePcm, encodePcm, RATE } from "./pcm.js";
import { Realtime } from "./realtime.js";

const SHORTEST_S = 0.1; // of a spoken turn: a shorter one was a slip of the finger
// Of our own making, in the moment between an answer's end and our hearing of it: nothing that a user must know.
const HARMLESS = new Set(["response_cancel_not_active", "item_truncate_invalid_item_id", "item_retrieve_invalid_item_id"]);

export class Dialogue {
  /** `onChange()` after anything that shows; `onError(words)`; `onTruncated(ms)`. `settings.session()` is the session to ask for. */
  constructor({ server, player, microphone, transcript, timing, settings, onChange, onError, onTruncated }) {
    Object.assign(this, { server, player, microphone, transcript, timing, settings, onChange, onError, onTruncated });
    this.realtime = new Realtime({ onEvent: (event) => this.#event(event), onClose: (why) => this.#closed(why) });
    this.#forget();
    this.connecting = false;
    this.talking = false; // the microphone's gate is open
  }

  #forget() {
    this.response = null; // {id, item, silent}: of the answer that is being made; without an id until the server has named it
    this.wanted = false; // an answer, as soon as the one before it has ended
    this.silenced = new Set(); // responses of which nothing more is to be heard
    this.sent = 0; // samples of this spoken turn
    this.events = 0; // numbered, for an error to name what it is about
    this.voiced = false; // from the first sound on, a session keeps its voice
  }

  get connected() {
    return this.realtime.open;
  }

  get answering() {
    return this.response !== null || this.wanted;
  }

  /** Raises an Error with words for the user. */
  async connect() {
    if (this.connected) return;
    this.connecting = true;
    this.onChange();
    try {
      if (!this.server.model) await this.server.loadModel();
      await this.realtime.connect(this.server);
    } finally {
      this.connecting = false;
      this.onChange();
    }
  }

  update() {
    this.#send("session.update", { session: this.settings.session() });
  }

  // ---- what the user does

  /** Text, a picture ({url}: a data URL), or both. */
  async write(text, picture) {
    await Promise.all([this.#hear(), this.connect()]);
    await this.interrupt();
    const content = [];
    if (picture) content.push({ type: "input_image", image_url: picture.url });
    if (text) content.push({ type: "input_text", text });
    this.transcript.expect(picture);
    this.#send("conversation.item.create", { event_id: `item-${this.events++}`, item: { type: "message", role: "user", content } });
    this.timing.inputEnded();
    this.#answer();
  }

  /** Opens the microphone's gate. Resolves to false where the user has let go before it could open. */
  async talk(still = () => true) {
    await Promise.all([this.#hear(), this.microphone.open(), this.connect()]);
    if (!still()) return false;
    this.sent = 0;
    this.talking = true;
    this.free = this.settings.handsFree; // as it was begun it ends
    this.microphone.start();
    if (!this.free) await this.interrupt();
    this.onChange();
    return true;
  }

  /** Closes it; with hold-to-talk, what was said is now the user's turn. */
  async endTalk() {
    if (!this.talking) return;
    await this.microphone.stop();
    this.talking = false;
    if (this.free) this.microphone.close();
    if (this.free || this.sent < SHORTEST_S * RATE) {
      this.#send("input_audio_buffer.clear");
      if (!this.free) this.onError("That was too short: hold the button for as long as you speak.");
    } else {
      this.#send("input_audio_buffer.commit");
      this.timing.inputEnded();
      this.#answer();
    }
    this.onChange();
  }

  /** A block of the microphone's. */
  heard(samples) {
    if (!this.talking) return;
    this.sent += samples.length;
    this.#send("input_audio_buffer.append", { audio: encodePcm(samples) });
  }

  /** Silence at once; the server forgets what has not been heard. `cancel` false: the server has ended the answer itself. */
  async interrupt(cancel = true) {
    const response = this.response;
    this.wanted = false;
    if (response) {
      response.silent = true;
      if (response.id) this.silenced.add(response.id);
      if (cancel) this.#send("response.cancel", response.id ? { response_id: response.id } : {});
    }
    for (const [item, samples] of await this.player.flush()) {
      const whole = this.player.samplesOf(item);
      if (samples >= whole && item !== response?.item) continue;
      const ms = Math.floor((samples / RATE) * 1000);
      this.#send("conversation.item.truncate", { item_id: item, content_index: 0, audio_end_ms: ms });
      this.onTruncated(ms);
    }
    this.onChange();
  }

  /** Ends the connection; the next turn begins a new conversation. */
  async reset() {
    await this.player.flush();
    this.realtime.close();
    this.transcript.clear();
  }

  async #hear() {
    if (this.settings.speaks) await this.player.start();
  }

  #answer() {
    if (this.response) {
      this.wanted = true;
    } else {
      this.response = { id: null, item: null, silent: false };
      this.#send("response.create", { event_id: `answer-${this.events++}` });
    }
    this.onChange();
  }

  #send(type, fields = {}) {
    this.realtime.send({ type, ...fields });
  }

  // ---- what the server says

  #closed(why) {
    this.#forget();
    if (this.talking) {
      this.talking = false;
      this.microphone.stop();
    }
    if (why) {
      this.transcript.note("The conversation has ended here; the next turn begins a new one.");
      this.onError(why);
    }
    this.onChange();
  }

  #event(event) {
    const { transcript, timing, player } = this;
    switch (event.type) {
      case "session.created":
        this.update();
        break;
      case "error":
        this.#refused(event.error);
        break;

      case "input_audio_buffer.speech_started":
        transcript.listening(event.item_id);
        // Also where the answer is complete at the server and only still being played.
        if (this.settings.bargeIn && (this.response || player.playing)) this.interrupt(false);
        break;
      case "input_audio_buffer.speech_stopped":
        timing.inputEnded();
        break;
      case "input_audio_buffer.cleared":
        transcript.dropListening();
        break;
      case "conversation.item.added":
        if (event.item.type === "message") transcript.added(event.item);
        break;
      case "conversation.item.input_audio_transcription.delta":
        transcript.append(event.item_id, event.delta);
        break;
      case "conversation.item.input_audio_transcription.completed":
        transcript.complete(event.item_id, event.transcript || "(nothing was understood)");
        break;
      case "conversation.item.input_audio_transcription.failed":
        transcript.complete(event.item_id, "(this could not be written down)");
        break;

      case "response.created":
        this.response = { item: null, silent: false, ...this.response, id: event.response.id };
        if (this.response.silent) this.silenced.add(event.response.id);
        break;
      case "response.output_item.added":
        if (this.response?.id === event.response_id && event.item.type === "message") this.response.item = event.item.id;
        break;
      case "response.output_text.delta":
      case "response.output_audio_transcript.delta":
        if (!this.silenced.has(event.response_id)) transcript.append(event.item_id, event.delta);
        break;
      case "response.output_audio.delta": {
        if (this.silenced.has(event.response_id)) break;
        const samples = decodePcm(event.delta);
        timing.audio(event.response_id, samples.length);
        this.voiced = true;
        player.push(event.item_id, samples);
        break;
      }
      case "response.output_audio.done":
        timing.done(event.response_id);
        break;
      case "response.done":
        this.#done(event.response);
        break;

      case "conversation.item.truncated":
        this.#send("conversation.item.retrieve", { item_id: event.item_id });
        break;
      case "conversation.item.retrieved":
        transcript.spoken(event.item.id, event.item.content?.[0]?.transcript ?? "");
        break;
      default:
        return; // what this page has no use for
    }
    this.onChange();
  }

  #refused(error) {
    if (error.event_id?.startsWith("answer-") && this.response?.id === null) this.response = null;
    if (error.event_id?.startsWith("item-")) this.transcript.expected.pop();
    if (!HARMLESS.has(error.code)) this.onError(error.message);
  }

  #done(response) {
    this.timing.done(response.id);
    this.silenced.delete(response.id);
    for (const item of response.output ?? []) this.transcript.end(item.id, response.status);
    const details = response.status_details;
    if (response.status === "failed") this.onError(details?.error?.message ?? "The answer failed.");
    if (this.response?.id === response.id) this.response = null;
    if (this.wanted && !this.response) {
      this.wanted = false;
      this.#answer();
    }
  }
}
