"""Lists AITER's families of tuned configs: the columns of their CSVs, and their names here."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import DEFAULT_FAMILY

DEVICE = ("gfx", "cu_num")
_RESULT = ("us", "kernelName", "tflops", "bw", "errRatio")
_CK = ("kernelId", "splitK", *_RESULT)
_MIXED = ("libtype", *_CK)
# Names that columns have in older generations of the files, and in those of batches with scales in powers of two.
OTHER_NAMES = {"soltimes": "us", "err_ratio": "errRatio", "g": "B", "b": "B", "m": "M", "n": "N", "k": "K"}


@dataclass(frozen=True)
class CsvFamily:
    """A family of AITER's."""

    name: str  # what its files are called
    ours: str  # the family or variant of a family that computes the same; "" for layers with experts, whose rows say it
    keys: tuple[str, ...]  # columns that say what is computed; with `DEVICE` they distinguish rows
    results: tuple[str, ...]  # the columns after them
    words: tuple[str, ...]  # beginning of a file name's part that says the family
    runs: tuple[str, ...] = ()  # libraries whose kernels its rows can name by a name alone
    shuffled: str = ""  # ours for rows whose column bpreshuffle says True; "" where the family has no such column
    scaled: str = ""  # ours for rows whose column scaleAB says True, with one scale factor for A and one for B
    log2_split: bool = False  # columns of splits hold exponents of two for assembly kernels too
    dtype: str = ""  # of A and B, where no column says it; "" for that of our family
    scales: str = ""  # granularity of its scale factors; "" for that of our family
    remark: str = ""  # how its products differ from ours, for the user; "" for not at all

    @property
    def header(self) -> tuple[str, ...]:
        """Columns of a file of results as AITER writes it today."""
        return (*DEVICE, *self.keys, *self.results)

    def ignores(self, columns: Iterable[str]) -> list[str]:
        """Return the columns of a file of sizes of this family that do not affect its products."""
        return [name for name in _named(columns) if OTHER_NAMES.get(name, name) not in (*DEVICE, *self.keys)]

    @property
    def needed(self) -> tuple[str, ...]:
        """The keys without which a file of sizes is of another family, in any generation."""
        own = "bias", "dtype", "B"
        return EXPERT_SIZES if not self.ours else (*SIZES, *(key for key in own if key in self.keys))


SIZES = ("M", "N", "K")
EXPERT_SIZES = ("token", "model_dim", "expert")
_MOE = (
    *("token", "model_dim", "inter_dim", "expert", "topk", "act_type", "dtype", "q_dtype_a", "q_dtype_w", "q_type"),
    *(
        "use_g1u1",
        "doweight_stage1",
        "shared_expert_id",
        "hidden_pad",
        "intermediate_pad",
        "gate_mode",
        "max_m",
        "_tag",
    ),
)

# Of names that begin alike the longer goes first.
FAMILIES = (
    CsvFamily(
        "bf16",
        DEFAULT_FAMILY,
        (*SIZES, "bias", "dtype", "outdtype", "scaleAB", "bpreshuffle"),
        ("libtype", "solidx", "splitK", "us", "kernelName", "err_ratio", "tflops", "bw"),
        ("bf16",),
        runs=("asm", "hipblaslt", "torch"),
        shuffled="dense_bpreshuffle",
        scaled="a8w8",
    ),
    CsvFamily(
        "a8w8_blockscale_bpreshuffle", "a8w8_blockscale_bpreshuffle", SIZES, _MIXED,
        ("a8w8_blockscale_bpreshuffle",), runs=("asm",),
    ),
    CsvFamily("a8w8_blockscale", "a8w8_blockscale", SIZES, _MIXED, ("a8w8_blockscale",)),
    CsvFamily(
        "a8w8_bpreshuffle", "a8w8_bpreshuffle", (*SIZES, "q_dtype_w"), _MIXED, ("a8w8_bpreshuffle",), runs=("asm",)
    ),
    CsvFamily("a8w8", "a8w8", (*SIZES, "q_dtype_w"), _CK, ("a8w8",), dtype="int8"),
    CsvFamily("a4w4_blockscale", "a4w4_bpreshuffle", SIZES, _CK, ("a4w4",), runs=("asm",), log2_split=True),
    CsvFamily("batched_a8w8", "a8w8", ("B", *SIZES), _CK, ("a8w8",), dtype="int8"),
    CsvFamily(
        "batched_a8w8_blockscale_mxscale", "a8w8_blockscale", ("B", *SIZES), _MIXED, ("a8w8_blockscale_mxscale",),
        scales="block_rows", remark="AITER's scale factors are powers of two there; they are float32 in what is tuned",
    ),
    CsvFamily("batched_bf16", DEFAULT_FAMILY, ("B", *SIZES), _CK, ("bf16",), dtype="bf16"),
    CsvFamily("fmoe", "", _MOE, ("us",), ("fmoe", "fhmoe")),
)  # fmt: skip
_KEYS = frozenset(key for family in FAMILIES for key in family.keys)
_COLUMNS = _KEYS.union(DEVICE, OTHER_NAMES, *(family.results for family in FAMILIES))
_FIRST = ("gfx", "cu_num", "M", "B", "token")
_INDEX = "Unnamed: "  # pandas' name of a column without one, such as row numbers
_OF_RESULTS = {"us", "kernelName", "us1", "kernelName1"}
_OWN = {"token", "B", "bias"}  # keys that make another product of one which has them not


