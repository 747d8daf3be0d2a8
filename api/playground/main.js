// The page: joins what the user touches to the conversation, and shows how things stand.

import { Microphone } from "./audio_in.js";
import { Player } from "./audio_out.js";
import { Dialogue } from "./dialogue.js";
import { readPicture } from "./picture.js";
import { Pipeline } from "./pipeline.js";
import { Server } from "./server.js";
import { ServerPanel } from "./server_panel.js";
import { Settings } from "./settings.js";
import { StatusFeed } from "./status_feed.js";
import { animate, Strip } from "./strip_chart.js";
import { TalkButton } from "./talk_button.js";
import { Timing } from "./timing.js";
import { Transcript } from "./transcript.js";

const at = (id) => document.getElementById(id);
const page = document.querySelector("main"); // its data attributes are counters, for whoever watches the page from outside

const server = new Server();
const transcript = new Transcript(at("transcript"), at("announcer"), at("empty"));
const settings = new Settings(at("settings"), server, changed);

const strips = {
  ttfp: new Strip(at("ttfp-chart"), at("ttfp"), { name: "Time to first packet", unit: " s", form: "dots" }),
  rtf: new Strip(at("rtf-chart"), at("rtf"), { name: "Real-time factor", unit: "", form: "dots", guide: 1 }),
  lead: new Strip(at("lead-chart"), at("lead"), { name: "Playback lead", unit: " s", form: "area", digits: 1 }),
};
const timing = new Timing((name, figure) => strips[name].add(figure));

const player = new Player(({ played, audible, queued }) => {
  page.dataset.samplesPlayed = played;
  page.dataset.samplesAudible = audible;
  timing.lead(queued);
  show();
});
const microphone = new Microphone(
  (samples) => {
    dialogue.heard(samples);
    page.dataset.samplesHeard = dialogue.sent;
  },
  (level) => at("level").style.setProperty("--level", level.toFixed(3)),
);
const dialogue = new Dialogue({
  server,
  player,
  microphone,
  transcript,
  timing,
  settings,
  onChange: show,
  onError: alertUser,
  onTruncated: (ms) => (page.dataset.truncatedMs = ms),
});
const pipeline = new Pipeline({ list: at("stages"), drawing: document.querySelector("#pipeline svg") });
const serverPanel = new ServerPanel({ figures: at("server-figures"), rows: at("replicas") });
const feed = new StatusFeed(server, {
  show: (status) => {
    write("pipeline-note", "");
    pipeline.show(status);
    serverPanel.show(status);
  },
  fail: (error) => write("pipeline-note", error.message),
});

// ---- how things stand

function show() {
  const { answering, connected, connecting, talking } = dialogue;
  const [state, words] = connecting
    ? ["connecting", "Connecting"]
    : player.playing
      ? ["speaking", "Speaking"]
      : answering
        ? ["answering", "Thinking"]
        : talking
          ? ["listening", "Listening"]
          : connected
            ? ["ready", "Connected"]
            : ["idle", "Not connected"];
  const shown = at("state");
  if (shown.dataset.state !== state) {
    shown.dataset.state = state;
    shown.textContent = words;
  }
  at("stop").disabled = !answering && !player.playing;
  const free = settings.handsFree;
  write("speak-text", talking ? (free ? "Listening: press to pause" : "Let go to send") : free ? "Start listening" : "Hold to talk");
  write("how", instruction(free));
  if (at("speak").dataset.on !== String(talking)) at("speak").dataset.on = talking;
  settings.voiced = dialogue.voiced;
}

function write(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}

function instruction(free) {
  if (at("speak").disabled) return "This model does not hear. Write below, and it answers.";
  return free
    ? "Press the button once, then just talk. Speak up at any time to interrupt."
    : "Hold the button, or the space bar, and speak. Let go, and the model answers aloud.";
}

/** Servers begin small and end without a stop. */
function alertUser(words) {
  at("alert").querySelector("p").textContent = words[0].toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? "" : ".");
  at("alert").hidden = false;
}

function dismiss() {
  at("alert").hidden = true;
}

/** Runs what a user asked for; what goes wrong is told in words. */
async function attempt(action) {
  dismiss();
  try {
    return await action();
  } catch (error) {
    alertUser(error.message);
    if (error.status === 401) askForKey();
    show();
    return undefined;
  }
}

function askForKey() {
  at("settings-panel").open = true;
  settings.fields.key.focus();
}

// ---- what the user does

const talkButton = new TalkButton(at("speak"), {
  onBegin: async () => {
    if ((await attempt(() => dialogue.talk(() => talkButton.on))) === undefined) talkButton.off();
  },
  onEnd: () => attempt(() => dialogue.endTalk()),
});

for (const mode of document.querySelectorAll("input[name=mode]")) {
  mode.addEventListener("change", () => {
    talkButton.off();
    talkButton.toggles = settings.handsFree;
    dialogue.update();
    show();
  });
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden && !talkButton.on) microphone.close(); // no page listens from behind, or seems to
});

at("stop").addEventListener("click", () => attempt(() => dialogue.interrupt()));
document.addEventListener("keydown", ({ key }) => {
  if (key === "Escape" && !at("stop").disabled) attempt(() => dialogue.interrupt());
});
at("alert").querySelector("button").addEventListener("click", dismiss);
at("reset").addEventListener("click", () => {
  talkButton.off();
  microphone.close();
  attempt(() => dialogue.reset());
});

let picture = null;

function choose(chosen) {
  picture = chosen;
  at("chosen").hidden = chosen === null;
  if (chosen) {
    at("chosen").querySelector("img").src = chosen.preview;
    at("chosen").querySelector("span").textContent = chosen.name;
  }
  at("picture").value = "";
}

async function take(file) {
  if (file && !at("picture").disabled) await attempt(async () => choose(await readPicture(file)));
}

at("picture").addEventListener("change", ({ target }) => take(target.files[0]));
at("text").addEventListener("paste", ({ clipboardData }) => take([...clipboardData.files].find(({ type }) => type.startsWith("image/"))));
at("chosen").querySelector("button").addEventListener("click", () => choose(null));

at("write").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  const shown = picture;
  if (!text && !shown) return;
  attempt(async () => {
    await dialogue.write(text, shown);
    at("text").value = "";
    choose(null);
  });
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("write").requestSubmit();
  }
});

function changed(name) {
  if (name === "key") {
    dialogue.realtime.close();
    attempt(() => {
      server.setKey(settings.fields.key.value.trim());
      return load();
    });
  } else {
    dialogue.update();
  }
}

// ---- the server's side

async function load() {
  const model = await server.loadModel();
  at("model").textContent = model.id;
  settings.offer(model);
  const sees = model.input_modalities.includes("image");
  at("picture").disabled = !sees;
  at("attach").hidden = !sees;
  at("speak").disabled = !model.input_modalities.includes("audio");
  show();
  feed.start();
}

settings.show();
animate(Object.values(strips));
attempt(load);
