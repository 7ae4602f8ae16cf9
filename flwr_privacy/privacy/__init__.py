"""The privacy core: clipping, grids and sums on them, exact noise, ledger, policy, guarantee."""
