"""The privacy core: clipping, sums on a grid, exact noise, ledger, policy, guarantee."""
