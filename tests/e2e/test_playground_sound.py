"""The page's two audio worklets in a real browser: what the microphone's makes of samples, and how exactly the loudspeaker's counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
from playwright.sync_api import Page, sync_playwright

from tests.support.browser import browser, visit
from tests.support.running_server import Server

RATE = 24_000

# A tone through the capture worklet, as fast as it computes; all that came out of it. The context begins to render only once the gate is open.
CAPTURE = """
async ([rate, tone, seconds]) => {
  const context = new OfflineAudioContext(1, rate * seconds, rate);
  await context.audioWorklet.addModule(new URL("playground/capture_worklet.js", document.baseURI));
  const node = new AudioWorkletNode(context, "capture", { channelCount: 1, channelCountMode: "explicit" });
  const blocks = [];
  let closed;
  const whole = new Promise((resolve) => (closed = resolve));
  node.port.onmessage = ({ data }) => (data.closed ? closed() : blocks.push([...data.samples]));
  const source = new OscillatorNode(context, { frequency: tone });
  source.connect(node).connect(context.destination);
  source.start();
  node.port.postMessage({ open: true });
  await new Promise((resolve) => {
    // The worklet has read its mail by the time it answers to some more of it.
    const probe = new AudioWorkletNode(context, "capture");
    probe.port.onmessage = resolve;
    probe.port.postMessage({ open: false });
  });
  await context.startRendering();
  node.port.postMessage({ open: false });
  await whole;
  return blocks;
}
"""

# Two items through the page's own player, silenced when the second has begun.
PLAY = """
async ([first, second]) => {
  const { Player } = await import(new URL("playground/audio_out.js", document.baseURI));
  let state = null;
  let begun;
  const second_began = new Promise((resolve) => (begun = resolve));
  const player = new Player((now) => {
    state = now;
    if (now.played > first) begun();
  });
  await player.start();
  const tone = (count) => Float32Array.from({ length: count }, (_, i) => 0.5 * Math.sin(i / 8));
  player.push("first", tone(first));
  player.push("second", tone(second));
  player.push("third", tone(second));
  await second_began;
  const played = await player.flush();
  const after = await player.flush();
  return { played: [...played], after: [...after], total: state.played, audible: state.audible, queued: state.queued };
}
"""


@pytest.fixture(scope="module")
def page(shared_server: Callable[..., Server]) -> Iterator[Page]:
    server = shared_server("probe.toml")
    with sync_playwright() as playwright, browser(playwright) as chrome, visit(chrome, server.url) as seen:
        yield seen.page


def captured(page: Page, rate: int, tone: float, seconds: int = 1) -> Any:
    blocks = page.evaluate(CAPTURE, [rate, tone, seconds])
    assert {len(block) for block in blocks[:-1]} == {960}, "blocks of 40 ms"
    return numpy.concatenate([numpy.array(block, dtype=numpy.float64) for block in blocks]) / 32767


@pytest.mark.parametrize("rate", [24_000, 44_100, 48_000])
def test_a_tone_is_captured_at_24_khz_whatever_the_microphone_has(page: Page, rate: int) -> None:
    heard = captured(page, rate, 1_000.0)
    assert abs(len(heard) - RATE) <= 128, "a second is a second, but for what the filter still holds"
    middle = heard[2_400:-2_400]
    spectrum = numpy.abs(numpy.fft.rfft(middle * numpy.hanning(len(middle))))
    assert abs(float(numpy.argmax(spectrum)) * RATE / len(middle) - 1_000.0) < 3.0
    assert math.isclose(float(numpy.sqrt(numpy.mean(middle**2))), math.sqrt(0.5), rel_tol=0.02)


@pytest.mark.parametrize("rate", [44_100, 48_000])
def test_what_is_too_high_for_24_khz_does_not_come_back_as_another_tone(page: Page, rate: int) -> None:
    middle = captured(page, rate, 16_000.0)[2_400:-2_400]
    assert float(numpy.sqrt(numpy.mean(middle**2))) < 0.01


def test_the_player_counts_every_sample_and_is_silent_at_once(page: Page) -> None:
    first, second = 4_800, 240_000
    page.mouse.click(1, 1)  # a browser lets a page sound once it has been touched
    result = page.evaluate(PLAY, [first, second])
    played = dict(result["played"])
    assert set(played) == {"second", "third"}, "the first was heard to its end"
    assert 0 < played["second"] < second and played["third"] == 0
    assert result["total"] == first + played["second"], "nothing sounds that is not counted, and nothing after the silence"
    assert result["after"] == [] and result["queued"] == 0
    assert 0.97 * result["total"] < result["audible"] <= result["total"]
