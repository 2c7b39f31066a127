"""Search strategies: one file each, with

    search(space, order, budget, seeds, expected, compiled)    a generator: yields batches of configs, is sent their trials

`exhaustive` says what each argument is. What one does not use, it takes all the same.
"""
