"""What a server's times are without and with a table, how sure their ratios are, and the JSON file that keeps it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

from tritongemm.core.errors import InputError
from tritongemm.core.values import MAP, NATURAL, POSITIVE, TEXT, FieldKind, Natural, kinds_of, list_of, map_of, require

KIND = "comparison of a server"  # how the file begins
RATES = ("tokens_per_s",)  # quantities of which more is better
QUANTITIES = {"step_ms": "step ms", "tpot_ms": "TPOT ms", "ttft_ms": "TTFT ms", "tokens_per_s": "tokens/s"}
_SHARE = FieldKind("a number from 0 to 1", lambda v: isinstance(v, int | float) and 0 <= v <= 1)
_NUMBER = FieldKind("a number", lambda v: isinstance(v, int | float))
_FIELDS = {
    "command": list_of(TEXT),
    "table": TEXT,
    "model": TEXT,
    "served": list_of(TEXT),
    "loads": list_of(MAP),
    "start_s": map_of(list_of(POSITIVE), most=2),
}
_LOAD_FIELDS = {"name": TEXT, "m": NATURAL, "predicted": FieldKind("a positive number, or null",
                lambda v: v is None or POSITIVE.holds(v)), "quantities": MAP}  # fmt: skip
_TIMES = {"without": list_of(POSITIVE, most=1000), "with": list_of(POSITIVE, most=1000)}


class Gain(NamedTuple):
    """How much faster a server is with a table: above 1, the table gains."""

    ratio: float  # the median over all pairs of a start without and a start with the table
    # least, most: of those pairs
    least: float
    most: float


@dataclass(frozen=True)
class Quantity:
    """One quantity of one load, a value for each start of the server."""

    name: str  # a key of `QUANTITIES`
    # without, served: the values without and with the table
    without: Sequence[float]
    served: Sequence[float]

    @property
    def gain(self) -> Gain:
        """The speed with the table over that without."""
        ratios = [b / a if self.name in RATES else a / b for a in self.without for b in self.served]
        return Gain(median(ratios), min(ratios), max(ratios))

    @property
    def noise(self) -> float | None:
        """How far starts without the table are apart, as a share of their median; None after one start."""
        return _spread(self.without)

    @property
    def is_sure(self) -> bool:
        """Whether the gain is more than twice what starts of one kind differ by, and every pair is on its side of 1.

        Values without any gain, of a normal distribution, pass in 7 of 100 cases with two starts each, and in 1 of 200
        with three.
        """
        ratio, least, most = self.gain
        spreads = _spread(self.without), _spread(self.served)
        return None not in spreads and (least > 1 or most < 1) and abs(ratio - 1) > 2 * max(s or 0.0 for s in spreads)


def _spread(values: Sequence[float]) -> float | None:
    return (max(values) - min(values)) / median(values) if len(values) > 1 else None


@dataclass(frozen=True)
class ComparedLoad:
    """A load, with all that was measured of it."""

    name: str  # such as `batch 16`
    m: int  # the M of most products
    quantities: tuple[Quantity, ...]  # in the order of `QUANTITIES`
    # The library's time of the products at this M over that of what the table serves; None where the table does not
    # say.
    predicted: float | None = None


@dataclass(frozen=True)
class Agreement:
    """How alike greedy answers of two starts are."""

    answers: Natural  # how many were compared
    equal: Natural  # how many of them have the same tokens
    share: Annotated[float, _SHARE]  # of all tokens, those before the first difference of their answer
    logprob: Annotated[float, _NUMBER]  # the largest difference of the logarithms of the probabilities of such tokens

    def __str__(self) -> str:
        return (
            f"{self.equal} of {self.answers} answers are the same, {self.share:.1%} of the tokens come before a first "
            f"difference, log probabilities differ by up to {self.logprob:.2g}"
        )


@dataclass(frozen=True)
class ServerComparison:
    """A server without and with a table."""

    command: Sequence[str]  # that started it
    table: str  # as in TRITONGEMM_CONFIG
    model: str  # that it served
    loads: tuple[ComparedLoad, ...]  # what it was sent
    # Of starts, by which were compared; empty where the server returns no tokens.
    agreement: Mapping[str, Agreement] = field(default_factory=dict)
    served: Sequence[str] = ()  # what its log says about the rows that serve
    # Seconds until each start answered, of A without and of B with the table.
    start_s: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the text of a file, with what follows from the values beside them."""
        loads = [
            {
                "name": load.name,
                "m": load.m,
                "predicted": load.predicted,
                "quantities": {
                    one.name: {"without": one.without, "with": one.served, "noise": one.noise, **one.gain._asdict()}
                    for one in load.quantities
                },
            }
            for load in self.loads
        ]
        agreement = {name: one.__dict__ for name, one in self.agreement.items()}
        return json.dumps({"kind": KIND, **self.__dict__, "loads": loads, "agreement": agreement}, indent=1) + "\n"


