"""Engines that carry out a run: in one process (inline), or on Ray through Flower itself."""
