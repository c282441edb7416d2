"""Log lines as JSON objects, one a line (`--log-format json`): for collectors that parse what they store."""

import logging
import time

import msgspec

FIELDS = "json_fields"  # a record's `extra` under this name: further members of the object


class JsonFormatter(logging.Formatter):
    """{"time", "level", "process", "pid", "logger", "message", …}; a traceback goes into "exception"."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


def as_json_line(tag: str, line: bytes) -> bytes:
    """A line as it is if it is an object already, else wrapped: native libraries write what they like."""
    if line.startswith(b"{"):
        return line
    return msgspec.json.encode({"process": tag, "message": line.decode(errors="replace")})
