"""Checks whether the ranks of a distributed job serve the same tables, without one rank ever waiting for another."""

import logging
from typing import Any

_LOG = logging.getLogger("tritongemm")


def agree(digest: str, generation: int = 1) -> bool:
    """Return whether this rank's tables are those of the rank that loaded first; a warning says where they are not.

    Ranks compare through the store that they met in, not through a collective operation: no rank waits for one that
    loads later, or for one that loads nothing, which is therefore not noticed. Without torch.distributed, or before it
    is initialised, there is no other rank to compare with.
    """
    from torch import distributed  # when asked: commands that run no kernel read tables without PyTorch

    if not distributed.is_available() or not distributed.is_initialized():
        return True
    store = distributed.distributed_c10d._get_default_store()
    first = _first_digest(store, digest, generation)
    if first == digest:
        return True
    _LOG.warning(
        "rank %d loaded other tuned records (sha256 %s) than the rank that was first (sha256 %s): "
        "ranks will compute by different kernels; give all of them the same file in TRITONGEMM_CONFIG",
        distributed.get_rank(),
        digest,
        first,
    )
    return False


def _first_digest(store: Any, digest: str, generation: int) -> str:
    """Return the digest of the first rank that asked, which is this one if no other did before."""
    answer: bytes = store.compare_set(f"tritongemm/tables/{generation}", "", digest)
    return answer.decode()
