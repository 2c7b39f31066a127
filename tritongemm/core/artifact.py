"""The classes `CompileJob` (a kernel to compile) and `Artifact` (what came of it); the names of code files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from tritongemm.core.config import Config
from tritongemm.core.trial import Trial


@dataclass(frozen=True)
class CompileJob:
    """A kernel or library of kernels to compile."""

    config: Config  # the candidate
    # Everything the binary depends on, JSON values only; its hash names the artifact.
    identity: dict[str, Any] = field(hash=False)
    # Further inputs of the compiler process, e.g. folders of headers.
    payload: dict[str, Any] = field(default_factory=dict, hash=False)

    @cached_property
    def digest(self) -> str:
        """Content hash of the identity, which names the artifact in the cache."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:40]


@dataclass(frozen=True)
class LoopFacts:
    """What the assembly of a kernel's main loop has: its innermost loop with the most matrix instructions."""

    instructions: int  # of one iteration
    matrix: int  # matrix instructions among them
    loads: int  # loads from memory among them
    narrow: int  # loads of less than four bytes a thread
    spilled: int | None  # bytes of spilled registers that a thread stores and loads; None where the text does not say
    drains: int  # waits after which no load is under way
    ahead: float | None  # least iterations between a load and the wait for it; None where no wait counts loads

    def describe(self) -> str:
        """Return the facts in a few words, what is as it should be left out."""
        loads = f"{self.narrow} of {self.loads} loads of less than 4 bytes" if self.narrow else f"{self.loads} loads"
        each = f"{self.instructions / self.matrix:.1f} instructions a matrix instruction" if self.matrix else ""
        parts = (
            each or f"{self.instructions} instructions",
            loads + ("" if self.ahead is None else f", waited for {self.ahead:.1f} iterations later"),
            f"{self.drains} waits for all loads" if self.drains else "",
            f"spills {self.spilled} bytes" if self.spilled else "",
        )
        return "; ".join(filter(None, parts))


@dataclass(frozen=True)
class Artifact:
    """A compiled config, or the reason there is none."""

    config: Config  # the compiled config
    digest: str  # content hash, which is its key in the cache
    path: str = ""  # the code object (cubin, hsaco), empty where compiling failed
    sha256: str = ""  # of the code object, once it is in the cache
    symbol: str = ""  # kernel symbol in it
    registers: int = 0  # vector registers a thread uses (AMD: VGPRs including AGPRs)
    spills: int = 0  # bytes of scratch (AMD) or local memory (NVIDIA) a thread uses
    shared: int = 0  # bytes of LDS / shared memory a program uses
    threads: int = 0  # threads of one program
    seconds: float = 0.0  # compile time; 0 when it came from the cache
    status: str = "ok"  # `ok`, `compile_failed`, `out_of_resources` or `timeout`
    reason: str = ""  # why not ok
    loop: LoopFacts | None = None  # what its main loop has, where it was measured
    # Launch data besides the symbol (parameter kinds, descriptors), JSON values only.
    launch: dict[str, Any] = field(default_factory=dict, hash=False)
    # Why it is not ok may be gone when it is compiled again, as where the compiler was killed from outside or a file
    # had changed: neither the cache nor a journal keeps it.
    try_again: bool = False

    def failed_trial(self) -> Trial:
        """Return the trial of a config that was not compiled."""
        return Trial(self.config, self.status, self.reason, try_again=self.try_again)

    def to_json(self) -> dict[str, Any]:
        """Return the artifact as JSON values, which `from_json` reads."""
        kept = {**asdict(self), "config": self.config.name}
        del kept["try_again"]
        return kept

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Artifact:
        """Read the artifact that `to_json` wrote."""
        loop = LoopFacts(**data["loop"]) if data.get("loop") else None
        return cls(**{**data, "config": Config.parse(data["config"]), "loop": loop})


CODE_FILES = {"nvidia": "kernel.cubin", "amd": "kernel.hsaco"}  # by the vendor of the target
