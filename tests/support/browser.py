"""A real Chromium on a page of ours, with a microphone that plays a file; whatever it complains of fails the test."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Playwright, WebSocket

EXECUTABLES = ("chromium", "chromium-browser", "google-chrome")
NAME = "omni.test"  # a host's name, as DNS has them: an insecure page, unlike those of localhost
WAIT_MS = 180_000  # for anything that a server on a busy machine has to do

_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}`);
});
"""
# Whether it holds is looked at whenever something on the page changes: there is no poll, and nothing is evaluated inside the page's policy.
_UNTIL = """
async ([argument, limit]) => new Promise((resolve) => {
  const holds = %s;
  const end = setTimeout(() => done(false), limit);
  const watcher = new MutationObserver(look);
  function done(held) { watcher.disconnect(); clearTimeout(end); resolve(held); }
  function look() { if (holds(argument)) done(true); }
  watcher.observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
  look();
})
"""


def chromium() -> str:
    """The executable: `CHROMIUM`, or one of EXECUTABLES on the PATH. Without one the test fails, with what to do."""
    found = os.environ.get("CHROMIUM") or next((path for name in EXECUTABLES if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(
            f"no browser: install Chromium (`make setup-browser`), or set CHROMIUM to its path; looked for {', '.join(EXECUTABLES)}"
        )
    return found


@contextlib.contextmanager
def browser(playwright: Playwright, microphone: pathlib.Path | None = None, *, denies: bool = False) -> Iterator[Browser]:
    """Headless; it finds NAME at 127.0.0.1. `microphone`: a WAV file, heard once from the moment the microphone is opened; without one, beeps.
    `denies`: its user lets no page use the microphone."""
    permission = "--deny-permission-prompts" if denies else "--use-fake-ui-for-media-stream"
    arguments = ["--use-fake-device-for-media-stream", permission, f"--host-resolver-rules=MAP {NAME} 127.0.0.1"]
    if microphone is not None:
        arguments.append(f"--use-file-for-fake-audio-capture={microphone}%noloop")
    chrome = playwright.chromium.launch(executable_path=chromium(), args=arguments, timeout=WAIT_MS)
    try:
        yield chrome
    finally:
        chrome.close()


# Columns of a canvas, in its own pixels, that hold its line's colour, but for the lowest `base` rows. It is copied first: a canvas that
# is read again and again makes Chromium warn of it.
_INKED = """
([id, base]) => {
  const canvas = document.getElementById(id);
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.fillStyle = getComputedStyle(canvas).color;
  copy.fillRect(0, 0, 1, 1);
  const ink = copy.getImageData(0, 0, 1, 1).data;
  copy.clearRect(0, 0, 1, 1);
  copy.drawImage(canvas, 0, 0);
  const { data, width, height } = copy.getImageData(0, 0, canvas.width, canvas.height);
  const inked = (at) => data[at + 3] > 100 && [0, 1, 2].every((i) => Math.abs(data[at + i] - ink[i]) < 24);
  const rows = [...Array(Math.max(0, height - base)).keys()];
  return [...Array(width).keys()].filter((x) => rows.some((y) => inked((y * width + x) * 4))).length;
}
"""


class Visit:
    """One tab on one address, and all it complained of."""

    def __init__(self, page: Page, url: str, allowed: tuple[str, ...]) -> None:
        self.page = page
        self.url = url
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.sockets: list[str] = []
        self.sent: list[dict[str, Any]] = []  # events that the page sent
        self.received: list[dict[str, Any]] = []  # and those it was sent
        self._allowed = allowed
        page.set_default_timeout(WAIT_MS)
        page.add_init_script(_VIOLATIONS)
        page.on("console", lambda message: self._said(message.type, message.text))
        page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("websocket", self._connected)
        page.goto(url)

    def _said(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not any(part in text for part in self._allowed):
            self.complaints.append(f"console {kind}: {text}")

    def _connected(self, socket: WebSocket) -> None:
        self.sockets.append(socket.url)
        socket.on("framesent", lambda frame: self.sent.append(json.loads(frame)))
        socket.on("framereceived", lambda frame: self.received.append(json.loads(frame)))

    def until(self, holds: str, argument: Any = None, *, why: str = "") -> None:
        """Wait until the JavaScript function `holds(argument)` is true; at most WAIT_MS."""
        if not self.page.evaluate(_UNTIL % holds, [argument, WAIT_MS]):
            pytest.fail(f"the page never came to: {why or holds}\n{self.page.inner_text('body')}\n{self.complaints}")

    @property
    def counters(self) -> Mapping[str, int]:
        """samplesPlayed, samplesAudible (at 24 kHz, since the page was opened), samplesHeard (of this turn), truncatedMs."""
        found: dict[str, str] = self.page.evaluate("() => ({...document.querySelector('main').dataset})")
        return {name: int(value) for name, value in found.items()}

    def until_counter(self, name: str, least: int) -> None:
        self.until(
            "([name, least]) => Number(document.querySelector('main').dataset[name]) >= least",
            [name, least],
            why=f"{name} ≥ {least}",
        )

    def until_state(self, *states: str) -> None:
        self.until(
            "(states) => states.includes(document.querySelector('#state').dataset.state)", list(states), why=f"state {states}"
        )

    def inked(self, canvas: str, base: int = 0) -> int:
        """How many columns of the canvas of this id hold its line's colour above its lowest `base` rows."""
        return int(self.page.evaluate(_INKED, [canvas, base]))

    def until_inked(self, canvas: str, more_than: int, base: int = 0) -> None:
        """It is drawn by a timer, and every drawing sets its width, which `until` notices."""
        holds = f"([id, base, least]) => ({_INKED})([id, base]) > least"
        self.until(holds, [canvas, base, more_than], why=f"more than {more_than} columns of {canvas} drawn")

    def turns(self, role: str) -> list[str]:
        """What each turn of "user" or "assistant" says."""
        return self.page.locator(f".turn.{role} .said").all_inner_texts()

    def until_turn(self, role: str, text: str) -> None:
        """A turn of that side is complete and has `text` in it, whatever its case."""
        self.until(
            """([role, text]) => [...document.querySelectorAll(`.turn.${role}[data-state=done] .said`)]
                .some((said) => said.textContent.toLowerCase().includes(text.toLowerCase()))""",
            [role, text],
            why=f"a turn of {role} with {text!r}",
        )

    def assert_nothing_amiss(self) -> None:
        """No complaint, no violation of the page's policy, and not one request to another origin."""
        violations = self.page.evaluate("() => window.violations")
        assert violations == [], violations
        assert self.complaints == [], self.complaints
        own = urllib.parse.urlsplit(self.url).netloc
        for url in [*self.requests, *self.sockets]:
            parts = urllib.parse.urlsplit(url)
            assert parts.netloc == own or (parts.scheme == "blob" and own in parts.path), url


@contextlib.contextmanager
def visit(chrome: Browser, url: str, *, allowed: tuple[str, ...] = (), **context: Any) -> Iterator[Visit]:
    """A tab of its own, without memory of others. `allowed`: what its console may complain of. `context`: viewport, color_scheme, …"""
    opened = chrome.new_context(**context)
    try:
        seen = Visit(opened.new_page(), url, allowed)
        yield seen
        seen.assert_nothing_amiss()
    finally:
        opened.close()
