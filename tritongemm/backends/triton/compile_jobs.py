"""What Triton compiles a kernel from, and launches of the results, without Triton, which takes long to load."""

from collections.abc import Sequence
from typing import Any

from tritongemm.core.artifact import Artifact
from tritongemm.core.errors import InputError
from tritongemm.core.launch import Buffer, Launch, Param
from tritongemm.core.target import Target
from tritongemm.system import settings

Grid = tuple[int, int, int]
ALIGN = 16  # bytes a base address is a multiple of, and the most elements a size is known to be a multiple of


def job_identity(target: Target, **more: Any) -> dict[str, Any]:
    """Return the identity of a job for `compile_job`; `more` are its other keys, such as source and types."""
    own = {"backend": "triton", "triton": settings.version("triton"), "arch": target.name}
    return {**own, "wave": target.wave_size, "lds": target.lds_bytes, **more}


def make_launch(
    built: Artifact,
    grid: Grid,
    params: Sequence[Param],
    buffers: Sequence[Buffer] = (),
    overlap: bool = False,
    cluster: int = 1,
) -> Launch:
    """Return the launch of a kernel that `compile_job` compiled.

    `params` are its parameters but the two pointers to Triton's own scratch memory, which is not used. With `overlap`
    it may start before the kernel before it ends.

    Raises:
        InputError: the binary takes another number of parameters.
    """
    every, offsets = (*params, Param("pointer", ""), Param("pointer", "")), built.launch["offsets"]
    if len(offsets) != len(every):
        raise InputError(
            f"{built.config.name}: the binary takes {len(offsets)} parameters, not {len(every)}; "
            "this version of Triton passes arguments in a way this backend does not know"
        )
    return Launch(
        path=built.path,
        symbol=built.symbol,
        grid=grid,
        block=(built.threads, 1, 1),
        shared=built.launch["dynamic_shared"],
        params=every,
        buffers=tuple(buffers),
        cluster=cluster,
        at=tuple(offsets),
        overlap=overlap,
        sha256=built.sha256,
    )
