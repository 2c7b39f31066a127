"""Strategy: every kept config, the promising first."""

from tritongemm.plugins.contracts import Search, SearchPlan, Strategy

# The best predicted get this share of a limited budget, whether or not their kernels are compiled already.
OWN_SHARE = 0.25
# The rest of a limited budget prefers kernels that other problems have compiled, among the best predicted, up to this
# times the budget.
SHARED_BUDGETS = 2


class Exhaustive(Strategy):
    """Every kept config in one batch; of a limited budget, kernels that are compiled anyway go before others."""

    def search(self, plan: SearchPlan, budget: int) -> Search:
        """Yield one batch: the seeds, then the configs in the order of their predictions; a budget of 0 tries all."""
        order = plan.expected.configs
        kept = set(order)
        ranked = list(dict.fromkeys([*(c for c in plan.seeds if c in kept), *order]))
        if 0 < budget < len(ranked):
            own = ranked[: round(OWN_SHARE * budget)]
            shared = (c for c in ranked[: SHARED_BUDGETS * budget] if c.kernel_name in plan.compiled)
            ranked = list(dict.fromkeys([*own, *shared, *ranked]))[:budget]
        yield ranked
