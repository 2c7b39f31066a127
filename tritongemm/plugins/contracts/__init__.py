"""The contract of every kind of plug-in.

A plug-in is a class in a file (or a folder with backend.py) of its kind's package, found by the file's name. It derives
from its kind's class here and implements the methods that begin with an underscore; the public methods are final, check
their arguments and call those. Defining a class without an abstract method is an error. docs/plugins has a page for
each kind with a short example.

Plugin
├── Backend                 a source of GEMM kernels
│   ├── KernelBackend       kernels compiled by this package, from text, code objects or library instances
│   │   └── SearchedBackend     kernels from templates with a search space
│   └── LibraryBackend      a library that lists its algorithms on its GPU
├── Family                  what is computed: operands, inputs, reference, tolerance
├── WeightLayout            a memory layout of B
├── ScaleLayout             a memory layout of scale factors
├── Timer                   takes samples of kernel times
├── Strategy                a search over configs
├── Format                  a file format
│   └── WritableFormat          a format that results can be written in
│       ├── ResultsFormat           the format of our own results
│       ├── ServerFormat            tables that configure a server's kernels
│       └── TunerFormat             tables of another tuner
├── CallLog                 lines of a library's log that name the GEMMs it was called for
└── KernelSource            a source of kernels for a call at run time
Evaluator                   times and verifies candidates on a GPU, or on a stand-in for one
"""

from tritongemm.plugins.contracts.backends import Backend, KernelBackend, LibraryBackend, SearchedBackend
from tritongemm.plugins.contracts.call_logs import CallLog
from tritongemm.plugins.contracts.capabilities import NO_INPUTS, BuildInputs, Capabilities
from tritongemm.plugins.contracts.formats import Format, ResultsFormat, ServerFormat, TunerFormat, WritableFormat
from tritongemm.plugins.contracts.measuring import Clock, Evaluator, ExternalRaceJob, ExternalTimer, Timer
from tritongemm.plugins.contracts.numerics import Family, Pieces, ScaleLayout, WeightLayout
from tritongemm.plugins.contracts.plugin import Plugin
from tritongemm.plugins.contracts.searching import Search, SearchPlan, Strategy, Watcher
from tritongemm.plugins.contracts.sources import KernelSource

__all__ = [
    "NO_INPUTS", "Backend", "BuildInputs", "CallLog", "Capabilities", "Clock", "Evaluator", "ExternalRaceJob",
    "ExternalTimer", "Family", "Format", "KernelBackend", "KernelSource", "LibraryBackend", "Pieces", "Plugin",
    "ResultsFormat", "ScaleLayout", "Search", "SearchPlan", "SearchedBackend", "ServerFormat", "Strategy", "Timer",
    "TunerFormat", "Watcher", "WeightLayout", "WritableFormat",
]  # fmt: skip
