"""How the tests of the structure report what breaks a rule."""

from collections.abc import Collection, Iterable


def check(rule: str, offenders: Iterable[str], advice: str, allowed: Collection[str] = ()) -> None:
    """Fail on offenders that are not allowed, and on allowed ones that are there no more; the message names all.

    Args:
        rule: what must hold.
        offenders: what breaks the rule, each in a form that does not change with line numbers.
        advice: what to do about one.
        allowed: offenders that may stay.
    """
    found = set(offenders)
    faults = [
        (advice, sorted(found - set(allowed))),
        ("these are not written any more: take them out of what is allowed", sorted(set(allowed) - found)),
    ]
    said = [f"{text}\n  " + "\n  ".join(names) for text, names in faults if names]
    assert not said, f"{rule}: " + "\n".join(said)
