"""Targets, and a config of each kernel template, small enough for the interpreter."""

from dataclasses import replace

from tests.support.nouns import Config, load_target

GFX942, SM90 = load_target("gfx942"), load_target("sm90")
PLAIN = Config("tile", 16, 16, 16, num_warps=1)
SPLIT = Config("tile", 16, 32, 16, 4, 3, options=(("xcds", 8),))
POLLED = Config("tile", 16, 32, 16, split_k=3, options=(("poll", 1),))
SWAPPED = Config("tile", 32, 16, 16, 2, options=(("runs", 2), ("swap_ab", 1)))  # a sum in the order of two splits
GEMV = Config("gemv", 4, 32, 32, split_k=2)
GEMV_ROW = Config("gemv", 1, 32, 32)
GEMV_POLLED = Config("gemv", 1, 16, 32, split_k=2, options=(("poll", 1),))
STREAM = Config("stream_k", 16, 16, 16, 2, options=(("num_sms", 5),))
STREAM_MORE = replace(STREAM, options=(("num_sms", 5), ("share_more", 1)))
TMA = Config("tma", 16, 32, 16, 2, 2)
TMA_POLLED = Config("tma", 16, 16, 16, split_k=2, options=(("poll", 1), ("swap_ab", 1)))
TMA_SWAPPED = replace(TMA, split_k=1, options=(("runs", 3), ("swap_ab", 1)))
PERSISTENT = Config("persistent", 16, 32, 32, 2, options=(("epilogue_parts", 2),))
STREAM_TMA = Config("stream_k_tma", 16, 16, 16, 2, options=(("num_sms", 5),))
POINTERS = (PLAIN, SPLIT, POLLED, SWAPPED, GEMV, GEMV_ROW, GEMV_POLLED, STREAM, STREAM_MORE)
WS = Config("ws_tma", 128, 64, 64, 8, num_warps=8, num_stages=4, options=(("epilogue_parts", 2), ("share", 2)))
WS_SPLIT = Config("ws_tma", 64, 32, 64, 1, 3, num_warps=4, num_stages=3)
DESCRIBED = (TMA, TMA_POLLED, TMA_SWAPPED, PERSISTENT, STREAM_TMA)
WS_SWAPPED = Config("ws_tma_swapped", 72, 64, 64, 4, num_warps=4, num_stages=3, options=(("swap_ab", 1),))
GROUPED = (
    Config("grouped", 16, 32, 32, 4, options=(("per_unit", 2),)),
    Config("grouped_tma", 16, 32, 16, 2),
    Config("grouped_tile", 16, 64, 32, 2),
    Config("grouped_gemv", 1, 4, 128),
    Config("grouped_ws_tma", 64, 32, 64, 4, num_warps=4, num_stages=3),  # no interpreter for this one and the next
    Config("grouped_ws_tma_swapped", 16, 64, 64, 1, num_warps=4, num_stages=3, options=(("swap_ab", 1),)),
)
# Of powers of two along K, and the rows of uneven groups, two of them empty.
UNEVEN = (7, 0, 33, 1, 0)
MX_GEMV = (Config("gemv", 1, 8, 128, split_k=2), Config("gemv", 4, 16, 256))
MX_BATCHED = (
    Config("tile", 16, 32, 128, split_k=2),
    Config("gemv", 4, 16, 256),
    Config("tma", 16, 64, 128, 2, 2, options=(("swap_ab", 1),)),
)
MX_GROUPED = (
    Config("grouped", 16, 32, 128, 4, options=(("per_unit", 2),)),
    Config("grouped", 16, 16, 256, options=(("swap_ab", 1),)),
    Config("grouped_tile", 16, 64, 128, 2),
    Config("grouped_tma", 16, 32, 128, 2),
)
# Warps that share a block of K, slices shorter and longer than a scale's group; splits; wide tiles; a rest of K; parts.
FRAGMENTS = (
    Config("fragments", 4, 32, 256, split_k=2, num_warps=4, options=(("slices", 4), ("swap_ab", 1))),
    Config("fragments", 16, 16, 256, split_k=2, num_warps=2, options=(("poll", 1), ("slices", 2), ("swap_ab", 1))),
    Config("fragments", 32, 64, 128, num_warps=4, options=(("swap_ab", 1),)),
    Config("fragments", 16, 64, 256, split_k=2, num_warps=4, options=(("poll", 1), ("swap_ab", 1))),
)
FRAGMENTS_OF_GROUPS = (
    Config("grouped_fragments", 8, 32, 256, num_warps=4, options=(("slices", 4), ("swap_ab", 1))),
    Config("grouped_fragments", 16, 16, 256, 2, num_warps=2, options=(("slices", 2), ("swap_ab", 1))),
    Config("grouped_fragments", 8, 64, 128, num_warps=4, options=(("swap_ab", 1),)),
    Config("grouped_fragments", 8, 16, 512, num_warps=4, options=(("slices", 4), ("swap_ab", 1), ("turns", 2))),
)
GLUON = (WS, WS_SPLIT, WS_SWAPPED)  # no interpreter for these
WS_FRAGMENTS = Config("ws_fragments", 96, 128, 64, 2, num_warps=8, num_stages=4, options=(("share", 1), ("swap_ab", 1)))
