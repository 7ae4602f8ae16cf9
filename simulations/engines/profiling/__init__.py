"""Where the time of a run goes: phases of sampled stacks, tables, and pages of a profile."""
