// The button to talk with, for pointer, keyboard and assistive technology alike.
//
// Held, it talks until it is let go. A short press (or a click that a screen reader makes) switches it on, the next one off: that is also
// what every press does where `toggles` is true.

const HOLD_MS = 350; // a shorter press is a tap
const FIELDS = "input, textarea, select, button, summary, a, label";

export class TalkButton {
  /** `onBegin()` and `onEnd()` come in turn. The space bar works wherever the focus is in no field. */
  constructor(button, { onBegin, onEnd }) {
    Object.assign(this, { button, onBegin, onEnd, toggles: false, on: false, pressedAt: null });
    button.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      button.setPointerCapture(event.pointerId);
      this.#press();
    });
    for (const name of ["pointerup", "pointercancel"]) button.addEventListener(name, () => this.#release());
    button.addEventListener("contextmenu", (event) => event.preventDefault()); // a long touch is ours
    button.addEventListener("click", (event) => {
      if (event.detail === 0) this.#tap(); // neither pointer nor key made it
    });
    document.addEventListener("keydown", (event) => {
      if (!this.#isOurs(event)) return;
      event.preventDefault();
      if (!event.repeat) this.#press();
    });
    document.addEventListener("keyup", (event) => {
      if (!this.#isOurs(event)) return;
      event.preventDefault();
      this.#release();
    });
    window.addEventListener("blur", () => this.#release()); // the key's release would go elsewhere
  }

  #isOurs(event) {
    if (this.button.disabled || event.ctrlKey || event.metaKey || event.altKey) return false;
    if (event.target === this.button) return event.key === " " || event.key === "Enter";
    return event.key === " " && !event.target.closest?.(FIELDS);
  }

  #press() {
    if (this.on) {
      this.off();
    } else {
      this.pressedAt = performance.now();
      this.on = true;
      this.onBegin();
    }
  }

  #release() {
    const held = this.pressedAt !== null && performance.now() - this.pressedAt >= HOLD_MS;
    this.pressedAt = null;
    if (held && !this.toggles) this.off();
  }

  #tap() {
    this.#press();
    this.pressedAt = null;
  }

  /** Also for whoever has to end it from outside. */
  off() {
    if (!this.on) return;
    this.pressedAt = null;
    this.on = false;
    this.onEnd();
  }
}
