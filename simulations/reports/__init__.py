"""Reports of runs: pages, tables and figures."""
