"""Colors that are seen together are told apart, also with color vision deficiencies."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from ddltrace import dashboard
from ddltrace.analyzer.report.palette import ROLES, SURFACES
from ddltrace.dashboard.timeline.tracks import Role

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
LEAST = 8  # CIEDE2000; 1 is just noticeable side by side
MEET = (
    ("compute", "update", "overlap", "exposed", "copy", "data", "idle"),  # a rank's step
    ("compute", "transfer", "wait", "update", "data", "copy", "host", "idle"),  # a critical path
    ("data", "overlap", "transfer", "host", "idle", "wait"),  # causes of idling
)
"""The roles of charts that meet."""

TIMELINE = tuple(role.name.lower() for role in Role)


def linear(color):
    channels = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def mixed(color, away, share):
    first, second = ([int(each[at : at + 2], 16) for at in (1, 3, 5)] for each in (color, away))
    return "#" + "".join(
        f"{round(a + (b - a) * share):02x}" for a, b in zip(first, second, strict=True)
    )


def lab(color, seen):
    """CIE L*a*b* of a color as somebody sees it."""
    xyz = TO_XYZ @ np.clip(SEEN[seen] @ linear(color), 0, 1) / TO_XYZ.sum(axis=1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def difference(first, second):
    """CIEDE2000 (Sharma, Wu and Dalal 2005) of two colors in L*a*b*."""
    far = 25.0**7
    mean = (np.hypot(*first[1:]) + np.hypot(*second[1:])) / 2
    wider = 1.5 - 0.5 * np.sqrt(mean**7 / (mean**7 + far))
    (l1, c1, h1), (l2, c2, h2) = (
        (light, np.hypot(a * wider, b), np.degrees(np.arctan2(b, a * wider)) % 360)
        for light, a, b in (first, second)
    )
    gray = c1 * c2 == 0
    turn = 0.0 if gray else (h2 - h1 + 180) % 360 - 180
    light, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    hue = h1 + h2 if gray else (h1 + turn / 2) % 360
    factors = ((1, -30, -0.17), (2, 0, 0.24), (3, 6, 0.32), (4, -63, -0.2))
    weight = 1 + sum(f * np.cos(np.radians(n * hue + shift)) for n, shift, f in factors)
    off = (light - 50) ** 2
    by_light = (l2 - l1) / (1 + 0.015 * off / np.sqrt(20 + off))
    by_chroma = (c2 - c1) / (1 + 0.045 * chroma)
    by_hue = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2)) / (1 + 0.015 * chroma * weight)
    blue = np.exp(-(((hue - 275) / 25) ** 2))
    bend = -2 * np.sqrt(chroma**7 / (chroma**7 + far)) * np.sin(np.radians(60 * blue))
    return np.sqrt(by_light**2 + by_chroma**2 + by_hue**2 + bend * by_chroma * by_hue)


@pytest.mark.parametrize(
    ("first", "second", "published"),
    [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((2.0776, 0.0795, -1.135), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_the_difference_is_the_published_one(first, second, published):
    assert difference(np.array(first), np.array(second)) == pytest.approx(published, abs=1e-4)


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("theme", ROLES)
def test_colors_that_meet_are_told_apart(theme, seen):
    for roles in MEET:
        for pair in itertools.combinations(roles, 2):
            first, second = (lab(ROLES[theme][role], seen) for role in pair)
            assert difference(first, second) >= LEAST, pair


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("theme", ROLES)
def test_colors_of_the_timeline_are_told_apart_in_all_their_shades(theme, seen):
    shades = shades_of_roles(theme)
    shades["canvas"] = [SURFACES[theme]["canvas"]]
    seen_as = {role: [lab(each, seen) for each in of_role] for role, of_role in shades.items()}
    for pair in itertools.combinations(seen_as, 2):
        for first, second in itertools.product(*(seen_as[role] for role in pair)):
            assert difference(first, second) >= LEAST, pair


def shades_of_roles(theme):
    """Role -> its lightest and its darkest color on the timeline, as its palette makes them."""
    script = (Path(dashboard.__file__).parent / "assets/timeline_palette.js").read_text()
    count, step = (
        float(re.search(rf"const {name} = ([0-9.]+);", script)[1]) for name in ("SHADES", "SHADE")
    )
    shaded = re.findall(r'"(\w+)"', re.search(r"SHADED = new Set\(\[(.*?)\]", script)[1])
    assert set(shaded) < set(TIMELINE)
    away = "#000000" if theme == "dark" else "#ffffff"
    colors = {}
    for role in TIMELINE:
        color = ROLES[theme][role]
        colors[role] = [color]
        if role in shaded:
            colors[role].append(mixed(color, away, (count - 1) * step))
    return colors
