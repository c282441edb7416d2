"""What `ps` and `top` show: `tokring: supervisor`, `tokring: frontend 0`, `tokring: engine 0`."""

import setproctitle


def set_process_title(name: str) -> None:
    setproctitle.setproctitle(f"tokring: {name}")
