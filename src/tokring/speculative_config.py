"""SpeculativeConfig: --speculative-config, vLLM's JSON object, for the one method that is built: n-gram lookup."""

from typing import Literal

import msgspec

MAX_DRAFT_TOKENS = 16  # counters by position have so many places
DEFAULT_LOOKUP = 5  # vLLM's


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names and meaning as in vLLM: the last prompt_lookup_min to prompt_lookup_max tokens are looked up."""

    method: Literal["ngram"]
    num_speculative_tokens: int
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

    @classmethod
    def from_json(cls, text: str) -> "SpeculativeConfig":
        """Raises ValueError with one line that says what is wrong."""
        try:
            config = msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"{error}; vLLM's JSON object with method 'ngram' is wanted") from None
        if not 1 <= config.num_speculative_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"num_speculative_tokens must be 1 to {MAX_DRAFT_TOKENS}")
        if not 1 <= config.lookup_range[0] <= config.lookup_range[1]:
            raise ValueError("prompt_lookup_min must be from 1 to prompt_lookup_max")
        return config

    @property
    def lookup_range(self) -> tuple[int, int]:
        """(least, most) tokens that are looked up; where one is missing it is the other."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is None:
            least = DEFAULT_LOOKUP if most is None else most
        return least, least if most is None else most
