"""The bar that a person sees while weights load."""

import time

BAR_CELLS = 30
CLEAR_LINE = b"\r\x1b[2K"


class ProgressBar:
    """Renders one terminal line; writing it is the caller's business."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._started = time.monotonic()
        self.is_shown = False

    def render(self, done: int, total: int) -> bytes:
        """The bytes that redraw the line; `done` and `total` in bytes, total 0 = not known yet."""
        self.is_shown = True
        seconds = time.monotonic() - self._started
        if total <= 0:
            return CLEAR_LINE + f"{self._label} … {seconds:.0f} s".encode()
        share = min(done / total, 1.0)
        filled = round(share * BAR_CELLS)
        bar = "█" * filled + "░" * (BAR_CELLS - filled)
        text = f"{self._label} {bar} {share:4.0%}  {done / 1e6:.0f} of {total / 1e6:.0f} MB  {seconds:.0f} s"
        return CLEAR_LINE + text.encode()

    def clear(self) -> bytes:
        """The bytes that remove the line, before other output; b"" if none is shown."""
        shown, self.is_shown = self.is_shown, False
        return CLEAR_LINE if shown else b""
