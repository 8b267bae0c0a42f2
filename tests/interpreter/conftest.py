"""Every process of this part interprets, and hastens the interpreter first."""

import pytest
from common.hastened import hasten_interpreter


@pytest.fixture(scope="session", autouse=True)
def hastened():
    with pytest.MonkeyPatch.context() as patch:
        hasten_interpreter(patch)
        yield
