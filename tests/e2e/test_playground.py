"""The page at /, in a real browser on real servers: a spoken turn, interruptions, keys, and what keyboard and screen readers need."""

from __future__ import annotations

import base64
import contextlib
import io
import pathlib
import re
import time
import urllib.request
import wave
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Playwright, sync_playwright

from tests.support.browser import NAME, Visit, browser, visit
from tests.support.cascade import skip_without_packages
from tests.support.running_server import Server, eventually, running

STORY = "Please tell me a long story about a cat who travels around the world."
WIDTHS = {"desktop": (1280, 800), "phone": (390, 844), "narrow": (320, 640)}
STRIPS = {  # name → what it tells, and how its newest figure reads
    "ttfp": ("Time to first packet", r"\d+\.\d\d s"),
    "rtf": ("Real-time factor", r"\d+\.\d\d"),
    "lead": ("Playback lead", r"\d+\.\d s"),
}
AUDIBLE = 6_000  # samples: a quarter of a second of sound


@pytest.fixture(scope="module")
def quickstart(shared_server: Callable[..., Server]) -> Server:
    skip_without_packages()
    return shared_server("quickstart.toml", sets=["stages.asr.threads=1"], ready_s=240)


@pytest.fixture(scope="module")
def probe(shared_server: Callable[..., Server]) -> Server:
    return shared_server("probe.toml")


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    """One for all browsers of this file, and no longer: no asyncio loop can run beside it."""
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="module")
def chrome(playwright: Playwright) -> Iterator[Browser]:
    with browser(playwright) as opened:
        yield opened


def microphone(path: pathlib.Path, before_s: float, after_s: float) -> float:
    """A WAV file with silence around the question; returns the seconds up to the question's end."""
    from bench.spoken import QUESTION, spoken, wav

    with wave.open(io.BytesIO(spoken(QUESTION))) as file:
        rate, pcm = file.getframerate(), file.readframes(file.getnframes())

    def silence(seconds: float) -> bytes:
        return bytes(2 * int(seconds * rate))

    path.write_bytes(wav(silence(before_s) + pcm + silence(after_s), rate))
    return before_s + len(pcm) / 2 / rate


def metrics(server: Server) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        return str(answer.read(), "utf-8")


def write(seen: Visit, text: str) -> None:
    seen.page.fill("#text", text)
    seen.page.press("#text", "Enter")


# ---- talking


