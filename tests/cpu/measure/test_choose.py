"""Who wins a race: clear wins, ties, noise and drift, on seeded samples whose truth is known."""

import itertools
from statistics import median
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.nouns import BASELINE_ENTRY, cases, each
from tritongemm.measure.choose import MARGIN, Choice, choose, decided, faster, still_racing
from tritongemm.measure.race import BRIEF_ROUNDS

ROUNDS = 40


def race(
    seed: int = 0, rounds: int = ROUNDS, noise: float = 0.02, drift: float = 0.0, **truth: float
) -> dict[str, list[float]]:
    """Samples of entries with these true times; `library` is the library. Drift slows every round a little more."""
    rng = np.random.default_rng(seed)
    slower = 1 + drift * np.arange(rounds) / rounds
    return {
        BASELINE_ENTRY if name == "library" else name: list(
            time * slower * (1 + noise * np.abs(rng.standard_normal(rounds)))
        )
        for name, time in truth.items()
    }


SAME = [1e-5] * 20
WITHIN = race(noise=1e-6, ours=1e-5, library=1e-5 * (1 + MARGIN / 2))  # faster without doubt, by less than the margin


@cases(
    (race(ours=1e-5, slow=2e-5, library=1.2e-5), Choice("ours", library_won=False, tie=False)),
    (race(ours=1.2e-5, slow=2e-5, library=1e-5), Choice("ours", library_won=True, tie=False)),
    (race(b=2e-5, a=1e-5), Choice("a", library_won=False, tie=False)),
    ({"a": SAME, BASELINE_ENTRY: SAME}, Choice("a", library_won=True, tie=True)),
    ({"a": [*SAME[1:], 1e-7], BASELINE_ENTRY: SAME}, Choice("a", library_won=True, tie=True)),  # a lucky sample
    (WITHIN, Choice("ours", library_won=True, tie=True)),
)
def test_who_wins(samples: dict[str, list[float]], choice: Choice, /) -> None:
    assert choose(samples) == choice


def test_the_margin_is_the_callers_and_few_rounds_prove_nothing() -> None:
    assert faster(WITHIN["ours"], WITHIN[BASELINE_ENTRY])
    assert choose(WITHIN, margin=0.0) == Choice("ours", library_won=False, tie=False)
    assert choose(race(noise=1e-6, ours=1e-5, library=1.2e-5), margin=0.5).library_won
    assert not faster([1.0] * 4, [2.0] * 4)
    assert faster([1.0 + i / 100 for i in range(8)], [2.0 + i / 100 for i in range(8)])
    samples = race(rounds=BRIEF_ROUNDS, noise=0.005, ours=1e-5, algorithm=1.05e-5)
    assert choose(samples, libraries={"algorithm"}).name == "ours"


@cases(
    ({"kernel": 1e-5, "quick": 1.002e-5, "slow": 2e-5, "library": 3e-5}, {"quick", "slow"}, ("quick", False)),
    ({"kernel": 1e-5, "slow": 2e-5, "library": 3e-5}, {"slow"}, ("kernel", False)),
    ({"quick": 1e-5, "slow": 2e-5}, {"quick", "slow"}, ("quick", False)),  # no kernel of ours
    ({"kernel": 2e-5, "quick": 1e-5, "library": 3e-5}, {"quick"}, ("quick", False)),
    # One that stands in for the kernel must beat PyTorch's call by the margin itself.
    ({"kernel": 1e-5, "near": 1.003e-5, "library": 1.006e-5}, {"near"}, ("near", True)),
    ({"kernel": 1e-5, "near": 1.003e-5, "library": 1.006e-5}, set(), ("kernel", False)),
)
def test_the_best_algorithm_of_a_library_counts(
    truth: dict[str, Any], libraries: set[str], choice: tuple[str, bool], /
) -> None:
    found = choose(race(noise=1e-6, **truth), libraries=libraries)
    assert (found.name, found.library_won) == choice and found.tie == found.library_won


@each("seed", range(1, 6))
def test_equal_times_are_a_tie_and_go_to_the_library(seed: int) -> None:
    choice = choose(race(seed, ours=1e-5, library=1e-5))
    assert choice.library_won and choice.tie


def test_the_margin_protects_the_librarys_best_algorithm() -> None:
    """A kernel that is faster without doubt, but by less than the margin, is not worth leaving the library for."""
    samples = race(noise=1e-6, kernel=1e-5, algorithm=1e-5 * (1 + MARGIN / 2), library=2e-5)
    assert faster(samples["kernel"], samples["algorithm"]) and faster(samples["algorithm"], samples[BASELINE_ENTRY])
    kept = Choice("algorithm", library_won=False, tie=False)
    assert choose(samples, libraries={"algorithm"}) == kept
    assert choose(samples, margin=0.0, libraries={"algorithm"}).name == "kernel"
    assert choose(samples).name == "kernel", "between two of ours the median decides"
    brief = {"first": (1.0, 1.2, *[1.0] * 5), "second": (1.01,) * 7, "algorithm": (1.1,) * 7}
    assert choose(brief, libraries={"algorithm"}).name == "second"
    far = race(noise=1e-6, kernel=1e-5, algorithm=1e-5 * (1 + 2 * MARGIN), library=2e-5)
    assert choose(far, libraries={"algorithm"}) == Choice("kernel", library_won=False, tie=False)
    assert choose(far, margin=0.05, libraries={"algorithm"}) == kept


