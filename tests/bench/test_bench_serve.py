"""`tokring bench serve`: its client against literal answers, its prompts, and a whole run on two servers."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.serving import mock_server
from tokring.bench import _native
from tokring.bench.serve.report import ratios
from tokring.bench.serve.run import Goal, Load, merged, request_bytes
from tokring.bench.serve.target import Target, TargetError
from tokring.bench.serve.workload import Workload, due_times
from tokring.checkpoint import open_checkpoint
from tokring.cli import main


@contextmanager
def answering(answer: bytes, piece: int) -> Iterator[int]:
    """The port of a server that sends `answer` in pieces of so many bytes and closes; one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                client.recv(65536)
                for at in range(0, len(answer), piece):
                    client.sendall(answer[at : at + piece])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(30)


def chunked(*events: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + body + b"0\r\n\r\n"


EVENTS = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"one"}}]}\n\n',
    b': ping\n\ndata: {"choices":[{"delta":{"content": "two"}}]}\n\ndata: {"choices":[{"text":"three"}]}\r\n\r\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n',
    b"data: [DONE]\n\n",
)


@pytest.mark.parametrize("piece", [1, 2, 7, 100_000])
@pytest.mark.parametrize(
    "answer",
    [
        chunked(*EVENTS),
        chunked(b"".join(EVENTS)[:50], b"".join(EVENTS)[50:]),
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"".join(EVENTS),
        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(b"".join(EVENTS)) + b"".join(EVENTS),
    ],
)
def test_events_with_text_are_counted_however_they_are_framed_and_cut(answer: bytes, piece: int) -> None:
    with answering(answer, piece) as port:
        client = _native.LoadClient("127.0.0.1", port)
        assert client.run([b"GET / HTTP/1.1\r\n\r\n"], [0], 0, 30)
    [found] = client.answers
    assert (found.status, found.num_chunks, found.is_complete) == (200, 3, True)
    assert json.loads(found.last_event)["usage"]["completion_tokens"] == 3
    assert 0 < found.sent_ns < found.first_token_ns <= found.last_token_ns <= found.end_ns
    assert len(client.gaps_ns) == 2 and sum(client.gaps_ns) == found.last_token_ns - found.first_token_ns


@pytest.mark.parametrize("answer", [chunked(*EVENTS[:2]), chunked(*EVENTS)[:-20], b"", b"HTTP/1.1 503 No\r\n\r\nbusy"])
def test_a_stream_that_breaks_off_is_not_complete(answer: bytes) -> None:
    with answering(answer, 100_000) as port:
        client = _native.LoadClient("127.0.0.1", port)
        assert client.run([b"GET / HTTP/1.1\r\n\r\n"], [0], 0, 30)
    [found] = client.answers
    assert not found.is_complete
    assert found.status == (int(answer[9:12]) if answer else 0)


def test_prompts_have_the_stated_number_of_tokens_and_the_shared_prefix() -> None:
    tokenizer = open_checkpoint(None).load_tokenizer()
    for kind in ("random", "shared-prefix", "sharegpt"):
        workload = Workload(kind=kind, num_prompts=5, input_len=40, output_len=8, prefix_len=64, seed=3)
        prompts = workload.make(tokenizer)
        assert prompts == workload.make(tokenizer)
        assert len({prompt.text for prompt in prompts}) == 5
        for prompt in prompts:
            assert len(tokenizer.encode(prompt.text, add_special_tokens=False).ids) == prompt.num_tokens
    shared = Workload(kind="shared-prefix", num_prompts=2, input_len=10, output_len=8, prefix_len=64, seed=3)
    first, second = (tokenizer.encode(prompt.text).ids for prompt in shared.make(tokenizer))
    assert first[:64] == second[:64] and first[64:] != second[64:]


def test_arrivals_are_poisson_or_at_once() -> None:
    assert due_times(3, None, 0) == [0, 0, 0]
    due = due_times(4000, 50.0, 0)
    assert due == sorted(due) and due[-1] == pytest.approx(80e9, rel=0.1)


def test_targets_are_parsed() -> None:
    target = Target.parse("ours=http://localhost:8001/v1#m", "other", None)
    assert (target.name, target.host, target.port, target.path, target.model) == ("ours", "127.0.0.1", 8001, "", "m")
    with pytest.raises(TargetError, match="TLS"):
        Target.parse("https://x", "", None)
    load = Load(concurrency=1, rate=None, ignore_eos=True, api="chat", timeout_s=1)
    prompt = Workload(kind="random", num_prompts=1, input_len=3, output_len=9).make(
        open_checkpoint(None).load_tokenizer()
    )
    head, _, body = request_bytes(target, prompt[0], load).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n") and json.loads(body)["max_tokens"] == 9


def test_goals_medians_and_ratios() -> None:
    assert Goal.parse("ttft:5,itl:2").is_met(5, 2, 1e9) and not Goal.parse("e2el:1").is_met(0, 0, 2)
    with pytest.raises(ValueError, match="none of"):
        Goal.parse("x:1")
    row = merged([{"output_tokens_per_s": float(value), "failed": 1, "cpu_s": {"a": value}} for value in (1, 9, 2)])
    assert (row["output_tokens_per_s"], row["failed"], row["cpu_s"]) == (2.0, 3, {"a": 4})
    assert row["ranges"]["output_tokens_per_s"] == [1.0, 9.0]
    rows = [
        {"server": "ours", "load": "c1", "output_tokens_per_s": 30.0, "ttft_ms_p50": 5.0},
        {"server": "theirs", "load": "c1", "output_tokens_per_s": 10.0, "ttft_ms_p50": 10.0},
    ]
    assert ratios(rows) == {"output_tokens_per_s_vs_theirs_c1": 3.0, "ttft_p50_vs_theirs_c1": 2.0}


def test_two_servers_in_alternation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock_server("--mock-step-ms", "1") as one, mock_server("--mock-step-ms", "4") as other:
        out, plot = tmp_path / "out.json", tmp_path / "out.svg"
        command = [
            "bench",
            "serve",
            f"fast={one.url}",
            f"slow={other.url}",
            "--concurrency",
            "1,3",
            "--num-prompts",
            "3",
        ]
        command += ["--output-len", "20", "--input-len", "16", "--repetitions", "1", "--goodput", "ttft:100000"]
        assert main([*command, "--json", str(out), "--plot", str(plot)]) == 0
        outcome = json.loads(out.read_text())
    assert [(row["load"], row["server"]) for row in outcome["rows"]] == [
        ("c1", "fast"), ("c1", "slow"), ("c3", "fast"), ("c3", "slow"),
    ]  # fmt: skip
    for row in outcome["rows"]:
        assert (row["completed"], row["failed"], row["output_tokens"]) == (3, 0, 60)
        assert row["input_tokens"] >= 48  # more where the server's tokenizer is another one
        assert row["goodput_requests_per_s"] == pytest.approx(row["requests_per_s"])
        assert {"tokring: frontend 0", "tokring: engine 0"} <= set(row["cpu_s"])
    assert "output_tokens_per_s_vs_slow_c3" in outcome["ratios"]
    assert plot.read_text().startswith("<svg")
    assert "TTFT" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "http://127.0.0.1:1"]) != 0
    assert "lists no models" in capsys.readouterr().err