def test_a_held_button_makes_a_spoken_turn(quickstart: Server, playwright: Playwright, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "question.wav"
    end_s = microphone(file, 3.0, 30.0)  # the file begins to play when the microphone opens, a moment before its gate does
    width, height = WIDTHS["desktop"]
    with (
        browser(playwright, file) as chrome,
        visit(chrome, quickstart.url, viewport={"width": width, "height": height}) as seen,
    ):
        assert [seen.inked(f"{name}-chart") for name in STRIPS] == [0, 0, 0], "nothing but lines and a scale"
        seen.page.hover("#speak")
        seen.page.mouse.down()
        seen.until_counter("samplesHeard", int((end_s + 0.3) * 24_000))
        assert seen.page.inner_text("#state") == "Listening"
        began = time.monotonic()
        seen.page.mouse.up()
        seen.until_turn("user", "capital of France")
        seen.until_turn("assistant", "Paris")
        seen.until_counter("samplesAudible", AUDIBLE)
        seen.until_state("ready")
        drawn = strips_of_a_turn(seen, time.monotonic() - began, dict.fromkeys(STRIPS, 0))
        seen.page.screenshot(path=tmp_path / "desktop.png")

        audible, began = seen.counters["samplesAudible"], time.monotonic()
        write(seen, "What is the capital of France?")
        seen.until_counter("samplesAudible", audible + AUDIBLE)
        seen.until("() => document.querySelectorAll('.turn.assistant[data-state=done]').length === 2")
        seen.until_state("ready")
        strips_of_a_turn(seen, time.monotonic() - began, drawn)
    assert (tmp_path / "desktop.png").stat().st_size > 10_000


def strips_of_a_turn(seen: Visit, took_s: float, before: dict[str, int]) -> dict[str, int]:
    """The strips show a turn's figures, as text and to a screen reader, and are drawn in more columns than `before`, which is returned anew."""
    found = {}
    for name, (title, text) in STRIPS.items():
        base = 8 if name == "lead" else 0  # along which its line goes on when nothing is played
        seen.until_inked(f"{name}-chart", before[name], base)
        found[name] = seen.inked(f"{name}-chart", base)
        figure = seen.page.inner_text(f"#{name}")
        assert re.fullmatch(text, figure), (name, figure)
        assert seen.page.get_attribute(f"#{name}-chart", "aria-label") == f"{title} over the last three minutes, now {figure}"
    ttfp, rtf = (float(seen.page.inner_text(f"#{name}").split()[0]) for name in ("ttfp", "rtf"))
    assert 0 < ttfp < took_s and rtf > 0
    return found


def test_stop_silences_the_answer_and_shows_what_was_heard(quickstart: Server, chrome: Browser, tmp_path: pathlib.Path) -> None:
    width, height = WIDTHS["phone"]
    with visit(chrome, quickstart.url, viewport={"width": width, "height": height}, has_touch=True) as seen:
        write(seen, STORY)
        seen.until_turn("user", STORY)
        seen.until_counter("samplesAudible", 3 * AUDIBLE)
        seen.until_state("speaking")  # a synthesiser that is slower than its listener makes pauses
        seen.page.click("#stop")
        seen.until_counter("truncatedMs", 1)
        seen.until("() => document.querySelector('.turn.assistant .unsaid') !== null", why="the words that were not spoken")
        seen.until_state("ready")
        counted = seen.counters
        assert counted["truncatedMs"] == counted["samplesPlayed"] * 1000 // 24_000, (
            "the one answer was cut where it was silenced"
        )
        assert seen.page.is_disabled("#stop")
        seen.page.screenshot(path=tmp_path / "phone.png")

        write(seen, "What is the capital of France?")  # the conversation goes on
        seen.until_turn("assistant", "Paris")
        seen.until_counter("samplesAudible", counted["samplesAudible"] + AUDIBLE)
    assert (tmp_path / "phone.png").stat().st_size > 10_000


