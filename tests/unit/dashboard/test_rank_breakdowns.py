"""The breakdown of a rank's time: known values."""

import pytest


def test_known_values(opened):
    (found,) = (row for row in opened.breakdowns if row.rank == 0)
    # Forward 25 ms and backward 50 ms less its wait of 18 ms; messages from 41 to 78 ms.
    assert found.parts_us == {
        "compute": pytest.approx((25 + 11 + 2) * 1e3),
        "update": pytest.approx(10e3),
        "overlap": pytest.approx(19e3),
        "exposed": pytest.approx(18e3),
        "copies": 0,
        "data": pytest.approx(5e3),
        "idle": pytest.approx(10e3),
    }
