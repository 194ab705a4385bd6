"""Adjacent colours are distinguishable, also with colour vision deficiencies."""

import itertools

import numpy as np
import pytest

from ddltrace.analyzer.report.palette import ROLES

# Machado, Oliveira and Fernandes 2009: what is left of linear RGB at full severity.
SEEN = {
    "all": np.eye(3),
    "no red": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "no green": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "no blue": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
HARD_TO_TELL = 10
MEET = (
    ("compute", "update", "overlap", "exposed", "copy", "data", "idle"),  # a rank's step
    ("compute", "transfer", "wait", "update", "data", "copy", "host", "idle"),  # a critical path
    ("data", "overlap", "transfer", "host", "idle", "wait"),  # causes of idling
    ("forward", "backward", "update", "data"),  # the timeline's computing
    ("collective", "p2p", "exposed", "unfinished", "wait"),  # and its communication
    ("collective", "data"),
)


def lab(colour, seen):
    """CIE L*a*b* of a colour as somebody sees it."""
    channels = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(SEEN[seen] @ linear, 0, 1) / TO_XYZ.sum(axis=1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("theme", ROLES)
def test_colours_that_meet_are_told_apart(theme, seen):
    for roles in MEET:
        for pair in itertools.combinations(roles, 2):
            first, second = (lab(ROLES[theme][role], seen) for role in pair)
            assert np.linalg.norm(first - second) > HARD_TO_TELL, pair
