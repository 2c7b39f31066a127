"""The door of `python -m tritongemm.capture`; programs call this module: ``with tritongemm.capture(path):``."""

import sys
from functools import partial

from tritongemm.system import import_path

if __name__ == "__main__":
    import_path.leave_out_current_folder()
from tritongemm.cli import door

main = partial(door.run, "tritongemm.cli.capture:main")
if __name__ == "__main__":
    sys.exit(main())
from tritongemm.workloads.capturing.callable_module import CallableModule  # noqa: E402

sys.modules[__name__].__class__ = CallableModule
