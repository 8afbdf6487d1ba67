from __future__ import annotations

import pytest

import fp8booster.colossal  # noqa: F401  (mends colossalai before it is imported)
from fp8booster import FP8Config
from fp8booster.plugins.arguments import warn_of_fused


class Log(list):
    def warning(self, sentence: str, ranks: list[int]) -> None:
        self.append(sentence)


@pytest.mark.parametrize(("fused", "use_fp8"), [(True, True), (True, False), (False, True)])
def test_a_plugin_that_does_not_fuse_says_so(fused: bool, use_fp8: bool) -> None:
    said = Log()
    warn_of_fused(FP8Config(fused=fused), use_fp8, said)
    assert ["fp8_config.fused has no effect" in sentence for sentence in said] == [True] * (fused and use_fp8)
