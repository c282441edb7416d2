"""Tool parsers: generated text, piece by piece, to OpenAI's tool-call deltas; bodies are made of the same deltas."""

import secrets
from typing import Any, Protocol

import orjson

TOOL_CALL_START = "<tool_call>"
TOOL_CALL_END = "</tool_call>"
_WHITESPACE = " \t\r\n"


class ToolParser(Protocol):
    """State of one choice. A delta is what goes into a chunk's "delta": content or tool_calls."""

    num_calls: int

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Deltas that the next piece of text completes."""

    def finish(self) -> list[dict[str, Any]]:
        """Deltas of what was held back, at the end of the text."""

    def parse(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """(content, tool calls) of a whole text."""


class _CallWriter:
    """Deltas of numbered calls; base of the parsers below."""

    def __init__(self) -> None:
        self.num_calls = 0

    def feed(self, text: str) -> list[dict[str, Any]]:
        raise NotImplementedError

    def finish(self) -> list[dict[str, Any]]:
        return []

    def parse(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        return join_deltas(self.feed(text) + self.finish())

    def _begin_call(self, name: str) -> dict[str, Any]:
        call = {
            "index": self.num_calls,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        self.num_calls += 1
        return {"tool_calls": [call]}

    def _arguments(self, text: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": self.num_calls - 1, "function": {"arguments": text}}]}


class NamedCallParser(_CallWriter):
    """tool_choice names a function: the grammar makes the whole text its arguments."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def feed(self, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        begin = [self._begin_call(self._name)] if self.num_calls == 0 else []
        return [*begin, self._arguments(text)]

    def finish(self) -> list[dict[str, Any]]:
        return [self._begin_call(self._name)] if self.num_calls == 0 else []


class RequiredCallsParser(_CallWriter):
    """tool_choice "required": the grammar makes the text a list of {"name", "parameters"} objects."""

    def __init__(self) -> None:
        super().__init__()
        self._scanner: CallScanner | None = None

    def feed(self, text: str) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        position = 0
        while position < len(text):
            if self._scanner is None:
                position = _skip_until_object(text, position)
                self._scanner = CallScanner() if position < len(text) else None
                continue
            position, scanned = self._scanner.feed(text, position)
            deltas += self._deltas_of(self._scanner, scanned)
            if self._scanner.is_complete:
                self._scanner = None
        return deltas

    def _deltas_of(self, scanner: "CallScanner", arguments: str) -> list[dict[str, Any]]:
        deltas = []
        if scanner.name is not None and not scanner.is_announced:
            scanner.is_announced = True
            deltas.append(self._begin_call(scanner.name))
        if scanner.is_announced and scanner.is_complete and not scanner.has_arguments:
            arguments = "{}"  # clients decode them as JSON
        if arguments:
            deltas.append(self._arguments(arguments))
        return deltas


class HermesParser(RequiredCallsParser):
    """The format of Hermes and Qwen: text, and any number of <tool_call>{"name": …, "arguments": …}</tool_call>."""

    def __init__(self, *, allows_several: bool = True) -> None:
        super().__init__()
        self._allows_several = allows_several
        self._held = ""  # may be the beginning of a tag, or white space in front of one
        self._raw_call = ""  # text of a call whose name is not known yet
        self._awaits_end = False

    def feed(self, text: str) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        text, self._held = self._held + text, ""
        while text:
            if self._scanner is not None:
                text = self._feed_call(text, deltas)
            elif self._awaits_end:
                text = self._skip_to_end_tag(text)
            else:
                text = self._feed_content(text, deltas)
        return deltas

    def finish(self) -> list[dict[str, Any]]:
        rest, self._held = self._held, ""
        if self._scanner is not None and not self._scanner.is_announced:
            rest = TOOL_CALL_START + self._raw_call + rest  # never became a call: it was text
        is_cut_tag = self._awaits_end and TOOL_CALL_END.startswith(rest.strip())
        if not rest or is_cut_tag or (self.num_calls and not rest.strip()):
            return []
        return [{"content": rest}]

    def _feed_content(self, text: str, deltas: list[dict[str, Any]]) -> str:
        """Takes text up to a start tag; white space in front of a tag is dropped with it."""
        start = text.find(TOOL_CALL_START)
        if start >= 0:
            content, rest = text[:start].rstrip(_WHITESPACE), text[start + len(TOOL_CALL_START) :]
            self._scanner, self._raw_call = CallScanner(), ""
        else:
            keep = _tag_prefix_chars(text, TOOL_CALL_START)
            content = text[: len(text) - keep].rstrip(_WHITESPACE)
            self._held, rest = text[len(content) :], ""
        if content:
            deltas.append({"content": content})
        return rest

    def _feed_call(self, text: str, deltas: list[dict[str, Any]]) -> str:
        scanner = self._scanner
        assert scanner is not None
        end, arguments = scanner.feed(text, 0)
        if not scanner.is_announced:
            self._raw_call += text[:end]
        if self._allows_several or self.num_calls == 0 or scanner.is_announced:
            deltas += self._deltas_of(scanner, arguments)
        if scanner.is_complete:
            self._scanner, self._awaits_end = None, scanner.name is not None
            if scanner.name is None:
                deltas.append({"content": TOOL_CALL_START + self._raw_call})  # an object, but no call: it was text
        return text[end:]

    def _skip_to_end_tag(self, text: str) -> str:
        """Drops what models leave in front of the end tag, such as a brace too many; the next call ends it as well."""
        ends = [(text.find(TOOL_CALL_END), len(TOOL_CALL_END)), (text.find(TOOL_CALL_START), 0)]
        found = [(start, size) for start, size in ends if start >= 0]
        if not found:
            self._held = text  # the answer's text if no tag comes
            return ""
        start, size = min(found)
        self._awaits_end = False
        return text[start + size :]


