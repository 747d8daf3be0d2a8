// The settings as they stand in the form, and as the protocol wants them.

const FORMAT = { type: "audio/pcm", rate: 24000 };

export class Settings {
  /** `onChange(name)` with the changed field's name, when a field has been left. */
  constructor(form, server, onChange) {
    this.form = form;
    this.fields = form.elements;
    this.server = server;
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("change", ({ target }) => {
      if (target.reportValidity()) onChange(target.name);
    });
    form.addEventListener("input", () => this.show());
  }

  /** What the model can do, from /v1/models. */
  offer(model) {
    this.fields.voice.replaceChildren(...model.voices.map((voice) => new Option(voice, voice)));
    const speaks = model.output_modalities.includes("audio");
    if (!speaks) this.fields.output.value = "text";
    this.fields.output.disabled = !speaks;
    const temperatures = this.form.querySelector("#temperatures");
    temperatures.replaceChildren(...model.generating_stages.map(temperatureField));
    this.show();
  }

  /** Fields that say something now; and of sliders, their values. */
  show() {
    const { fields, speaks } = this;
    for (const output of this.form.querySelectorAll("output")) output.value = fields[output.htmlFor.value].value;
    fields.speed.disabled = !speaks;
    fields.voice.disabled = !speaks || this.form.dataset.voiced !== undefined;
    const silence = fields.detection.value === "server_vad";
    for (const part of this.form.querySelectorAll("[data-detection]")) {
      part.hidden = (part.dataset.detection === "server_vad") !== silence;
    }
  }

  /** From the first sound on a session keeps its voice. */
  set voiced(voiced) {
    if (voiced === this.form.hasAttribute("data-voiced")) return;
    this.form.toggleAttribute("data-voiced", voiced);
    this.show();
  }

  /** Whether answers are to be heard. */
  get speaks() {
    return this.fields.output.value === "audio";
  }

  get handsFree() {
    return document.querySelector("input[name=mode]:checked").value === "free";
  }

  /** Whether speech interrupts an answer. */
  get bargeIn() {
    return this.handsFree && this.fields.interrupt.checked;
  }

  session() {
    const { fields, speaks } = this;
    const session = {
      type: "realtime",
      output_modalities: [fields.output.value],
      instructions: fields.instructions.value,
      max_output_tokens: fields.tokens.value ? Number(fields.tokens.value) : "inf",
      sampling: this.#sampling(),
      seed: fields.seed.value ? Number(fields.seed.value) : null,
      audio: {
        input: {
          format: FORMAT,
          transcription: { model: this.server.model.id },
          turn_detection: this.handsFree ? this.#detection() : null,
        },
        output: { format: FORMAT },
      },
    };
    if (speaks) session.audio.output.speed = Number(fields.speed.value);
    if (speaks && !fields.voice.disabled) session.audio.output.voice = fields.voice.value;
    return session;
  }

  /** This server's own field, as in /v1/chat/completions: by stage. */
  #sampling() {
    const said = [...this.form.querySelectorAll("#temperatures input")].filter(({ value }) => value !== "");
    return Object.fromEntries(said.map(({ dataset, value }) => [dataset.stage, { temperature: Number(value) }]));
  }

  #detection() {
    const { fields } = this;
    const detection = { type: fields.detection.value, create_response: true, interrupt_response: fields.interrupt.checked };
    if (detection.type === "semantic_vad") return { ...detection, eagerness: fields.eagerness.value };
    return {
      ...detection,
      threshold: Number(fields.threshold.value),
      silence_duration_ms: Number(fields.silence.value),
      prefix_padding_ms: Number(fields.padding.value),
    };
  }
}

function temperatureField(stage) {
  const label = document.createElement("label");
  const input = document.createElement("input");
  Object.assign(input, { type: "number", name: `temperature-${stage}`, min: 0, max: 2, step: 0.1, placeholder: "the server's", inputMode: "decimal" });
  input.dataset.stage = stage;
  label.append(`Temperature, ${stage}`, input);
  return label;
}
