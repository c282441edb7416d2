"""How much a run of `tokring bench frontend` measures."""

from dataclasses import dataclass

from tokring.bench.frontend.runs import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """`num_probes`: requests per row and repetition; `num_pairs`: runs with and without clients that never read."""

    loads: tuple[Load, ...]
    repetitions: int
    num_probes: int
    num_pairs: int
    itl_tokens: int


FULL = Sizes(
    loads=(Load(1, 2000, 2.0), Load(64, 400, 10.0), Load(512, 120, 80.0)),
    repetitions=5,
    num_probes=1000,
    num_pairs=5,
    itl_tokens=600,
)
QUICK = Sizes(
    loads=(Load(1, 600, 2.0), Load(64, 150, 10.0), Load(512, 60, 80.0)),
    repetitions=3,
    num_probes=500,
    num_pairs=5,
    itl_tokens=200,
)
