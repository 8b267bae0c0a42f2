"""Whatever hypothesis draws is held to the contract: the same examples in every run, other ones with CCE_FUZZ_SEED."""

import os

import pytest
from common.poison import poisoned_memory  # noqa: F401
from common.strategies import cases
from helpers import DEVICE, INTERPRET, check, pick
from hypothesis import HealthCheck, Phase, given, seed, settings

PARTS = 8
EXAMPLES = int(os.environ.get("CCE_FUZZ_EXAMPLES", pick(2000, 200)))
FIRST_SEED = int(os.environ.get("CCE_FUZZ_SEED", 0)) * PARTS


def least_workspace(cce, case, needs):
    """The planner's minimum for this call."""
    v = case.options["vocab_size"] or case.c.shape[0]
    device = "cuda" if INTERPRET or DEVICE == "cuda" else "cpu"
    needs = {f"need_d{name}": name in needs for name in ("e", "c", "bias")}
    with pytest.raises(ValueError, match="workspace") as error:
        cce.plan(case.targets.numel(), v, case.c.shape[1], case.e.dtype, device=device, workspace=-1, **needs)
    return max(int(word) for word in str(error.value).split() if word.isdigit())


@pytest.mark.parametrize("part", range(PARTS))
def test_fuzz(cce, part):
    @seed(FIRST_SEED + part)
    @settings(
        max_examples=EXAMPLES // PARTS,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(cases())
    def holds(drawn):
        function, case, needs, narrow = drawn
        if narrow:
            case = case.but(workspace=least_workspace(cce, case, needs))
        check(cce, case, function, needs)

    holds()
