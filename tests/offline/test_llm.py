"""tokring.LLM: batches through a real engine process and its rings, from scripts that know nothing of servers."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import tokring
from tests.support.serving import tiny_model, wait_until
from tokring import LLM, EngineDied, OfflineError, ParameterError, SamplingParams, StructuredOutput
from tokring.config import ConfigError
from tokring.offline.errors import PromptError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """A tiny random model, computed by the CPU engine."""
    with LLM(tiny_model(), max_model_len=256, max_num_seqs=8, kv_cache_memory_bytes=8 << 20) as llm:
        yield llm


@pytest.fixture(scope="module")
def mock_llm() -> Iterator[LLM]:
    with LLM(tiny_model(), engine="mock") as llm:
        yield llm


def test_importing_tokring_loads_nothing_heavy() -> None:
    program = "import sys, tokring; sys.exit(bool({'numpy', 'aiohttp', 'tokenizers', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'llm_engine'"):
        tokring.llm_engine  # noqa: B018


def test_outputs_come_in_the_order_of_the_prompts_and_do_not_depend_on_the_batch(llm: LLM) -> None:
    prompts = [f"prompt number {number} " * (1 + number % 5) for number in range(40)]
    together = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in together] == prompts
    for number in (0, 17, 39):
        [alone] = llm.generate(prompts[number], GREEDY)
        assert alone.outputs == together[number].outputs
    first = together[0]
    assert first.error is None
    assert first.outputs[0].finish_reason == "length"
    assert len(first.outputs[0].token_ids) == 8
    assert first.outputs[0].text
    assert first.usage.prompt_tokens == len(first.prompt_token_ids)
    assert first.usage.completion_tokens == 8


def test_the_same_prompt_as_text_ids_and_mapping_is_the_same(llm: LLM) -> None:
    [by_text] = llm.generate("a few words", GREEDY)
    ids = by_text.prompt_token_ids
    outputs = [
        by_text,
        *llm.generate(ids, GREEDY),
        *llm.generate([ids, {"prompt": "a few words"}, {"prompt_token_ids": ids}], [GREEDY] * 3),
    ]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert outputs[-1].usage.cached_tokens <= len(ids)


def test_logprobs_name_the_chosen_token_and_the_likeliest(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    [output] = llm.generate("logprobs please", params)
    [completion] = output.outputs
    assert completion.logprobs is not None and len(completion.logprobs) == 4
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(position) == 3
        assert position[token_id].rank == 1  # greedy
        assert all(entry.logprob <= position[token_id].logprob for entry in position.values())
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    for token_id, row in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert row is not None and row[token_id].logprob <= 0


def test_choices_and_best_of(llm: LLM) -> None:
    params = SamplingParams(n=2, best_of=4, max_tokens=6, seed=7, ignore_eos=True, logprobs=0)
    [output] = llm.generate("several", params)
    assert [completion.index for completion in output.outputs] == [0, 1]
    assert output.usage.completion_tokens == 24
    means = []
    for completion in output.outputs:
        assert completion.logprobs is not None
        rows = zip(completion.token_ids, completion.logprobs, strict=True)
        means.append(sum(row[token_id].logprob for token_id, row in rows))
    assert means[0] >= means[1]
    assert llm.generate("several", params)[0].outputs == output.outputs  # the same seed


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    [whole] = llm.generate("stop here", params)
    stop = whole.outputs[0].text[4:6]
    [stopped] = llm.generate("stop here", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop))
    [completion] = stopped.outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == whole.outputs[0].text.split(stop)[0]


def test_chat_renders_the_models_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    [single] = llm.chat(conversation, GREEDY)
    assert single.prompt is not None and "hello" in single.prompt and single.prompt.endswith("assistant\n")
    both = llm.chat([conversation, [{"role": "system", "content": "be brief"}, *conversation]], GREEDY)
    assert both[0].outputs == single.outputs
    assert len(both[1].prompt_token_ids) > len(single.prompt_token_ids)


def test_without_sampling_params_the_models_own_are_used(mock_llm: LLM) -> None:
    assert mock_llm.default_sampling_params().temperature == 0.7  # generation_config.json of the tiny model
    assert mock_llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].outputs


def test_more_prompts_than_the_engine_may_hold_all_complete(mock_llm: LLM) -> None:
    outputs = mock_llm.generate([[1 + number % 50] for number in range(2000)], SamplingParams(max_tokens=2))
    assert len(outputs) == 2000
    assert [output.prompt_token_ids[0] for output in outputs] == [1 + number % 50 for number in range(2000)]


def test_bad_input_is_refused_before_anything_is_submitted(llm: LLM) -> None:
    with pytest.raises(PromptError, match="prompt 1: .*maximum context length is 256"):
        llm.generate(["fine", [1] * 300], GREEDY)
    with pytest.raises(PromptError, match="prompt 0: .*token ids must be between"):
        llm.generate([[10**6]], GREEDY)
    with pytest.raises(PromptError, match="prompt 0: has no token"):
        llm.generate([""], GREEDY)
    with pytest.raises(PromptError, match=r"conversation 0: .*role must be one of"):
        llm.chat([{"role": "nobody", "content": "x"}], GREEDY)
    with pytest.raises(ValueError, match="2 prompts, but 1 sampling_params"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(TypeError, match="must be SamplingParams, not str"):
        llm.generate("a", {"max_tokens": 2})
    with pytest.raises(PromptError, match="prompt 1: not valid Unicode"):
        llm.generate(["a", "\ud800"], GREEDY)
    with pytest.raises(PromptError, match="conversation 0: .*surrogates"):
        llm.chat([{"role": "user", "content": "\ud800"}], GREEDY)
    with pytest.raises(PromptError, match="conversation 0: must be a list of messages"):
        llm.chat({"role": "user", "content": "a"}, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="prompt 0: 'prompt_token_ids' must be a list of token ids, not str"):
        llm.generate({"prompt_token_ids": "abc"}, GREEDY)
    with pytest.raises(ParameterError, match="allowed_token_ids needs 1 to .* ids, got 0"):
        llm.generate("a", SamplingParams(allowed_token_ids=[]))  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="token ids must be whole numbers, not 5.5"):
        llm.generate("a", SamplingParams(stop_token_ids=[5.5]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--max-model-len long: must be a number"):
        LLM(tiny_model(), max_model_len="long")
    with pytest.raises(ConfigError, match="--port means nothing without a server"):
        LLM(tiny_model(), port=80)
    with pytest.raises(ConfigError, match="unknown option --max-seqs"):
        LLM(tiny_model(), max_seqs=80)


def test_an_error_of_one_request_leaves_the_others_alone(llm: LLM) -> None:
    refused = SamplingParams(max_tokens=4, structured_output=StructuredOutput("regex", "(unclosed"))
    bad, good = llm.generate(["one", "two"], [refused, GREEDY])
    assert bad.error is not None and "constraint" in bad.error and not bad.outputs
    assert good.error is None and len(good.outputs[0].token_ids) == 8


def test_threads_share_one_llm(mock_llm: LLM) -> None:
    counts: list[int] = []

    def work() -> None:
        counts.append(len(mock_llm.generate([[5, 6]] * 50, SamplingParams(max_tokens=3))))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [50] * 4


def test_a_reset_empties_the_prefix_cache(llm: LLM) -> None:
    prompt = list(range(3, 43))

    def num_cached() -> int:
        [output] = llm.generate([prompt], GREEDY)
        return output.usage.cached_tokens

    num_cached()
    assert num_cached() == 32
    assert llm.reset_prefix_cache() is True
    assert [num_cached(), num_cached()] == [0, 32]


def test_the_death_of_the_engine_is_an_exception_and_leaves_nothing() -> None:
    with LLM(tiny_model(), engine="mock", mock_step_ms=50) as llm:
        pid = llm.engine_pid
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(EngineDied, match=rf"pid {pid}\) was ended by SIGKILL"):
            llm.generate([[1]] * 4, SamplingParams(max_tokens=1000, ignore_eos=True))
        with pytest.raises(EngineDied, match="SIGKILL"):
            llm.generate([[1]], GREEDY)
        with pytest.raises(EngineDied, match="SIGKILL"):
            llm.reset_prefix_cache()
    assert not psutil.pid_exists(pid)


def test_an_engine_that_cannot_start_says_why() -> None:
    with pytest.raises(OfflineError, match="kv_cache|KV cache|--max-model-len"):
        LLM(tiny_model(), kv_cache_memory_bytes=1024)


def test_a_closed_llm_says_so_and_its_engine_is_gone() -> None:
    llm = LLM(tiny_model(), engine="mock")
    pid = llm.engine_pid
    llm.close()
    llm.close()
    wait_until(lambda: not psutil.pid_exists(pid), "the engine has ended")
    with pytest.raises(OfflineError, match="closed"):
        llm.generate([[1]], GREEDY)
    dropped = LLM(tiny_model(), engine="mock")
    pid = dropped.engine_pid
    del dropped
    gc.collect()
    wait_until(lambda: not psutil.pid_exists(pid), "the engine of a forgotten LLM has ended")


def test_a_closed_llm_leaves_no_stats_page(mock_llm: LLM) -> None:
    def pages() -> set[str]:
        return {page.name for page in Path("/dev/shm").glob(f"tokring.{os.getpid()}.*")}

    before = pages()
    with LLM(tiny_model(), engine="mock"):
        assert pages() > before
    assert pages() == before


SCRIPT = """
import os, sys
import tokring
llm = tokring.LLM(sys.argv[1], engine="mock")
pid = os.fork()
if pid == 0:
    try:
        llm.generate([[1]])
    except tokring.OfflineError as error:
        print("child:", error, flush=True)
    sys.exit(0)  # runs exit handlers: they must leave the parent's engine alone
os.waitpid(pid, 0)
print("parent:", len(llm.generate([[1, 2]] * 3, tokring.SamplingParams(max_tokens=2))), llm.engine_pid, flush=True)
"""


def test_a_plain_script_needs_no_main_guard_survives_a_fork_and_ends_clean(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", str(script), tiny_model()],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "child: this LLM belongs to the parent" in done.stdout
    [line] = [line for line in done.stdout.splitlines() if line.startswith("parent: 3 ")]
    wait_until(lambda: not psutil.pid_exists(int(line.split()[-1])), "the engine has ended with the script")


@pytest.fixture
def control_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt even where the tests run in the background, and a shell had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("control_c")
def test_control_c_cancels_the_batch_and_the_llm_goes_on() -> None:
    with LLM(tiny_model(), engine="mock", mock_step_ms=20) as llm:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1]] * 4, SamplingParams(max_tokens=5000, ignore_eos=True))
        [output] = llm.generate([[1]], SamplingParams(max_tokens=2, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 2
