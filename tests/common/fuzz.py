"""Whatever hypothesis draws is held to the contract: the same examples in every run, other ones with CCE_FUZZ_SEED."""

import os

import pytest
from common.draws import least_workspace
from common.poison import poisoned_memory  # noqa: F401
from common.strategies import cases
from helpers import PLANNED_FOR, check, pick
from hypothesis import HealthCheck, Phase, given, seed, settings

PARTS = 8
EXAMPLES = int(os.environ.get("CCE_FUZZ_EXAMPLES", pick(2000, 200)))
FIRST_SEED = int(os.environ.get("CCE_FUZZ_SEED", 0)) * PARTS


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
            case = case.but(workspace=least_workspace(cce, case, needs, PLANNED_FOR))
        check(cce, case, function, needs)

    holds()