def is_comparison(start: bytes) -> bool:
    """Return whether a file that begins so is empty, or such a comparison."""
    return not start or start.lstrip().startswith(f'{{\n "kind": "{KIND}"'.encode())


def read_comparison(path: Path, text: str) -> ServerComparison:
    """Return the comparison of a file. Raises InputError: it is none; names the file and the field."""
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("kind") != KIND:
            raise InputError("it is not JSON that tritongemm compare-server -o wrote")
        require(data, _FIELDS)
        agreement = {name: _read_agreement(one) for name, one in data["agreement"].items()}
        loads = tuple(map(_read_load, data["loads"]))
        fields = (data["command"], data["table"], data["model"])
        return ServerComparison(*fields, loads, agreement, data["served"], data["start_s"])
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except ValueError as error:
        raise InputError(f"{path}: it is not JSON that tritongemm compare-server -o wrote: {error}") from None
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: it is not JSON that tritongemm compare-server -o wrote ({error!r})") from None


def _read_load(data: Mapping[str, Any]) -> ComparedLoad:
    require(data, _LOAD_FIELDS)
    quantities = []
    for name in QUANTITIES:
        times = data["quantities"][name]
        require(times, _TIMES)
        if not times["without"] or not times["with"]:
            raise InputError(f"{data['name']}: {name} has no value")
        quantities.append(Quantity(name, times["without"], times["with"]))
    return ComparedLoad(data["name"], data["m"], tuple(quantities), data["predicted"])


def _read_agreement(data: Mapping[str, Any]) -> Agreement:
    kinds = kinds_of(Agreement)
    require(data, kinds)
    return Agreement(**{name: data[name] for name in kinds})


# Greedy tokens of an answer, and the logarithms of their probabilities.
Answer = tuple[Sequence[str], Sequence[float]]


def compare_answers(pairs: Sequence[tuple[Answer, Answer]]) -> Agreement:
    """Return how alike answers to the same prompts are, pair by pair."""
    equal = same = total = 0
    largest = 0.0
    for (mine, my_logprobs), (other, other_logprobs) in pairs:
        common = next(
            (i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other))
        )
        equal, same, total = equal + (mine == other), same + common, total + max(len(mine), len(other))
        differences = [abs(a - b) for a, b in zip(my_logprobs[:common], other_logprobs[:common], strict=False)]
        largest = max([largest, *differences])
    return Agreement(len(pairs), equal, same / max(total, 1), largest)


def agreements(without: Sequence[Sequence[Answer]], served: Sequence[Sequence[Answer]]) -> dict[str, Agreement]:
    """Return how alike the answers of starts without and with a table are, and those of starts without it."""
    mixed = [pair for a, b in zip(without, served, strict=False) for pair in zip(a, b, strict=True)]
    alike = [pair for a, b in pairwise(without) for pair in zip(a, b, strict=True)]
    found = {"A against B": mixed, "A against A": alike}
    return {name: compare_answers(pairs) for name, pairs in found.items() if any(a[0] for a, _ in pairs)}
