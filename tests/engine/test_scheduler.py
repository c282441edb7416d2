"""The whole engine under random events: nothing is lost, and every request gets the tokens it gets alone."""

from functools import cache

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.machines import machine_settings
from tests.support.engine_harness import EngineHarness
from tests.support.toy_runner import ToyRunner
from tokring.engine.threaded_runner import ThreadedRunner
from tokring_ipc import FinishReason

LIMITS = {"max_model_len": 64, "num_blocks": 9, "block_size": 8, "max_num_seqs": 4, "max_queued": 6}
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=40).map(tuple)
REFERENCE = EngineHarness(max_model_len=64, num_blocks=8, block_size=8, enable_prefix_caching=False)


@cache
def tokens_alone(prompt, max_tokens, seed):
    stream = REFERENCE.submit(prompt, max_tokens=max_tokens, temperature=0.7, seed=seed)
    REFERENCE.run()
    REFERENCE.channel.reuse(stream)
    return stream.token_ids


class EngineMachine(RuleBasedStateMachine):
    """Two front ends submit, cancel, stop reading and die, over a pool that holds about one and a half requests."""

    @initialize(
        budget=st.integers(5, 40),
        prefill_tokens=st.integers(1, 50),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        runs_ahead=st.booleans(),
    )
    def start(self, budget, prefill_tokens, policy, caching, runs_ahead):
        runner = ToyRunner(block_size=LIMITS["block_size"])
        self.harness = EngineHarness(
            ThreadedRunner(runner) if runs_ahead else runner,
            num_channels=2,
            max_num_batched_tokens=budget,
            max_num_prefill_tokens=prefill_tokens,
            scheduling_policy=policy,
            enable_prefix_caching=caching,
            **LIMITS,
        )
        self.requests = []
        self.dead = set()

    @rule(
        prompt=PROMPTS, max_tokens=st.integers(0, 30), seed=st.integers(0, 2), channel=st.integers(0, 1), data=st.data()
    )
    def submit(self, prompt, max_tokens, seed, channel, data):
        parents = [stream.stream_slot for stream, *_, of in self.requests if of == channel and stream.finish is None]
        fields = {"priority": data.draw(st.integers(-1, 1))}
        if parents and data.draw(st.booleans()):
            fields["parent_slot"] = data.draw(st.sampled_from(parents))
        if data.draw(st.booleans()):
            fields["num_logprobs"] = 1
        stream = self.harness.channels[channel].submit(
            prompt, max_tokens=max_tokens, temperature=0.7, seed=seed, **fields
        )
        self.requests.append((stream, prompt, max_tokens, seed, channel))

    @rule(steps=st.integers(1, 12))
    def step(self, steps):
        for _ in range(steps):
            self.harness.core.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        stream, *_, channel = data.draw(st.sampled_from(self.requests))
        self.harness.channels[channel].cancel(stream)

    @rule(channel=st.integers(0, 1), full=st.booleans())
    def stop_reading(self, channel, full):
        self.harness.channels[channel].full = full

    @rule()
    def reset_prefix_cache(self):
        self.harness.core.reset_prefix_cache()

    @precondition(lambda self: len(self.requests) > 4 and not self.dead)
    @rule()
    def front_end_dies(self):
        self.harness.core.detach(1)
        self.dead.add(1)

    @invariant()
    def blocks_are_where_the_tables_say(self):
        if hasattr(self, "harness"):
            self.harness.check_consistent()

    def teardown(self):
        if not hasattr(self, "harness"):
            return
        for channel in self.harness.channels:
            channel.full = False
            if self.harness.channels.index(channel) in self.dead:
                channel._requests.clear()
        self.harness.run()
        self.harness.check_nothing_left()
        for stream, prompt, max_tokens, seed, channel in self.requests:
            expected = tokens_alone(prompt, max_tokens, seed)
            assert stream.token_ids == expected[: len(stream.token_ids)]
            if channel not in self.dead:
                assert stream.reason in (FinishReason.LENGTH, FinishReason.ABORT)
            if stream.reason == FinishReason.LENGTH:
                assert stream.token_ids == expected


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = machine_settings(80, 25)
