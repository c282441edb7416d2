"""A whole server on the CUDA backend, its kernels emulated (TOKRING_CUDA_EMULATION=1), over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from tests.support.serving import ServerProcess, wait_until
from tests.support.tiny_hf import write_tiny_hf

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)  # kernels are compiled at first use


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    model = write_tiny_hf(tmp_path_factory.mktemp("tiny"), head_dim=64)
    cache = tmp_path_factory.mktemp("cache")
    (cache / "tokring").mkdir()
    emulation = ROOT / "build" / "emulation"  # where the kernels' own tests keep theirs
    emulation.mkdir(parents=True, exist_ok=True)
    (cache / "tokring" / "kernels").symlink_to(emulation)
    server = ServerProcess(
        [
            "--model", str(model), "--port", "0", "--device", "cuda", "--max-model-len", "128", "--max-num-seqs", "2",
            "--max-num-batched-tokens", "32", "--served-model-name", "tiny", "--step-timeout", "600",
        ],
        {"TOKRING_CUDA_EMULATION": "1", "XDG_CACHE_HOME": str(cache)},
    )  # fmt: skip
    try:
        wait_until(lambda: server.url or server.process.poll() is not None, "the kernels are compiled", 600.0)
        server.wait_ready()
        yield server
    finally:
        server.kill()


def test_requests_of_every_kind_are_answered_by_the_cuda_backend(server):
    assert "computing on the emulation of CUDA" in server.log
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)
    prompt = list(range(5, 30))

    def complete(**fields) -> openai.types.CompletionChoice:
        return client.completions.create(model="tiny", prompt=prompt, max_tokens=6, **fields).choices[0]

    complete(temperature=0)  # from here on all find the prompt's first block in the prefix cache
    greedy = complete(temperature=0, logprobs=2)
    assert greedy.text == complete(temperature=0).text
    assert len(greedy.logprobs.token_logprobs) == 6
    assert complete(seed=7, temperature=1.0).text == complete(seed=7, temperature=1.0).text
    assert complete(temperature=0, presence_penalty=2.0, frequency_penalty=2.0).finish_reason in ("length", "stop")
    choice = complete(temperature=0, extra_body={"structured_outputs": {"choice": ["ab", "ba"]}})
    assert choice.text in ("ab", "ba")
    streamed = client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == greedy.text


def test_the_front_end_and_the_supervisor_load_nothing_of_torch_or_cuda(server):
    processes = {"supervisor": psutil.Process(server.pid), **server.children()}
    for name, process in processes.items():
        loaded = [Path(mapped.path).name for mapped in process.memory_maps()]
        heavy = [name for name in loaded if name.startswith(("libtorch", "libcuda", "libcupy", "libnvrtc"))]
        assert bool(heavy) == (name.startswith("engine")), f"{name}: {heavy}"
