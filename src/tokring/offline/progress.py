"""Progress: the bar a person sees while a batch runs."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from tokring.offline.output import RequestOutput


class Progress:
    """Counts on the loop's thread, draws on the caller's; draws nothing unless `console` is a terminal."""

    def __init__(self, num_prompts: int, *, is_shown: bool, console: Console | None = None) -> None:
        self.num_done = 0
        self.num_tokens = 0
        self._started = time.monotonic()
        console = console or Console(stderr=True)
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]:.0f} tokens/s"),
            console=console,
            auto_refresh=False,
            transient=False,
            disable=not (is_shown and console.is_terminal),
        )
        self._task = self._bar.add_task("prompts", total=num_prompts, speed=0.0)

    def count(self, output: RequestOutput) -> None:
        """One more prompt is complete."""
        self.num_done += 1
        self.num_tokens += output.usage.completion_tokens

    def draw(self) -> None:
        """Brings the bar up to date."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        self._bar.update(self._task, completed=self.num_done, speed=self.num_tokens / seconds)
        self._bar.refresh()

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.draw()
        self._bar.stop()
