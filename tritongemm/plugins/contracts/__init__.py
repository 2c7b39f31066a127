"""The contract of every kind of plug-in.

A plug-in is a class in a file (or a folder with backend.py) of its kind's package, found by the file's name. It derives
from its kind's class here and fills the methods that begin with an underscore; the public methods are final, check what
they are given and call those. A class that leaves an abstract method out is refused when it is defined. docs/plugins
has a page for each kind with a short example.

Plugin
├── Backend                 a source of GEMM kernels
│   ├── KernelBackend       whose kernels are compiled here, from text, code objects or instances of a library
│   │   └── SearchedBackend     whose kernels come from templates with a search space
│   └── LibraryBackend      a library that is asked on its GPU for its algorithms
├── Family                  what is computed: operands, inputs, reference, tolerance
├── WeightLayout            an order of B in memory
├── ScaleLayout             an order of scale factors in memory
├── Timer                   a clock
├── Strategy                a search
├── Format                  a file format
│   └── ResultsFormat           that in which our own results are kept
├── CallLog                 lines of a library's log that tell what it was asked for
└── KernelSource            who may serve a call at run time
Evaluator                   what times and verifies candidates: a GPU, or what stands in for one
"""

from __future__ import annotations

from tritongemm.plugins.contracts.backends import (
    Backend,
    KernelBackend,
    LibraryBackend,
    SearchedBackend,
)
from tritongemm.plugins.contracts.capabilities import NO_INPUTS, BuildInputs, Capabilities
from tritongemm.plugins.contracts.formats import CallLog, Format, ResultsFormat, ServerFormat
from tritongemm.plugins.contracts.measuring import Clock, Evaluator, ExternalRaceJob, ExternalTimer, Timer
from tritongemm.plugins.contracts.numerics import Family, FamilyDefaults, Pieces, ScaleLayout, WeightLayout
from tritongemm.plugins.contracts.plugin import Plugin
from tritongemm.plugins.contracts.searching import Search, SearchPlan, Strategy, Watcher
from tritongemm.plugins.contracts.sources import KernelSource

__all__ = [
    "NO_INPUTS",
    "Backend",
    "BuildInputs",
    "CallLog",
    "Capabilities",
    "Clock",
    "Evaluator",
    "ExternalRaceJob",
    "ExternalTimer",
    "Family",
    "FamilyDefaults",
    "Format",
    "KernelBackend",
    "KernelSource",
    "LibraryBackend",
    "Pieces",
    "Plugin",
    "ResultsFormat",
    "ScaleLayout",
    "Search",
    "SearchPlan",
    "SearchedBackend",
    "ServerFormat",
    "Strategy",
    "Timer",
    "Watcher",
    "WeightLayout",
]
