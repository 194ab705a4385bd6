"""The palette of the HTML report and the dashboard: colors by role."""

from __future__ import annotations

from typing import Final, Literal

Theme = Literal["light", "dark"]
DEFAULT_THEME: Final[Theme] = "light"

SURFACES: Final[dict[Theme, dict[str, str]]] = {
    "light": {
        "page": "#f5f6f8",
        "surface": "#fafbfc",
        "card": "#ffffff",
        "canvas": "#ffffff",
        "stripe": "#f3f5f8",
        "line": "#e1e5eb",
        "strong-line": "#cbd2dc",
        "ink": "#1a2230",
        "soft": "#5f6b7c",
        "accent": "#2f6fdb",
        "accent-ground": "#e8f0fd",
        "gain": "#1f7a6d",
        "alarm": "#c53030",
        "alarm-ground": "#fdeeec",
        "caution": "#b7791f",
        "caution-ground": "#fff7e0",
        "shadow": "0 1px 2px rgba(20, 30, 50, 0.05), 0 2px 8px rgba(20, 30, 50, 0.04)",
    },
    "dark": {
        "page": "#0f1319",
        "surface": "#151a22",
        "card": "#181e27",
        "canvas": "#11161d",
        "stripe": "#161c25",
        "line": "#27303c",
        "strong-line": "#3a4656",
        "ink": "#e3e8ef",
        "soft": "#94a1b2",
        "accent": "#6ea8fe",
        "accent-ground": "#1c2b45",
        "gain": "#45b8a7",
        "alarm": "#ff8585",
        "alarm-ground": "#3a1d20",
        "caution": "#dfb34d",
        "caution-ground": "#332b17",
        "shadow": "0 1px 2px rgba(0, 0, 0, 0.4), 0 2px 10px rgba(0, 0, 0, 0.25)",
    },
}

# Colors that are seen together differ by 8 or more (CIEDE2000), also with color blindness; a test
# checks it. To change one, search for others: few pairs have room.
ROLES: Final[dict[Theme, dict[str, str]]] = {
    "light": {
        # Parts of a step.
        "compute": "#2b6fd5",
        "overlap": "#319177",
        "transfer": "#f1cc07",
        "exposed": "#c72943",
        "wait": "#b2357f",
        "update": "#a486fa",
        "data": "#695707",
        "host": "#979a9a",
        "idle": "#e6ddd3",
        "muted": "#98a3af",
        # Intervals of the dashboard's timeline.
        "step": "#cbd6dd",
        "forward": "#4392c3",
        "layer": "#b3d6fa",
        "backward": "#3c4eb2",
        "marker": "#836c5b",
        "codec": "#7a965a",
        "gradient": "#d75aa5",
        "collective": "#ef8d29",
        "p2p": "#af6406",
        "unfinished": "#841226",
        "kernel": "#47b981",
        "copy": "#80a9c8",
        # Colors that distinguish items of one kind.
        "series-0": "#3b7dc4",
        "series-1": "#e08a3c",
        "series-2": "#2f9e8f",
        "series-3": "#cf4a5a",
        "series-4": "#8a67c0",
        "series-5": "#b39b2e",
        "scale-low": "#e3edf8",
        "scale-high": "#1f5a9c",
    },
    "dark": {
        "compute": "#3999fa",
        "overlap": "#2ebbad",
        "transfer": "#f4d80f",
        "exposed": "#f85f8b",
        "wait": "#bf6aa8",
        "update": "#c296cf",
        "data": "#8d7a05",
        "host": "#8b8a84",
        "idle": "#545d64",
        "muted": "#6f7c8b",
        "step": "#344257",
        "forward": "#0dc2fa",
        "layer": "#2762ac",
        "backward": "#5f6dec",
        "marker": "#c9a170",
        "codec": "#c1d27b",
        "gradient": "#f7b2d8",
        "collective": "#faa037",
        "p2p": "#9a4c07",
        "unfinished": "#cc2849",
        "kernel": "#0e7f4f",
        "copy": "#a7ecca",
        "series-0": "#5b9be0",
        "series-1": "#eb9c54",
        "series-2": "#45b8a7",
        "series-3": "#e5687a",
        "series-4": "#a586d8",
        "series-5": "#cdb548",
        "scale-low": "#1f2c3b",
        "scale-high": "#7db4f0",
    },
}


def contrast(first: str, second: str) -> float:
    """Returns the contrast ratio of two colors, 1 to 21, as WCAG 2 defines it."""
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


def ink_on(colour: str) -> str:
    """Returns black or white, whichever has more contrast on a color."""
    return max("#000000", "#ffffff", key=lambda ink: contrast(ink, colour))


def _luminance(colour: str) -> float:
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(c * weight for c, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def style_sheet() -> str:
    """Returns the palette of both themes as CSS variables, one per surface and role."""
    rules = []
    for theme, roles in ROLES.items():
        selector = ":root" if theme == DEFAULT_THEME else f':root[data-theme="{theme}"]'
        colours = SURFACES[theme] | roles
        lines = [f"color-scheme: {theme};", *(f"--{name}: {colours[name]};" for name in colours)]
        rules.append(f"{selector} {{ {' '.join(lines)} }}")
    return "\n".join(rules)
