"""Settings of the state machines: short by default, long by `pytest --hypothesis-profile=long`."""

from __future__ import annotations

from hypothesis import settings

LONG_OPERATIONS = 100_000  # of each machine in the long form
_LONG = "long"
settings.register_profile(_LONG, deadline=None, print_blob=True)


def machine_settings(max_examples: int, steps: int) -> settings:
    """max_examples runs of up to `steps` operations; in the long form as many as make 100,000 operations."""
    if settings.get_current_profile_name() == _LONG:
        max_examples = -(-LONG_OPERATIONS // steps)
    return settings(max_examples=max_examples, stateful_step_count=steps, deadline=None)
