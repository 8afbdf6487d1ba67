"""Values that JSON has."""

from __future__ import annotations

import math
from typing import Any


def finite_or_null(value: Any) -> Any:
    """The value; None, which is JSON's null, for a number that is infinite or NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
