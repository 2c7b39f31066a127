"""The entry point of `python -m tritongemm.tune`, the same as `tritongemm tune`."""

import sys

from tritongemm.system import import_path

if __name__ == "__main__":
    import_path.leave_out_current_folder()

    from tritongemm.__main__ import main

    sys.exit(main("tritongemm.cli.tune:main"))