def test_speaking_hands_free_interrupts_the_answer(quickstart: Server, playwright: Playwright, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "question.wav"
    microphone(file, 3.0, 60.0)
    with browser(playwright, file) as chrome, visit(chrome, quickstart.url) as seen:
        write(seen, STORY)
        seen.until_counter("samplesAudible", AUDIBLE)
        seen.page.check("input[name=mode][value=free]")
        seen.page.click("#speak")
        seen.until_counter("truncatedMs", 1)
        seen.until("() => document.querySelector('.turn.assistant .who').textContent.includes('interrupted')")
        cut = seen.counters
        assert cut["truncatedMs"] <= cut["samplesPlayed"] * 1000 // 24_000
        seen.until_turn("user", "capital of France")
        seen.until_turn("assistant", "Paris")
        seen.until_counter("samplesAudible", cut["samplesAudible"] + AUDIBLE)
        seen.page.click("#speak")
        seen.until("() => document.querySelector('#speak-text').textContent === 'Start listening'")


def test_new_conversation_forgets(probe: Server, chrome: Browser) -> None:
    with visit(chrome, probe.url) as seen:
        write(seen, "one two three")
        seen.until_turn("assistant", "three")
        seen.page.click("#reset")
        seen.until_state("idle")
        assert seen.turns("user") == seen.turns("assistant") == []
        write(seen, "four five")
        seen.until_turn("assistant", "five")
        assert len(seen.sockets) == 2


def test_a_picture_is_shown_sent_and_answered(chrome: Browser, omni_checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    from PIL import Image

    Image.new("RGBA", (3_000, 1_500), (200, 30, 30, 128)).save(tmp_path / "red.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    sets = [f"model.path={omni_checkpoint}", "stages.thinker.sampling.max_tokens=8", "stages.talker.sampling.max_tokens=16"]
    with running("qwen3_omni_tiny.toml", sets=sets) as server, visit(chrome, server.url) as seen:
        seen.until("() => !document.querySelector('#attach').hidden", why="this model sees")
        seen.page.set_input_files("#picture", tmp_path / "broken.png")
        seen.until("() => document.querySelector('#alert p').textContent.startsWith('This file is no picture')")
        seen.page.set_input_files("#picture", tmp_path / "red.png")
        seen.until("() => document.querySelector('#chosen span').textContent === 'red.png'")
        assert seen.page.is_hidden("#alert")
        _, voice = seen.page.locator("[name=voice] option").all_inner_texts()[:2]  # the first one is what it would be anyway
        seen.page.select_option("[name=voice]", voice)
        write(seen, "What colour is this?")
        seen.until_turn("user", "What colour")
        assert seen.page.get_attribute(".turn.user img", "alt") == "Picture: red.png"
        seen.until("() => document.querySelector('.turn.assistant[data-state=done]') !== null", why="an answer")
        seen.until_state("ready")
        assert seen.page.is_hidden("#alert") and seen.page.is_hidden("#chosen")
        assert seen.page.inner_text(".turn.assistant .who") == "Answer, cut short at the token limit"
    (item,) = [event["item"] for event in seen.sent if event["type"] == "conversation.item.create"]
    (session,) = sessions_of_answers(seen)
    (answer,) = [event["response"] for event in seen.received if event["type"] == "response.created"]
    assert session["audio"]["output"]["voice"] == answer["audio"]["output"]["voice"] == voice
    image, text = item["content"]
    assert text == {"type": "input_text", "text": "What colour is this?"}
    header, _, data = image["image_url"].partition(",")
    with Image.open(io.BytesIO(base64.b64decode(data))) as sent:
        assert header == "data:image/jpeg;base64" and sent.size == (1_024, 512), "made small"


def test_stop_works_before_the_server_has_begun_to_answer(probe: Server, chrome: Browser) -> None:
    with visit(chrome, probe.url) as seen:
        write(seen, "one")
        seen.until_turn("assistant", "one")
        seen.until_state("ready")
        words = " ".join(f"word{number}" for number in range(2_000))
        # In one task of the page: nothing of the server's can come in between.
        seen.page.evaluate(
            """(words) => {
                document.querySelector("#text").value = words;
                document.querySelector("#write").requestSubmit();
                const stop = document.querySelector("#stop");
                new MutationObserver((_, watcher) => {
                    if (stop.disabled) return;
                    watcher.disconnect();
                    stop.click();
                    stop.dataset.clicked = "";
                }).observe(stop, { attributes: true });
            }""",
            words,
        )
        seen.until("() => document.querySelector('#stop:disabled')?.dataset.clicked === ''")
        write(seen, "two three")
        seen.until_turn("assistant", "two three")
        assert seen.turns("assistant")[-1].strip() == "two three" and not any(
            "word1999" in turn for turn in seen.turns("assistant")
        )
        assert seen.page.is_hidden("#alert")


def sessions_of_answers(seen: Visit) -> list[dict[str, Any]]:
    """The session that the page had last asked for, at each answer it asked for."""
    session, found = {}, []
    for event in seen.sent:
        if event["type"] == "session.update":
            session = event["session"]
        elif event["type"] == "response.create":
            assert "response" not in event, "an answer is asked for as the session says"
            found.append(session)
    return found


def test_settings_are_told_to_the_session(probe: Server, chrome: Browser) -> None:
    with visit(chrome, probe.url) as seen:
        seen.until("() => document.querySelector('[name=temperature-source]') !== null", why="the stages that generate")
        asked = {"[name=temperature-source]": "0.5", "[name=seed]": "7", "[name=tokens]": "64", "[name=speed]": "1.25"}
        for field, value in {**asked, "[name=instructions]": "Be brief."}.items():
            seen.page.fill(field, value)
        write(seen, "one two")
        seen.until_turn("assistant", "two")
        seen.until_counter("samplesPlayed", 1)
        seen.until_state("ready")
        seen.page.select_option("[name=output]", "text")
        write(seen, "three four")
        seen.until_turn("assistant", "four")
        seen.until_state("ready")
        spoken, written = sessions_of_answers(seen)
        first, second = [event["response"] for event in seen.received if event["type"] == "response.created"]
        speaking = {event["response_id"] for event in seen.received if event["type"] == "response.output_audio.delta"}
        shown = [event["session"] for event in seen.received if event["type"] == "session.updated"][-1]
    for session in (spoken, written):
        assert session["sampling"] == {"source": {"temperature": 0.5}}
        assert (session["seed"], session["max_output_tokens"], session["instructions"]) == (7, 64, "Be brief.")
    assert (spoken["output_modalities"], written["output_modalities"]) == (["audio"], ["text"])
    assert (spoken["audio"]["output"]["voice"], spoken["audio"]["output"]["speed"]) == ("tone", 1.25)
    assert written["audio"]["output"].keys() == {"format"}, "nothing of a voice that is not heard"
    assert speaking == {first["id"]} and second["output_modalities"] == ["text"]
    assert (shown["seed"], shown["sampling"], shown["audio"]["output"]["speed"]) == (7, written["sampling"], 1.25)


# ---- how the server stands


def test_the_pipeline_is_drawn_with_its_queues_and_replicas(probe: Server, chrome: Browser) -> None:
    with visit(chrome, probe.url) as seen:
        seen.until("() => document.querySelectorAll('.stage').length === 3")
        names = seen.page.locator(".stage b").all_inner_texts()
        assert names == ["source", "relay", "sink"]
        seen.until("() => document.querySelector('.stage .load').textContent === '0 waiting · 0 running'")
        assert seen.page.locator(".replicas li").first.inner_text() == "source.0 · cpu · ready"
        assert seen.page.locator("path.edge").count() == 5
        write(seen, "one two three")
        seen.until("() => document.querySelector('path.flowing') !== null", why="an edge that is lit while chunks flow")


def test_a_hidden_page_asks_nothing(probe: Server, chrome: Browser) -> None:
    """Hiding is played: a headless browser shows every page."""
    with visit(chrome, probe.url) as seen:
        seen.until("() => document.querySelectorAll('.stage').length === 3")
        hide = "(hidden) => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true }); \
            document.dispatchEvent(new Event('visibilitychange')); }"
        seen.page.evaluate(hide, True)
        seen.page.wait_for_timeout(200)  # an answer may still have been on its way
        asked = len(seen.requests)
        seen.page.wait_for_timeout(2_500)
        assert len(seen.requests) == asked
        eventually(lambda: "omni_bus_status_watchers 0.0" in metrics(probe), 60, "nobody follows the status")
        with seen.page.expect_request("**/v1/status/watch?*"):
            seen.page.evaluate(hide, False)
        follows = seen.page.text_content("#server-figures dd")
        seen.until("(was) => document.querySelector('#server-figures dd').textContent !== was", follows, why="it follows again")


def test_the_server_panel_opens_and_follows_the_server(probe: Server, chrome: Browser) -> None:
    ended = "() => document.querySelectorAll('#server-figures dd')[3].textContent"
    with visit(chrome, probe.url) as seen:
        page = seen.page
        seen.until("() => document.querySelectorAll('#replicas tr').length === 3")
        assert page.is_hidden("#server-figures")
        page.focus("#server-panel summary")
        page.keyboard.press("Enter")
        assert page.is_visible("#server-figures") and page.is_visible("#replicas")
        rows = page.locator("#replicas th").all_inner_texts()
        assert [row.split("\n")[0] for row in rows] == ["source.0", "relay.0", "sink.0"]
        assert all(row.split("\n")[1].startswith("ready · cpu · ") for row in rows)
        assert page.inner_text("#server-figures dd >> nth=0").startswith("ready, up ")
        before = page.evaluate(ended)
        write(seen, "one two three")
        seen.until_turn("assistant", "three")
        seen.until(
            "(was) => document.querySelectorAll('#server-figures dd')[3].textContent !== was", before, why="one more has ended"
        )
        seen.until("() => / ms$/.test(document.querySelectorAll('#server-figures dd')[4].textContent)", why="a TTFP")
        page.focus("#server-panel summary")
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.getAttribute('aria-label')") == "Replicas"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that asks for a key; every test leaves it as it was."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("sk/odd=one\nsk-page\n")
    with running("probe.toml", sets=[f"api.api_keys_file={keys}"]) as server:
        yield server


def test_a_key_is_asked_for_and_opens_the_page(keyed: Server, chrome: Browser) -> None:
    with visit(chrome, keyed.url, allowed=("401",)) as seen:
        field = seen.page.locator("[name=key]")
        seen.until("() => document.activeElement.name === 'key'", why="the key's field has the focus")
        assert seen.page.inner_text("#alert p") == "This server asks for an API key."
        field.fill("sk-wrong")
        field.press("Tab")
        seen.until("() => document.querySelector('#alert p').textContent.includes('does not know this API key')")
        field.fill("sk-page")
        field.press("Tab")
        seen.until("() => document.querySelector('#model').textContent === 'probe'")
        assert seen.page.is_hidden("#alert")
        write(seen, "one two")
        seen.until_turn("assistant", "two")
        seen.page.reload()
        seen.until("() => document.activeElement.name === 'key'", why="the key is asked for again: it was kept nowhere")


def test_a_key_that_a_browser_cannot_send_is_told_and_another_one_taken(keyed: Server, chrome: Browser) -> None:
    with visit(chrome, keyed.url, allowed=("401",)) as seen:
        for key in ("sk/odd=one", "sk-page"):
            seen.page.fill("[name=key]", key)
            seen.page.press("[name=key]", "Tab")
            seen.until("() => document.querySelectorAll('.stage').length === 3")
            write(seen, "one two")
            if key == "sk-page":
                seen.until_turn("assistant", "two")
            else:
                seen.until(
                    "() => document.querySelector('#alert p').textContent.includes('characters that a browser cannot send')"
                )
        seen.page.fill("[name=key]", "sk-pagé")
        seen.page.press("[name=key]", "Tab")
        seen.until("() => document.querySelector('#alert p').textContent.includes('check what you have pasted')")


def test_a_replica_that_dies_and_a_server_that_goes_away_are_told(serve: Callable[..., Server], chrome: Browser) -> None:
    server = serve("probe.toml")
    phone = {"width": WIDTHS["phone"][0], "height": WIDTHS["phone"][1]}
    last = "([state, again]) => { const row = document.querySelectorAll('#replicas tr')[2]; \
        return row?.querySelector('span').className === state && row.lastChild.textContent === again; }"
    allowed = ("ERR_CONNECTION_REFUSED", "WebSocket connection")
    with visit(chrome, server.url, allowed=allowed, viewport=phone) as seen:
        seen.page.click("#server-panel summary")
        seen.until(last, ["ready", "0"])
        server.processes()["sink.0"].kill()
        seen.until(last, ["ready", "1"], why="it was started again, and the page has followed")
        assert seen.page.evaluate("() => document.documentElement.scrollWidth") == phone["width"]
        write(seen, "one two")
        seen.until_turn("assistant", "two")
        server.stop()
        seen.until("() => document.querySelector('#alert p').textContent.length > 0")
        assert seen.page.inner_text("#alert p") == "The server is restarting; connect again."
        seen.until(
            "() => document.querySelector('#pipeline-note').textContent === 'The server does not answer. Is it running?'"
        )
        write(seen, "three")
        seen.until("() => document.querySelector('#alert p').textContent === 'The server does not answer. Is it running?'")
        assert seen.page.input_value("#text") == "three", "what was not sent is not lost"


def test_an_insecure_page_says_so_and_still_writes(keyed: Server, chrome: Browser) -> None:
    with visit(chrome, f"http://{NAME}:{keyed.port}", allowed=("401",)) as seen:
        seen.page.fill("[name=key]", "sk-page")
        seen.page.press("[name=key]", "Tab")
        seen.until("() => document.querySelectorAll('.stage').length === 3")
        write(seen, "one two")
        seen.until("() => document.querySelector('#alert p').textContent.includes('secure page')")
        assert seen.page.input_value("#text") == "one two"
        seen.page.select_option("[name=output]", "text")
        write(seen, "one two")
        seen.until_turn("assistant", "two")
        assert seen.page.is_hidden("#alert")


def test_a_name_that_the_server_does_not_know_is_told(probe: Server, chrome: Browser) -> None:
    """Any site's owner may let a name of theirs point here: without keys, such a page must not talk."""
    address = f"http://{NAME}:{probe.port}"
    with visit(chrome, address, allowed=("WebSocket connection", "400")) as seen:
        seen.until("() => document.querySelectorAll('.stage').length === 3")
        seen.page.select_option("[name=output]", "text")
        write(seen, "one two")
        seen.until(
            "(address) => document.querySelector('#alert p').textContent.includes(`list ${address} in api.cors_origins`)",
            address,
        )
        seen.until_state("idle")


def test_a_server_that_is_full_says_so_and_takes_the_next(serve: Callable[..., Server], chrome: Browser) -> None:
    server = serve("probe.toml", sets=["api.max_sessions=1"])
    with visit(chrome, server.url, allowed=("WebSocket connection", "503")) as second:
        with visit(chrome, server.url) as first:
            write(first, "one two")
            first.until_turn("assistant", "two")
            second.until("() => document.querySelectorAll('.stage').length === 3")
            second.page.select_option("[name=output]", "text")
            write(second, "three")
            second.until("() => document.querySelector('#alert p').textContent.includes('as many sessions as it takes')")
        eventually(lambda: "omni_bus_voice_sessions 0.0" in metrics(server), 30, "the first page has gone")
        second.page.press("#text", "Enter")
        second.until_turn("assistant", "three")


def test_a_microphone_that_is_denied_is_told(quickstart: Server, playwright: Playwright) -> None:
    with browser(playwright, denies=True) as chrome, visit(chrome, quickstart.url) as seen:
        seen.until("() => document.querySelector('#model').textContent === 'cascade'")
        seen.page.hover("#speak")
        seen.page.mouse.down()
        seen.until("() => document.querySelector('#alert p').textContent.includes('Allow it in the address bar')")
        seen.page.mouse.up()
        assert seen.page.inner_text("#speak-text") == "Hold to talk"


# ---- for every user

# Visible controls that the tab key must reach: of a group of radio buttons only the chosen one.
CONTROLS = """
() => [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")]
  .filter((element) => !element.disabled && element.checkVisibility({ visibilityProperty: true }) && !(element.type === "radio" && !element.checked))
  .map((element) => (element.dataset.probe ??= element.id || element.name || element.textContent.trim() || element.className))
"""
# Text below the contrast that WCAG AA asks for: 4.5. Disabled controls are exempt there.
FAINT = """
() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const colour = parse(getComputedStyle(element).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const seen = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (seen.has(element) || !walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    seen.add(element);
    if (element.closest(":disabled, label:has(:disabled), noscript, option")) continue;
    const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(ground(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push(`${element.textContent.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return [found, seen.size];
}
"""


def accessible(page: Page) -> list[dict[str, Any]]:
    """Chromium's own accessibility tree: role and computed name of everything that can have the focus."""
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    found = []
    for node in nodes:
        focusable = any(entry["name"] == "focusable" and entry["value"].get("value") for entry in node.get("properties", ()))
        if focusable and not node.get("ignored"):
            found.append({"role": node["role"]["value"], "name": node.get("name", {}).get("value", "")})
    return found


@pytest.fixture
def talked(probe: Server, chrome: Browser) -> Iterator[Callable[..., Visit]]:
    """talked(viewport=…, color_scheme=…) → a page on which a turn has been made and a message is shown."""
    with contextlib.ExitStack() as stack:

        def open_page(**context: Any) -> Visit:
            seen = stack.enter_context(visit(chrome, probe.url, **context))
            write(seen, "one two three")
            seen.until_turn("assistant", "three")
            seen.until_state("ready")
            seen.until("() => document.querySelectorAll('.stage').length === 3")
            seen.page.click("#server-panel summary")
            return seen

        yield open_page


def test_every_control_has_a_name(talked: Callable[..., Visit]) -> None:
    controls = accessible(talked().page)
    assert [control for control in controls if not control["name"] and control["role"] != "RootWebArea"] == []
    assert {"button", "textbox", "radio", "combobox", "slider", "checkbox", "spinbutton"} <= {one["role"] for one in controls}


def test_the_tab_key_reaches_every_control_in_the_order_they_are_read(talked: Callable[..., Visit]) -> None:
    page = talked().page
    controls = page.evaluate(CONTROLS)
    assert len(controls) > 20
    page.evaluate("() => { document.activeElement.blur(); document.body.tabIndex = -1; document.body.focus(); }")
    reached = []
    for _ in controls:
        page.keyboard.press("Tab")
        reached.append(page.evaluate("() => document.activeElement.dataset.probe"))
    assert reached == controls


def test_the_space_bar_and_escape_work_without_a_pointer(quickstart: Server, chrome: Browser) -> None:
    with visit(chrome, quickstart.url) as seen:
        page = seen.page
        seen.until("() => document.querySelector('#model').textContent === 'cascade'")
        page.evaluate("() => document.activeElement.blur()")
        page.keyboard.down(" ")
        seen.until_counter("samplesHeard", 24_000)
        page.keyboard.up(" ")
        seen.until("() => document.querySelectorAll('.turn.user').length === 1", why="the beeps are a turn")
        page.focus("#speak")
        page.keyboard.press("Enter")  # a tap begins, the next one ends
        seen.until_state("listening")
        seen.until("() => Number(document.querySelector('main').dataset.samplesHeard) < 24000")
        seen.until_counter("samplesHeard", 24_000)
        page.keyboard.press("Enter")
        seen.until("() => document.querySelectorAll('.turn.user').length === 2")
        write(seen, STORY)
        seen.until_state("speaking")
        page.keyboard.press("Escape")
        seen.until_state("ready")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out_from_its_ground(talked: Callable[..., Visit], scheme: str) -> None:
    page = talked(color_scheme=scheme).page
    page.evaluate(
        "() => { document.querySelector('#alert p').textContent = 'A message'; document.querySelector('#alert').hidden = false; }"
    )
    faint, looked_at = page.evaluate(FAINT)
    assert faint == [] and looked_at > 25


@pytest.mark.parametrize("name", WIDTHS)
def test_nothing_sticks_out_at_any_width(talked: Callable[..., Visit], name: str) -> None:
    width, height = WIDTHS[name]
    page = talked(viewport={"width": width, "height": height}).page
    assert page.evaluate("() => document.documentElement.scrollWidth") == width
    outside = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, canvas, .stage, .said")]
            .filter((element) => element.checkVisibility() && !element.closest(".hidden") && !element.matches(".hidden"))
            .filter((element) => { const box = element.getBoundingClientRect(); return box.left < 0 || box.right > innerWidth; })
            .map((element) => element.id || element.className)"""
    )
    assert outside == []


def test_less_motion_is_no_motion(talked: Callable[..., Visit]) -> None:
    page = talked(reduced_motion="reduce").page
    assert page.evaluate("() => document.getAnimations().length") == 0


def test_turns_are_read_out_once_they_are_whole(talked: Callable[..., Visit]) -> None:
    page = talked().page
    region = page.locator("[aria-live=polite]")
    assert region.inner_text().strip() == "Answer: one two three"
    assert page.get_attribute("#alert", "role") == "alert" and page.get_attribute("#state", "role") == "status"
