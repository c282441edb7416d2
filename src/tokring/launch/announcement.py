"""The line with which a person tries the server."""

import json
import shlex

from tokring.config import Config

QUESTION = "What is the capital of France?"


def curl_line(config: Config, url: str) -> str:
    """A command that works when pasted into a shell (a key, if one is needed, from $TOKRING_API_KEY)."""
    names = config.model.served_model_name
    body = {
        **({"model": names[0]} if names else {}),
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "stream": True,
    }
    words = ["curl", "-N"]
    if url.startswith("unix:"):
        words += ["--unix-socket", url.removeprefix("unix:")]
        url = "http://localhost"
    if url.startswith("https:"):
        words.append("-k")
    words += [f"{url}{config.server.root_path}/v1/chat/completions", "-H", "Content-Type: application/json"]
    words += ["-d", json.dumps(body)]
    line = shlex.join(words)
    return line + ' -H "Authorization: Bearer $TOKRING_API_KEY"' if config.server.api_key else line