def own_names(columns: Iterable[str]) -> list[str]:
    """Return the columns by the names that they have in AITER's files of today."""
    return [OTHER_NAMES.get(name, name) for name in columns]


def is_header(columns: Sequence[str]) -> bool:
    """Return whether the first line of a file is one of AITER's, in any order where all columns are AITER's."""
    names = own_names(_named(columns))
    known = {*SIZES} <= {*names} or {*EXPERT_SIZES} <= {*names}
    return known and (names[0] in _FIRST or not unknown_columns(columns))


def unknown_columns(columns: Sequence[str]) -> list[str]:
    """Return the names in the first line of a file that none of AITER's files has, but for those of row numbers."""
    return [name for name in _named(columns) if name not in _COLUMNS]


def has_results(columns: Iterable[str]) -> bool:
    """Return whether a file is one of results, not of sizes."""
    return not _OF_RESULTS.isdisjoint(own_names(columns))


def _named(columns: Iterable[str]) -> list[str]:
    return [name for name in columns if name and not name.startswith(_INDEX)]


def fitting(columns: Iterable[str]) -> tuple[CsvFamily, ...]:
    """Return the families whose files may have these columns, of any generation."""
    names = {*own_names(columns)}
    has = names & _KEYS
    return tuple(family for family in FAMILIES if has <= {*family.keys} and _may_be(family, names))


def _may_be(family: CsvFamily, columns: set[str]) -> bool:
    """Return whether no column contradicts a family whose keys are all there."""
    if "libtype" in columns and "libtype" not in family.results:
        return False
    own = next((key for key in ("token", "B") if key in family.keys), "")
    if own:
        return own in columns
    if "solidx" in columns or "bias" in columns or "bias" in family.keys:
        return {"bias", "dtype"} <= columns and "bias" in family.keys
    return "q_dtype_w" not in columns or "q_dtype_w" in family.keys


def _containing(columns: Iterable[str]) -> tuple[CsvFamily, ...]:
    """Return the families whose sizes a file without results holds, beside columns that AITER's tuners pass over."""
    names = {*own_names(columns)}
    if has_results(columns):
        return ()
    return tuple(family for family in FAMILIES if names & _OWN <= {*family.needed} <= names)


def _named_in(path: Path, families: Iterable[CsvFamily]) -> list[CsvFamily]:
    """Return those of some families that a file's name names, by the longest of their words."""
    found, name = tuple(families), path.name.lower()
    words = {word for family in found for word in family.words if word in name}
    longest = {word for word in words if not any(word != other and word in other for other in words)}
    return [family for family in found if longest & {*family.words}]


def families_of_output(path: Path, columns: Collection[str], wanted: str) -> tuple[CsvFamily, ...]:
    """Return the families that results in a file may be of: by its columns, its name, and the user's word."""
    found = fitting(columns) if columns else FAMILIES
    named = _named_in(path, found)
    if not columns:
        named = [family for family in named if ("B" in family.keys) == ("batched" in path.name.lower())]
    asked = [family for family in found if wanted in (family.name, family.ours, family.shuffled)]
    return tuple(named or ([] if wanted in ("", Defaults.family) else asked) or found)


def family_of_file(path: Path, columns: Collection[str], wanted: str, dtype: str = "") -> CsvFamily:
    """Return the family of a file, by the user's word or its name, of those that its columns can be of.

    `wanted` is AITER's name of a family, or ours; the default family says nothing. `dtype` is what the user says that A
    is; with M, N and K alone it is a product without scales. A file of sizes may have columns beside its family's,
    which AITER's tuners pass over too. An InputError lists the choices where it is not known, or a word or the name is
    wrong.
    """
    found, wider = fitting(columns), _containing(columns)
    says, named = wanted not in ("", Defaults.family), _named_in(path, FAMILIES)
    plain = FAMILIES[0]
    if {*own_names(_named(columns))} == {*SIZES}:
        if wanted == plain.name or (dtype and not says and not named):
            return replace(plain, keys=SIZES, dtype="" if dtype else plain.name)
        if says and not any(wanted in (one.name, one.ours, one.shuffled) for one in FAMILIES):
            return replace(plain, name=wanted, ours=wanted, keys=SIZES, shuffled="", scaled="")
    for those in (found, wider):
        asked = [one for one in those if wanted in (one.name, one.ours, one.shuffled)] if says else []
        fits = asked if says else [one for one in those if one in named]
        if fits:
            return fits[0]
    names, choices = ",".join(columns), ", ".join(family.name for family in found or wider)
    if not choices:
        raise InputError(f"{path}: its columns are those of none of AITER's families ({names})")
    if says:
        raise InputError(f"{path}: the columns {names} are not those of family {wanted}, but of {choices}")
    if named:
        wrong = " or ".join(family.name for family in named)
        raise InputError(
            f"{path}: the file's name says {wrong}, and its columns {names} are those of {choices}; rename it, or name "
            "the family with --family"
        )
    if len(found) == 1:
        return found[0]
    raise InputError(
        f"{path}: the columns {names} are those of several families; name one with --family, or one of AITER's in the "
        f"file's name: {choices}; or, of products without scales, the type with -dtype_a, such as bf16"
    )