class CallScanner:
    """Reads one JSON object with a name and arguments, character by character, and lets the arguments through raw."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_complete = False
        self.is_announced = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._string = ""  # the string at depth 1 that is being read, without its quotes
        self._key: str | None = None  # the key whose value is being read
        self._value_depth = 0
        self._in_arguments = False
        self.has_arguments = False
        self._early_arguments = ""  # arguments that came before the name

    def feed(self, text: str, position: int) -> tuple[int, str]:
        """Reads from `position` to the object's end at most; (position behind what was read, new arguments)."""
        passed: list[str] = []
        while position < len(text) and not self.is_complete:
            character = text[position]
            position += 1
            if self._take(character):
                self.has_arguments = True
                passed.append(character)
        arguments = "".join(passed)
        if self.name is None:
            self._early_arguments += arguments
            return position, ""
        early, self._early_arguments = self._early_arguments, ""
        return position, early + arguments

    def _take(self, character: str) -> bool:
        """Advances by one character; whether it belongs to the arguments."""
        if self._in_string:
            return self._take_string(character)
        if character == '"':
            self._in_string, self._string = True, ""
            self._begin_value_if_due()
            return self._in_arguments
        if character in "{[":
            self._begin_value_if_due()
            self._depth += 1
            return self._in_arguments
        if character in "}]":
            return self._close()
        if self._depth == 1:
            return self._take_between(character)
        return self._in_arguments

    def _take_string(self, character: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
            self._string += character
        elif character == "\\":
            self._is_escaped = True
            self._string += character
        elif character == '"':
            self._in_string = False
            return self._end_string()
        else:
            self._string += character
        return self._in_arguments

    def _end_string(self) -> bool:
        was_in_arguments = self._in_arguments
        if self._depth == 1:
            if self._key is None:
                self._key = _unquoted(self._string)
            else:
                if self._key == "name" and not was_in_arguments:
                    self.name = _unquoted(self._string)
                self._in_arguments = False
        return was_in_arguments

    def _begin_value_if_due(self) -> None:
        if self._depth == 1 and self._key in ("arguments", "parameters"):
            self._in_arguments = True

    def _close(self) -> bool:
        was_in_arguments = self._in_arguments and self._depth > 1
        self._depth -= 1
        if self._depth == 1:
            self._in_arguments = False
        if self._depth <= 0:
            self.is_complete = True
            self._in_arguments = False
        return was_in_arguments

    def _take_between(self, character: str) -> bool:
        """Commas, colons, white space and literals at depth 1."""
        if character == ",":
            self._key, self._in_arguments = None, False
            return False
        if character in _WHITESPACE or character == ":":
            return False
        self._begin_value_if_due()  # a number, true, false or null
        return self._in_arguments


def join_deltas(deltas: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """(content, tool calls) that a list of deltas adds up to, as clients of a stream add them up."""
    content: list[str] = []
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content.append(delta.get("content") or "")
        for part in delta.get("tool_calls", []):
            if "id" in part:
                calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return "".join(content), calls


def _skip_until_object(text: str, position: int) -> int:
    found = text.find("{", position)
    return len(text) if found < 0 else found


def _tag_prefix_chars(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-size:]):
            return size
    return 0


def _unquoted(raw: str) -> str:
    try:
        return str(orjson.loads(f'"{raw}"'))
    except orjson.JSONDecodeError:
        return raw
