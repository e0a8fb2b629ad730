"""How many examples the property tests draw: the one place that decides.

The numbers in the tests are for CI: few, because many suites draw the same cases for other backends
and builds. ``FASTEMB_THOROUGH=1`` draws ten times as many, for whoever changes a kernel.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

TIMES = 10 if os.environ.get("FASTEMB_THOROUGH") == "1" else 1


def drawn(number: int, **options: Any) -> settings:
    """Settings of a property test that draws ``number`` examples.

    Fixtures are the same for all examples; large cases are slow, or filtered out.
    """
    return settings(
        max_examples=number * TIMES,
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.filter_too_much,
            HealthCheck.too_slow,
        ],
        **options,
    )
