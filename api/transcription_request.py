"""OpenAI's transcription form checked against the served model: what is to be written down, and how it is to look."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from omni_bus.api.form import Form
from omni_bus.api.served import ServedModel
from omni_bus.api.submission import deadline_s
from omni_bus.errors import InvalidRequest, ModelRefused
from omni_bus.events import PRIORITIES
from omni_bus.payloads import TranscriptWish

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
STREAMED = ("json", "text")
TIMED = ("srt", "vtt")  # are nothing without times
GRANULARITIES = ("segment", "word")
MAX_PROMPT = 4096  # characters
_LANGUAGE = re.compile(r"[a-z]{2,3}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranscriptionRequest:
    wish: TranscriptWish
    response_format: str
    stream: bool
    deadline_s: float
    priority: str | None  # None: not said
    alone: bool  # by the pipeline's own recogniser; else its language model is asked
    segments: bool  # are to be shown, with their times


def parse_transcription(form: Form, model: ServedModel, timeout_header: str | None = None) -> TranscriptionRequest:
    """InvalidRequest (400), NotFound (404, another model) or ModelRefused (422), each naming the field."""
    name = form.one("model")
    if name is None:
        raise InvalidRequest("model: is required", param="model")
    model.check_name(name)
    model.check_takes("audio", "file")
    if form.file is None:
        raise InvalidRequest("file: is required; send the audio as a part of the form with this name", param="file")
    if not form.file:
        raise InvalidRequest("file: it is empty", param="file")
    alone = model.pipeline.transcript_edge is not None
    response_format = _choice(form, "response_format", FORMATS) or "json"
    if response_format in TIMED and not alone:
        raise ModelRefused(
            f"response_format: this model gives no times, so that it cannot write {response_format}; ask for json",
            param="response_format",
        )
    stream = _choice(form, "stream", ("true", "false")) == "true"
    if stream and response_format not in STREAMED:
        raise InvalidRequest(f"stream goes with response_format {' or '.join(STREAMED)} only", param="stream")
    granularities = form.fields.get("timestamp_granularities", ())
    _check_granularities(granularities, response_format, alone)
    prompt = form.one("prompt") or ""
    if len(prompt) > MAX_PROMPT:
        raise InvalidRequest(f"prompt may have up to {MAX_PROMPT} characters; it has {len(prompt)}", param="prompt")
    language = (form.one("language") or "").casefold()
    if language and not _LANGUAGE.fullmatch(language):
        raise InvalidRequest("language must be a code of ISO 639 such as en", param="language")
    return TranscriptionRequest(
        wish=TranscriptWish(
            times=alone and response_format in (*TIMED, "verbose_json"),
            words="word" in granularities,
            language=language,
            prompt=prompt,
            temperature=_number(form, "temperature", 0.0, 1.0) or 0.0,
        ),
        response_format=response_format,
        stream=stream,
        deadline_s=deadline_s(_number(form, "timeout", 0.0, float("inf")), timeout_header, model.max_deadline_s),
        alone=alone,
        segments=alone and (not granularities or "segment" in granularities),
        priority=_choice(form, "priority", PRIORITIES),
    )


def _check_granularities(wanted: Sequence[str], response_format: str, alone: bool) -> None:
    param = "timestamp_granularities"
    for name in wanted:
        if name not in GRANULARITIES:
            raise InvalidRequest(f"{param} must be segment or word", param=param)
    if wanted and response_format != "verbose_json":
        raise InvalidRequest(f"{param} goes with response_format verbose_json only", param=param)
    if "word" in wanted and not alone:
        raise ModelRefused(f"{param}: this model gives no times, of words neither; leave it out", param=param)


def _choice(form: Form, name: str, choices: tuple[str, ...]) -> str | None:
    value = form.one(name)
    if value is None:
        return None
    if value.casefold() not in choices:
        raise InvalidRequest(f"{name} must be one of {', '.join(choices)}", param=name)
    return value.casefold()


def _number(form: Form, name: str, least: float, most: float) -> float | None:
    value = form.one(name)
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not least <= number <= most:
        raise InvalidRequest(f"{name} must be a number from {least:g} to {most:g}", param=name)
    return number
