"""Colossal-AI's logger, where messages that nobody sees cost nothing."""

from __future__ import annotations

import logging

from colossalai.logging import DistributedLogger


class QuietLogger:
    """A logger that hands on a debug message only if it is shown.

    Colossal-AI looks up every frame of the call stack, with its source, before it asks whether the message is shown
    (logging/logger.py: __get_call_info), and Gemini has one such message after each backward. It costs the host tens
    of milliseconds, more the more modules are imported.

    Args:
        logger: what shows messages.
    """

    def __init__(self, logger: DistributedLogger) -> None:
        self._shown = logger

    def debug(self, message: str, ranks: list[int] | None = None) -> None:
        """As `DistributedLogger.debug`."""
        if self._shown._logger.isEnabledFor(logging.DEBUG):
            self._shown.debug(message, ranks)

    def __getattr__(self, name: str) -> object:
        return getattr(self._shown, name)
