// The conversation as it is read: a list of turns, each filled while it comes, and read out to screen readers once it is whole.

const SIDES = { user: "You", assistant: "Answer" };

export class Transcript {
  /** `list`: an <ol>; `announcer`: a polite live region; `empty`: shown until there is a turn. */
  constructor(list, announcer, empty) {
    Object.assign(this, { list, announcer, empty });
    this.turns = new Map(); // item id → {element, text, role}
    this.expected = []; // pictures of turns that were sent and have not come back yet
  }

  clear() {
    this.list.replaceChildren();
    this.turns.clear();
    this.expected = [];
    this.empty.hidden = false;
  }

  /** The next written turn that comes back from the server has this picture, or none. */
  expect(picture) {
    this.expected.push(picture);
  }

  listening(id) {
    this.#turn(id, "user", "listening");
  }

  /** What was being heard has been thrown away. */
  dropListening() {
    for (const [id, { element }] of this.turns) {
      if (element.dataset.state !== "listening") continue;
      element.remove();
      this.turns.delete(id);
    }
  }

  /** An item of the server's. */
  added(item) {
    if (!(item.role in SIDES)) return;
    const content = item.content ?? [];
    const written = content.some((part) => part.type === "input_text" || part.type === "input_image");
    const turn = this.#turn(item.id, item.role, item.role === "user" && !written ? "waiting" : "writing");
    if (!written || item.role !== "user") return;
    const picture = this.expected.shift();
    if (picture) {
      const image = document.createElement("img");
      Object.assign(image, { src: picture.preview, alt: `Picture: ${picture.name}` });
      turn.element.querySelector(".said").before(image);
    }
    this.complete(item.id, content.map((part) => part.text ?? "").join(""));
  }

  append(id, piece) {
    const turn = this.turns.get(id);
    if (!turn) return;
    turn.text += piece;
    this.#show(turn);
  }

  /** Nothing more comes for it, and this is all of it. */
  complete(id, text) {
    const turn = this.turns.get(id);
    if (!turn) return;
    turn.text = text;
    this.#show(turn);
    this.#finish(turn);
  }

  /** An answer has ended with a response's status. */
  end(id, status) {
    const turn = this.turns.get(id);
    if (!turn) return;
    if (status === "cancelled") this.#label(turn, "interrupted");
    if (status === "failed") this.#label(turn, "failed");
    if (status === "incomplete") this.#label(turn, "cut short at the token limit");
    this.#finish(turn);
  }

  /** Of an interrupted answer, only this was heard, and only this does the model remember. */
  spoken(id, heard) {
    const turn = this.turns.get(id);
    if (!turn || turn.role !== "assistant") return;
    this.#label(turn, "interrupted");
    const rest = turn.text.startsWith(heard) ? turn.text.slice(heard.length).trim() : "";
    const said = turn.element.querySelector(".said");
    said.textContent = heard.trim();
    if (rest) {
      const unsaid = document.createElement("s");
      unsaid.className = "unsaid";
      unsaid.title = "Not spoken, and not remembered";
      unsaid.textContent = rest;
      said.append(" ", unsaid);
    }
  }

  /** A line between turns. */
  note(text) {
    if (!this.turns.size) return;
    const line = document.createElement("li");
    line.className = "note";
    line.textContent = text;
    this.#add(line);
  }

  #turn(id, role, state) {
    let turn = this.turns.get(id);
    if (!turn) {
      const element = document.createElement("li");
      element.className = `turn ${role}`;
      const who = document.createElement("span");
      who.className = "who";
      who.textContent = SIDES[role];
      const said = document.createElement("p");
      said.className = "said";
      element.append(who, said);
      turn = { element, role, text: "" };
      this.turns.set(id, turn);
      this.#add(element);
    }
    turn.element.dataset.state = state;
    return turn;
  }

  #finish(turn) {
    if (turn.element.dataset.state === "done") return;
    turn.element.dataset.state = "done";
    const line = document.createElement("p");
    line.textContent = `${SIDES[turn.role]}: ${turn.text}`;
    this.announcer.replaceChildren(line);
  }

  #label(turn, text) {
    const who = turn.element.querySelector(".who");
    who.textContent = `${SIDES[turn.role]}, ${text}`;
  }

  #show(turn) {
    const following = this.#atEnd();
    turn.element.querySelector(".said").textContent = turn.text;
    if (following) this.#follow();
  }

  #add(element) {
    const following = this.#atEnd();
    this.empty.hidden = true;
    this.list.append(element);
    if (following) this.#follow();
  }

  /** Whoever has scrolled up to read is left alone. */
  #atEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.list.parentElement;
    return scrollHeight - scrollTop - clientHeight < 80;
  }

  #follow() {
    const box = this.list.parentElement;
    box.scrollTop = box.scrollHeight;
  }
}
