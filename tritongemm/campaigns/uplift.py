"""Computes what a campaign gained: which kernels are kept, and how much of the log's time they save."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

LEAST_RATIO = 1.03  # A tuned kernel is kept if the reference takes at least this many times its time.


@dataclass(frozen=True)
class ComparedProduct:
    """A product of the log whose reference and tuned kernels were measured."""

    problem: str  # its key
    count: float  # calls in the log; 0 of a product that another campaign's results brought
    kernel_reference: str  # config of what runs untuned
    kernel_tuned: str  # config of what the campaign found
    # Seconds of one launch each, a tuple for each process that took them.
    samples_reference: tuple[tuple[float, ...], ...] = ()
    samples_tuned: tuple[tuple[float, ...], ...] = ()  # the same; none where the kernel is the reference's own
    error_reference: float | None = None  # largest deviation from the float64 reference; None where it was not verified
    error_tuned: float | None = None  # the same of the tuned kernel
    tolerance: float | None = None  # largest error that the family allows
    failure: str = ""  # why it could not be compared; "" where it was
    # What else the list of products says of it, by column.
    columns: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @property
    def kernel_changed(self) -> bool:
        """Whether the campaign found another kernel than the reference."""
        return self.kernel_tuned != self.kernel_reference

    @property
    def reference_seconds(self) -> float | None:
        """The median of the processes' medians, in seconds; None where the reference was not measured."""
        return _median_of_medians(self.samples_reference)

    @property
    def tuned_seconds(self) -> float | None:
        """The median of the tuned kernel's processes, in seconds; the reference's where the kernel did not change."""
        return _median_of_medians(self.samples_tuned) if self.kernel_changed else self.reference_seconds

    @property
    def ratio(self) -> float | None:
        """The reference's time over the tuned one; None where one of them was not measured."""
        reference, tuned = self.reference_seconds, self.tuned_seconds
        return None if reference is None or tuned is None else reference / tuned

    @property
    def total_seconds(self) -> float:
        """The calls times the reference's seconds, which weight the product; 0 where that was not measured."""
        return self.count * (self.reference_seconds or 0.0)

    @property
    def saved_seconds(self) -> float:
        """The calls times the seconds that one saves; 0 where one of the two was not measured."""
        reference, tuned = self.reference_seconds, self.tuned_seconds
        return 0.0 if reference is None or tuned is None else self.count * (reference - tuned)


def _median_of_medians(samples: Iterable[Sequence[float]]) -> float | None:
    medians = [median(taken) for taken in samples if taken]
    return median(medians) if medians else None


def drop_reason(product: ComparedProduct) -> str:
    """Return why the tuned kernel of a measured product is not kept; "" where it is."""
    error, tolerance, ratio = product.error_tuned, product.tolerance, product.ratio
    if product.failure:
        return product.failure
    if not product.kernel_changed:
        return "the kernel did not change: the reference won the tuning"
    if error is None or tolerance is None:
        return "the tuned kernel was not verified"
    if not error <= tolerance:
        return f"error {error:.3g} is more than the {tolerance:.3g} that the family allows"
    if ratio is None:
        return "it was not measured"
    return "" if ratio >= LEAST_RATIO else f"ratio {ratio:.3f} is less than {LEAST_RATIO:g}"


@dataclass(frozen=True)
class CampaignUplift:
    """What the kept kernels gain, as fractions."""

    kept: int  # number of kept products
    compared: int  # number of all
    average: float = 0.0  # mean of ratio - 1 over the kept
    geometric: float = 0.0  # geometric mean of the ratios, less 1
    weighted: float = 0.0  # share of the total time that they save
    share: float = 0.0  # of the total time that the kept products took before

    def describe(self) -> str:
        """Return a line with the gains as fractions of the GEMM time."""
        return (
            f"{self.kept} of {self.compared} GEMMs kept, which took {self.share:.2%} of the GEMM time; average uplift "
            f"{self.average:.2%}, geometric {self.geometric:.2%}; time-weighted uplift {self.weighted:.2%} of the GEMM "
            f"time is saved (all of it runs {1 / (1 - self.weighted):.3f} times as fast)"
        )


def summarise(
    kept: Sequence[ComparedProduct], every: Sequence[ComparedProduct], rest_seconds: float = 0.0
) -> CampaignUplift:
    """Return the uplift of those products that are kept, of `every` one that was compared.

    The weighted uplift is hipBLASLt's TuningDriver's: the sum over the kept of ``share * (1 - 1 / ratio)``, where the
    share is of calls times the reference's time. It says how much of the time is saved, so that it can't reach 1.
    `rest_seconds` is calls times time of what was not compared, such as what a threshold cut off.
    """
    ratios = [product.ratio for product in kept if product.ratio is not None]
    total = rest_seconds + math.fsum(product.total_seconds for product in every)
    if not ratios:
        return CampaignUplift(0, len(every))
    return CampaignUplift(
        len(kept),
        len(every),
        fmean(ratio - 1 for ratio in ratios),
        math.exp(fmean(map(math.log, ratios))) - 1,
        math.fsum(product.saved_seconds for product in kept) / total if total else 0.0,
        math.fsum(product.total_seconds for product in kept) / total if total else 0.0,
    )


def percent_of_total(totals: Sequence[float]) -> list[float]:
    """Return each total in percent of their sum; zeros where that is 0."""
    total = math.fsum(totals)
    return [100 * one / total if total else 0.0 for one in totals]
