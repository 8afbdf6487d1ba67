"""Keep what the report and CUDA graphs tell of the calls of experts."""

from __future__ import annotations


class Calls:
    """The calls of experts in one mode, training or evaluation: one of few tokens tells nothing of the other mode."""

    def __init__(self) -> None:
        self.ran = False
        """Some were computed in grouped products."""

        self.reasons: dict[str, None] = {}
        """Reasons for which others were not, in the order in which they were found."""

    @classmethod
    def by_mode(cls) -> dict[bool, Calls]:
        """Return those of a module's modes, by its `training`."""
        return {True: cls(), False: cls()}

    def note(self, reason: str | None) -> None:
        """Remember a call that was computed in grouped products, or why it was not."""
        if reason is None:
            self.ran = True
        else:
            self.reasons[reason] = None

    @property
    def has_any(self) -> bool:
        """Tell whether there were any."""
        return self.ran or bool(self.reasons)

    @property
    def told(self) -> str | None:
        """Return all reasons; None: there are none."""
        return ", ".join(self.reasons) or None
