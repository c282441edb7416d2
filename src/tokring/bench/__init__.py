"""What a step costs between two processes: `tokring bench ipc` measures the rings beside what others use."""