@each("seed", range(1, 6))
def test_a_tie_with_an_algorithm_goes_to_it(seed: int) -> None:
    samples = race(seed, kernel=1e-5, algorithm=1e-5, library=2e-5)
    assert choose(samples, margin=0.0, libraries={"algorithm"}).name == "algorithm"
    assert choose(race(seed, kernel=1e-5, algorithm=1e-5), libraries={"algorithm"}).name == "algorithm"


def test_an_algorithm_that_left_the_race_early_was_beaten() -> None:
    """Too few of its rounds are left for a test, but it left because it was clearly slower; the margin still counts."""
    samples = race(noise=0.001, kernel=1e-5, algorithm=1.2e-5, library=2e-5)
    samples["algorithm"] = samples["algorithm"][:2]
    assert not faster(samples["kernel"], samples["algorithm"])
    assert choose(samples, libraries={"algorithm"}).name == "kernel"
    assert choose(samples, margin=0.5, libraries={"algorithm"}).name == "algorithm"


def test_drift_meets_both() -> None:
    """Clocks that slow by half during the race hide a 2 % gain from unpaired samples, not from paired ones."""
    samples = race(noise=0.005, drift=0.5, ours=1e-5, library=1.02e-5)
    assert max(samples["ours"]) > 1.4 * min(samples[BASELINE_ENTRY])
    assert choose(samples) == Choice("ours", library_won=False, tie=False)
    shuffled = {**samples, BASELINE_ENTRY: samples[BASELINE_ENTRY][::-1]}
    assert choose(shuffled).tie, "the same samples in other rounds decide nothing"


def test_false_wins_are_rare() -> None:
    """Of 200 races between equals, about one in a hundred is called; most of those stay under the margin."""
    wins = sum(
        not choose(race(seed, noise=0.01, ours=1e-5, library=1e-5), margin=0.0).library_won for seed in range(200)
    )
    assert wins <= 8


def test_one_sign_in_a_hundred_is_beyond_the_noise() -> None:
    """Of the 1024 ways in which ten rounds can go, those ten of which the slower rounds have the least ranks."""
    ways = list(itertools.product((0, 1), repeat=10))
    called = [
        way
        for way in ways
        if faster(
            [100.0 + i * up for i, up in enumerate(way, 1)], [100.0 + i * (not up) for i, up in enumerate(way, 1)]
        )
    ]
    assert called == [way for way in ways if sum(i * up for i, up in enumerate(way, 1)) <= 5] and len(called) == 10


@each(("rounds", "most"), [(10, 0), (60, 20)])
def test_equal_distances_share_their_ranks(rounds: int, most: int) -> None:
    """The probability of 20 slower rounds of 60 is 0.0049 by SciPy's test, that of 21 is 0.0101."""
    for slower in (most, most + 1):
        assert faster([2.0] * slower + [1.0] * (rounds - slower), [1.0] * slower + [2.0] * (rounds - slower)) == (
            slower == most
        )


def test_who_stays_in_the_race_and_when_more_rounds_change_nothing() -> None:
    samples = race(best=1e-5, close=1e-5, equal=1e-5, slow=1.2e-5, library=5e-5, seed=1)
    assert still_racing(samples) == {"best", "close", "equal", BASELINE_ENTRY}
    assert still_racing(race(best=1e-5, slow=2e-5, slower=3e-5)) == {"best", "slow"}, "two of ours always"
    assert still_racing({BASELINE_ENTRY: [1e-5] * 9}) == {BASELINE_ENTRY}
    assert decided(race(best=1e-5, next=1.2e-5, library=2e-5))
    assert decided(race(best=1e-5, next=1.2e-5, library=5e-6)), "distinct from the library on either side"
    assert not decided(race(1, best=1e-5, next=1e-5, library=2e-5))
    assert not decided(race(best=1e-5, next=1.2e-5, library=1e-5))
    assert decided(race(best=1e-5)) and decided({BASELINE_ENTRY: [1e-5] * 9})
    assert not decided(race(rounds=3, best=1e-5, next=2e-5)), "too early to decide"


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c", BASELINE_ENTRY]), st.lists(st.floats(1e-7, 1e-3), min_size=1, max_size=12)
    )
)
def test_any_samples_have_an_outcome(samples: dict[str, list[float]]) -> None:
    """Never both won and tied; the name is one of ours; races of uneven length are compared where they overlap."""
    ours = samples.keys() - {BASELINE_ENTRY}
    assert still_racing(samples) <= samples.keys()
    decided(samples)
    if ours:
        choice = choose(samples)
        assert choice.name in ours and choice.name in still_racing(samples)
        for library in ours:
            stands = choose(samples, libraries={library})
            assert median(samples[stands.name]) <= median(samples[library]), "the library or a faster kernel"
            assert not stands.tie or stands.library_won
        assert (not choice.tie or choice.library_won) and (BASELINE_ENTRY in samples or not choice.library_won)
