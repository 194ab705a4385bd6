"""A late rank is found in every operation, as root and as leaf: programs whose cause is known."""

from __future__ import annotations

import itertools
import random
import tempfile
from pathlib import Path

import pytest
from support import programs

STEPS = 6
OPS = ("broadcast", "scatter", "gather", "reduce", "all_reduce", "all_gather", "barrier")
KIND = {"forward": "compute", "backward": "compute"}


def _analyzed(build_class, program):
    played = programs.run(program)
    with tempfile.TemporaryDirectory() as folder:
        built = build_class(Path(folder) / "trace", len(program))
        programs.write(built, played)
        return played, built.trace().analyze()


def _cases(op):
    """Three to six ranks, each late in turn, with one of the activities and a random root."""
    chance = random.Random(op)
    late = [(ranks, rank) for ranks in range(3, 7) for rank in range(ranks)]
    for (ranks, rank), part in zip(late, itertools.cycle(programs.ACTIVITIES), strict=False):
        root = chance.choice([rank, chance.randrange(ranks)])
        yield ranks, rank, part, root, chance.randint(400, 1500)


@pytest.mark.parametrize("op", OPS)
def test_a_late_rank_is_found_with_its_activity_and_what_it_costs(build_class, op):
    tight = []
    for seed, (ranks, rank, part, root, extra) in enumerate(_cases(op)):
        program = programs.with_collective(
            seed, ranks=ranks, steps=STEPS, op=op, root=root, late=(rank, part), extra=extra
        )
        played, analysis = _analyzed(build_class, program)
        again = programs.run(programs.without_cause(program, "fault"))
        truth = (played.end() - played.end_of(0) - again.end() + again.end_of(0)) / (STEPS - 1)
        main, finding = analysis.root_causes[0], analysis.findings[0]
        case = (op, ranks, rank, part, root, extra)
        activity = KIND.get(part, part)
        assert (main.rank, main.activity) == (rank, activity), case
        assert (finding.kind, finding.rank) == ("straggler", rank), case
        assert f"rank {rank}" in finding.evidence
        assert activity in finding.evidence, case
        assert finding.saves_us >= truth - 2, case
        tight.append(finding.saves_us <= 1.05 * truth + 2)
    assert sum(tight) >= 0.95 * len(tight), op
