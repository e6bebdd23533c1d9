"""What the sweep for lost messages remembers of a queue, at every setting; its work is tested on real servers."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime, timedelta

import pytest

from bridge.sweeps import _newest_of_age, _Sample


@pytest.mark.parametrize("lost_after", [1, 3, 60, 224, 300, 3600, 86400])
def test_a_sample_of_the_age_that_is_asked_for_is_always_kept(lost_after: int) -> None:
    age, every = timedelta(seconds=lost_after), timedelta(seconds=min(lost_after / 4, 15) + 1)
    samples: deque[_Sample] = deque()
    at = start = datetime(2026, 1, 1, tzinfo=UTC)
    while at < start + 4 * age + 4 * every:
        samples.append(_Sample(at, 0, {}))
        found = _newest_of_age(samples, at - age)
        if at - start >= age:
            assert found is not None
            assert age <= at - found.at < age + every
        else:
            assert found is None
        assert len(samples) <= age / every + 3
        at += every
