"""Measurements: the shapes, the states, float64 truth, timings, and the evidence recorded on a GPU."""
