"""aiohttp's own log, without what clients sent: its errors of malformed requests quote the headers, and those may hold keys."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError


class WithoutContent(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.exc_info = None
            record.exc_text = None
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.msg = f"malformed HTTP ({type(error).__name__}): {record.msg}"
        return True


http_log = logging.getLogger("omni_bus.api.http")
http_log.addFilter(WithoutContent())
