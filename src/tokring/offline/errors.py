"""What the offline class raises beside ConfigError and ParameterError."""


class OfflineError(RuntimeError):
    """The engine could not be started, or the LLM can't be used any more; the message says why."""


class EngineDied(OfflineError):
    """The engine process ended while it was needed; the message holds how, and its last words."""


class PromptError(ValueError):
    """A prompt or conversation can't be generated from; nothing of its batch was submitted."""
