"""Strategy: a toy, which goes down the predicted order until eight configs in a row bring nothing."""

from __future__ import annotations

from tritongemm.plugins.contracts import Search, SearchPlan, Strategy

BATCH_CONFIGS = 8


class DownTheOrder(Strategy):
    """The seeds that were kept, then the best predicted, eight at a time, while the best time improves."""

    def search(self, plan: SearchPlan, budget: int) -> Search:
        """Yield batches of configs, and be sent the trials of each; 0 puts no limit on their number."""
        kept = plan.expected.configs
        order = list(dict.fromkeys([*(c for c in plan.seeds if c in kept), *kept]))[: budget or None]
        best_s = float("inf")
        for first in range(0, len(order), BATCH_CONFIGS):
            trials = yield order[first : first + BATCH_CONFIGS]
            fastest_s = min((t.seconds for t in trials if t.status == "ok"), default=float("inf"))
            if fastest_s >= best_s:
                return
            best_s = fastest_s
